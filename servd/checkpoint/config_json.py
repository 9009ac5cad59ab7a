"""Reads config.json, without transformers."""

import json
from pathlib import Path
from typing import Any, TypeVar

from servd.base.errors import ModelNotFound
from servd.checkpoint.account import object_in, with_defaults
from servd.checkpoint.multimodal_config import text_part
from servd.checkpoint.overrides import extend_positions
from servd.checkpoint.remote_code_configs import upgrade_old_keys

Value = TypeVar("Value", dict[str, Any], list[Any])


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON object from a file. Raises ModelNotFound if it is not an object, or is missing
    and there is no default.
    """
    return default if default is not None and not path.exists() else _read_value(path, dict)


def read_json_list(path: Path) -> list[Any]:
    """Return a JSON list from a file. Raises ModelNotFound if it is missing or not a list."""
    return _read_value(path, list)


def _read_value(path: Path, kind: type[Value]) -> Value:
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ModelNotFound(
            f"{path.parent} has no {path.name}; is it a Hugging Face model folder? Name a GGUF "
            "file itself"
        ) from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, kind):
        raise ModelNotFound(f"{path} must hold a JSON {'object' if kind is dict else 'list'}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a text model, or of the text part of a multimodal model."""
    config = read_json(folder / "config.json")
    # Draft heads in *speculators* format keep a decoder's keys in transformer_layer_config.
    config = (object_in(config, "transformer_layer_config") or {}) | config
    config = with_defaults(upgrade_old_keys(text_part(config)))
    return extend_positions(config)
