"""The dependencies and their tested versions: `python -m tools.versions` prints the names, for
`make test-newest`. With --record, it writes the installed versions to requirements/newest.txt;
`make docs` makes docs/reference/versions.md of them and of the bounds in pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NEWEST = ROOT / "requirements/newest.txt"
HEAD = """\
# Versions

<!-- Generated from requirements/newest.txt by `make docs`; changes here are lost. -->

servd runs on Linux with Python 3.11 to 3.13, and with these versions of its dependencies:

| dependency | allowed | oldest tested | newest tested |
|---|---|---|---|
"""
TAIL = """
These commands test both on a CPU, without servers:

```console
$ make test-oldest      # with the torch of `make`
$ make test-newest
```

On a GPU, [torch 2.11 is tested](../benchmarks/gpu.md). `make`, `install.sh` and the images install
one version of torch; `make` and the images take the others from `requirements/serve.txt`.
"""


def read_requirements() -> list[Requirement]:
    """Return what servd needs to run, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
    return [Requirement(text) for text in project["project"]["dependencies"]]


def read_newest() -> dict[str, str]:
    """Return the newest version of each dependency that passed the tests."""
    lines = NEWEST.read_text(encoding="utf8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def oldest(requirement: Requirement) -> str:
    """Return the lower bound."""
    [bound] = [item.version for item in requirement.specifier if item.operator == ">="]
    return bound


def page() -> str:
    """The page on tested versions."""
    newest = read_newest()
    rows: list[str] = []
    for requirement in read_requirements():
        name = requirement.name
        allowed = ", ".join(sorted(map(str, requirement.specifier), reverse=True))
        rows.append(f"| {name} | `{allowed}` | {oldest(requirement)} | {newest[name]} |\n")
    return HEAD + "".join(rows) + TAIL


def record() -> None:
    """Write the installed versions, without what tells a build, such as +cpu."""
    lines = [f"{item.name}=={version(item.name).split('+')[0]}" for item in read_requirements()]
    head = "# The newest versions that passed the tests, by `make test-newest`."
    NEWEST.write_text("\n".join([head, *lines]) + "\n", encoding="utf8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        print(*(requirement.name for requirement in read_requirements()))
