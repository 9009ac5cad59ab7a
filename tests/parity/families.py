"""Tiny seeded checkpoints of every family in servd/worker/models, and transformers beside them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

LLAMA = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 1.7, 1.8, 1.9, 2.1],
    "long_factor": [1.5, 2.0, 3.0, 6.0, 7.0, 8.0, 8.5, 9.0],
}
GPT2 = {
    "vocab_size": 199,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}

QWEN3_MOE = LLAMA | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "norm_topk_prob": False,
}

GEMMA2 = LLAMA | {
    "head_dim": 16,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
    "pad_token_id": None,
}
GEMMA3 = LLAMA | {
    "head_dim": 16,
    "query_pre_attn_scalar": 40,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": None,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GRANITE = LLAMA | {
    "head_dim": 16,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 6.0,
    "logits_scaling": 3.0,
}
SMOLLM3 = LLAMA | {"no_rope_layer_interval": 2, "head_dim": 16, "pad_token_id": None}
GPT_OSS = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "rope_parameters": YARN_ROPE | {"truncate": False},
    "pad_token_id": None,
}
QWEN3_NEXT = QWEN3_MOE | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_expert_intermediate_size": 40,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "pad_token_id": None,
}
GRANITE_HYBRID = GRANITE | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
}
LFM2 = LLAMA | {
    "layer_types": ["conv", "full_attention", "conv"],
    "head_dim": 16,
    "pad_token_id": None,
}
LFM2_MOE = LFM2 | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
}
LFM3 = LFM2 | {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    "sliding_window": 7,
}
MAMBA2 = {
    "vocab_size": 199,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 12,
    "state_size": 10,
    "n_groups": 2,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PHI3 = LLAMA | {"hidden_size": 64, "num_attention_heads": 4, "pad_token_id": None}

DEEPSEEK = LLAMA | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9},
    "pad_token_id": None,
}

# model_type -> variants of its config.json, by name.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v2": {
        "any group": DEEPSEEK,
        "groups, short queries": DEEPSEEK
        | {"topk_method": "group_limited_greedy", "q_lora_rank": 28, "attention_bias": True},
    },
    "deepseek_v3": {
        "renormalized": DEEPSEEK | {"q_lora_rank": 28, "norm_topk_prob": True},
        "halves turned": DEEPSEEK | {"rope_interleave": False, "norm_topk_prob": False},
    },
    "gpt2": {
        "tied": GPT2 | {"n_embd": 64, "n_head": 4},
        "untied, relu, n_inner": GPT2
        | {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 70},
        "unscaled": GPT2 | {"scale_attn_weights": False, "initializer_range": 0.1},
    },
    "gemma2": {
        "caps": GEMMA2,
        "no caps": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma3_text": {
        "layer types": GEMMA3 | {"rope_parameters": TWO_ROPES},
        "head cap": GEMMA3 | {"final_logit_softcapping": 2.0, "sliding_window_pattern": 2},
    },
    "gpt_oss": {
        "sinks": GPT_OSS,
        "clamped": GPT_OSS | {"swiglu_limit": 0.5, "swiglu_alpha": 1.1, "attention_bias": False},
    },
    "granite": {"factors": GRANITE},
    "granitemoehybrid": {
        "experts, no positions": GRANITE_HYBRID,
        "dense, positions, groups": GRANITE_HYBRID
        | {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
        },
    },
    "lfm2": {
        "tied": LFM2,
        "untied, biases, a size": LFM2
        | {
            "tie_word_embeddings": False,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_multiple_of": 20,
            "block_ffn_dim_multiplier": 1.1,
        },
    },
    "lfm2_moe": {
        "biased router": LFM2_MOE,
        "plain router": LFM2_MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    },
    "lfm3": {
        "norms and gates": LFM3,
        "neither": LFM3
        | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True},
    },
    "llama": {
        "untied": LLAMA,
        "tied, biases": LLAMA
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "head_dim": LLAMA | {"head_dim": 12, "num_attention_heads": 4, "num_key_value_heads": 4},
        "llama3 rope": LLAMA | {"rope_parameters": LLAMA3_ROPE, "head_dim": 16},
        "linear rope": LLAMA
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
        "yarn rope": LLAMA | {"rope_parameters": YARN_ROPE},
    },
    "mamba2": {
        "groups": MAMBA2,
        "one group, biases, tied": MAMBA2
        | {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    },
    "mistral": {
        "window": LLAMA | {"sliding_window": 7, "head_dim": 16},
        "no window": LLAMA | {"sliding_window": None, "head_dim": 16},
    },
    "mixtral": {
        "experts": LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
        "window": LLAMA | {"num_local_experts": 4, "sliding_window": 7, "head_dim": 16},
    },
    "olmo2": {"of heads": LLAMA | {"hidden_size": 64, "num_attention_heads": 4}},
    "phi3": {
        "window": PHI3 | {"sliding_window": 7},
        # Contexts of up to 128 tokens, which tests have, are short ones.
        "long contexts": PHI3
        | {
            "rope_parameters": LONG_ROPE,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
        },
        "part of heads": PHI3
        | {
            "rope_parameters": LONG_ROPE
            | {"partial_rotary_factor": 0.75}
            | {key: LONG_ROPE[key] + [2.0] * 4 for key in ("short_factor", "long_factor")},
            "num_attention_heads": 2,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "qwen2": {"untied": LLAMA, "tied": LLAMA | {"tie_word_embeddings": True}},
    "qwen3": {
        "head_dim": LLAMA | {"head_dim": 16},
        "bias": LLAMA | {"attention_bias": True, "head_dim": 8},
    },
    "qwen3_moe": {
        "renormalized": QWEN3_MOE | {"norm_topk_prob": True},
        "some layers dense": QWEN3_MOE | {"mlp_only_layers": [1], "head_dim": 8},
    },
    "qwen3_5_moe_text": {"experts": QWEN3_NEXT | {"layer_types": None}},
    "qwen3_5_text": {"of four layers": QWEN3_NEXT | {"layer_types": None, "attention_bias": True}},
    "qwen3_next": {
        "experts": QWEN3_NEXT | {"norm_topk_prob": True},
        "some layers dense": QWEN3_NEXT
        | {"mlp_only_layers": [1, 2], "linear_conv_kernel_dim": 3, "linear_num_key_heads": 6},
    },
    "smollm3": {
        "window": SMOLLM3 | {"use_sliding_window": True, "sliding_window": 7},
        "no window": SMOLLM3 | {"no_rope_layers": [0, 1, 0]},
    },
}

STATES = (
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba2",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)

ENCODER = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 130,
    "initializer_range": 0.15,
}
PADDED = ENCODER | {"pad_token_id": 1, "type_vocab_size": 1}
GTE_ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 40000.0, "factor": 1.14}}
MODERN = ENCODER | {
    "num_hidden_layers": 4,
    "local_attention": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
# model_type -> variants of its config.json, by name.
ENCODERS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {"types": ENCODER, "gelu_new": ENCODER | {"hidden_act": "gelu_new"}},
    "gte": {
        "one type": PADDED | GTE_ROPE,
        "no types, a default base": PADDED | {"type_vocab_size": 0},
    },
    "roberta": {"positions": PADDED},
    "xlm-roberta": {"positions": PADDED | {"pad_token_id": 3, "num_labels": 1}},
    "modernbert": {
        "first token": MODERN,
        "mean, biases": MODERN
        | {"classifier_pooling": "mean", "norm_bias": True, "mlp_bias": True, "num_labels": 3},
    },
}


def keeps_state(model_type: str) -> bool:
    """Whether some of its layers keep a state."""
    return model_type in STATES


@cache
def reference(folder: Path) -> Any:
    """The transformers model of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {}
    if getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # before 5.24 the default leaves the cap out
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.inference_mode()
def greedy(folder: Path, prompt: list[int], num_outputs: int) -> list[int]:
    """Prompt and greedy continuation by transformers."""
    ids = torch.tensor([prompt])
    out = reference(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_outputs,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0].tolist()


@torch.inference_mode()
def logits_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position [num_tokens, vocab] by transformers."""
    return reference(folder)(torch.tensor([token_ids])).logits[0]


def tolerance_of(model_type: str) -> float:
    """How far logits may be from transformers'. A gated delta rule multiplies rounding errors:
    transformers in 32 bits is up to 1.8e-4 away from itself in 64 bits, where its attention is 4e-6
    away. Both sides of a comparison have such an error.
    """
    has_delta_rule = model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    return 4e-4 if has_delta_rule else 1e-4


def make_any(folder: Path, model_type: str) -> Path:
    """Write the checkpoint of a family's first case, a decoder or an encoder."""
    kind = "AutoModel" if model_type in ENCODERS else "AutoModelForCausalLM"
    options = next(iter((CASES | ENCODERS)[model_type].values()))
    return make_checkpoint(folder, model_type, options, kind)


def make_checkpoint(
    folder: Path, model_type: str, options: dict[str, Any], kind: str = "AutoModelForCausalLM"
) -> Path:
    """Write a seeded random checkpoint of a class of transformers, biases and norms too."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind).from_config(
            transformers.AutoConfig.for_model(model_type, **options), dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return folder
