"""The parts of a multimodal model. The language model has its config.json nested in the model's,
and its weights have a prefix; what servd needs to know of the others is a MultiModalSpec.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

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
FAMILIES: dict[str, dict[str, Any]] = _DATA["families"]  # whose pictures servd reads
PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # files of the image processor


class MultiModalSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model that sees adds to its language model."""

    processor: str  # of pictures: a file in servd/worker/multimodal
    image_token_id: int  # whose embeddings the tower's outputs replace
    num_deepstack: int = 0  # further features of an image token, which the first layers add
    is_bidirectional: bool = False  # whether the tokens of a picture see each other
    # Pairs of a head that rotate by time, row and column; empty: all by one position.
    mrope_section: list[int] = []
    mrope_interleaved: bool = False
    # About how many tokens the language model computes while the tower computes an image token.
    token_cost: float = 1.0


def multimodal_spec(
    folder: Path, config: Mapping[str, Any], vocab_size: int
) -> MultiModalSpec | str:
    """Return how a checkpoint with this config.json reads pictures; else why servd cannot."""
    if not is_part(config):
        return "it is a text model"
    model_type = str(config.get("model_type"))
    if (family := FAMILIES.get(model_type)) is None:
        names = ", ".join(FAMILIES)
        return f"servd reads no pictures with model_type {model_type}, only with {names}"
    if not any((folder / name).exists() for name in PROCESSORS):
        return f"its folder has no {PROCESSORS[1]}: download it again"
    text = object_in(config, TEXT) or config
    rope = object_in(text, "rope_parameters") or object_in(text, "rope_scaling") or {}
    vision = object_in(config, "vision_config") or {}
    values = {"processor": model_type} | family
    if model_type == "llava" and vision.get("model_type") == "pixtral":
        values["processor"] = "mistral3"
    token_id = config.get("image_token_id", config.get("image_token_index"))
    if token_id is not None:
        values["image_token_id"] = token_id
    if "mrope_section" in family:
        values["mrope_section"] = rope.get("mrope_section", family["mrope_section"])
    values["num_deepstack"] = len(vision.get("deepstack_visual_indexes") or ())
    values["token_cost"] = _token_cost(config, text, vision)
    try:
        spec = msgspec.convert(values, MultiModalSpec)
    except msgspec.ValidationError as error:
        return f"config.json: {error}"
    if spec.image_token_id not in range(vocab_size):
        return f"config.json: image_token_id {spec.image_token_id} is no token"
    return spec


def _token_cost(
    config: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]
) -> float:
    """Return MultiModalSpec.token_cost, by the sizes of matrices."""
    side = _size(config, "scale_factor", "spatial_merge_size")
    num_patches = max(side, _size(vision, "spatial_merge_size")) ** 2  # of an image token
    if "mm_tokens_per_image" in config:  # Gemma 3
        side = _size(vision, "image_size", default=896) // _size(vision, "patch_size", default=14)
        num_patches = side**2 // _size(config, "mm_tokens_per_image")
    hidden = _size(vision, "hidden_size")
    tower = hidden * (4 * hidden + 2 * _size(vision, "intermediate_size", default=4 * hidden))
    tower *= _size(vision, "depth", "num_hidden_layers", default=24)
    hidden = _size(text, "hidden_size")
    model = hidden * (3 * hidden + 3 * _size(text, "intermediate_size", default=3 * hidden))
    model *= _size(text, "num_hidden_layers", default=32)
    return max(num_patches * tower / model, 0.1)


def _size(values: Mapping[str, Any], *names: str, default: int = 1) -> int:
    """Return the first of these keys that is a size."""
    sizes = (values.get(name) for name in names)
    return next((size for size in sizes if type(size) is int and size > 0), default)


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
