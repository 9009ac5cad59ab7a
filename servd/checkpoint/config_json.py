"""Reads config.json, without transformers."""

import json
from pathlib import Path
from typing import Any

from servd.base.errors import ModelNotFound
from servd.checkpoint.account import with_defaults
from servd.checkpoint.multimodal_config import text_part
from servd.checkpoint.overrides import extend_positions
from servd.checkpoint.remote_code_configs import upgrade_old_keys


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Raises ModelNotFound if it is missing or not an object."""
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
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} must hold a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a text model, or of the text part of a multimodal model."""
    config = read_json(folder / "config.json")
    # Draft heads in *speculators* format keep a decoder's keys in transformer_layer_config.
    layer = config.get("transformer_layer_config")
    config = (layer if isinstance(layer, dict) else {}) | config
    config = upgrade_old_keys(config)
    config = with_defaults(text_part(config))
    return extend_positions(config)
