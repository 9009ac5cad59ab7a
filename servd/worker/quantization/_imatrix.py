"""Importance matrices of `llama-imatrix`: how large the inputs of each layer are.

https://github.com/ggml-org/llama.cpp/blob/master/tools/imatrix/README.md defines the GGUF format.
"""

from pathlib import Path

import torch
from torch import Tensor

from servd.base.errors import ConfigError
from servd.checkpoint.gguf import open_file
from servd.worker.quantization.gguf import rename

SUMS = ".in_sum2"
COUNTS = ".counts"
LEAST = 1e-3  # of the mean: columns that were never seen get some importance


def read(path: Path) -> dict[str, Tensor]:
    """Return mean squares of the inputs of matrices, float32 [in], by their Hugging Face names.
    Raises ConfigError if the file is no importance matrix, or is for a model with other layer
    names; ModelNotFound if it cannot be read as GGUF.
    """
    reader, values = open_file(path, mode="c")
    kind = values.get("general.type")
    if kind != "imatrix":
        raise ConfigError(
            f"--quantization-imatrix {path}: this GGUF file is of {kind or 'a model'}, not of "
            "llama-imatrix"
        )
    numbers: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        if tensor.tensor_type.name != "F32":
            raise ConfigError(f"--quantization-imatrix {path}: {tensor.name} is not of float32")
        numbers[tensor.name] = torch.from_numpy(tensor.data)
    importance = {}
    for name, sums in numbers.items():
        stem = name.removesuffix(SUMS)
        if stem == name or (counts := numbers.get(stem + COUNTS)) is None:
            continue
        mean = sums.reshape(-1, sums.shape[-1]).sum(0) / counts.sum().clamp(min=1)
        if not bool(((mean >= 0) & mean.isfinite()).all()):
            raise ConfigError(f"--quantization-imatrix {path}: {name} has numbers below 0")
        importance[rename(stem)] = mean + LEAST * mean.mean() + torch.finfo().tiny
    if not any(name.startswith("model.layers.") for name in importance):
        raise ConfigError(f"--quantization-imatrix {path}: the file has no layers of a model")
    return importance
