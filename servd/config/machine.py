"""Machine: what this machine can do."""

import ctypes
import importlib.util
import re
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """The machine's capabilities, found without importing torch."""

    num_gpus: int = 0
    torch_has_cuda: bool = False
    has_triton: bool = False


def look_at_machine() -> Machine:
    """Return the machine: GPUs from the CUDA driver, CUDA support from torch's version file."""
    has_triton = importlib.util.find_spec("triton") is not None
    return Machine(num_gpus=_num_gpus(), torch_has_cuda=_torch_has_cuda(), has_triton=has_triton)


def _num_gpus() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds the package without running it
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    built_for = re.compile(r"^cuda\b.*=\s*'", re.MULTILINE)
    return version.exists() and built_for.search(version.read_text()) is not None
