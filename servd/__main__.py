"""`python -m servd` is the `servd` command."""

from servd.cli import main

if __name__ == "__main__":
    main()
