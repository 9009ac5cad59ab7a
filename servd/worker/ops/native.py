"""The operations of cpu/ for float32 on a CPU, compiled when servd is installed, if possible."""

import ctypes
import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from ctypes import c_char, c_char_p, c_int, c_int64
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from servd.base.errors import ConfigError
from servd.worker.ops import reference
from servd.worker.ops._decode_rows import SlotTensors
from servd.worker.ops._huge_pages import HugePages
from servd.worker.ops._state_rows import Decay, Factors, Filter, StateRows
from servd.worker.ops.reference import LowRank, Rotation, Routing, RoutingRule

log = logging.getLogger("servd.worker")

FOLDER = Path(__file__).parent
STAMP = re.compile(rb"servd_state_(\w{16})")  # hash of a library's sources, see setup.py
SWITCH = "SERVD_CPU_KERNELS"  # name of a library, or off; default: the best for this CPU
REMEDY = (
    "compile it with SERVD_KERNELS=all python setup.py build_ext --inplace (a checkout) or install "
    "a wheel"
)
# The capabilities of torch.backends.cpu that run a library.
CAPABILITIES = {
    "amx": ("AVX512",),
    "bf16": ("AVX512",),
    "vnni": ("AVX512",),
    "avx512": ("AVX512",),
    "avxvnni": ("AVX2", "AVX512"),
    "avx2": ("AVX2", "AVX512"),
    "i8mm": (),
    "dotprod": (),
    "generic": (),
}
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.uint8: 4,  # numbers of 4 bits
    torch.float8_e4m3fn: 5,
}
FUNCTIONS = {
    "gelu_new": 0,
    "gelu_pytorch_tanh": 0,
    "silu": 1,
    "relu": 2,
    "gelu": 3,
    "quick_gelu": 4,
}
WORDS = {"i": "i4x", "q": "q", "f": "f4x"}  # a number of cpu/graph.cpp in 8 bytes; others: q
# Types to which the addresses of cpu/graph.cpp point. A: addresses.
ELEMENTS = {
    "F": torch.float32,
    "D": torch.float64,
    "I": torch.int32,
    "Q": torch.int64,
    "A": torch.int64,
}
INT6 = 6  # int8 from -32 to 31, packed in 6 bits
DTYPES = {number: dtype for dtype, number in TYPES.items()} | {INT6: torch.int8}
PARAMETER = re.compile(  # see the table in cpu/graph.cpp
    r"(?P<name>\w+)(?P<null>\?\w*)?(<(?P<type>\w+)>)?"
    r"(?P<open>[\[{])?(?(open)(?P<size>.+?)[\]}])(, |$)"
)

ZERO = torch.zeros(1, dtype=torch.int64)
# Limits of cpu/states.cpp.
CONVOLUTIONS = range(2, 9)  # sizes
MAX_KEY_DIM = 256

Argument = Tensor | float | None
"""An argument of a kernel. A tensor stands for its address, None for a null pointer."""


class Kernel(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("types", c_char_p),
        ("parameters", c_char_p),
        ("call", ctypes.c_void_p),
    )


class Signature:
    """The parameter types of a kernel, compiled to one expression, so that a check takes 1 us.
    `kernel`: its entry in the library. Its expressions are trusted code, like the kernel itself.
    """

    def __init__(self, number: int, kernel: Kernel, names: dict[str, Any]) -> None:
        self.number = number
        self.types = kernel.types.decode()
        self.layout = Struct("=q" + "".join(WORDS.get(type, "q") for type in self.types))
        parameters = list(PARAMETER.finditer(kernel.parameters.decode()))
        self.names = [parameter["name"] for parameter in parameters]
        self.tests = {
            parameter["name"]: self._test_of(parameter, type)
            for parameter, type in zip(parameters, self.types, strict=True)
            if type not in WORDS
        }
        self.context = ELEMENTS | names
        self.context |= {"DTYPES": DTYPES, "reach": _reach, "row_size": _row_size}
        self.fits = self._compile(" and ".join(self.tests.values()) or "True")

    def _compile(self, test: str) -> Callable[..., bool]:
        return eval(f"lambda {', '.join(self.names)}: {test}", self.context)

    @staticmethod
    def _test_of(parameter: re.Match[str], type: str) -> str:
        name = parameter["name"]
        null = parameter["null"]
        dtype = f"DTYPES[{parameter['type']}]" if parameter["type"] else type
        if parameter["open"] == "[":
            size = f"{name}.is_contiguous() and {name}.numel()"
        else:
            size = f"reach({name})"
        test = f"{name}.dtype is {dtype} and {name}.is_cpu and {size} >= ({parameter['size']})"
        if not null:
            return f"({name} is not None and {test})"
        return f"({null[1:] or name} is None if {name} is None else {test})"

    def find_misfit(self, arguments: Sequence[Any]) -> str:
        for name, value in zip(self.names, arguments, strict=True):
            if name in self.tests and not self._compile(self.tests[name])(*arguments):
                if value is None:
                    return f"{name} is missing"
                return (
                    f"{name} {value.dtype} {list(value.shape)}, strides {list(value.stride())}, on"
                    f" {value.device}: needed is {self.tests[name]}"
                )
        raise AssertionError("every argument fits")


def _reach(tensor: Tensor) -> int:
    """Return the number of elements from the tensor's first element to the end of its storage."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize - int(tensor.storage_offset())


def _row_size(type: int, size: int) -> int:
    """Return the number of elements in a row of the KV cache; in int8, a scale follows the row."""
    return size + 4 if DTYPES[type] == torch.int8 else size


Message = c_char * 200
FAILURES = {1: IndexError, 2: MemoryError}  # by the status of servd_run


class Library:
    """The kernels compiled for one instruction set. Raises OSError: the file is not a library;
    AttributeError, ValueError: the library lacks these kernels.
    """

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        self.name = path.name.split(".")[0].lstrip("_")  # the name of the instruction set
        self._run = lib.servd_run
        self._run.argtypes = [c_char_p, c_int64, ctypes.POINTER(c_char), c_int64]
        self.is_usable = bool(lib.servd_is_usable())
        self.pages = HugePages()  # of the weights that its kernels multiply
        packed_size = lib.servd_packed_size
        packed_size.argtypes = [c_int, c_int, c_int64, c_int64]
        packed_size.restype = c_int64
        # Type, terms, rows and size of a matrix -> its numbers when packed, padding included; 0 if
        # there is no product of the type.
        self.packed_size: Callable[[int, int, int, int], int] = cache(packed_size)
        num_kernels = c_int.in_dll(lib, "servd_num_kernels").value
        table = (Kernel * num_kernels).in_dll(lib, "servd_kernel_table")
        self.signatures = {
            kernel.name.decode(): Signature(number, kernel, {"packed_size": self.packed_size})
            for number, kernel in enumerate(table)
        }

    def encode(self, kernel: str, *arguments: Any) -> bytes:
        """Return a graph of one call. The graph holds addresses: keep the tensors alive until it
        has run. Raises KeyError: unknown kernel; TypeError: the number of arguments differs from
        the number of parameters; ValueError: a tensor has the wrong type, is not contiguous, or is
        shorter than its sizes.
        """
        signature = self.signatures[kernel]
        if not signature.fits(*arguments):
            raise ValueError(f"{kernel}: {signature.find_misfit(arguments)}")
        words = []
        for type, value in zip(signature.types, arguments, strict=True):
            if type in WORDS:
                words.append(value)
            else:
                words.append(0 if value is None else value.data_ptr())
        return signature.layout.pack(signature.number, *words)

    def run(self, graph: bytes) -> None:
        """Run the calls of a graph in order. Raises IndexError: a call got an index out of range
        and did not run; MemoryError: a call found no memory for intermediate results. Later calls
        have not run.
        """
        message = Message()
        if status := self._run(graph, len(graph) // 8, message, len(message)):
            raise FAILURES[status](message.value.decode())


@cache
def library() -> Library | None:
    choice = os.environ.get(SWITCH, "")
    if choice and choice not in (*CAPABILITIES, "off"):
        raise ConfigError(f"{SWITCH}={choice}: must be {', '.join(CAPABILITIES)} or off")
    for name in CAPABILITIES:
        if choice not in ("", name) or not _may_run(name):
            continue
        for path in FOLDER.glob(f"_{name}.*"):
            try:
                if _is_stale(path):
                    raise OSError("its sources have changed since it was compiled")
                loaded = Library(path)
            except (OSError, AttributeError, ValueError) as error:
                log.warning(
                    "cannot use %s (%s): install servd again. Using torch, which is slower",
                    path.name,
                    error,
                )
                continue
            if not loaded.is_usable:  # such as on a CPU with AVX-512 and without AMX
                continue
            log.info("CPU kernels: %s", loaded.name)
            return loaded
    return None


def _may_run(name: str) -> bool:
    needed = CAPABILITIES[name]
    return not needed or torch.backends.cpu.get_cpu_capability() in needed


def explain_absence() -> str:
    """Return the cost of a missing library and the remedy; "" if there is one, or it is off."""
    choice = os.environ.get(SWITCH, "")
    if library() is not None or choice == "off":
        return ""
    built = [*FOLDER.glob(f"_{choice or '*'}.so")]
    if not choice and not built:
        why = "servd was installed without a C++ compiler: install g++, then install servd again"
    elif not choice or any(map(_is_stale, built)):
        why = "none of the CPU kernels can be used here: install servd again"
    elif built or not _may_run(choice):
        why = f"{SWITCH}={choice}: not for this CPU"
    else:
        why = f"{SWITCH}={choice}: not built here: {REMEDY}"
    return f"computing is about ten times slower than it could be, by torch alone: {why}"


def set_num_threads(num_threads: int) -> None:
    """Set the threads of all kernels; the default is one per CPU. torch's are separate."""
    if library() is not None:
        call("set_threads", num_threads)


def call(kernel: str, *arguments: Argument) -> None:
    """Call a kernel of the library. A TorchFunctionMode sees the call, like torch's functions."""
    if has_torch_function(arguments):
        handle_torch_function(call, arguments, kernel, *arguments)
        return
    lib = loaded_library()
    lib.run(lib.encode(kernel, *arguments))


def loaded_library() -> Library:
    lib = library()
    assert lib is not None
    return lib


def state() -> str | None:
    """Return a hash of the sources, as setup.py computes it, or None in a wheel without sources."""
    sources = sorted(path for path in FOLDER.glob("cpu/*") if path.suffix in (".cpp", ".h"))
    if not sources:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _is_stale(path: Path) -> bool:
    """Return whether a library was built from other sources; False if it has no hash of them."""
    stamp = STAMP.search(path.read_bytes())
    now = state()
    return stamp is not None and now is not None and stamp[1].decode() != now


def _fits(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in tensors)


def _fits_by_token(*tensors: Tensor | None) -> bool:
    """Return whether tensors are float32 [num_tokens, ...], and contiguous but for tokens."""
    return all(t is None or (t.dtype == torch.float32 and _are_dense(t)) for t in tensors)


def _are_dense(x: Tensor) -> bool:
    sizes = x.shape[1:]
    return x.stride()[1:] == tuple(math.prod(sizes[i:]) for i in range(1, len(sizes) + 1))


# ---- Ops ----

clamped_gate = reference.clamped_gate


def begin_decode(step: Tensor, seq_lens: Tensor, state: SlotTensors, block_size: int) -> None:
    tokens = state.token_ids, *state.token_ids.shape, state.num_computed
    blocks = state.tables, *state.tables.shape, block_size
    call("begin_decode", step, step.shape[1], seq_lens, *tokens, *blocks)


def embed(index: Tensor, table: Tensor) -> Tensor:
    if not _fits(table):
        return reference.embed(index, table)
    out = torch.empty(len(index), table.shape[1])
    call("embed", table, *table.shape, index.contiguous(), len(index), out)
    return out


def rotation(positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype) -> Rotation:
    if dtype != torch.float32:
        return reference.rotation(positions, inv_freq, magnitude, dtype)
    positions = positions.contiguous()
    cos, sin = (torch.empty(len(positions), len(inv_freq)) for _ in range(2))
    call("rotation", positions, len(positions), inv_freq, len(inv_freq), magnitude, cos, sin)
    return cos, sin


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if not _fits(residual, weight) or x.dtype != torch.float32:
        return reference.rms_norm(x, residual, weight, eps)
    return _norm(x, residual, weight, None, eps)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if not _fits(residual, weight, bias) or x.dtype != torch.float32:
        return reference.layer_norm(x, residual, weight, bias, eps)
    return _norm(x, residual, weight, bias, eps)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    centered = 0 if bias is None else 1  # RMSNorm or LayerNorm
    out = torch.empty(x.shape)
    sums = None if residual is None else torch.empty(x.shape)
    call("norm", centered, *_rows(x), residual, weight, bias, eps, out, sums, *_sizes(x))
    return out, x if sums is None else sums


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x, [n, size] or of heads, [n, heads, size]; with its heads and the strides of both."""
    x = x if x.dim() <= 3 and x.stride(-1) == 1 else x.contiguous().flatten(0, -2)
    return x, x.shape[1] if x.dim() == 3 else 1, x.stride(0), x.stride(-2)


def _sizes(x: Tensor) -> tuple[int, int]:
    """Return the number of rows of x [..., size], and their size."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def can_add(x: Any, residual: Any) -> bool:
    are_tensors = isinstance(x, Tensor) and isinstance(residual, Tensor)
    return are_tensors and x.shape == residual.shape and _fits(x, residual)


def add(x: Tensor, residual: Tensor, out: Tensor) -> None:
    """Write `x + residual` to `out`; all are contiguous float32 of one shape."""
    assert _fits(x, residual, out)
    call("scale", x, 1.0, residual, x.numel(), out)


def can_concatenate(parts: Any, dim: int = 0) -> bool:
    return dim in (1, -1) and all(part.dim() == 2 and _fits(part) for part in parts)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return float32 [n, size] parts side by side. Makes a call per row and part: use few rows."""
    sizes = [part.shape[1] for part in parts]
    out = torch.empty(len(parts[0]), sum(sizes))
    for part, to in zip(parts, out.split(sizes, dim=1), strict=True):
        for row, to_row in zip(part, to, strict=True):
            call("embed", row, 1, len(row), ZERO, 1, to_row)
    return out


def look_up(index: Tensor, table: Tensor) -> Tensor:
    """Return the entries `index` [n] of `table`; both are int64."""
    out = torch.empty(2 * len(index))  # a float tensor, to be in a graph's buffers
    call("embed", table.view(torch.float32), len(table), 2, index, len(index), out)
    return out.view(torch.int64)


def scale(x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
    if not _fits(x, residual):
        return reference.scale(x, factor, residual)
    out = torch.empty(x.shape)
    call("scale", x, factor, residual, x.numel(), out)
    return out


def activate(x: Tensor, name: str) -> Tensor:
    if not _fits(x):
        return reference.activate(x, name)
    out = torch.empty(x.shape)
    size = x.shape[-1]
    call("activate", x, x.numel() // size, size, FUNCTIONS[name], 0, out)
    return out


def gate(x: Tensor, name: str) -> Tensor:
    if not _fits(x):
        return reference.gate(x, name)
    out = torch.empty(x.shape[0], x.shape[1] // 2)
    call("activate", x, *out.shape, FUNCTIONS[name], 1, out)
    return out


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    if not _fits(logits, rule.bias) or rule.num_groups > rule.top_groups:
        return reference.route(logits, rule)
    top_k = rule.top_k
    num_tokens, num_experts = logits.shape
    # 32-bit integers in float tensors, to be in a graph's buffers.
    tokens, starts, places = (
        torch.empty(shape).view(torch.int32)
        for shape in ((num_tokens * top_k,), (num_experts + 1,), (num_tokens, top_k))
    )
    weights = torch.empty(places.shape)
    sizes = *logits.shape, top_k, rule.renormalize
    call("route", logits, rule.bias, *sizes, tokens, starts, places, weights)
    return Routing(tokens, starts, places, weights, rule.factor)


def combine(y: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
    if not _fits(y):
        return reference.combine(y, routing, residual)
    reference.mask_other_rows(y, routing.local_starts)
    places = routing.places
    out = torch.empty(len(places), y.shape[1])
    call("combine", y, len(y), places, routing.weights, *places.shape, y.shape[1], out)
    return out if residual is None else scale(out, routing.factor, residual)


def add_low_rank(out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
    a = factors.a
    b = factors.b
    if not _fits(out) or x.dtype != torch.float32:
        reference.add_low_rank(out, x, factors, places)
        return
    inputs = TYPES[a.dtype], x.contiguous(), *x.shape
    adapters = a, a.shape[2], b, b.shape[1], factors.ranks, factors.part_ends, *factors.ranks.shape
    call("add_low_rank", *inputs, *adapters, places, out, out.shape[1])


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    if not _fits(x) or gate.dtype != torch.float32:
        return reference.multiply_sigmoid(x, gate)
    out = torch.empty(x.shape)
    call("multiply_sigmoid", x, *_rows(gate), gate.shape[-1], *_sizes(x), out)
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool) -> Tensor:
    if not _fits(weight) or {x.dtype, gate.dtype} != {torch.float32}:
        return reference.gated_norm(x, gate, weight, eps, gates_first)
    out = torch.empty(x.shape)
    weights = weight, weight.numel() // x.shape[-1]
    call("gated_norm", *_rows(x), *_rows(gate), *weights, eps, gates_first, *_sizes(x), out)
    return out


def convolve(x: Tensor, taps: Filter, factors: Factors | None, rows: StateRows) -> Tensor:
    weight, bias, activation = taps
    size = weight.shape[1]
    fits = _fits_by_token(x, *(factors or ())) and _fits(weight.t(), bias)
    if not fits or size not in CONVOLUTIONS or activation not in ("silu", None):
        return reference.convolve(x, taps, factors, rows)
    out = torch.empty(x.shape)
    inputs = x, x.stride(0), *x.shape, weight.t(), size, bias, activation == "silu"
    around = (number for factor in factors or (None, None) for number in _with_stride(factor))
    call("convolve", *inputs, *around, *_numbers(rows), out)
    return out


def linear_scan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, decay: Decay, rows: StateRows
) -> Tensor:
    if not _fits_by_token(q, k, v, a, b) or k.shape[2] > MAX_KEY_DIM:
        return reference.linear_scan(q, k, v, a, b, decay, rows)
    out = torch.empty(v.shape)
    inputs = (number for x in (q, k, v, a) for number in _with_stride(x))
    rates = decay.dt_bias, decay.A, *_with_stride(b), decay.D, *decay.dt_limits
    sizes = *v.shape[:2], *k.shape[1:], v.shape[2]
    call("linear_scan", *inputs, *rates, *sizes, *_numbers(rows), out)
    return out


def _with_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    return x, 0 if x is None else x.stride(0)


def _numbers(rows: StateRows) -> tuple[Argument, ...]:
    """Return the arguments of a kernel for states."""
    checkpoints = rows.checkpoints if len(rows.checkpoints) else None
    states = rows.states, len(rows.states), rows.states.stride(0)
    of_rows = rows.slots, rows.query_lens, rows.seq_lens, len(rows.query_lens)
    kept = checkpoints, len(rows.checkpoints), rows.checkpoints.stride(0)
    return *states, *of_rows, *kept, rows.saves, len(rows.saves)
