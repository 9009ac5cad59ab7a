"""Quantize a checkpoint, with or without a calibration text: `servd quantize`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint.quantization_config import quantization_of
from servd.checkpoint.weight_files import find_weight_files
from servd.worker.calibration import checkpoint, gptq
from servd.worker.calibration.walk import CalibrationModel
from servd.worker.quantization._files import read_tensors

BATCH = 8  # rows


class Result(NamedTuple):
    num_matrices: int  # that were quantized
    share: float  # of all weights, in these matrices
    before: float  # perplexity of the original; 0 without a text
    after: float  # perplexity of the quantized model; 0 without a text
    num_bytes: int  # of the quantized model's weights


def quantize(
    folder: Path,
    output: Path,
    bits: int,
    group_size: int,
    rows: list[list[int]],
    held_out: list[list[int]],
    progress: Callable[[float], None],
) -> Result:
    """Write a quantized copy of a checkpoint. Raises ConfigError: the checkpoint is quantized
    already; UnsupportedModel: transformers cannot load it, or no matrix can be quantized.

    Args:
        output: folder that this function creates.
        bits: 4 or 8.
        group_size: columns that share a scale.
        rows: token ids to calibrate with, all of the same length; without them, each number is
            rounded alone.
        held_out: token ids that measure the perplexity.
        progress: called with the finished share, 0 to 1.
    """
    if (stated := quantization_of(folder)) is not None:
        raise ConfigError(f"{folder} is quantized already, by {stated.get('quant_method')}")
    model = CalibrationModel(folder)
    # The checkpoint may have the names of the model, or those of the model without its head.
    prefix = f"{model.base_prefix}."
    stored = {
        name.removeprefix(prefix): name for name, _ in read_tensors(find_weight_files(folder))
    }
    matrices: dict[str, gptq.Codes] = {}
    layers: set[str] = set()

    def make_codes(name: str, weight: Tensor, *inputs: Tensor) -> Tensor:
        tensor = stored.get(f"{name}.weight".removeprefix(prefix))
        if tensor is None or weight.shape[1] % group_size:
            return weight
        if inputs:
            moments, drift = inputs
            codes = gptq.quantize(weight, moments, bits, group_size, drift)
        else:
            codes = gptq.round_to_nearest(weight, bits, group_size)
        matrices[tensor] = codes
        layers.add(name)
        return codes.dequantize()

    before = 0.0
    after = 0.0
    if rows:
        before = model.perplexity(torch.tensor(held_out))
        model.exchange(torch.tensor(rows).split(BATCH), make_codes, progress)
        after = model.perplexity(torch.tensor(held_out))
    else:
        weights = dict(model.matrices())
        for done, (name, weight) in enumerate(weights.items(), 1):
            make_codes(name, weight)
            progress(done / len(weights))
    if not matrices:
        raise UnsupportedModel(f"{folder}: no matrix has a multiple of {group_size} columns")
    ignored = sorted(set(model.names.values()) - layers)
    num_bytes = checkpoint.write(folder, output, matrices, ignored)
    share = sum(matrix.codes.numel() for matrix in matrices.values()) / model.num_weights
    return Result(len(matrices), share, before, after, num_bytes)
