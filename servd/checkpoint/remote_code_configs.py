"""config.json in transformers' current form, for models that were published with their own code,
or with other names of keys. servd never runs such code.
"""

from typing import Any

from servd.base.errors import UnsupportedModel
from servd.checkpoint.account import is_number

GTE = "new"  # Alibaba's name for it
MAX_LAYERS = 10_000
# Names of LFM2's keys = those that other models have.
LIQUID = {
    "block_ff_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embedding": "tie_word_embeddings",
}


def upgrade_old_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with transformers' current names. Other models' files are unchanged."""
    if config.get("model_type") == GTE:
        classes = config.get("architectures")
        if isinstance(classes, list):
            classes = [str(name).replace("New", "Gte", 1) for name in classes]
        config = {"rope_theta": 10000.0} | config | {"model_type": "gte", "architectures": classes}
    model_type = config.get("model_type")
    if model_type in ("lfm2", "lfm2_moe", "lfm3"):
        config = config | {new: config[old] for old, new in LIQUID.items() if old in config}
    num_layers = config.get("num_hidden_layers")
    if config.get("layer_types") is None and type(num_layers) is int:
        config = config | _layer_types(model_type, config, min(num_layers, MAX_LAYERS))
    return config | _rotation(config) if model_type == "gte" else config


def _layer_types(model_type: Any, config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the layer_types that transformers takes where config.json has none."""
    state = "linear_attention"
    layers = range(num_layers)
    match model_type:
        case "lfm2":
            state = "conv"
            stated = config.get("full_attn_idxs")
            with_attention = stated if isinstance(stated, list) else layers
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            every = config.get("full_attention_interval", 4)
            if type(every) is not int or every < 1:
                raise UnsupportedModel(f"config.json: full_attention_interval {every!r:.50}")
            with_attention = layers[every - 1 :: every]
        case _:
            return {}
    return {"layer_types": ["full_attention" if i in with_attention else state for i in layers]}


def _rotation(config: dict[str, Any]) -> dict[str, Any]:
    """Return fixed NTK (https://kexue.fm/archives/9706, equation 6) as theta and linear scaling."""
    rope = config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("type") != "ntk" or rope.get("mixed_b") is not None:
        return {}
    keys = ("rope_theta", "num_attention_heads", "hidden_size")
    numbers = [*map(config.get, keys), rope.get("factor")]
    if not all(is_number(number) and number > 0 for number in numbers):
        return {}  # which is refused where they are read
    (theta, heads, size, factor) = numbers
    return {
        "rope_theta": theta * factor,
        "rope_scaling": {"rope_type": "linear", "factor": factor ** (2 * heads / size)},
    }
