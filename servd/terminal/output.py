"""The output of commands: rows of a table, figures as JSON, and hints."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from servd.base.errors import ConfigError

HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf8"))


def suggest(word: str, words: Sequence[str]) -> str:
    """Return what an unknown word may have meant."""
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(words)}"


def format_row(name: object, *cells: object) -> str:
    """Return a line of a table: a left-aligned name, then right-aligned cells."""
    return f"{name!s:<24}" + "".join(f"{_format(cell):>12}" for cell in cells)


def _format(cell: object) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    if cell == int(cell):
        return f"{cell:.0f}"
    return f"{cell:.2f}" if cell < 100 else f"{cell:.1f}"


def write_json(flag: str, file: str | Path, figures: Any) -> None:
    """Write figures as JSON to `file`, given by `flag`. Raises ConfigError like `write_file`."""
    write_file(flag, file, msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def write_file(flag: str, file: str | Path, content: bytes) -> None:
    """Write `file`, given by `flag`. Raises ConfigError if it cannot be written."""
    try:
        Path(file).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from None
