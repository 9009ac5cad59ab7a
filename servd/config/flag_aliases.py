"""Options of other servers that servd lacks: aliases of servd's options, options without effect,
and hints for all others, from other_flags.toml.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from servd.base.errors import ConfigError

_DATA = tomllib.loads(Path(__file__).with_name("other_flags.toml").read_text(encoding="utf8"))
ALIASES: dict[str, str] = _DATA["aliases"]  # other name -> option
OTHER_FLAGS: dict[str, list[str]] = _DATA["flags"]  # option -> flags
VALUE_ALIASES: dict[str, dict[str, str | None]] = {
    option: {other: value or None for other, value in values.items()}
    for option, values in _DATA["values"].items()
}
# Option without effect -> why; with "=" if it takes a value.
IGNORED: dict[str, str] = _DATA["ignored"]
IGNORED_VALUES: dict[str, dict[str, str]] = _DATA["ignored_values"]
# Rejected option or short flag -> what to do instead.
HINTS: dict[str, str] = {flag: hint["text"] for hint in _DATA["hints"] for flag in hint["flags"]}
SPECULATIVE_KEYS: dict[str, str] = _DATA["speculative_keys"]  # rejected key -> why
COUNTS = {"max_model_len", "max_num_batched_tokens"}  # "8k" is 8000 and "8K" 8192
THOUSANDS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def translate(name: str, value: Any) -> tuple[str, Any]:
    """Return servd's name and value for an option of another server."""
    name = ALIASES.get(name, name)
    if isinstance(value, str | int):
        value = VALUE_ALIASES.get(name, {}).get(str(value), value)
    if name in COUNTS and isinstance(value, str):
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", value.strip()):
            value = int(float(match[1]) * THOUSANDS[match[2]])
    if isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("["):
        try:
            value = json.loads(value[0])  # as vLLM writes `--allowed-origins`
        except (ValueError, TypeError):
            pass  # rejected later
    return name, value


def why_ignored(name: str) -> str | None:
    """Return why an option has no effect; None if the option has one, or is unknown."""
    return IGNORED.get(name) or IGNORED.get(f"{name}=")


def hint(flag: str, known_flags: Iterable[str], listed: str) -> str:
    """Return what to use instead of an unknown flag.

    `flag`: as typed. `listed`: the result if no known flag is similar.
    """
    stem = flag.partition("=")[0]
    name, _, key = stem.removeprefix("--").replace("-", "_").partition(".")
    if not stem.startswith("--"):
        name = stem.rstrip("0123456789.")
    if name in HINTS and "--max-model-len" in known_flags:  # only commands that have an engine
        return HINTS[name]
    if key and f"--{name.replace('_', '-')}" in known_flags:
        return f"write JSON: --{name.replace('_', '-')} '{{\"{key}\": ...}}'"
    if name.startswith("data_parallel_"):
        return HINTS["data_parallel_*"]
    near = difflib.get_close_matches(stem, known_flags, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else listed


def unknown(name: str, known_flags: Iterable[str]) -> ConfigError:
    flag = f"--{name.replace('_', '-')}"
    flags = [f"--{name.replace('_', '-')}" for name in known_flags]
    return ConfigError(f"unknown option {flag}; {hint(flag, flags, 'see `servd serve --help`')}")
