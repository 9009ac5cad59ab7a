"""The Triton kernels compile for Hopper, without a GPU; the interpreter tests what they do."""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import pytest

# Kernel, types of what is not constant (":16": a multiple of 16, as all pointers are), constants,
# warps or all options.
OPS = "servd.worker.ops.triton"
SAMPLE = "servd.worker.sample.ops.triton"
LOGITS = {"COUNT_BITS": 2**30 - 1, "LAST": 2**31 - 1, "ENTRIES": 256, "BLOCK": 4096}
NO_BIAS = {"starts_ptr": None, "ids_ptr": None, "biases_ptr": None}
NO_PENALTIES = {
    "words_ptr": None,
    "mask_rows_ptr": None,
    "slots_ptr": None,
    "counts_ptr": None,
    "factors_ptr": None,
}
# Llama 3 8B: 32 heads, 8 of keys and values, of 128 numbers each.
HEADS = {
    "HEADS": 32,
    "KV_HEADS": 8,
    "KEY_SIZE": 128,
    "VALUE_SIZE": 128,
    "HEAD_DIM": 128,
    "ROPE_DIM": 0,
    "WINDOW": None,
    "BLOCK_SIZE": 16,
}
PLAIN = {"tails_ptr": None, "TAIL": 0, "sinks_ptr": None, "SOFT_CAP": None}
SMALL = {"LIST": 0, "TILE_HEADS": 4, "TILE_KEYS": 64, "LINES": 16}
LARGE = {"LIST": 1, "TILE_HEADS": 4, "TILE_KEYS": 64, "LINES": 128}
CACHE = "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32"
TREE = HEADS | {"TAIL": 5, "SOFT_CAP": 50.0}  # and sinks
# DeepSeek V2 Lite: 16 heads with one key of 64 + 512 numbers.
LATENT = HEADS | {"HEADS": 16, "KV_HEADS": 1, "KEY_SIZE": 576, "VALUE_SIZE": 512}
LATENT |= {"value_ptr": None, "HEAD_DIM": 512, "ROPE_DIM": 64, "TILE_HEADS": 16, "TILE_KEYS": 32}
STEP = "*i32 *i32 *i32 *i32"
SIZES = "i32:16 i32 i32 fp32"
DECODING = {"num_warps": 4, "num_stages": 5}
PROMPTS = {"num_warps": 8, "num_stages": 5}
EXPERTS = {"num_warps": 4, "num_stages": 4}
ROUTE = {"TOP_K": 8, "EXPERTS": 256, "CHOICES": 8, "RENORMALIZE": True}
WORK = {
    "SPLIT_QUERIES": 4,
    "TILE_QUERIES": 32,
    "TILE_KEYS": 64,
    "MIN_SPLIT": 256,
    "MIN_TILE_SPLIT": 1024,
    "MAX_SPLITS": 64,
}
ROTARY = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAIRS": 64, "HALF": 64, "ROWS": 32}
NO_NORMS = {"q_weight_ptr": None, "k_weight_ptr": None}
LOW_RANK = {"DEPTH": 64}
GATE = {"ALPHA": None, "LIMIT": None}
LOW_BIT = "*bf16 *bf16 *i32 *i32 *fp32 i32 i32 i32:16 i32:16 i32:16"
LOW_BIT_EXPERTS = "*bf16 *bf16 *i32 *i32 *i32 *i32 *fp32 *fp32 i32 i32 i32:16 i32:16 i32:16"
DENSE = {"index_ptr": None, "starts_ptr": None, "bias_ptr": None}
FEW_TILES = {"ROWS": 16, "COLUMNS": 64, "STAGES": 5}
MANY_TILES = {"ROWS": 64, "COLUMNS": 128, "STAGES": 3}
INT4 = {"STORAGE": "int4", "SHIFT": -8, "HAS_OFFSET": True, "GROUP": 32, "PIECES": 4, "DEPTH": 128}
FP4 = INT4 | {"STORAGE": "fp4", "HAS_OFFSET": False}
INT8 = FP4 | {"STORAGE": "int8", "SHIFT": -128, "GROUP": 1 << 20, "PIECES": 2}
FP8 = INT8 | {"STORAGE": "fp8", "GROUP": 128}
KERNELS = [
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT, INT4 | FEW_TILES | DENSE, 4),
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT, INT4 | MANY_TILES | DENSE, 8),
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT_EXPERTS, FP4 | FEW_TILES, 4),
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT_EXPERTS, FP4 | MANY_TILES, 8),
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT, INT8 | MANY_TILES | DENSE, 8),
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT, FP8 | FEW_TILES | DENSE, 4),
    (f"{OPS}.low_bit.low_bit_kernel", LOW_BIT, FP8 | MANY_TILES | DENSE, 8),
    (f"{OPS}.work_list.work_list_kernel", "*i32 *i32 *i32 i32 i32 i32", WORK | {"WINDOW": None}, 4),
    (f"{OPS}.work_list.work_list_kernel", "*i32 *i32 *i32 i32 i32 i32", WORK | {"WINDOW": 4096}, 4),
    (
        f"{OPS}.begin_decode.begin_decode_kernel",
        "*i64 *i32 *i32 *i64 *i32 i32 i32 i32",
        {"BLOCK_SIZE": 16},
        8,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"{CACHE} {STEP} {SIZES}",
        HEADS | PLAIN | SMALL,
        DECODING,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"{CACHE} {STEP} {SIZES}",
        HEADS | PLAIN | LARGE,
        PROMPTS,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"{CACHE} {STEP} *i64 *bf16 {SIZES}",
        TREE | LARGE | {"WINDOW": 4096},
        PROMPTS,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"{CACHE} {STEP} *i64 *bf16 {SIZES}",
        TREE | SMALL,
        DECODING,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"*bf16 *fp8e4nv *fp8e4nv *bf16 *fp32 *fp32 {STEP} {SIZES}",
        HEADS | PLAIN | SMALL | {"WINDOW": 4096},
        DECODING,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"{CACHE} {STEP} {SIZES}",
        HEADS | PLAIN | LARGE | {"KEY_SIZE": 96, "VALUE_SIZE": 96},
        PROMPTS,
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"*bf16 *bf16 *bf16 *fp32 *fp32 {STEP} {SIZES}",
        SMALL | LATENT | PLAIN,
        {"num_warps": 8, "num_stages": 3},
    ),
    (
        f"{OPS}.paged_attention.attention_kernel",
        f"*bf16 *bf16 *bf16 *fp32 *fp32 {STEP} {SIZES}",
        LARGE | LATENT | PLAIN | {"LINES": 64},
        {"num_warps": 8, "num_stages": 3},
    ),
    (
        f"{OPS}.paged_attention.merge_kernel",
        "*fp32 *fp32 *bf16 *i32 *i32 i32",
        {
            "sinks_ptr": None,
            "HEADS": 32,
            "VALUE_SIZE": 128,
            "HEAD_DIM": 128,
            "MAX_SPLITS": 64,
            "SPLITS": 16,
        },
        1,
    ),
    (
        f"{OPS}.product.product_kernel",
        "*bf16 *bf16 *bf16 *bf16 i32 i32:16 i32:16 i32:16",
        {},
        {"num_warps": 4, "num_stages": 4},
    ),
    (
        f"{OPS}.product.product_kernel",
        "*bf16 *bf16 *bf16 i32 i32 i32:16 i32:16",
        {"bias_ptr": None},
        {"num_warps": 4, "num_stages": 4},
    ),
    (
        f"{OPS}.experts.experts_kernel",
        "*bf16 *bf16 *i32 *i32 *bf16 *fp32 i32:16 i32:16 i32:16",
        {"EXPERTS": 128, "ROWS": 16, "COLUMNS": 64, "DEPTH": 128},
        EXPERTS,
    ),
    (
        f"{OPS}.experts.experts_kernel",
        "*bf16 *bf16 *i32 *i32 *bf16 i32:16 i32:16 i32:16",
        {"EXPERTS": 128, "ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "biases_ptr": None},
        {"num_warps": 8, "num_stages": 3},
    ),
    (
        f"{OPS}.route.route_kernel",
        "*i32 *fp32 *bf16 i32 i32:16",
        ROUTE | {"bias_ptr": None, "NUM_GROUPS": 1, "TOP_GROUPS": 1},
        4,
    ),
    (
        f"{OPS}.route.route_kernel",
        "*i32 *fp32 *bf16 *fp32 i32 i32:16",
        ROUTE | {"NUM_GROUPS": 8, "TOP_GROUPS": 4},
        4,
    ),
    (f"{OPS}.route.place_kernel", "*i32 *i32 *i32 *i32 i32", {"TOP_K": 8}, 8),
    (
        f"{OPS}.route.combine_kernel",
        "*bf16 *bf16 *i32 *fp32 *i32 *bf16 fp32 i32:16 i32",
        {"TOP_K": 8, "CHOICES": 8},
        4,
    ),
    (
        f"{OPS}.rotary.rotate_and_store_kernel",
        "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *i64 *bf16 *bf16 i32 i32:16 i32:16 i32:16 fp32",
        ROTARY | NO_NORMS,
        4,
    ),
    (
        f"{OPS}.rotary.rotate_and_store_kernel",
        "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *i64 *bf16 *bf16 *bf16 *bf16 i32 i32:16 i32:16 i32:16 "
        "fp32",
        ROTARY,
        4,
    ),
    (
        f"{OPS}.rotary.rotate_and_store_kernel",
        "*bf16 *bf16 *bf16 *bf16 *fp8e4nv *fp8e4nv *i64 i32 i32:16 i32:16 i32:16 fp32",
        ROTARY | NO_NORMS | {"cos_ptr": None, "sin_ptr": None},
        4,
    ),
    (
        f"{OPS}.rotary.rotate_and_store_kernel",
        "*bf16 *bf16 *bf16 *bf16 *bf16 *i64 *bf16 *bf16 i32 i32:16 i32:16 i32:16 fp32",
        NO_NORMS
        | {"HEADS": 16, "KV_HEADS": 1, "HEAD_DIM": 576, "PAIRS": 32, "HALF": 512, "ROWS": 4}
        | {"v_ptr": None},
        4,
    ),
    (
        f"{OPS}.norm.norm_kernel",
        "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32 fp32",
        {"ROWS": 1, "BLOCK": 4096},
        8,
    ),
    (
        f"{OPS}.norm.norm_kernel",
        "*fp16 *fp16 *fp16 *fp16 i32 i32 i32 i32 i32 fp32",
        {"residual_ptr": None, "bias_ptr": None, "ROWS": 8, "BLOCK": 128},
        4,
    ),
    (
        f"{OPS}.round_rows.round_rows_kernel",
        "*bf16 *fp8e4nv *fp32 i32 i32:16",
        {"BLOCK": 16384},
        16,
    ),
    (f"{OPS}.activation.activate_kernel", "*bf16 *bf16 i32", {"NAME": "gelu"}, 4),
    (f"{OPS}.activation.gate_kernel", "*bf16 *bf16 i32", GATE | {"NAME": "silu"}, 4),
    (
        f"{OPS}.activation.gate_kernel",
        "*bf16 *bf16 i32",
        {"NAME": "clamped", "ALPHA": 1.702, "LIMIT": 7.0},
        4,
    ),
    (f"{OPS}.low_rank.shrink_kernel", "*bf16 *bf16 *i64 *fp32 i32 i32:16 i32:16", LOW_RANK, 4),
    (
        f"{OPS}.low_rank.expand_kernel",
        "*fp32 *bf16 *i64 *bf16 i32 i32 i32:16 i32 i32 i32 i32 i32",
        LOW_RANK,
        4,
    ),
    (
        f"{SAMPLE}.logit_edits.edit_logits_kernel",
        "*fp32 *i64 *i64 *fp32 *i32 *i32 *i64 *i32 *fp32 *i64 i32 i32 i32",
        LOGITS,
        8,
    ),
    (
        f"{SAMPLE}.logit_edits.edit_logits_kernel",
        "*fp32 *i64 i32 i32 i32",
        NO_BIAS | NO_PENALTIES | LOGITS,
        8,
    ),
    (
        f"{SAMPLE}.logit_edits.choose_kernel",
        "*i64 *i64 *i64 *i32 *i64 i32 i32",
        {"LAST": 2**31 - 1, "BLOCKS": 32},
        1,
    ),
    (f"{SAMPLE}.to_weights.to_weights_kernel", "*fp32 *fp32 *fp32 *fp32 i32 i32", {}, 8),
    (f"{SAMPLE}.top_k_top_p.top_k_top_p_kernel", "*fp32 *fp32 *i64 *fp64 *i32 *fp32 i32", {}, 16),
    (f"{SAMPLE}.draw.block_masses_kernel", "*fp32 *fp32 *i64 i32", {}, 8),
    (f"{SAMPLE}.draw.draw_kernel", "*fp32 *fp32 *i64 *i64 *i64 *i64 i32 i32", {"BLOCKS": 64}, 8),
    (f"{SAMPLE}.score.score_kernel", "*fp32 *i64 *fp32 *i32 i32 i32", {}, 8),
]


@pytest.mark.parametrize("variants", ["first", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_kernels_compile_for_hopper(tmp_path, variants):
    """In a process of its own, where Triton is not told to interpret."""
    pytest.importorskip("triton")
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
    }
    command = [sys.executable, __file__, variants]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def main(variants: str) -> None:
    """Compile the first variant of each kernel, or all of them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    first = {case[0]: case for case in reversed(KERNELS)}
    for name, types, constants, options in KERNELS if variants == "all" else first.values():
        module, _, kernel_name = name.rpartition(".")
        kernel = getattr(importlib.import_module(module), kernel_name)
        types_left = iter(types.split())
        signature = {
            arg: "constexpr" if arg in constants else next(types_left) for arg in kernel.arg_names
        }
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, kind in enumerate(signature.values())
            if kind.startswith("*") or kind.endswith(":16")
        }
        signature = {arg: kind.removesuffix(":16") for arg, kind in signature.items()}
        source = ASTSource(kernel, signature, constants, aligned)
        if isinstance(options, int):
            options = {"num_warps": options}
        if "low_bit" in name:
            for capability in (80, 89, 90, 100, 120) if variants == "all" else (90,):
                card = GPUTarget("cuda", capability, 32)
                compiled = triton.compile(source, target=card, options=options)
                check_low_bit(compiled, capability, constants)
            continue
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        if options is DECODING:  # keys and values of two turns are loaded ahead
            tile_bytes = 64 * 128 * (1 if "*fp8e4nv" in types else 2)
            assert compiled.metadata.shared >= 2 * 2 * tile_bytes, (name, compiled.metadata.shared)
        if options is EXPERTS:  # weights are not read number by number
            assert "ld.global.b16" not in compiled.asm["ptx"], name
            assert "wgmma" in compiled.asm["ptx"], name


def check_low_bit(compiled: Any, capability: int, constants: dict[str, Any]) -> None:
    """Weights are loaded ahead, in words; registers suffice; Hopper's tensor cores are used."""
    import triton

    ptx = compiled.asm["ptx"]
    case = (capability, constants)
    assert not re.search(r"ld\.global[.\w:]*\.[bus](8|16)\b", ptx), case
    assert "cp.async.cg" in ptx, case
    assert capability != 90 or "wgmma.mma_async" in ptx, case
    # 99 KB on sm_89 and sm_120
    assert compiled.metadata.shared <= 99 << 10, case
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage and "LOCAL:0 " in usage, (case, usage)


if __name__ == "__main__":
    main(sys.argv[1])
