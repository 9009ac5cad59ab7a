"""A worker's resources: threads and memory of a CPU, memory of a CUDA device."""

import ctypes
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from servd.base.errors import ConfigError
from servd.worker.ops import native

log = logging.getLogger("servd.worker")

CGROUP = Path("/sys/fs/cgroup")
# see mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def set_num_threads(num_workers: int = 1, cgroup: Path = CGROUP) -> int:
    """Divide the CPUs that this process may use among the workers of this host, set the thread
    counts of torch and the native library, and return the number of threads.

    OMP_NUM_THREADS, if set, is the number for each worker.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    setting = os.environ.get("OMP_NUM_THREADS", "")
    cpus = allowed if quota is None else min(allowed, max(1, int(quota)))
    num_threads = max(1, int(setting) if setting.isdigit() else cpus // num_workers)
    torch.set_num_threads(num_threads)
    native.set_num_threads(num_threads)
    log.info(
        "threads for this worker: %d (%d CPUs by affinity, %s by cgroup quota, %d workers, "
        "OMP_NUM_THREADS %s)",
        num_threads,
        allowed,
        "no limit" if quota is None else f"{quota:g}",
        num_workers,
        setting or "not set",
    )
    return num_threads


def require_c_compiler() -> None:
    """Check for a C compiler, which Triton needs for the launchers of its kernels. Raises
    ConfigError: no compiler was found.
    """
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang"])):
        raise ConfigError(
            f"kernels for the GPU need a C compiler, and there is no {compiler or 'gcc or clang'} "
            "on PATH: install gcc and Python's headers (python3-dev), or set CC"
        )


def count_gpus() -> int:
    """Return the number of GPUs that torch can use. Raises ConfigError: torch can use none, even if
    the driver lists some.
    """
    if count := torch.cuda.device_count():
        return count
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(
        f"torch {torch.__version__}, built {built}, finds no GPU (CUDA_VISIBLE_DEVICES is "
        f"{'not set' if visible is None else repr(visible)}): install a build of torch for the "
        "driver that nvidia-smi shows, or choose --device cpu"
    )


def cache_folder(name: str) -> Path:
    """Return the folder for cached files, which users may delete at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "servd", name)


def configure_triton() -> None:
    """Have Triton cache compiled kernels for the next start, and fuse multiplications with
    additions, which 3.10 leaves off: slower, and with other last bits. Variables that are set stay.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder("triton")))
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def keep_freed_memory(largest: int = 32 << 20, max_kept: int = 1 << 30) -> None:
    """Have glibc keep freed memory for the next step instead of returning it to the system.

    The kernel clears newly mapped memory page by page, which took a quarter of the time of GPT-2's
    prompts. `largest`: bytes of the largest block to keep (glibc's maximum); `max_kept`: bytes to
    keep in total.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The user's settings have precedence.
    variables = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    if mallopt is not None and not variables & os.environ.keys():
        mallopt(M_MMAP_THRESHOLD, largest)
        mallopt(M_TRIM_THRESHOLD, max_kept)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return the CPU limit of the control group (cgroup v1 or v2), or None."""
    # Version 2: "200000 100000" or "max 100000".
    quota, period = [*_read(cgroup / "cpu.max").split(), "", ""][:2]
    if not quota:
        quota = _read(cgroup / "cpu/cpu.cfs_quota_us")
        period = _read(cgroup / "cpu/cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():  # absent, "max" or "-1"
        return None
    return int(quota) / int(period)


def available_memory(cgroup: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the main memory, in bytes, that the kernel and the control group leave available."""
    lines = dict(line.split(":", 1) for line in _read(meminfo).splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    for folder, limit_file, usage_file in (
        (cgroup, "memory.max", "memory.current"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _read(folder / limit_file)
        usage = _read(folder / usage_file)
        if limit.isdigit() and usage.isdigit():
            used = int(usage) - _cached_files(folder / "memory.stat")
            available = min(available, int(limit) - max(used, 0))
    return max(available, 0)


def _cached_files(stat: Path) -> int:
    """Return the bytes of cached files (e.g. a checkpoint) that count as memory of a control group.
    The kernel frees them on demand.
    """
    counters = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    prefix = "total_" if "total_active_file" in counters else ""  # v1: with groups below
    return sum(int(counters.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device asynchronously. On a CPU, the tensor shares its memory, but not
    that of a column of structured rows.
    """
    if not array.flags.c_contiguous:  # a GPU would copy it synchronously
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def at_hand(tensor: torch.Tensor) -> Any:
    """Return the tensor, on a CPU as a numpy view: numpy is faster for a few numbers."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def sent(array: np.ndarray, device: torch.device) -> Any:
    """Return the array on a CPU, else a tensor on the device, to match results of `at_hand`."""
    return array if device.type == "cpu" else upload(array, device)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextmanager
def defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within this context, new tensors have this type and are on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
