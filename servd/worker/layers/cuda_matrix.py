"""Quantized matrices on CUDA: packed for `ops/triton/low_bit.py`, or 8-bit floats as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.layers.quantized import FP4, ROWS, Quantized
from servd.worker.layers.weight_stack import WeightStack
from servd.worker.ops import target

LARGEST = torch.finfo(torch.float8_e4m3fn).max
MULTIPLE = 16  # tensor cores need multiples of this in both sizes of a matrix of 8-bit floats
LEAST_CAPABILITY = (9, 0)  # Hopper
PANEL = 64  # rows that are adjacent in memory
WHOLE_ROW = 1 << 20  # the group size of a scale per row: more than any row has
SHIFTS = range(-16, 1)  # values of the code 0 of int4 that the kernel adds exactly


class Storage(NamedTuple):
    """What codes and scales mean. A turn of the kernel has `depth` columns in as many `pieces` as
    a word of 32 bits has pairs of codes. A piece has one group, or a part of a group.
    """

    name: str  # int4, fp4, int8 or fp8
    group_size: int  # weights of a row that share a scale
    has_offset: bool  # whether a weight is value * scale + offset, and not value * scale
    shift: int  # value of the code 0 of integers
    pieces: int
    depth: int
    groups: int  # of a turn; 1 if a group has several turns

    @classmethod
    def of(cls, quantized: Quantized) -> Self | None:
        """Return the storage for a matrix; None if the kernel has none for its format."""
        size = WHOLE_ROW if quantized.scale.shape[1] == 1 else quantized.group_size
        name = _name_of(quantized)
        if name is None or (size % 128 and size not in (16, 32, 64)):
            return None
        has_offset = quantized.offset is not None
        table = quantized.table
        shift = -128
        if name == "int4" and table is not None:
            # With offsets, sums of values around zero lose least.
            shift = -8 if has_offset else int(table[0])
        pieces = 4 if name.endswith("4") else 2
        depth = min(128, pieces * size)
        return cls(name, size, has_offset, shift, pieces, depth, max(1, depth // size))

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of the kernel."""
        names = ("STORAGE", "GROUP", "HAS_OFFSET", "SHIFT", "PIECES", "DEPTH")
        return dict(zip(names, self, strict=False))


def _name_of(quantized: Quantized) -> str | None:
    table = quantized.table
    if table is None:
        return "fp8" if quantized.codes.dtype.is_floating_point else "int8"
    if table[0] in SHIFTS and all(value == table[0] + i for i, value in enumerate(table)):
        return "int4"
    if all(6 * value == table[7] * number for value, number in zip(table, FP4, strict=True)):
        return "fp4"
    is_int8 = all(float(value).is_integer() and -128 <= value < 128 for value in table)
    return "int8" if is_int8 else None


class Tiles(NamedTuple):
    """The tensors of a matrix, or with a first dimension those of all experts.

    Args:
        codes: int32 [panels, turns, 64, words]: in a word's lower half, and in its upper half, the
            i-th bits are of columns 2w and 2w + 1 of piece i.
        scale: int32 [panels, turns or groups, words, 64]: a word is two float16, which are a scale
            and its offset, or else the scales of two groups.
        factor: float32 [out]: a power of two on a row's scales, as float16 has a small range.
    """

    codes: Tensor
    scale: Tensor
    factor: Tensor


TENSORS = ("codes", "scale", "factor")  # names of Tiles in a WeightStack


class TiledMatrix:
    """A matrix that is multiplied as it is stored, with sums in float32."""

    def __init__(self, quantized: Quantized, storage: Storage) -> None:
        self.storage = storage
        self.shape = quantized.shape
        self.columns = quantized.columns
        self.table = None
        if storage.name == "fp4":
            self.table = quantized.codes.new_tensor(FP4, dtype=torch.float32)
        self.tiles = _pack(quantized, storage)
        self.nbytes = sum(tensor.nbytes for tensor in self.tiles)

    def move(self, allocate: Callable[[str, Sequence[int], torch.dtype], Tensor]) -> None:
        """Copy the tensors to the memory that `allocate` returns for a name, shape and type."""
        tensors = zip(TENSORS, self.tiles, strict=True)
        self.tiles = Tiles(*(allocate(k, x.shape, x.dtype).copy_(x) for k, x in tensors))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from servd.worker.ops.triton import low_bit

        x = x if self.columns is None else x[:, self.columns]
        return low_bit.product(x, self.tiles, bias, self.storage.constants)

    def rows(self, index: Tensor) -> Tensor:
        storage = self.storage
        panel = index // PANEL
        lane = index % PANEL
        words = self.tiles.codes[panel, :, lane]  # [n, turns, words]
        bits = 16 // storage.pieces
        places = [(bits * piece, bits * piece + 16) for piece in range(storage.pieces)]
        pairs = [torch.stack((words >> low, words >> high), dim=-1) for low, high in places]
        codes = torch.stack(pairs, dim=2).flatten(1)[:, : self.shape[1]] & (1 << bits) - 1
        if storage.name == "fp8":
            codes = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        elif self.table is None:
            codes += storage.shift
        numbers = self.tiles.scale[panel, :, :, lane].flatten(1).view(torch.float16)
        numbers = numbers * self.tiles.factor[index, None]
        is_paired = storage.has_offset or storage.groups == 1
        scale = numbers[:, ::2] if is_paired else numbers
        offset = numbers[:, 1::2] if storage.has_offset else None
        size = min(storage.group_size, self.shape[1])
        columns = self.columns
        table = None if self.table is None else FP4
        return Quantized(codes, scale, offset, size, table, columns).dequantize(self.table)


@dataclass(frozen=True)
class TiledExperts:
    """The matrices of all experts in a stack, with biases [num_experts, out] or none."""

    constants: dict[str, Any]  # see Storage
    tiles: Tiles
    biases: Tensor | None

    @classmethod
    def of(
        cls, methods: Sequence[object], stack: WeightStack, biases: Tensor | None = None
    ) -> Self | None:
        """Return the experts of the stack; None if the kernel cannot multiply them together."""
        matrices = [method for method in methods if isinstance(method, TiledMatrix)]
        kinds = {(matrix.storage, matrix.columns is None) for matrix in matrices}
        if len(matrices) < len(methods) or len(kinds) != 1:
            return None
        ((storage, is_ordered),) = kinds
        tiles = Tiles(*(stack.tensors[name] for name in TENSORS))
        return cls(storage.constants, tiles, biases) if is_ordered else None

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        from servd.worker.ops.triton import low_bit

        return low_bit.product(x, self.tiles, self.biases, self.constants, index, starts)


def _pack(quantized: Quantized, storage: Storage) -> Tiles:
    """Return the matrix with scales and offsets rounded to float16."""
    (num_rows, size) = quantized.shape
    num_panels = -(-num_rows // PANEL)
    num_turns = -(-size // storage.depth)
    num_scales = -(-size // max(storage.depth, storage.group_size))
    width = storage.depth // storage.pieces // 2
    scales = storage.groups if storage.has_offset else (storage.groups + 1) // 2
    new = partial(torch.empty, device=quantized.codes.device)
    tiles = Tiles(
        new(num_panels, num_turns, PANEL, width, dtype=torch.int32),
        new(num_panels, num_scales, scales, PANEL, dtype=torch.int32),
        new(num_rows, dtype=torch.float32),
    )
    # Some rows at once, as temporary tensors are several times as large.
    for start in range(0, 0 if quantized.codes.is_meta else num_rows, ROWS):
        part = quantized.narrow(0, start, min(ROWS, num_rows - start)).without_factors()
        panels = slice(start // PANEL, (start + ROWS) // PANEL)
        tiles.codes[panels] = _pack_codes(part, storage)
        scale, factor = _pack_scales(part, storage, num_scales)
        tiles.scale[panels] = scale
        tiles.factor[start : start + ROWS] = factor
    return tiles


def _pack_codes(part: Quantized, storage: Storage) -> Tensor:
    codes = part.codes
    table = part.table_on_device()
    if storage.name == "int8":
        codes = (codes if table is None else table[codes.int()].to(torch.int8)).view(torch.uint8)
        codes = codes ^ 128  # codes are unsigned
    (num_rows, size) = codes.shape
    wide = F.pad(codes.view(torch.uint8), (0, -size % storage.depth, 0, -num_rows % PANEL))
    turns = wide.unflatten(1, (-1, storage.depth)).unflatten(0, (-1, PANEL))
    # [panels, 64, turns, pieces, words, 2] -> [panels, turns, 64, words, 2, pieces]
    bits = turns.unflatten(3, (storage.pieces, -1, 2)).permute(0, 2, 1, 4, 5, 3)
    if storage.pieces == 4:
        bits = bits[..., ::2] | bits[..., 1::2] << 4
    return bits.flatten(-2).contiguous().view(torch.int32).squeeze(-1)


def _pack_scales(part: Quantized, storage: Storage, num_scales: int) -> tuple[Tensor, Tensor]:
    scale = part.scale.float()
    table = part.table or (0.0,) * 16
    if storage.name == "fp4":
        scale = scale * (table[7] / FP4[7])
    numbers = scale.unsqueeze(-1)
    if part.offset is not None:
        offset = part.offset.float()
        if storage.name == "int4":
            offset = offset + (table[0] - storage.shift) * scale
        numbers = torch.stack((scale, offset), dim=-1)
    (_, exponent) = numbers.abs().amax(dim=(1, 2)).frexp()
    factor = torch.ones_like(scale[:, 0]).ldexp(exponent)
    (num_rows, num_groups, count) = numbers.shape
    single = 1 if storage.groups * count == 1 else 0
    missing = storage.groups * num_scales - num_groups
    halves = (numbers / factor[:, None, None]).half()
    halves = F.pad(halves, (0, single, 0, missing, 0, -num_rows % PANEL))
    # [panels, 64, turns, words, 2] -> [panels, turns, words, 64, 2]
    pairs = halves.flatten(1).unflatten(1, (num_scales, -1, 2)).unflatten(0, (-1, PANEL))
    return pairs.permute(0, 2, 3, 1, 4).contiguous().view(torch.int32).squeeze(-1), factor


class Fp8Matrix:
    """A matrix float8_e4m3fn [out, in] with a scale per row, float32 [out, 1], multiplied without
    conversion, with sums in float32 and a bfloat16 result.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight = weight
        self.scale = scale
        self.round_rows = round_rows
        # torch would run seven kernels for each product.
        if target.runs_triton(weight.device):
            from servd.worker.ops.triton.round_rows import round_rows as fused

            self.round_rows = fused
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    @staticmethod
    def supports(quantized: Quantized) -> bool:
        """Return whether the device multiplies such matrices."""
        return (
            quantized.codes.dtype == torch.float8_e4m3fn
            and quantized.scale.shape[1] == 1
            and not any(size % MULTIPLE for size in quantized.shape)
            and target.capability(quantized.codes.device) >= LEAST_CAPABILITY
        )

    @property
    def quantized(self) -> Quantized:
        return Quantized(self.weight, self.scale, None, self.weight.shape[1])

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # A compiler fuses the plain version with the norm or the gate before it.
        rounded, scale = round_rows(x) if torch.compiler.is_compiling() else self.round_rows(x)
        by_row = F.ScalingType.RowWise
        adds_bias = bias is not None and bias.dtype == torch.bfloat16
        out = F.scaled_mm(
            rounded,
            self.weight.t(),
            scale,
            by_row,
            self.scale.t(),
            by_row,
            bias=bias if adds_bias else None,
            output_dtype=torch.bfloat16,
            # Sums of some products in fewer bits: else Hopper's tensor cores wait for other units.
            use_fast_accum=True,
        )
        out = out.to(x.dtype)
        return out if bias is None or adds_bias else out + bias

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index].float() * self.scale[index]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, size] as 8-bit floats, and the factor of each row, float32 [n, 1]."""
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale
