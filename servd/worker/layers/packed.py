"""Weight matrices packed for the CPU kernels (ops/cpu)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from servd.worker.layers.quantized import Quantized
from servd.worker.ops.native import INT6, TYPES, call, loaded_library

EXACT_TERMS = 3  # terms of bfloat16 or int8 that are as exact as float32: see ops/cpu/terms.h
RUN = 16  # products that are summed before a group's scale is applied: see ops/cpu/dots.h


@dataclass(eq=False)
class Packed:
    """A weight matrix [out, in] in the kernels' order, with rows padded to whole panels."""

    shape: torch.Size
    nbytes: int = field(init=False)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:  # float32 [n, in] -> [n, out]
        out = torch.empty(x.shape[0], self.shape[0])
        self.multiply_into(out, x, bias)
        return out

    def multiply_into(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Write the products of x, float32 [n, in], to columns of a tensor: out [n, out]."""
        fits = x.dtype == torch.float32 and x.shape[1] == self.shape[1]
        assert fits, (x.dtype, x.shape, self.shape)
        self._multiply(out, x.contiguous(), bias)

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        raise NotImplementedError

    def rows(self, index: Tensor) -> Tensor:  # int64 [n] -> float32 [n, in]
        raise NotImplementedError


@dataclass(eq=False)
class PackedWeight(Packed):
    """A matrix that is one `PackedWeight` of ops/cpu/kernels.h."""

    type: int  # like the next field, as in `_pack`
    num_terms: int
    packed: Tensor  # the result of `_pack`
    scale: Tensor | None  # float32 [out], or with groups packed; None: no scale
    group_size: int = 0  # weights of a row that share a scale and an offset; 0: no groups
    table: Tensor | None = None  # float32 [16]: the values of 4-bit codes
    offset: Tensor | None = None
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        self.scale_type = TYPES[torch.float32 if self.scale is None else self.scale.dtype]
        scales = self.scale, self.offset, self.factors
        tensors = self.packed, self.table, *scales
        self.nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        groups = self.table, self.scale_type, *scales, self.group_size
        self.arguments = (self.type, self.num_terms, self.packed, *groups, *self.shape)

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        call("matmul", x, len(x), *self.arguments, bias, out, out.stride(0))

    def rows(self, index: Tensor) -> Tensor:
        out = torch.empty(len(index), self.shape[1])
        call("gather_rows", *self.arguments, index.contiguous(), len(index), out)
        return out


def spread(x: Tensor, is_inverse: bool = False) -> Tensor:
    """Return rows of float32 [n, size], rotated so that outliers spread over all elements and one
    scale per row is precise enough. Dot products of two rotated rows are unchanged.
    """
    out = torch.empty(x.shape)
    call("spread", x.contiguous(), *x.shape, is_inverse, out)
    return out


class PackedMatrix(PackedWeight):
    """
    Args:
        weight: [out, in] of any strides, float32, bfloat16, float16 or int8.
        scale: float32 [out]: factor on each row, for int8.
        x_dtype: type that x may be rounded to where that is faster (AVX2, VNNI, AMX, Arm), if the
            weight has this type. int8 has a scale for each row, or for 1024 elements of it.
        is_spread: the weight's rows are rotated by `spread`.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None = None,
        x_dtype: torch.dtype = torch.float32,
        is_spread: bool = False,
    ) -> None:
        num_terms = 1 if weight.dtype == x_dtype else EXACT_TERMS
        packed = _pack(weight, num_terms)
        super().__init__(weight.shape, TYPES[weight.dtype], num_terms, packed, scale)
        self.is_spread = is_spread

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        super()._multiply(out, spread(x) if self.is_spread else x, bias)

    def rows(self, index: Tensor) -> Tensor:
        out = super().rows(index)
        return spread(out, is_inverse=True) if self.is_spread else out


class GroupedMatrix(PackedWeight):
    """A matrix with a scale, and optionally an offset, for each group of elements of a row.
    `x_dtype`: see `PackedMatrix`; int8 for weights whose codes are integers.
    """

    def __init__(self, quantized: Quantized, x_dtype: torch.dtype = torch.float32) -> None:
        num_terms = _num_terms(quantized, x_dtype)
        type = _type_of(quantized, num_terms)
        offset = quantized.offset
        factors = quantized.factors
        super().__init__(
            quantized.shape,
            type,
            num_terms,
            _pack(quantized.codes, num_terms, type),
            _pack(quantized.scale),
            quantized.group_size,
            None if quantized.table is None else torch.tensor(quantized.table),
            None if offset is None else _pack(offset),
            None if factors is None else _pack(factors),
        )
        self.columns = quantized.columns
        if self.columns is not None:
            self.nbytes += self.columns.nbytes

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        super()._multiply(out, x if self.columns is None else _take_columns(x, self.columns), bias)

    def rows(self, index: Tensor) -> Tensor:
        out = super().rows(index)
        return out if self.columns is None else out[:, self.columns.argsort()]


def _take_columns(x: Tensor, columns: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    for row, to in zip(x, out, strict=True):
        call("embed", row, len(columns), 1, columns, len(columns), to)
    return out


class Stacked(Packed):
    """Matrices of several types, stacked by rows. There is no `rows`: tables have one type."""

    def __init__(self, matrices: Sequence[Packed]) -> None:
        super().__init__(torch.Size((sum(m.shape[0] for m in matrices), matrices[0].shape[1])))
        self.matrices = matrices
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        start = 0
        for matrix in self.matrices:
            part = slice(start, start := start + matrix.shape[0])
            matrix.multiply_into(out[:, part], x, None if bias is None else bias[part])


class ExpertMatrices:
    """Experts' matrices of one shape and type. One call multiplies the rows of all experts."""

    def __init__(self, matrices: Sequence[PackedMatrix] | Sequence[GroupedMatrix]) -> None:
        self.matrices = matrices  # keeps the memory that the tables point to
        first = matrices[0]
        self.arguments = (
            first.type,
            first.num_terms,
            len(matrices),
            _addresses([matrix.packed for matrix in matrices]),
            first.table,
            first.scale_type,
            _addresses([matrix.scale for matrix in matrices]),
            _addresses([matrix.offset for matrix in matrices]),
            _addresses([matrix.factors for matrix in matrices]),
            first.group_size,
            *first.shape,
        )

    @staticmethod
    def kind(matrix: object) -> tuple[object, ...] | None:
        if isinstance(matrix, PackedMatrix):
            return matrix.type, matrix.num_terms, matrix.scale is None, matrix.is_spread
        if isinstance(matrix, GroupedMatrix) and matrix.columns is None:
            table = None if matrix.table is None else tuple(matrix.table.tolist())
            of_scales = matrix.scale_type, matrix.offset is None, matrix.group_size
            return matrix.type, matrix.num_terms, *of_scales, table
        return None

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        x = x.contiguous()
        first = self.matrices[0]
        if isinstance(first, PackedMatrix) and first.is_spread:
            x = spread(x)
        num_rows = len(x) if index is None else len(index)
        out = torch.empty(num_rows, first.shape[0])
        call("matmul_experts", x, len(x), index, starts, *self.arguments, out, num_rows)
        return out


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return the addresses of tensors, int64 [n]; None if the tensors are None."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    # By NumPy, as this may run while a graph is recorded.
    return torch.from_numpy(np.array(addresses, dtype=np.int64)) if addresses else None


def _num_terms(quantized: Quantized, x_dtype: torch.dtype) -> int:
    """Return the number of int8 terms of x; 0 unless codes are integers in large enough groups."""
    codes = quantized.codes
    size = quantized.group_size
    are_whole = all(value in range(-128, 128) for value in quantized.table or ())
    if codes.is_floating_point() or not are_whole or (size % RUN and size < codes.shape[1]):
        return 0
    return 1 if x_dtype == torch.int8 else EXACT_TERMS


def _type_of(quantized: Quantized, num_terms: int) -> int:
    if quantized.num_bits == 6 and num_terms == 1:
        if loaded_library().packed_size(INT6, num_terms, *quantized.shape):
            return INT6
    return TYPES[quantized.codes.dtype]


def _pack(weight: Tensor, num_terms: int = 0, type: int | None = None) -> Tensor:
    """Pack `weight` [out, in] in panels of rows; two 4-bit codes in a byte. `num_terms`: see
    terms.h; 0 if inputs are float32, or if `weight` contains scales.
    """
    type = TYPES[weight.dtype] if type is None else type
    if type in (TYPES[torch.uint8], INT6):
        weight = weight.contiguous()
    library = loaded_library()
    num_values = library.packed_size(type, num_terms, *weight.shape)
    packed = library.pages.empty(num_values, weight.dtype)
    call("pack", type, num_terms, weight, *weight.stride(), *weight.shape, packed)
    return packed
