"""The operations of cpu/ for float32 on a CPU, compiled when servd is installed, if they can be."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Sequence
from ctypes import c_char, c_char_p, c_int, c_int64
from functools import cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from servd.errors import ConfigError
from servd.worker.layers.quantized import Quantized
from servd.worker.ops import reference
from servd.worker.ops.reference import Routing

if TYPE_CHECKING:
    from servd.worker.ops import LowRank

log = logging.getLogger("servd.worker")

FOLDER = Path(__file__).parent
STAMP = re.compile(rb"servd_state_(\w{16})")  # what a library was compiled from, see setup.py
SWITCH = "SERVD_CPU_KERNELS"  # avx512, avx2, generic, or off; default: the best that this CPU has
# The capabilities of torch.backends.cpu that run a library.
CAPABILITIES = {"avx512": ("AVX512",), "avx2": ("AVX2", "AVX512"), "generic": ()}
TYPES = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3,
    torch.uint8: 4,  # numbers of 4 bits
    torch.float8_e4m3fn: 5,
}  # fmt: skip
FUNCTIONS = {"gelu_new": 0, "gelu_pytorch_tanh": 0, "silu": 1, "relu": 2, "gelu": 3}
WORDS = {"i": "i4x", "q": "q", "f": "f4x", "P": "q"}  # a parameter of cpu/program.cpp, in 8 bytes

Argument = Tensor | float | None
"""A tensor stands for the address of its first element, None for a null pointer."""


class Kernel(ctypes.Structure):
    """An entry of the table in cpu/program.cpp."""

    _fields_ = (("name", c_char_p), ("parameters", c_char_p), ("call", ctypes.c_void_p))


Message = c_char * 200
FAILURES = {1: IndexError, 2: MemoryError}  # by the status of servd_run


class Library:
    """The kernels as they were compiled for one instruction set.

    Raises:
        OSError: not a library.
        AttributeError, ValueError: not one of these kernels.
    """

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        self._run = lib.servd_run
        self._run.argtypes = [c_char_p, c_int64, ctypes.POINTER(c_char), c_int64]
        self.panel_size = c_int.in_dll(lib, "servd_panel_size").value
        num_kernels = c_int.in_dll(lib, "servd_num_kernels").value
        table = (Kernel * num_kernels).in_dll(lib, "servd_kernels")
        self._numbers = {kernel.name.decode(): number for number, kernel in enumerate(table)}
        self._parameters = [kernel.parameters.decode() for kernel in table]
        self._layouts = [Struct("=q" + "".join(WORDS[p] for p in ps)) for ps in self._parameters]

    def encode(self, kernel: str, *arguments: Any) -> bytes:
        """A program of one call. It holds addresses, so the tensors must live until it has run.

        Raises:
            KeyError: no such kernel.
            ValueError: not as many arguments as the kernel has parameters.
        """
        number = self._numbers[kernel]
        words = [
            value if parameter != "P" else 0 if value is None else value.data_ptr()
            for parameter, value in zip(self._parameters[number], arguments, strict=True)
        ]
        return self._layouts[number].pack(number, *words)

    def run(self, program: bytes) -> None:
        """Make the calls of a program, in order.

        Raises:
            IndexError: a call was given an index outside of what it indexes. It and those after it
                have not run.
            MemoryError: a call found no memory for its intermediate results. Those after it have
                not run.
        """
        message = Message()
        if status := self._run(program, len(program) // 8, message, len(message)):
            raise FAILURES[status](message.value.decode())


@cache
def library() -> Library | None:
    """The library for this CPU, or None where there is none or it is switched off."""
    capability, wanted = torch.backends.cpu.get_cpu_capability(), os.environ.get(SWITCH, "")
    if wanted and wanted not in (*CAPABILITIES, "off"):
        raise ConfigError(f"{SWITCH}={wanted}: there are {', '.join(CAPABILITIES)} and off")
    for name, needed in CAPABILITIES.items():
        if (needed and capability not in needed) or wanted not in ("", name):
            continue
        for path in FOLDER.glob(f"_{name}.*"):
            try:
                if _is_stale(path):
                    raise OSError("its sources have changed since it was compiled")
                loaded = Library(path)
            except (OSError, AttributeError, ValueError) as error:
                log.warning(
                    "%s cannot be used (%s): install servd again. The slower operations of torch "
                    "are used",
                    path.name,
                    error,
                )
                continue
            log.debug("CPU kernels: %s", name)
            return loaded
    return None


def set_num_threads(num_threads: int) -> None:
    """For all kernels from now on; at first one for each CPU. torch's threads are others."""
    if library() is not None:
        call("set_threads", num_threads)


def call(kernel: str, *arguments: Argument) -> None:
    """Call a kernel of the library. A TorchFunctionMode sees it, as it sees torch's functions.

    Raises:
        IndexError, MemoryError: see `Library.run`.
    """
    if has_torch_function(arguments):
        return handle_torch_function(call, arguments, kernel, *arguments)
    lib = loaded_library()
    lib.run(lib.encode(kernel, *arguments))


def loaded_library() -> Library:
    """The library where there must be one."""
    lib = library()
    assert lib is not None
    return lib


def state() -> str | None:
    """A hash of the sources, as setup.py computes it; None where there are none: in a wheel."""
    sources = sorted(path for path in FOLDER.glob("cpu/*") if path.suffix in (".cpp", ".h"))
    if not sources:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _is_stale(path: Path) -> bool:
    """Whether a library is of other sources than those beside it. Built by hand, it names none."""
    stamp, now = STAMP.search(path.read_bytes()), state()
    return stamp is not None and now is not None and stamp[1].decode() != now


def _fits(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in tensors)


# ---- Ops ----


def embed(index: Tensor, table: Tensor) -> Tensor:
    """See `Ops.embed`."""
    if not _fits(table):
        return reference.embed(index, table)
    out = torch.empty(len(index), table.shape[1])
    call("embed", table, *table.shape, index.contiguous(), len(index), out)
    return out


def rotation(
    positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `Ops.rotation`."""
    if dtype != torch.float32:
        return reference.rotation(positions, inv_freq, magnitude, dtype)
    positions = positions.contiguous()
    cos, sin = (torch.empty(len(positions), len(inv_freq)) for _ in range(2))
    call("rotation", positions, len(positions), inv_freq, len(inv_freq), magnitude, cos, sin)
    return cos, sin


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.rms_norm`."""
    if not _fits(residual, weight) or x.dtype != torch.float32:
        return reference.rms_norm(x, residual, weight, eps)
    return _norm(0, x, residual, weight, None, eps)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.layer_norm`."""
    if not _fits(residual, weight, bias) or x.dtype != torch.float32:
        return reference.layer_norm(x, residual, weight, bias, eps)
    return _norm(1, x, residual, weight, bias, eps)


def _norm(
    centered: int,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    heads = x.dim() == 3 and x.stride()[1:] == (size, 1)  # a slice of qkv: its tokens are apart
    x = x if heads else x.contiguous()
    per_stride, stride = (x.shape[1], x.stride(0)) if heads else (1, size)
    out = torch.empty(x.shape)
    sums = x if residual is None else torch.empty(x.shape)
    call(
        "norm", centered, x, per_stride, stride, residual, weight, bias, eps, out, sums,
        x.numel() // size, size,
    )  # fmt: skip
    return out, sums


def can_add(x: Any, residual: Any) -> bool:
    """Whether `add` takes them."""
    are_tensors = isinstance(x, Tensor) and isinstance(residual, Tensor)
    return are_tensors and x.shape == residual.shape and _fits(x, residual)


def add(x: Tensor, residual: Tensor, out: Tensor) -> None:
    """`x + residual`, contiguous float32 of one shape each, to `out`."""
    assert _fits(x, residual, out)
    call("scale", x, 1.0, residual, x.numel(), out)


def scale(x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
    """See `Ops.scale`."""
    if not _fits(x, residual):
        return reference.scale(x, factor, residual)
    out = torch.empty(x.shape)
    call("scale", x, factor, residual, x.numel(), out)
    return out


def activate(x: Tensor, name: str) -> Tensor:
    """See `Ops.activate`."""
    if not _fits(x):
        return reference.activate(x, name)
    out, size = torch.empty(x.shape), x.shape[-1]
    call("activate", x, x.numel() // size, size, FUNCTIONS[name], 0, out)
    return out


def gate(x: Tensor, name: str) -> Tensor:
    """See `Ops.gate`."""
    if not _fits(x):
        return reference.gate(x, name)
    out = torch.empty(x.shape[0], x.shape[1] // 2)
    call("activate", x, *out.shape, FUNCTIONS[name], 1, out)
    return out


def route(logits: Tensor, top_k: int, renormalize: bool) -> Routing:
    """See `Ops.route`."""
    if not _fits(logits):
        return reference.route(logits, top_k, renormalize)
    num_tokens, num_experts = logits.shape
    # Of 32 bits each, and made as floats: in a program they lie in its buffers.
    tokens, starts, places = (
        torch.empty(shape).view(torch.int32)
        for shape in ((num_tokens * top_k,), (num_experts + 1,), (num_tokens, top_k))
    )
    weights = torch.empty(places.shape)
    call(
        "route", logits, *logits.shape, top_k, renormalize, tokens, starts, places, weights
    )  # fmt: skip
    return Routing(tokens, starts, places, weights)


def combine(y: Tensor, routing: Routing) -> Tensor:
    """See `Ops.combine`."""
    if not _fits(y):
        return reference.combine(y, routing)
    places = routing.places
    out = torch.empty(len(places), y.shape[1])
    call("combine", y, len(y), places, routing.weights, *places.shape, y.shape[1], out)
    return out


def add_low_rank(out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
    """See `Ops.add_low_rank`."""
    a, b = factors.a, factors.b
    if not _fits(out) or x.dtype != torch.float32:
        return reference.add_low_rank(out, x, factors, places)
    call(
        "add_low_rank", TYPES[a.dtype], x.contiguous(), *x.shape, a, a.shape[2], b, b.shape[1],
        factors.ranks, factors.part_ends, *factors.ranks.shape, places, out, out.shape[1],
    )  # fmt: skip


# ---- matrices ----


class Packed:
    """A weight matrix [out, in] in the order in which products read it. Rows are padded to whole
    panels.
    """

    nbytes: int

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """float32 [n, in] -> [n, out]."""
        out = torch.empty(x.shape[0], self.shape[0])
        self.multiply_into(out, x, bias)
        return out

    def multiply_into(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """float32 [n, in] -> out [n, out], which may be columns of a wider tensor."""
        fits = x.dtype == torch.float32 and x.shape[1] == self.shape[1]
        assert fits, (x.dtype, x.shape, self.shape)
        self._multiply(out, x.contiguous(), bias)

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        raise NotImplementedError

    def rows(self, index: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]."""
        raise NotImplementedError


class PackedMatrix(Packed):
    """
    Args:
        weight: [out, in] of any strides, float32, bfloat16, float16 or int8.
        scale: float32 [out]: factor on each row, for int8.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        super().__init__(weight.shape)
        self.type = TYPES[weight.dtype]
        self.scale = scale
        self.packed = _pack(weight)
        self.nbytes = self.packed.nbytes + (scale.nbytes if scale is not None else 0)

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        size = out.stride(0), out.shape[1]
        call("matmul", self.type, x, *x.shape, self.packed, self.scale, bias, out, *size)

    def rows(self, index: Tensor) -> Tensor:
        """See `Packed`."""
        index = index.contiguous()
        out = torch.empty(len(index), self.shape[1])
        call("gather_rows", self.type, self.packed, self.scale, *self.shape, index, len(index), out)
        return out


class GroupedMatrix(Packed):
    """With a scale, and perhaps an offset, for each group of a row's numbers."""

    def __init__(self, quantized: Quantized) -> None:
        super().__init__(quantized.shape)
        table, scale, offset = quantized.table, quantized.scale, quantized.offset
        self.type, self.scale_type = TYPES[quantized.codes.dtype], TYPES[scale.dtype]
        self.group_size = quantized.group_size
        self.table = None if table is None else torch.tensor(table)
        self.packed, self.scale = _pack(quantized.codes), _pack(scale)
        self.offset = None if offset is None else _pack(offset)
        self.columns = quantized.columns
        kept = (self.packed, self.scale, self.offset, self.table, self.columns)
        self.nbytes = sum(tensor.nbytes for tensor in kept if tensor is not None)

    def _multiply(self, out: Tensor, x: Tensor, bias: Tensor | None) -> None:
        if self.columns is not None:
            x = _take_columns(x, self.columns)
        call(
            "matmul_grouped", self.type, x, *x.shape, self.packed, self.table, self.scale_type,
            self.scale, self.offset, self.group_size, bias, out, out.stride(0), out.shape[1],
        )  # fmt: skip

    def rows(self, index: Tensor) -> Tensor:
        """See `Packed`."""
        index = index.contiguous()
        out = torch.empty(len(index), self.shape[1])
        call(
            "gather_grouped", self.type, self.packed, self.table, self.scale_type, self.scale,
            self.offset, self.group_size, *self.shape, index, len(index), out,
        )  # fmt: skip
        return out if self.columns is None else out[:, self.columns.argsort()]


def _take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """x[:, columns] in calls of the library, so that a program can have them."""
    out, size = torch.empty(x.shape), len(columns)
    for row, to in zip(x, out, strict=True):
        call("embed", row, size, 1, columns, size, to)
    return out


class Stacked(Packed):
    """Matrices of several types, one below the other. It has no `rows`: tables are of one type."""

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
    """Matrices of one shape and type, of which each multiplies rows of its own, in one call."""

    def __init__(self, matrices: Sequence[PackedMatrix] | Sequence[GroupedMatrix]) -> None:
        self.matrices = matrices  # which the tables point to
        first = matrices[0]
        self.out_features, self.type = first.shape[0], first.type
        self.packed = _addresses([matrix.packed for matrix in matrices])
        self.scales = _addresses([matrix.scale for matrix in matrices])
        self.offsets: Tensor | None = None
        if isinstance(first, GroupedMatrix):
            self.offsets = _addresses([m.offset for m in matrices if isinstance(m, GroupedMatrix)])

    @staticmethod
    def kind(matrix: object) -> tuple[object, ...] | None:
        """What all of the matrices have in common; None: they cannot be these."""
        if isinstance(matrix, PackedMatrix):
            return matrix.type, matrix.scale is None
        if isinstance(matrix, GroupedMatrix) and matrix.columns is None:
            table = None if matrix.table is None else tuple(matrix.table.tolist())
            return matrix.type, matrix.scale_type, matrix.offset is None, matrix.group_size, table
        return None

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        """See `GroupedForm`."""
        x, first = x.contiguous(), self.matrices[0]
        num_rows = len(x) if index is None else len(index)
        out = torch.empty(num_rows, self.out_features)
        given = (self.type, x, *x.shape, index, starts, len(self.matrices), self.packed)
        if isinstance(first, GroupedMatrix):
            call(
                "matmul_experts_grouped", *given, first.table, first.scale_type, self.scales,
                self.offsets, first.group_size, out, *out.shape,
            )  # fmt: skip
        else:
            call("matmul_experts", *given, self.scales, out, *out.shape)
        return out


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """int64 [n]; None of tensors that are None."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    # Not by torch: the first step that needs them may be one that is recorded.
    return torch.from_numpy(np.array(addresses, dtype=np.int64)) if addresses else None


def _pack(weight: Tensor) -> Tensor:
    """[out, in] in panels of rows; two codes of 4 bits in a byte."""
    num_rows, size = weight.shape
    panel_size = loaded_library().panel_size
    num_values = -(-num_rows // panel_size) * panel_size * size
    if weight.dtype == torch.uint8:
        num_values, weight = num_values // 2, weight.contiguous()
    packed = torch.empty(num_values, dtype=weight.dtype)
    call("pack", TYPES[weight.dtype], weight, *weight.stride(), num_rows, size, packed)
    return packed
