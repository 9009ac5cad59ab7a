"""The language model of a multimodal model: its config.json is nested in the model's, and its
weights have a prefix. servd runs only this part.
"""

from collections.abc import Mapping
from typing import Any

TEXT = "text_config"
# The classes of servd's models, by the model_type of the part.
CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Qwen's M-RoPE has three positions per token, which are equal for text.
SAME = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # as Qwen published them: text keys at the top level
# What published files leave out as transformers knows it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "eos_token_id": 2,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
# Keys of the whole model that hold for its text.
OF_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")
INNER = ("language_model.", "text_model.")  # where its weights are in the whole model
# Names of its weights where they are not inside of another module, and of the layer that drafts.
OWN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


def is_part(config: Mapping[str, Any]) -> bool:
    """Return whether config.json belongs to a multimodal model."""
    is_flat = config.get("model_type") in FLAT and "vision_config" in config
    return isinstance(config.get(TEXT), dict) or is_flat


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the language model alone. A text model's config.json is unchanged."""
    if not is_part(config):
        return config
    inner = config.get(TEXT) or {key: config[key] for key in config if key != "vision_config"}
    model_type = str(inner.get("model_type") or config.get("model_type"))
    defaults = DEFAULTS.get(model_type, {})
    model_type = SAME.get(model_type, model_type)
    stated = {key: each for key, each in inner.items() if each is not None or key not in defaults}
    of_whole = {key: config[key] for key in OF_WHOLE if config.get(key) is not None}
    text = defaults | stated | of_whole | {"model_type": model_type}
    if model_type in CLASSES:
        text["architectures"] = [CLASSES[model_type]]
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            kept = {name: each for name, each in rope.items() if name != "type"}
            text[key] = kept | {"rope_type": "default"}
    return text


def text_name(name: str) -> str | None:
    """Return the name that a multimodal checkpoint's tensor has in the language model; None if the
    tensor belongs to another part.
    """
    for place in INNER:
        _, is_inside, rest = name.partition(place)
        if is_inside:
            rest = rest.removeprefix("model.")
            return rest if rest.startswith("lm_head.") else f"model.{rest}"
    return name if name.startswith(OWN) else None
