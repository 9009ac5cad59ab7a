"""GGUF files of tiny models, as llama.cpp's converter and llama-gguf-split would write them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from torch import Tensor

Quant = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
}
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
STATES = (*QWEN, "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2")


def write_model(
    path: Path,
    model: Any,
    quant: Quant = Quant.F32,
    types: dict[str, Quant] | None = None,
    vocabulary: dict[str, Any] | None = None,
    **changed: Any,
) -> Path:
    """Write a transformers model. `types`: of tensors, by the last part of their names; `quant`: of
    the others that are matrices. `vocabulary`: metadata of the tokenizer. `changed`: the
    architecture, or `split`, a number of tensors in a file, or `has_split_experts`.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    [member] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(member, config.num_hidden_layers)
    split = changed.get("split", 0)
    writer = gguf.GGUFWriter(
        path, changed.get("architecture", architecture), split_max_tensors=split
    )
    _add_config(writer, config)
    for key, value in (vocabulary or plain_vocabulary(config.vocab_size)).items():
        _add(writer, f"tokenizer.{key}", value)
    for name, tensor in _converted(model):
        stem, dot, leaf = name.rpartition(".")
        if name.endswith((".A_log", ".D")):
            gguf_name = names.get_name(name)
            writer.add_tensor(gguf_name, tensor.float().numpy())
            continue
        if dot and stem.startswith(("rope_", "blk.")):
            gguf_name = stem
        else:
            gguf_name = names.get_name(stem)
            assert gguf_name, name
        kind = (types or {}).get(gguf_name.rpartition(".")[2], quant)
        is_exact = tensor.dim() == 1 or leaf == "bias" or "gate_inp" in gguf_name
        is_exact |= gguf_name.endswith(("ssm_conv1d", "shortconv.conv", "ssm_norm"))
        kind = Quant.F32 if is_exact else kind
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), kind)
        if gguf_name.endswith("_exps") and changed.get("has_split_experts"):
            for number, entry in enumerate(data):
                old = f"{gguf_name.removesuffix('_exps')}.{number}.{leaf}"
                writer.add_tensor(old, entry, raw_dtype=kind)
        else:
            writer.add_tensor(f"{gguf_name}.{leaf}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a tokenizer that no test runs."""
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": [f"t{i}" for i in range(size)],
        "ggml.merges": ["a b"],
    }


def bpe_vocabulary(file: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """Metadata of a byte-level tokenizer.json."""
    backend = tokenizers.Tokenizer.from_file(str(file))
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    special = backend.get_added_tokens_decoder()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "ggml.merges": [" ".join(merge) for merge in merges],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata that the converter makes of config.json."""
    if config.model_type in STATES:
        _add_states(writer, config)
    if config.model_type == "mamba2":
        return
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    kv_heads = config.num_key_value_heads
    if config.model_type in STATES and config.model_type not in QWEN:
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, config, head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        writer.add_attn_logit_softcapping(cap)
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        writer.add_final_logit_softcapping(cap)
    size = getattr(config, "moe_intermediate_size", None)
    has_experts = config.model_type == "granitemoehybrid" and config.num_local_experts
    if size or has_experts or config.model_type in ("gpt_oss", "mixtral"):
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if size or config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(size or config.intermediate_size)


def _add_states(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata of layers with a state."""
    match config.model_type:
        case "lfm2":
            writer.add_shortconv_l_cache(config.conv_L_cache)
            writer.add_vocab_size(config.vocab_size)
        case "lfm2_moe":
            writer.add_shortconv_l_cache(config.conv_L_cache)
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        case "granitemoehybrid":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
            writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
            writer.add_ssm_conv_kernel(config.mamba_d_conv)
            writer.add_ssm_state_size(config.mamba_d_state)
            writer.add_ssm_group_count(config.mamba_n_groups)
            writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
            writer.add_ssm_time_step_rank(config.mamba_n_heads)
        case "mamba2":
            writer.add_context_length(1 << 20)
            writer.add_embedding_length(config.hidden_size)
            writer.add_feed_forward_length(0)
            writer.add_head_count(0)
            writer.add_block_count(config.num_hidden_layers)
            writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
            writer.add_ssm_conv_kernel(config.conv_kernel)
            writer.add_ssm_state_size(config.state_size)
            writer.add_ssm_group_count(config.n_groups)
            writer.add_ssm_inner_size(config.expand * config.hidden_size)
            writer.add_ssm_time_step_rank(config.num_heads)
        case _:
            writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
            writer.add_ssm_state_size(config.linear_key_head_dim)
            writer.add_ssm_group_count(config.linear_num_key_heads)
            writer.add_ssm_time_step_rank(config.linear_num_value_heads)
            writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
            writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
            are_states = [kind == "linear_attention" for kind in config.layer_types]
            writer.add_array(f"{writer.arch}.attention.recurrent_layers", are_states)
            if config.model_type != "qwen3_5_text":
                size = config.shared_expert_intermediate_size
                writer.add_expert_shared_feed_forward_length(size)
            if config.model_type != "qwen3_next":
                writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    partial = rope.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(partial * head_dim))
    if config.model_type != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    original = rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original)
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if config.model_type == "phi3":
        original = original or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config.max_position_embeddings / original
        if kind == "longrope":
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original))
            )


def _converted(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names of Hugging Face, and tensors as the converter changes them."""
    config = model.config
    kind = config.model_type
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind in STATES:
            yield from _of_states(config, name, tensor)
            continue
        module, _, leaf = name.rpartition(".")
        last = module.rpartition(".")[2]
        if kind in ("llama", "mistral", "mixtral") and last in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if last == "q_proj" else config.num_key_value_heads
            halves = tensor.unflatten(0, (heads, 2, -1))
            yield name, halves.transpose(1, 2).flatten(0, 2)
        elif kind.startswith("gemma") and last.endswith("norm"):
            yield name, tensor + 1.0
        elif kind == "gpt2" and last in ("c_attn", "c_proj", "c_fc") and leaf == "weight":
            yield name, tensor.t()
        elif leaf == "sinks":
            yield f"{name}.weight", tensor
        elif last == "experts":
            yield from _of_experts(module, leaf, tensor, is_interleaved=kind == "gpt_oss")
        else:
            yield name, tensor
    yield from _rope_factors(config)


def _of_states(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that the converter makes of one of a model with states."""
    layer = name.partition(".layers.")[2].partition(".")[0]
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    tensor = _changed(config, name, tensor)
    parts: dict[str, Tensor] = {}
    if last == "in_proj_qkvz":
        num_keys = config.linear_num_key_heads
        keys = config.linear_key_head_dim
        values = config.linear_value_head_dim * config.linear_num_value_heads // num_keys
        heads = tensor.unflatten(0, (num_keys, -1))
        *qkv, z = (x.flatten(0, 1) for x in heads.split([keys, keys, values, values], dim=1))
        parts = {"attn_qkv.weight": torch.cat(qkv), "attn_gate.weight": z}
    elif last == "experts":
        names = ("gate", "up") if leaf == "gate_up_proj" else ("down",)
        pieces = zip(names, tensor.chunk(len(names), dim=1), strict=True)
        parts = {f"ffn_{part}_exps.weight": piece for part, piece in pieces}
    elif ".shared_mlp." in name:
        names = ("gate", "up") if last == "input_linear" else ("down",)
        suffix = "_shexp" if config.num_local_experts else ""
        pieces = zip(names, tensor.chunk(len(names)), strict=True)
        parts = {f"ffn_{part}{suffix}.weight": piece for part, piece in pieces}
    elif last == "router":
        parts = {"ffn_gate_inp.weight": tensor}
    elif leaf == "dt_bias":
        parts = {"ssm_dt.bias": tensor}
    elif leaf == "expert_bias":
        parts = {"exp_probs_b.bias": tensor}
    for part, piece in parts.items():
        yield f"blk.{layer}.{part}", piece
    if not parts:
        yield name, tensor


def _changed(config: Any, name: str, tensor: Tensor) -> Tensor:
    """A tensor with the numbers and the shape that the converter gives it."""
    is_qwen = config.model_type in QWEN
    if ".linear_attn." in name and config.model_type != "qwen3_next":
        tensor = _tiled(config, name, tensor)
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith((".A_log", ".D")):
        return tensor if is_qwen else tensor.reshape(-1, 1)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.squeeze(1)
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        key = "n_groups" if config.model_type == "mamba2" else "mamba_n_groups"
        return tensor.reshape(getattr(config, key), -1)
    if is_qwen and name.endswith("norm.weight") and ".linear_attn." not in name:
        return tensor + 1.0
    if config.model_type == "granitemoehybrid" and name.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        is_query = name.endswith("q_proj.weight")
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor


def _tiled(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Heads of values in the order in which ggml repeats heads of keys."""
    num_keys = config.linear_num_key_heads
    shape = (num_keys, config.linear_num_value_heads // num_keys, -1)
    if "out_proj" in name:
        return tensor.unflatten(1, shape).transpose(1, 2).flatten(1)
    if name.endswith("linear_attn.norm.weight"):
        return tensor
    has_keys = "in_proj_qkv" in name or "conv1d" in name
    keys = 2 * num_keys * config.linear_key_head_dim if has_keys else 0
    values = tensor[keys:].unflatten(0, shape).transpose(0, 1).flatten(0, 2)
    return torch.cat((tensor[:keys], values))


def _of_experts(
    module: str, leaf: str, tensor: Tensor, is_interleaved: bool
) -> Iterator[tuple[str, Tensor]]:
    part = leaf.removesuffix("_bias")
    kind = "weight" if part == leaf else "bias"
    if is_interleaved and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if part == "down_proj":
        yield f"{module}.down_proj.{kind}", tensor
        return
    size = tensor.shape[1] // 2
    gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if is_interleaved else tensor.split(size, dim=1)
    yield f"{module}.gate_proj.{kind}", gate
    yield f"{module}.up_proj.{kind}", up


def _rope_factors(config: Any) -> Iterator[tuple[str, Tensor]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") != "llama3":
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / size)
        turns = rope["original_max_position_embeddings"] / wavelength
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    yield "rope_freqs.weight", torch.tensor(factors)


def matrices_of(model: Any) -> Iterator[Tensor]:
    """Parameters that `write_model` quantizes, each [..., out, in] as a file has it."""
    transposed = {"gpt2": ("c_attn", "c_proj", "c_fc"), "gpt_oss": ("gate_up_proj", "down_proj")}
    names = transposed.get(model.config.model_type, ())
    for name, parameter in model.named_parameters():
        is_router = name.endswith(
            ("gate.weight", "router.weight", "conv1d.weight", "conv.conv.weight")
        )
        if parameter.dim() < 2 or is_router or name.endswith("_bias"):
            continue
        last = name.removesuffix(".weight").rpartition(".")[2]
        yield parameter.data.mT if last in names else parameter.data
