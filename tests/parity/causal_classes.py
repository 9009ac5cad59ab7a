"""Tiny seeded checkpoints of the causal classes of transformers, by model_type."""

from pathlib import Path
from typing import Any

import torch

# What a config has of these, whatever it calls them, is made small.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 80),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.15),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    "vocab_size": 199,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 7,
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    "moe_shared_expert_intermediate_size": 48,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Small too where the default is None: not every class computes them then.
NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
)
TWO_KINDS = ["sliding_attention", "full_attention"]
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
# Where that is not enough.
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "electra", "ernie", "roc_bert"), {"is_decoder": True}
    ),
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY}},
    "cwm": {"bos_token_id": 1},
    "codegen": {"n_ctx": 128, "rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 5e5, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "layer_types": TWO_KINDS * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 199,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": TWO_KINDS * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 199,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
    },
    "dory": dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1),
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 7},
    "emu3_text_model": dict.fromkeys(IDS, 0),
    "longcat_flash": {"head_dim": 8, "num_layers": 1},
    "modernbert-decoder": dict.fromkeys(IDS, 0),
}


def make(folder: Path, model_type: str, architecture: str) -> Path:
    """Write a checkpoint of the class `architecture`."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config(model_type)
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(transformers, architecture)(config).parameters())
        if size > 20_000_000:
            raise ValueError(f"{size} parameters are not tiny")
        model = getattr(transformers, architecture)(config)
        model.generation_config = transformers.GenerationConfig()  # nothing forced
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def tiny_config(model_type: str) -> Any:
    """The class's own defaults, with small sizes."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[model_type]
    default = config_class()
    if (text := default.get_text_config()) is not default:
        return tiny_config(text.model_type)
    default.allow_global_per_layer_attribute_access = True
    options: dict[str, Any] = {}
    for name, size in SIZES.items():
        value = getattr(default, name, None)
        is_size = isinstance(value, int | float) and not isinstance(value, bool)
        is_property = isinstance(getattr(config_class, name, None), property)
        if (is_size and not is_property) or (
            name in NEEDED and hasattr(default, name) and value is None
        ):
            options[name] = size
    if hasattr(default, "qk_rope_head_dim"):  # compressed keys: all heads have their own
        options.pop("head_dim", None)
        if "num_key_value_heads" in options:
            options["num_key_value_heads"] = options["num_attention_heads"]
    for name in IDS:
        if hasattr(default, name):
            options[name] = None
    return config_class(**options | OPTIONS.get(model_type, {}))
