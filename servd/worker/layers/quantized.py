"""Matrices of few bits, into which servd/worker/quantization converts its formats."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 1024  # dequantized at once
FACTOR_SIZE = 256  # numbers of a row that share a factor
# Numbers of 4 bits: a sign, two bits of exponent, and one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LAYER = re.compile(r"(?:^|\.)(\d+)\.")  # the first number in a tensor's name


@dataclass(frozen=True)
class Quantized:
    """A matrix [out, in]. Each number is `value * scale + offset` in float32, with the scale and
    offset of its group: `group_size` numbers of a row; a row's last group may be smaller.

    Args:
        codes: [out, in]; the values, int8 or float8_e4m3fn; or uint8, indices into `table`.
        scale: [out, groups], float32, bfloat16 or float16; int8 if there are `factors`.
        offset: like scale; None: zero. Otherwise value * scale must be exact in float32, because
            kernels may fuse the product with the sum.
        group_size: numbers of a row that share a scale.
        table: 16 values, for codes of 4 bits.
        columns: int64 [in]; column j of the codes is column columns[j] of the matrix. None: columns
            are in order.
        factors: float16, [out, in / 256]: scales are times the factor of their 256 numbers. With
            offsets [out, in / 128]: after each factor of scales that of offsets.
        num_bits: 6 if codes of int8 are from -32 to 31, which takes less memory.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    group_size: int
    table: tuple[float, ...] | None = None
    columns: Tensor | None = None
    factors: Tensor | None = None
    num_bits: int = 8

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scale, self.offset, self.columns, self.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that matrices must share to be stacked."""
        has_offset = self.offset is not None
        columns = self.columns
        order = None if columns is None or columns.is_meta else tuple(columns.tolist())
        of_codes = self.codes.dtype, self.num_bits, self.table, order
        return *of_codes, self.scale.dtype, has_offset, self.group_size

    def table_on_device(self) -> Tensor | None:
        """Return the table, float32 [16], on the device of the codes."""
        if self.table is None:
            return None
        return self.codes.new_tensor(self.table, dtype=torch.float32)

    def dequantize(self, table: Tensor | None = None) -> Tensor:
        """Return the weights as the format defines them, float32 [out, in]. `table`: the result of
        `table_on_device`, for CUDA graphs, which cannot contain that call.
        """
        table = self.table_on_device() if table is None else table
        values = self.codes.float() if table is None else table[self.codes.int()]
        groups = self.without_factors()
        weights = values.mul_(self._spread(groups.scale))
        if groups.offset is not None:
            weights += self._spread(groups.offset)
        return weights if self.columns is None else weights[:, self.columns.argsort()]

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weights in another type, [out, in]."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        # Some rows at once: float32 and the scales of all columns take several times as much.
        for start in range(0, 0 if out.is_meta else len(out), ROWS):
            part = self.narrow(0, start, min(ROWS, len(out) - start))
            out[start : start + ROWS] = part.dequantize()
        return out

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.float().repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]

    def without_factors(self) -> Self:
        if self.factors is None:
            return self
        times = FACTOR_SIZE // self.group_size
        both = self.factors.float().unflatten(1, (-1, 1 if self.offset is None else 2))
        factors = both.repeat_interleave(times, dim=1)[:, : self.scale.shape[1]]
        offset = None if self.offset is None else self.offset * factors[..., 1]
        return replace(self, scale=self.scale * factors[..., 0], offset=offset, factors=None)

    def split(self, rows: Sequence[int]) -> list[Self]:
        """Return parts by rows; `rows` has the row count of each part."""
        starts = [sum(rows[:index]) for index in range(len(rows))]
        return [self.narrow(0, start, n) for start, n in zip(starts, rows, strict=True)]

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Return some rows or columns. Groups that would be cut become smaller groups. Raises
        ValueError if columns are not in order.
        """
        if length == self.shape[dim]:
            return self
        if dim == 1 and self.factors is not None:
            return self.without_factors().narrow(dim, start, length)
        codes = self.codes.narrow(dim, start, length)
        if dim == 0:
            return self.map(lambda x: x.narrow(0, start, length), codes)
        if self.columns is not None:
            raise ValueError(
                "desc_act does not work with tensor parallelism: leave out --tensor-parallel-size"
            )
        end = start + length
        size = math.gcd(self.group_size, start, 0 if end == self.shape[1] else end)
        times = self.group_size // size
        groups = slice(start // size, -(-end // size))
        narrowed = self.map(lambda x: x.repeat_interleave(times, dim=1)[:, groups], codes)
        return replace(narrowed, group_size=size)

    def with_columns(self, columns: Tensor) -> Self:
        """Return the matrix with reordered columns. `columns`: int64 [in], each column once."""
        return replace(self, codes=self.codes[:, columns], columns=columns)

    def with_heads(self, order: Tensor, size: int) -> Self | Tensor:
        """Return the matrix with columns in another order, int64, which keeps heads of `size`. It
        is dequantized if a head is no whole number of groups.
        """
        if size % self.group_size:
            return self.dequantize()[:, order]
        matrix = self.without_factors()
        groups = order[:: self.group_size] // self.group_size
        return matrix.map(lambda x: x[:, groups], matrix.codes[:, order])

    def padded(self, num_rows: int) -> Self:
        """Return the matrix with rows of zeros appended, up to `num_rows` rows."""
        missing = num_rows - self.shape[0]
        return self.map(lambda x: F.pad(x, (0, 0, 0, missing))) if missing else self

    def map(self, change: Callable[[Tensor], Tensor], codes: Tensor | None = None) -> Self:
        """Return a copy with each tensor changed by `change`, and with `codes` if given."""
        return replace(
            self,
            codes=change(self.codes) if codes is None else codes,
            scale=change(self.scale),
            offset=None if self.offset is None else change(self.offset),
            factors=None if self.factors is None else change(self.factors),
        )


def stack(parts: Sequence[Quantized]) -> Quantized:
    """Return matrices of one kind stacked by rows."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = ("codes", "scale", "offset", "factors")
    names_of_tensors = [name for name in names if getattr(first, name) is not None]
    tensors = {name: torch.cat([getattr(p, name) for p in parts]) for name in names_of_tensors}
    return replace(first, **tensors)


AnyTensor = Tensor | Quantized
"""A tensor of a checkpoint."""
NamedTensors = Iterator[tuple[str, AnyTensor]]
"""The tensors of a checkpoint, each with its name."""


def rename(tensors: NamedTensors, names: Mapping[str, str]) -> NamedTensors:
    """Yield the tensors with parts of their names replaced, one after the other."""
    for name, tensor in tensors:
        for old, new in names.items():
            name = name.replace(old, new)
        yield name, tensor


class QuantizedMatrix:
    """Multiplies with torch's products, which is slow: the reference. `dtype`: the model's type."""

    def __init__(self, quantized: Quantized, dtype: torch.dtype) -> None:
        self.quantized = quantized
        self.dtype = dtype
        self.table = quantized.table_on_device()
        self.nbytes = quantized.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.quantized.dequantize(self.table).to(x.dtype), bias)

    def rows(self, index: Tensor) -> Tensor:
        chosen = self.quantized.map(lambda x: x[index])
        return chosen.dequantize(self.table).to(self.dtype)
