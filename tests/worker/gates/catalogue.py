"""What people serve on one GPU, by its config.json and the names and shapes of its files' tensors:
models of the true sizes with few layers. Files have headers, and no data on the disk.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from servd.base.cards import CARDS, Card
from servd.checkpoint.model_spec import read_spec
from servd.worker.ops import target
from servd.worker.runner import dry_run, step_cost
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from servd.worker.runner.step_cost import Launch
from tests.worker.driver import config_for

H100 = CARDS["h100"]
NUM_LAYERS = 3
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CUDA = torch.device("cuda")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "8B": LLAMA,
    "Phi-3 mini": LLAMA
    | {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": 32,
        "head_dim": 96,
        "vocab_size": 32064,
        "pad_token_id": None,
    },
    "Gemma 3 27B": LLAMA
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    "30B-A3B": LLAMA
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    },
    "GPT-OSS-20B": LLAMA
    | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
        "vocab_size": 201088,
    },
    "V2-Lite": LLAMA
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
    },
}

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type, as safetensors names it, and shape of each tensor."""
ITEM_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}


def _fp8_rows(out: int, size: int) -> Shapes:
    return {"weight": ("F8_E4M3", (out, size)), "weight_scale": ("BF16", (out, 1))}


def _fp8_blocks(out: int, size: int) -> Shapes:
    blocks = math.ceil(out / 128), math.ceil(size / 128)
    return {"weight": ("F8_E4M3", (out, size)), "weight_scale_inv": ("F32", blocks)}


def _awq(out: int, size: int) -> Shapes:
    groups = math.ceil(size / 128)
    return {
        "qweight": ("I32", (size, out // 8)),
        "qzeros": ("I32", (groups, out // 8)),
        "scales": ("F16", (groups, out)),
    }


def _gptq(out: int, size: int) -> Shapes:
    groups = math.ceil(size / 128)
    return {
        "qweight": ("I32", (size // 8, out)),
        "qzeros": ("I32", (groups, out // 8)),
        "scales": ("F16", (groups, out)),
        "g_idx": ("I32", (size,)),
    }


def _w4a16(out: int, size: int) -> Shapes:
    group = 128 if size % 128 == 0 else 32
    return {
        "weight_packed": ("I32", (out, size // 8)),
        "weight_scale": ("BF16", (out, size // group)),
        "weight_shape": ("I64", (2,)),
    }


def _w8a16(out: int, size: int) -> Shapes:
    return {"weight": ("I8", (out, size)), "weight_scale": ("BF16", (out, 1))}


def _compressed(bits: int, kind: str, form: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True}
    groups = {"0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


# The quantization_config, and the tensors of a matrix [out, in].
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], Shapes]]] = {
    "fp8 rows": (_compressed(8, "float", "float-quantized"), _fp8_rows),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8_blocks),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, _awq),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, _gptq),
    "GPTQ desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True},
        _gptq,
    ),
    "c-t w4a16": (_compressed(4, "int", "pack-quantized"), _w4a16),
    "c-t w8a16": (_compressed(8, "int", "int-quantized"), _w8a16),
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a model's checkpoint, experts one by one."""
    model_type = config["model_type"]
    options = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(model_type, **options)
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        prefix, is_of_experts, leaf = name.partition(".experts.")
        if not is_of_experts or tensor.dim() != 3 or model_type == "gpt_oss":
            shapes[name] = tuple(tensor.shape)
            continue
        for number in range(len(tensor)):
            _, out, size = tensor.shape
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for part in parts:
                expert = f"{prefix}.experts.{number}.{part}.weight"
                shapes[expert] = (out // len(parts), size)
    return shapes


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether quantizers convert a tensor: projections, neither routers nor tables."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and len(shape) == 2 and "proj" in module


def write_headers(
    folder: Path, family: str, form: str | None, num_layers: int = NUM_LAYERS
) -> Path:
    """Write a checkpoint of a family in a format, without data."""
    folder.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[family] | {"num_hidden_layers": num_layers, "dtype": "bfloat16"}
    tensors: Shapes = {}
    stated: dict[str, Any] = {}
    for name, shape in shapes_of(config).items():
        if form == "MXFP4" and ".experts." in name and len(shape) == 3:
            tensors |= dict(_mxfp4(name, shape))
            stated = {"quant_method": "mxfp4"}
        elif form in FORMATS and is_quantized(name, shape):
            stated, make = FORMATS[form]
            stem = name.removesuffix("weight")
            tensors |= {stem + leaf: value for leaf, value in make(*shape).items()}
        else:
            tensors[name] = ("BF16", shape)
    assert form is None or stated, f"{family} has nothing in {form}"
    if stated:
        config = config | {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, entry in header.items():
            if name.endswith(".g_idx"):  # groups that are checked; scattered with desc_act
                size = entry["shape"][0]
                groups = np.arange(size, dtype=np.int32)[::-1] // 128
                file.seek(8 + len(text) + entry["data_offsets"][0])
                file.write(groups.tobytes() if stated.get("desc_act") else groups[::-1].tobytes())
    return folder


def _mxfp4(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Transformers has experts' matrices as [experts, in, out]; checkpoints have rows of blocks."""
    (num_experts, size, out) = shape
    yield f"{name}_blocks", ("U8", (num_experts, out, size // 32, 16))
    yield f"{name}_scales", ("U8", (num_experts, out, size // 32))


def load(folder: Path, card: Card = H100, **options: Any) -> GPUModelRunner:
    """The runner of a checkpoint on a card, without memory."""
    config = config_for(
        folder,
        **{
            "device": "cuda",
            "dtype": "bfloat16",
            "block_size": 16,
            "max_model_len": 4096,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 4096,
        }
        | options,
    )
    spec = read_spec(folder)
    with target.assume(card):
        return dry_run.load(GPUModelRunner, config, spec, CUDA)


def decode_step(runner: GPUModelRunner, num_rows: int, num_tokens: int) -> list[Launch]:
    """The launches of a step on an H100."""
    with target.assume(H100), dry_run.Weightless(CUDA):
        return step_cost.step_launches(runner, num_rows, num_tokens)


def layer_of(launches: list[Launch]) -> list[Launch]:
    """The launches from the attention of the last layer but one to that of the last."""
    places = [at for at, launch in enumerate(launches) if launch.name in step_cost.ATTENTION]
    return launches[places[-2] : places[-1]]


def stored_bytes(folder: Path, num_rows: int) -> float:
    """The bytes of the last layer's matrices, of experts those that some row has."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    config = json.loads((folder / "config.json").read_text())
    num_experts = next((config[key] for key in NUM_EXPERTS if key in config), 1)
    num_chosen = num_rows * config.get("num_experts_per_tok", 1)
    total = 0.0
    for name, entry in header.items():
        if f".{NUM_LAYERS - 1}." not in name:
            continue
        first, last = entry["data_offsets"]
        share = 1.0
        if ".experts." in name:
            share = step_cost.share_of_experts(num_experts, num_chosen)
        total += share * (last - first)
    return total
