"""Write a checkpoint in the format "pack-quantized" of compressed-tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from servd.checkpoint.config_json import read_json
from servd.checkpoint.hub import METADATA_FILES
from servd.checkpoint.weight_files import find_weight_files
from servd.worker.calibration.gptq import Codes
from servd.worker.quantization._files import read_tensors

LAYOUT = "pack-quantized"


def write(folder: Path, output: Path, matrices: dict[str, Codes], ignored: list[str]) -> int:
    """Copy the checkpoint of `folder` to `output`, with `matrices` (by tensor name) in place of the
    originals. Create `output`, and return the size of all weights in bytes. `ignored`: names of the
    layers that stay unquantized.
    """
    output.mkdir(parents=True)
    for pattern in METADATA_FILES:
        for file in folder.glob(pattern):
            shutil.copyfile(file, output / file.name)
    where: dict[str, str] = {}
    num_bytes = 0
    for path in find_weight_files(folder):
        tensors: dict[str, Tensor] = {}
        for name, tensor in read_tensors([path]):
            if name not in matrices:
                tensors[name] = tensor
                continue
            matrix = matrices[name]
            tensors[f"{name}_packed"] = pack(matrix.codes.to(torch.uint8), matrix.bits)
            tensors[f"{name}_scale"] = matrix.scale.bfloat16()
            tensors[f"{name}_shape"] = torch.tensor(matrix.codes.shape)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, path.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (index := output / "model.safetensors.index.json").exists():
        stated = {"metadata": {"total_size": num_bytes}, "weight_map": where}
        index.write_text(json.dumps(stated, indent=2))
    config = read_json(folder / "config.json")
    config["quantization_config"] = _scheme(next(iter(matrices.values())), ignored)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return num_bytes


def _scheme(matrix: Codes, ignored: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": matrix.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": matrix.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "format": LAYOUT}
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUT,
        "ignore": ignored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes: uint8 [rows, codes] -> int32 [rows, words]. The first code is in the lowest bits
    of a word. Zeros pad each row.
    """
    fields = F.pad(codes, (0, -codes.shape[1] % (32 // bits))).unflatten(1, (-1, 8 // bits))
    data = fields[..., 0].clone()
    for place in range(1, 8 // bits):
        data |= fields[..., place] << bits * place
    return data.view(torch.int32)
