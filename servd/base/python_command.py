"""The command that runs a module of servd in a process of its own."""

import os
import sys


def python_command(module: str, *args: str) -> list[str]:
    """Return the command `python -m MODULE ARGS`. The current folder, with a stray random.py or a
    clone of servd, stays out of its path (-P), unless this process itself runs out of that folder.
    """
    safe = [] if sys.path[0] in ("", working_folder()) else ["-P"]
    return [sys.executable, *safe, "-m", module, *args]


def working_folder() -> str:
    """Return the working folder, or `/` if it was removed, as deployments do."""
    try:
        return os.getcwd()
    except OSError:
        return "/"
