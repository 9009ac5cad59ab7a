"""A decode step moves the bytes of its weights once, as the checkpoint stores them."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from tests.worker.gates import catalogue

# Bytes that the matrices of a layer move per byte that is stored, at batch 1.
MOST = {
    (family, form): 1.12
    for family in ("8B", "30B-A3B", "V2-Lite")
    for form in (None, *catalogue.FORMATS)
    # Experts with scattered columns are dequantized, as is what has no kernel: 16 bits for 4.
    if form != "GPTQ desc_act" or family == "8B"
} | {
    ("30B-A3B", "GPTQ desc_act"): 4.0,
    ("GPT-OSS-20B", None): 1.02,
    ("GPT-OSS-20B", "MXFP4"): 1.06,
    ("Phi-3 mini", "AWQ"): 1.05,
    ("Gemma 3 27B", "fp8 rows"): 1.02,
}
# Checkpoints that servd rounds while it loads them: the bits of a weight.
ROUNDED = {"fp8": 8, "int8": 8, "int4": 5}


def bytes_moved(folder: Path, **options: object) -> int:
    launches = catalogue.layer_of(catalogue.decode_step(catalogue.load(folder, **options), 1, 1024))
    return sum(launch.weights + launch.activations for launch in launches)


@pytest.mark.parametrize(("family", "form"), MOST, ids=str)
def test_stored_bytes_are_moved_once(tmp_path: Path, family: str, form: str | None):
    folder = catalogue.write_headers(tmp_path, family, form)
    assert bytes_moved(folder) <= MOST[family, form] * catalogue.stored_bytes(folder, 1)


@pytest.mark.parametrize("family", ["8B", "30B-A3B"])
@pytest.mark.parametrize("quantization", ROUNDED)
def test_rounded_bytes_are_moved_once(tmp_path: Path, family: str, quantization: str):
    folder = catalogue.write_headers(tmp_path, family, None)
    stored = catalogue.stored_bytes(folder, 1) * ROUNDED[quantization] / 16
    assert bytes_moved(folder, quantization=quantization) <= 1.05 * stored


# Types of GGUF files: of all matrices, and of values and of the second matrix of the feed-forward.
GGUF = {"Q4_0": ("Q4_0", "Q4_0"), "Q8_0": ("Q8_0", "Q8_0"), "Q4_K_M": ("Q4_K", "Q6_K")}


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_of_gguf_are_moved_once(tmp_path: Path, kind: str):
    gguf = pytest.importorskip("gguf")
    config = catalogue.FAMILIES["8B"] | {"num_hidden_layers": catalogue.NUM_LAYERS}
    stated = {"quantization_config": {"quant_method": "gguf"}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    file = tmp_path / "8B.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, catalogue.NUM_LAYERS)
    total = stored = 0
    for name, shape in catalogue.shapes_of(config).items():
        renamed = names.get_name(name.removesuffix(".weight"))
        is_larger = renamed.endswith(("attn_v", "ffn_down"))
        type_name = "F32" if len(shape) == 1 else GGUF[kind][is_larger]
        tensor_type = gguf.GGMLQuantizationType[type_name]
        size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        num_bytes = math.prod(shape) // size * block_bytes
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(f"{renamed}.weight", shape, dtype, num_bytes, tensor_type)
        total += num_bytes + 64
        stored += num_bytes if renamed.startswith(f"blk.{catalogue.NUM_LAYERS - 1}.") else 0
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(file, file.stat().st_size + total)
    (tmp_path / "model.gguf").symlink_to(file)
    # Codes of Q6_K take 8 bits. Half of the layers of a Q4_K_M file have some, and the others 1.11.
    assert bytes_moved(tmp_path) <= (1.22 if kind == "Q4_K_M" else 1.12) * stored
