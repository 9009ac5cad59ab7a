"""The models that are measured: config.json of well-known shapes. Their weights are random."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
# With twice GPT-2's positions: the workload has sequences of up to 2048 tokens.
GPT2_124M: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "dtype": "bfloat16",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 2048,
    "activation_function": "gelu_new",
}


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The same family in a size for a CPU: to test the measurement."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "n_embd": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "n_layer": 1,
        "num_attention_heads": 2,
        "n_head": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    return (
        config
        | {name: size for name, size in sizes.items() if name in config}
        | {"dtype": "float32"}
    )
