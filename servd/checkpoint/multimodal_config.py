"""The language model of a multimodal model: its config.json is nested in the model's, and its
weights have a prefix. servd runs only this part.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servd.checkpoint.account import object_in

TEXT = "text_config"
_DATA = tomllib.loads(Path(__file__).with_name("multimodal.toml").read_text(encoding="utf8"))
CLASSES: dict[str, str] = _DATA["classes"]  # model_type of the part -> class of servd's model
SAME: dict[str, str] = _DATA["same"]
DEFAULTS: dict[str, dict[str, Any]] = _DATA["defaults"]
UNREAD: dict[str, list[str]] = _DATA["unread"]
FLAT = ("qwen2_vl", "qwen2_5_vl")  # as Qwen published them: text keys at the top level
# Keys of the whole model that hold for its text.
OF_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")
INNER = ("language_model.", "text_model.")  # where its weights are in the whole model
OTHERS = tuple(_DATA["others"])


def is_part(config: Mapping[str, Any]) -> bool:
    """Return whether config.json belongs to a multimodal model."""
    is_flat = config.get("model_type") in FLAT and "vision_config" in config
    return isinstance(config.get(TEXT), dict) or is_flat


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the language model alone. A text model's config.json is unchanged."""
    if not is_part(config):
        return config
    inner = object_in(config, TEXT) or {k: v for k, v in config.items() if k != "vision_config"}
    model_type = str(inner.get("model_type") or config.get("model_type"))
    defaults = DEFAULTS.get(model_type, {})
    unread = UNREAD.get(model_type, [])
    model_type = SAME.get(model_type, model_type)
    stated = {
        key: value
        for key, value in inner.items()
        if key not in unread and (value is not None or key not in defaults)
    }
    of_whole = {key: config[key] for key in OF_WHOLE if config.get(key) is not None}
    text = defaults | stated | of_whole | {"model_type": model_type}
    if model_type in CLASSES:
        text["architectures"] = [CLASSES[model_type]]
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            kept = {name: value for name, value in rope.items() if name != "type"}
            text[key] = kept | {"rope_type": "default"}
    return text


def text_name(name: str) -> str | None:
    """Return the name that a multimodal checkpoint's tensor has in the language model, or its own
    name; None if the tensor belongs to a part that sees or hears.
    """
    if name.removeprefix("model.").startswith(OTHERS):
        return None
    for place in INNER:
        outside, is_inside, inside = name.partition(place)
        if is_inside and outside in ("", "model."):
            inside = inside.removeprefix("model.")
            return inside if inside.startswith("lm_head.") else f"model.{inside}"
    return name
