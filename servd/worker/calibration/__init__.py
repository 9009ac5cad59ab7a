"""A checkpoint of fewer bits than another, made with a text: `servd quantize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from servd.errors import ConfigError, UnsupportedModel
from servd.hf import quantization_of, weight_files
from servd.worker.calibration import checkpoint, gptq, mixed
from servd.worker.calibration.walk import Model

BATCH = 8  # rows
CHOOSING = 0.2  # of the time, about


class Result(NamedTuple):
    """What became of a model.

    Args:
        num_matrices: that have fewer bits now.
        num_wide: of these have 8, where others have 4.
        bits: of a weight that is in them, with its share of scales.
        share: of all weights that are in them.
        before: perplexity of the original.
        after: of the new one.
        num_bytes: of the new one's weights.
    """

    num_matrices: int
    num_wide: int
    bits: float
    share: float
    before: float
    after: float
    num_bytes: int


def quantize(
    folder: Path,
    output: Path,
    bits: int,
    group_size: int,
    rows: list[list[int]],
    held_out: list[list[int]],
    progress: Callable[[float], None],
    mean_bits: float | None = None,
    is_symmetric: bool = True,
) -> Result:
    """Write a checkpoint.

    Args:
        folder: of the original.
        output: a folder that is made.
        bits: 4 or 8.
        group_size: columns that share a scale.
        rows: token ids to calibrate with, equally many each.
        held_out: to measure with.
        progress: called with how far it is, 0 to 1.
        mean_bits: the most that `Result.bits` may be; matrices that matter more have 8. None: all
            have `bits`.
        is_symmetric: see `gptq.Codes`; those of 8 bits are.

    Raises:
        ConfigError: it is quantized already.
        UnsupportedModel: transformers does not know it, or there is nothing to be quantized.
    """
    if (stated := quantization_of(folder)) is not None:
        raise ConfigError(f"{folder} is quantized already, by {stated.get('quant_method')}")
    model = Model(folder)
    rounding = _Rounding(model, folder, bits, group_size, is_symmetric)
    batches = torch.tensor(rows).split(BATCH)
    before, begin = model.perplexity(torch.tensor(held_out)), 0.0
    if mean_bits is not None:
        begin = CHOOSING
        chooser = mixed.Chooser(model, bits, group_size, is_symmetric, rounding.tensor_of)
        rounding.wide = chooser.choose(batches[:1], mean_bits, lambda done: progress(begin * done))
    model.exchange(batches, rounding.round, lambda done: progress(begin + (1 - begin) * done))
    if not (matrices := rounding.matrices):
        raise UnsupportedModel(
            f"{folder}: no layer has a matrix with columns in groups of {group_size}"
        )
    after = model.perplexity(torch.tensor(held_out))
    left = sorted(set(model.names.values()) - set(rounding.layers.values()))
    num_bytes = checkpoint.write(folder, output, matrices, rounding.layers, left)
    count = sum(each.codes.numel() for each in matrices.values())
    mean = sum(each.codes.numel() * each.bits_each for each in matrices.values()) / count
    num_wide, share = len(rounding.wide), count / model.num_weights
    return Result(len(matrices), num_wide, mean, share, before, after, num_bytes)


class _Rounding:
    """What becomes of matrices, by the names of their tensors in the checkpoint.

    Args:
        model: that they are of.
        folder: see `quantize`, as the others.
    """

    def __init__(
        self, model: Model, folder: Path, bits: int, group_size: int, is_symmetric: bool
    ) -> None:
        self.bits, self.group_size, self.is_symmetric = bits, group_size, is_symmetric
        self.prefix = f"{model.base_prefix}."
        self.stored = {name.removeprefix(self.prefix): name for name in _names(folder)}
        self.matrices: dict[str, gptq.Codes] = {}
        self.layers: dict[str, str] = {}  # their names in the model
        self.wide: set[str] = set()  # layers that have 8 bits

    def tensor_of(self, name: str, weight: Tensor) -> str | None:
        """Of a layer; None: it stays as it is."""
        tensor = self.stored.get(f"{name}.weight".removeprefix(self.prefix))
        return None if weight.shape[1] % self.group_size else tensor

    def round(self, name: str, weight: Tensor, moments: Tensor, drift: Tensor) -> Tensor:
        if (tensor := self.tensor_of(name, weight)) is None:
            return weight
        bits = mixed.WIDE if name in self.wide else self.bits
        is_symmetric = self.is_symmetric or bits == mixed.WIDE
        codes = gptq.quantize(weight, moments, bits, self.group_size, drift, is_symmetric)
        self.layers[tensor], self.matrices[tensor] = name, codes
        return codes.dequantize()


def _names(folder: Path) -> list[str]:
    names: list[str] = []
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    return names
