"""Output of commands: rows of a table, and figures as JSON."""

from pathlib import Path
from typing import Any

import msgspec

from servd.base.errors import ConfigError


def format_row(name: object, *cells: object) -> str:
    """Return a row of a table: the name left-aligned, then the cells right-aligned."""
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
    """Write figures as JSON to the file given with `flag`. Raises ConfigError: the write failed."""
    write_file(flag, file, msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def write_file(flag: str, file: str | Path, content: bytes) -> None:
    """Write `content` to the file given with `flag`. Raises ConfigError: the write failed."""
    try:
        Path(file).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from None
