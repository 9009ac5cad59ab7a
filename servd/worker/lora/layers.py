"""Matrices of a model that add the product of LoRA adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from servd.checkpoint.lora import layer_of
from servd.worker import ops
from servd.worker.layers._matrix import Dense, Matrix, QuantMethod
from servd.worker.loading.model_loader import Model
from servd.worker.ops.reference import LowRank

IN_A_LAYER = re.compile(r"\.\d+\.")
WIDTH = 16  # columns of `LowRank.a` are a multiple of it: the widest vector of a CPU


@dataclass
class AdapterRows:
    """The adapter slot of each token of the step."""

    adapter_slots: Tensor  # int64 [maximum tokens of a step], on the device; -1: none
    is_active: bool = False  # whether any token has an adapter


class AdapterTarget(NamedTuple):
    matrix: AdaptedMatrix
    part: int | None  # None: all of it


class AdaptedMatrix:
    """A matrix with `num_slots` slots for adapters, which are added in rows of a step."""

    def __init__(
        self, matrix: Matrix, rows: AdapterRows, num_slots: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        self.base: QuantMethod = matrix.quant_method or Dense(matrix.data)
        self.matrix = matrix
        self.step = rows
        self.max_rank = max_rank
        parts = len(matrix.part_shapes)
        self.rows_of = [matrix.rows_of(part) for part in range(parts)]
        num_inputs = matrix.part_shapes[0][1]
        if matrix.shard_dim == 1:
            num_inputs = matrix.parallel.share(num_inputs)
        width = -(-parts * max_rank // WIDTH) * WIDTH
        device = rows.adapter_slots.device
        zeros = partial(torch.zeros, num_slots, dtype=dtype, device=device)
        self.factors = LowRank(
            zeros(num_inputs, width),
            zeros(max_rank, self.rows_of[-1].stop),
            torch.zeros(num_slots, parts, dtype=torch.int64, device="cpu"),
            torch.tensor([part.stop for part in self.rows_of], device="cpu"),
        )
        self.nbytes = self.base.nbytes + self.factors.a.nbytes + self.factors.b.nbytes
        self.ops = ops.for_device(device)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x times the matrix, plus the adapters' products in a step that has adapters."""
        out = self.base.multiply(x, bias)
        if self.step.is_active:
            self.ops.add_low_rank(out, x, self.factors, self.step.adapter_slots[: len(x)])
        return out

    def rows(self, index: Tensor) -> Tensor:
        return self.base.rows(index)

    def shares(self, part: int | None, a: Tensor, b: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Return this worker's share of a [rank, in] and b [out, rank], transposed, by part."""
        matrix = self.matrix
        if matrix.row_order is not None:
            b = b[matrix.row_order]
        sizes = [shape[0] for shape in matrix.part_shapes]
        parts = enumerate(b.split(sizes)) if part is None else [(part, b)]
        if matrix.shard_dim == 1:
            a = _whole(matrix.share(a))
        if matrix.shard_dim == 0:
            parts = [(number, _whole(matrix.share(rows, number))) for number, rows in parts]
        return [(number, a.t().contiguous(), rows.t().contiguous()) for number, rows in parts]

    def put(self, adapter_slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Fill an adapter slot, which is all zeros, with the result of `shares`."""
        rank = a.shape[1]
        first = part * self.max_rank
        rows = self.rows_of[part]
        self.factors.a[adapter_slot, : len(a), first : first + rank].copy_(a)
        self.factors.b[adapter_slot, :rank, rows.start : rows.start + b.shape[1]].copy_(b)
        self.factors.ranks[adapter_slot, part] = rank

    def clear(self, adapter_slot: int) -> None:
        if self.factors.ranks[adapter_slot].any():
            self.factors.ranks[adapter_slot] = 0
            self.factors.a[adapter_slot].zero_()
            self.factors.b[adapter_slot].zero_()


def _whole(share: object) -> Tensor:
    assert isinstance(share, Tensor)
    return share


def adapt(
    model: Model, rows: AdapterRows, num_adapter_slots: int, max_rank: int, dtype: torch.dtype
) -> dict[str, AdapterTarget]:
    """Give every linear layer an `AdaptedMatrix`; return these by the names of `layer_of`."""
    targets: dict[str, AdapterTarget] = {}
    for layer, (matrix, part) in _linear_layers(model).items():
        if not isinstance(matrix.quant_method, AdaptedMatrix):
            matrix.quant_method = AdaptedMatrix(matrix, rows, num_adapter_slots, max_rank, dtype)
        targets[layer] = AdapterTarget(matrix.quant_method, part)
    return targets


def layers_of(model: Model) -> dict[str, tuple[int, int]]:
    """Return each linear layer's inputs and outputs over all ranks, by the names of `layer_of`."""
    sizes: dict[str, tuple[int, int]] = {}
    for layer, (matrix, part) in _linear_layers(model).items():
        shapes = matrix.part_shapes
        outputs = sum(shape[0] for shape in shapes) if part is None else shapes[part][0]
        sizes[layer] = shapes[0][1], outputs
    return sizes


def _linear_layers(model: Model) -> dict[str, tuple[Matrix, int | None]]:
    """Return each linear layer's matrix, by its name from `layer_of`, and the part of the matrix
    that is the layer; None: all of it.

    Expert layers are left out: they compute a part of the step's tokens.
    """
    layers: dict[str, tuple[Matrix, int | None]] = {}
    fused: dict[str, list[tuple[int | None, str]]] = {}
    for name, (into, part) in model.packed.items():
        fused.setdefault(into, []).append((part, name))
    for name, module in model.named_modules():
        matrix = getattr(module, "weight", None)
        if type(matrix) is not Matrix or isinstance(module, nn.Embedding):
            continue
        if not IN_A_LAYER.search(name) or ".experts." in name:
            continue
        parent, _, last = name.rpartition(".")
        parts = fused.get(last, [])
        if len(matrix.part_shapes) == 1:  # fused names are other names of the whole
            parts = [(None, last), *((None, leaf) for _, leaf in parts)]
        for part, leaf in parts or [(None, last)]:
            if (layer := layer_of(f"{parent}.{leaf}")) is not None:
                layers[layer] = matrix, part
    return layers
