"""--hf-overrides: changes config.json, and adapts the positions to the changes."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from servd.base.errors import ConfigError
from servd.checkpoint.account import is_like, is_number, object_in, read_tables

FLAG = "--hf-overrides"
PLACE = f"{FLAG} "  # of a key in errors
TEXT = "text_config"  # the part of a model that reads images too which servd runs
LENGTH = "max_position_embeddings"
FIRST_LENGTH = "original_max_position_embeddings"
# Before transformers 5, and of it. transformers reads the first that is there.
ROPE = ("rope_scaling", "rope_parameters")
FULL = "full_attention"  # the layers that scaling is for, where windows have rotations of their own

_DATA = tomllib.loads(Path(__file__).with_name("overrides.toml").read_text(encoding="utf8"))
ROPE_TYPES: dict[str, list[str]] = _DATA["types"]
WITH_FIRST_LENGTH: list[str] = _DATA["with_first_length"]
ROTATION: list[str] = _DATA["rotation"]
OF_FILES: dict[str, str] = _DATA["of_files"]
ROPE_KEYS = {*_DATA["rope"], *ROTATION, *(key for keys in ROPE_TYPES.values() for key in keys)}
NUMBERS = ROPE_KEYS - {*_DATA["no_numbers"]}
OPTIONAL = {*ROPE, *_DATA["optional"]}


def override(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with --hf-overrides: objects are merged, null removes a key. A rotary
    scaling also changes the number of positions, unless the overrides state that number.

    `config` is of a text model (see `text_part`); a `text_config` in `changes` applies to
    `config`. Raises ConfigError if the model does not have a key, a value is invalid, or a
    scaling of rotary positions is incomplete.
    """
    changes = {**changes, **(object_in(changes, TEXT, PLACE) or {})}
    changes.pop(TEXT, None)
    for key, value in changes.items():
        if key in OF_FILES:
            raise ConfigError(f"{FLAG} {key}: {OF_FILES[key]}")
        _check_key(key, {*config, *OPTIONAL}, "config.json has none, and no model reads it")
        _check_type(key, value, config.get(key))
    objects = [key for key, value in config.items() if isinstance(value, dict)]
    changed = config | {
        key: config[key] | value if isinstance(value, dict) and key in objects else value
        for key, value in changes.items()
        if key not in ROPE
    }
    parts = [object_in(changes, key, PLACE) for key in ROPE if key in changes]
    for key in ("rope_theta", FIRST_LENGTH):
        if key in changes and (parts or key in rope_of(config)):
            parts.insert(0, {key: changes[key]})
    if parts:
        if LENGTH not in config:
            raise ConfigError(f"{FLAG}: the model has no rotary positions that could be scaled")
        scaling = {key: value for part in parts if part for key, value in part.items()}
        changed |= _scaled(config, None if None in parts else scaling)
        changed |= {LENGTH: changes[LENGTH]} if LENGTH in changes else {}
    return {key: value for key, value in changed.items() if key not in changes or value is not None}


def extend_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the number of positions that YaRN reaches. Published checkpoints may
    state the number without YaRN. Dynamic scaling begins at the number that config.json states,
    not at the one inside the rotation, which is here for --hf-overrides.
    """
    rope = rope_of(config)
    if kind_of(rope) == "dynamic" and FIRST_LENGTH in rope:
        place = next(key for key in ROPE if config.get(key))
        kept = {key: value for key, value in rope.items() if key != FIRST_LENGTH}
        return config | {place: config[place] | {FULL: kept} if FULL in config[place] else kept}
    length = config.get(LENGTH)
    first = rope.get(FIRST_LENGTH)
    factor = rope.get("factor")
    if kind_of(rope) == "yarn" and is_number(length) and is_number(first) and is_number(factor):
        return config | {LENGTH: max(length, int(first * factor))}
    return config


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of layers without a window, as transformers reads them from
    both forms of config.json.
    """
    rope = next(filter(None, (object_in(config, key) for key in ROPE)), {})
    if any(isinstance(value, dict) for value in rope.values()):
        return rope.get(FULL) or {}
    if config.get(FIRST_LENGTH) is not None and kind_of(rope) in WITH_FIRST_LENGTH:
        return rope | {FIRST_LENGTH: config[FIRST_LENGTH]}
    return rope


def kind_of(rope: Mapping[str, Any], default: str = "default") -> str:
    return str(rope.get("rope_type") or rope.get("type") or default)


def _scaled(config: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return config.json's keys for the changed rotary scaling and the length that it reaches."""
    place = next((key for key in ROPE if config.get(key)), ROPE[0])
    written = config.get(place) or {}
    before = rope_of(config)
    is_layered = any(isinstance(layer, dict) for layer in written.values())
    if scaling and is_layered and any(isinstance(layer, dict) for layer in scaling.values()):
        layers = {key: object_in(scaling, key, PLACE) or {} for key in scaling}
        written = written | {key: written.get(key, {}) | layers[key] for key in layers}
        scaling = layers.get(FULL, {})
    kept = {key: before[key] for key in ROTATION if key in before}
    kind = "default" if scaling is None else kind_of(scaling, kind_of(before))
    is_same = kind == kind_of(before)
    rope: dict[str, Any] = (before if is_same else kept) | (scaling or {})
    rope.pop("type", None)
    rope["rope_type"] = kind
    _check_rope(scaling or {}, rope)
    length = config[LENGTH]
    lengths = dict[str, Any]()
    if kind in ("yarn", "linear", "dynamic"):
        first = rope.setdefault(FIRST_LENGTH, length)
        if kind == "yarn":
            lengths[LENGTH] = max(int(first * rope["factor"]), 0 if is_same else length)
        else:
            # With linear scaling, files state the scaled length; with dynamic, the unscaled one.
            share = before.get("factor", 1) if is_same and kind == "linear" else 1
            lengths[LENGTH] = int(length * rope["factor"] / share)
    if config.get(FIRST_LENGTH) and kind in WITH_FIRST_LENGTH:
        lengths[FIRST_LENGTH] = rope[FIRST_LENGTH]
    return lengths | {place: written | {FULL: rope} if is_layered else rope}


def _check_rope(scaling: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    kind = kind_of(rope)
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{FLAG}: there is no rope_type {kind!r}; there are: {', '.join(ROPE_TYPES)}"
        )
    for key, value in scaling.items():
        _check_key(key, ROPE_KEYS, "rotary positions have none")
        if key in NUMBERS:
            if not is_number(value) or value <= 0 or (key == "factor" and value < 1):
                at_least = "of 1 or more" if key == "factor" else "above 0"
                raise ConfigError(f"{FLAG}: {key} {value!r:.50} must be a number {at_least}")
    if kind == "default" and "factor" in scaling:
        raise ConfigError(f'{FLAG}: factor needs a rope_type, such as "yarn"')
    if missing := [key for key in ROPE_TYPES[kind] if rope.get(key) is None]:
        raise ConfigError(f"{FLAG}: rope_type {kind!r} needs {', '.join(missing)}")


def _check_key(key: str, names: Iterable[str], why: str) -> None:
    if key not in (names := set(names)):
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{FLAG} {key}: {why}{hint}")


def _check_type(key: str, value: Any, before: Any) -> None:
    """Check that a value has the type of `before`: the text "false" would count as true."""
    is_free = value is None or before is None or key in read_tables()["config"].untyped
    if not (is_free or is_like(value, before)):
        raise ConfigError(f"{FLAG} {key}: {value!r:.50} has another type than {before!r:.50}")
