"""config.json in transformers' current form, for models that were published with their own code.
servd never runs such code.
"""

from typing import Any

from servd.checkpoint.account import is_number

GTE = "new"  # Alibaba's name for it


def upgrade_old_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with transformers' current names. Other models' files are unchanged."""
    if config.get("model_type") == GTE:
        classes = config.get("architectures")
        if isinstance(classes, list):
            classes = [str(name).replace("New", "Gte", 1) for name in classes]
        config = {"rope_theta": 10000.0} | config | {"model_type": "gte", "architectures": classes}
    return config | _rotation(config) if config.get("model_type") == "gte" else config


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
