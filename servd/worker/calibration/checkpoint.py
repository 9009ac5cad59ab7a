"""Write a checkpoint of compressed-tensors, "pack-quantized"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from servd.hf import METADATA_FILES, read_json, weight_files
from servd.worker.calibration.gptq import Codes

LAYOUT = "pack-quantized"


def write(
    folder: Path, output: Path, matrices: dict[str, Codes], layers: dict[str, str], left: list[str]
) -> int:
    """The checkpoint of `folder`, with these matrices in place of some; returns the bytes of all
    weights.

    Args:
        folder: of the original.
        output: a folder that is made.
        matrices: by the name of the tensor in the original.
        layers: names of their layers in the model, by the same.
        left: names of the layers whose matrices stay as they are.
    """
    output.mkdir(parents=True)
    for pattern in METADATA_FILES:
        for file in folder.glob(pattern):
            shutil.copyfile(file, output / file.name)
    where: dict[str, str] = {}
    num_bytes = 0
    for path in weight_files(folder):
        tensors: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if (matrix := matrices.get(name)) is None:
                    tensors[name] = file.get_tensor(name)
                else:
                    tensors |= _tensors(name.removesuffix(".weight"), matrix)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, path.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (index := output / "model.safetensors.index.json").exists():
        stated = {"metadata": {"total_size": num_bytes}, "weight_map": where}
        index.write_text(json.dumps(stated, indent=2))
    config = read_json(folder / "config.json")
    config["quantization_config"] = scheme(
        {layers[name]: matrix for name, matrix in matrices.items()}, left
    )
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return num_bytes


def scheme(matrices: dict[str, Codes], left: list[str]) -> dict[str, Any]:
    """What config.json says of the weights; matrices and `left` by the names of their layers."""
    groups: dict[str, Any] = {}
    for bits in sorted({matrix.bits for matrix in matrices.values()}):
        named = {name: matrix for name, matrix in matrices.items() if matrix.bits == bits}
        first = next(iter(named.values()))
        weights = {
            "num_bits": bits, "type": "int", "symmetric": first.is_symmetric, "strategy": "group",
            "group_size": first.group_size, "dynamic": False,
        }  # fmt: skip
        targets = ["Linear"] if len(named) == len(matrices) else [*named]
        groups[f"group_{len(groups)}"] = {"targets": targets, "weights": weights, "format": LAYOUT}
    return {
        "quant_method": "compressed-tensors", "format": LAYOUT, "ignore": left,
        "quantization_status": "compressed", "config_groups": groups,
    }  # fmt: skip


def _tensors(name: str, matrix: Codes) -> dict[str, Tensor]:
    codes = matrix.codes.to(torch.uint8)
    dtype = torch.bfloat16 if matrix.is_symmetric else torch.float16
    tensors = {
        f"{name}.weight_packed": pack(codes, matrix.bits),
        f"{name}.weight_scale": matrix.scale.to(dtype),
        f"{name}.weight_shape": torch.tensor(codes.shape),
    }
    if not matrix.is_symmetric:  # packed along the rows
        zeros = pack(matrix.zero.t().contiguous().to(torch.uint8), matrix.bits)
        tensors[f"{name}.weight_zero_point"] = zeros.t().contiguous()
    return tensors


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, codes] -> int32 [rows, words], the first code in a word's lowest bits. Rows are
    filled up with zeros.
    """
    per_byte = 8 // bits
    full = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    fields = full.unflatten(1, (-1, per_byte))
    data = fields[..., 0].clone()
    for place in range(1, per_byte):
        data |= fields[..., place] << bits * place
    return data.view(torch.int32)
