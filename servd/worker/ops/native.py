"""The operations of cpu/, for float32 on a CPU; compiled when servd is installed, if there is a
compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import threading
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from servd.errors import ConfigError
from servd.worker.ops import reference

log = logging.getLogger("servd.worker")

FOLDER = Path(__file__).parent
STAMP = re.compile(
    rb"servd_state_(\w{16})"
)  # of a library: what it was compiled from, see setup.py
SWITCH = "SERVD_CPU_KERNELS"  # avx512, avx2, generic, or off; default: the best that this CPU has
CAPABILITIES = {
    "avx512": ("AVX512",),
    "avx2": ("AVX2", "AVX512"),
    "generic": (),
}  # of torch.backends.cpu
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
FUNCTIONS = {"gelu_new": 0, "gelu_pytorch_tanh": 0, "silu": 1, "relu": 2, "gelu": 3}

# Pointers may be null where the C++ says so; numbers of rows, strides and sizes count elements.
SIGNATURES = {
    "servd_set_threads": [c_int],
    "servd_panel": [],
    "servd_vector": [],
    "servd_pack": [c_int, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p],
    "servd_multiply": [c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64],
    "servd_rows": [c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    "servd_write": [c_int, *[c_void_p, c_int64] * 3, *[c_void_p] * 6, *[c_int64] * 5],
    "servd_attend": [c_int, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_void_p, *[c_int64] * 6, c_float,
                     c_void_p],
    "servd_norm": [c_int, c_void_p, c_int64, c_int64, *[c_void_p] * 3, c_float, c_void_p, c_void_p, c_int64, c_int64],
    "servd_activate": [c_void_p, c_int64, c_int64, c_int, c_int, c_void_p],
    "servd_take": [c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    "servd_rotation": [c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p, c_void_p],
    "servd_run": [c_void_p, c_int64, c_int64],
    "servd_shift": [c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_int64, c_void_p],
    "servd_to_weights": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "servd_narrow": [*[c_void_p] * 4, c_int64, c_int64, c_void_p],
    "servd_draw": [*[c_void_p] * 4, c_int64, c_int64, c_void_p],
    "servd_score": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
}  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
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
                loaded = ctypes.CDLL(str(path))
                for function, arguments in SIGNATURES.items():
                    getattr(loaded, function).argtypes = arguments
                    getattr(loaded, function).restype = None
            except (
                OSError,
                AttributeError,
            ) as error:  # the latter: compiled from an earlier state of cpu/
                log.warning(
                    "%s cannot be used (%s): install servd again. The slower operations of torch "
                    "are used",
                    path.name, error,
                )  # fmt: skip
                continue
            loaded.servd_panel.restype = loaded.servd_vector.restype = c_int
            log.debug("CPU kernels: %s", name)
            return loaded
    return None


def set_num_threads(num_threads: int) -> None:
    """For all kernels from now on; at first, as many as this process has CPUs. torch's threads are
    others.
    """
    if (lib := library()) is not None:
        lib.servd_set_threads(num_threads)


class Recording(Protocol):
    """What a forward pass calls, written down while it runs: see program_runner.py."""

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for a float32 result."""
        ...

    def add(self, function: str, arguments: tuple[float | None, ...]) -> None:
        """A call that is made now."""
        ...


class _ThisThread(threading.local):
    recording: Recording | None = None  # of the step that runs now


this_thread = _ThisThread()


def call(function: str, *arguments: float | None) -> None:
    """Call a function of the library; addresses are numbers, and None is a null pointer."""
    getattr(_lib(), function)(*arguments)
    if this_thread.recording is not None:
        this_thread.recording.add(function, arguments)


def empty(*shape: int) -> torch.Tensor:
    """Memory for a float32 result of `call`."""
    return (
        torch.empty(shape) if this_thread.recording is None else this_thread.recording.empty(*shape)
    )


def state() -> str | None:
    """Of the sources, as setup.py computes it; None where there are none: in a wheel."""
    sources = sorted(path for path in FOLDER.glob("cpu/*") if path.suffix in (".cpp", ".h"))
    return (
        hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
        if sources
        else None
    )


def _is_stale(path: Path) -> bool:
    """Whether a library is of another state than the sources beside it. Compiled by hand, it names
    none.
    """
    stamp, now = STAMP.search(path.read_bytes()), state()
    return stamp is not None and now is not None and stamp[1].decode() != now


def _lib() -> ctypes.CDLL:
    lib = library()
    assert lib is not None
    return lib


def _fits(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in tensors)


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's elements begin; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()


# ---- Ops ----


def embed(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `Ops.embed`."""
    if not _fits(table):
        return reference.embed(index, table)
    index, out = index.contiguous(), empty(len(index), table.shape[1])
    call(
        "servd_take", table.data_ptr(), table.shape[1], index.data_ptr(), len(index), out.data_ptr()
    )
    return out


def rotation(
    positions: torch.Tensor, inv_freq: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.rotation`."""
    if dtype != torch.float32:
        return reference.rotation(positions, inv_freq, magnitude, dtype)
    positions = positions.contiguous()
    cos, sin = (empty(len(positions), len(inv_freq)) for _ in range(2))
    call(
        "servd_rotation", positions.data_ptr(), len(positions), inv_freq.data_ptr(), len(inv_freq), magnitude,
        cos.data_ptr(), sin.data_ptr(),
    )  # fmt: skip
    return cos, sin


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.rms_norm`."""
    if not _fits(residual, weight) or x.dtype != torch.float32:
        return reference.rms_norm(x, residual, weight, eps)
    return _norm(0, x, residual, weight, None, eps)


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.layer_norm`."""
    if not _fits(residual, weight, bias) or x.dtype != torch.float32:
        return reference.layer_norm(x, residual, weight, bias, eps)
    return _norm(1, x, residual, weight, bias, eps)


def _norm(
    centered: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    heads = x.dim() == 3 and x.stride()[1:] == (size, 1)  # of a slice of qkv: its tokens are apart
    x = x if heads else x.contiguous()
    per_stride, stride = (x.shape[1], x.stride(0)) if heads else (1, size)
    out = empty(*x.shape)
    sums = x if residual is None else empty(*x.shape)
    call(
        "servd_norm", centered, x.data_ptr(), per_stride, stride, address(residual), weight.data_ptr(), address(bias),
        eps, out.data_ptr(), sums.data_ptr(), x.numel() // size, size,
    )  # fmt: skip
    return out, sums


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """See `Ops.activate`."""
    if not _fits(x):
        return reference.activate(x, name)
    out, size = empty(*x.shape), x.shape[-1]
    call(
        "servd_activate", x.data_ptr(), x.numel() // size, size, FUNCTIONS[name], 0, out.data_ptr()
    )
    return out


def gate(x: torch.Tensor, name: str) -> torch.Tensor:
    """See `Ops.gate`."""
    if not _fits(x):
        return reference.gate(x, name)
    out = empty(x.shape[0], x.shape[1] // 2)
    call("servd_activate", x.data_ptr(), *out.shape, FUNCTIONS[name], 1, out.data_ptr())
    return out


# ---- matrices ----


class PackedMatrix:
    """A weight matrix in the order in which products read it. Rows are padded to whole panels.

    Args:
        weight: [out, in] of any strides, float32, bfloat16, float16 or int8.
        scale: float32 [out]: factor on each row, for int8.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        lib = _lib()
        self.shape = weight.shape
        self.type = TYPES[weight.dtype]
        self.scale = scale
        num_rows, size = weight.shape
        panel = lib.servd_panel()
        self.packed = torch.empty(-(-num_rows // panel) * panel * size, dtype=weight.dtype)
        lib.servd_pack(
            self.type, weight.data_ptr(), *weight.stride(), num_rows, size, self.packed.data_ptr()
        )
        self.nbytes = self.packed.nbytes + (scale.nbytes if scale is not None else 0)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """float32 [n, in] -> [n, out]."""
        assert x.dtype == torch.float32 and x.shape[1] == self.shape[1], (
            x.dtype,
            x.shape,
            self.shape,
        )
        x = x.contiguous()
        out = empty(x.shape[0], self.shape[0])
        call(
            "servd_multiply", self.type, x.data_ptr(), *x.shape, self.packed.data_ptr(), address(self.scale),
            address(bias), out.data_ptr(), out.shape[1],
        )  # fmt: skip
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> float32 [n, in]."""
        index = index.contiguous()  # has a name, so that a copy lives until the call is over
        out = empty(len(index), self.shape[1])
        call(
            "servd_rows", self.type, self.packed.data_ptr(), address(self.scale), self.shape[1], index.data_ptr(),
            len(index), out.data_ptr(),
        )  # fmt: skip
        return out
