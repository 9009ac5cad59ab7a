"""MXFP4, for GPT-OSS's experts: 4-bit floats, with a power-of-two scale per 32 numbers of a row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.worker.layers.quantized import FP4, NamedTensors, Quantized
from servd.worker.quantization._files import read_tensors

GROUP_SIZE = 32
BIAS = 127  # of exponents; 255 is no number


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield tensors; `experts.NAME_blocks` and `NAME_scales` become `experts.NUMBER.NAME`."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(files):
        stem, _, kind = name.rpartition("_")
        if kind not in ("blocks", "scales"):
            yield name, tensor
            continue
        pair = pairs.setdefault(stem, {})
        pair[kind] = tensor
        if len(pair) == 2:
            del pairs[stem]
            module, _, leaf = stem.rpartition(".")
            for number, matrix in enumerate(_matrices(stem, pair, device)):
                yield f"{module}.{number}.{leaf}", matrix
    if pairs:
        raise UnsupportedModel(f"of {', '.join(pairs)} the file has only blocks, or only scales")


def _matrices(name: str, pair: dict[str, Tensor], device: torch.device) -> Iterator[Quantized]:
    """Yield matrices from blocks uint8 [experts, out, groups, 16], the lower 4 bits of a byte
    first, and scales uint8 [experts, out, groups].
    """
    blocks = pair["blocks"]
    scales = pair["scales"]
    shape = list(scales.shape)
    if scales.dim() != 3 or list(blocks.shape) != [*shape, GROUP_SIZE // 2]:
        raise UnsupportedModel(
            f"{name} has blocks {list(blocks.shape)} and scales {shape}, expected [experts, rows, "
            f"groups, {GROUP_SIZE // 2}] and [experts, rows, groups]"
        )
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise UnsupportedModel(f"{name} has blocks or scales that are not bytes")
    for data, exponents in zip(blocks, scales, strict=True):
        data = data.to(device)
        exponents = exponents.to(device)
        if not exponents.is_meta and bool((exponents == 255).any()):
            raise UnsupportedModel(f"{name} has a scale that is not a number")
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
        scale = torch.exp2(exponents.float() - BIAS).to(torch.bfloat16)  # exact: powers of two
        yield Quantized(codes, scale, None, GROUP_SIZE, FP4)
