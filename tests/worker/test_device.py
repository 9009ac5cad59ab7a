"""Limits of the machine, read from files of both cgroup versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from servd.base.errors import ConfigError
from servd.worker.device.device import (
    available_memory,
    configure_triton,
    count_gpus,
    cpu_quota,
    require_c_compiler,
    set_num_threads,
)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None):
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"memory.max": "max", "memory.current": "10"}, 1000 * 1024),
        ({"memory.max": "5000", "memory.current": "2000"}, 3000),
        ({"memory.max": "5000", "memory.current": "6000"}, 0),
        ({"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "1000"}, 8000),
        (  # files that were read, such as a checkpoint, make room
            {
                "memory.max": "5000",
                "memory.current": "4000",
                "memory.stat": "anon 900\nfile 3000\nshmem 100\nactive_file 700\n"
                "inactive_file 2200",
            },
            5000 - (4000 - 2900),
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "6000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n"
                "total_active_file 1000",
            },
            9000 - 3000,
        ),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int):
    meminfo = (
        write(tmp_path, {"meminfo": "MemTotal: 4000 kB\nMemAvailable:    1000 kB"}) / "meminfo"
    )
    assert available_memory(write(tmp_path, files), meminfo) == expected


def test_freed_memory_is_taken_again():
    """By the page faults, in a process of its own: the setting stays."""
    script = """
import resource, torch
from servd.worker.device.device import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(4 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
keep_freed_memory()
faults()
print(faults())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    if before < 20 * 1000:
        pytest.skip("this C library keeps memory anyway")
    assert after < before / 100


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert set_num_threads(1, tmp_path) == len(os.sched_getaffinity(0))
        assert set_num_threads(10**6, tmp_path) == 1
        assert set_num_threads(1, write(tmp_path, {"cpu.max": "50000 100000"})) == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert set_num_threads(1, tmp_path) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_missing_c_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no gcc or clang on PATH: install gcc"):
        require_c_compiler()
    (tmp_path / "mine").touch(mode=0o755)
    monkeypatch.setenv("CC", "mine")
    require_c_compiler()
    monkeypatch.setenv("CC", "theirs")
    with pytest.raises(ConfigError, match="no theirs on PATH"):
        require_c_compiler()


def test_compiled_kernels_are_kept_beside_what_else_is(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")
    configure_triton()
    assert os.environ["TRITON_CACHE_DIR"] == "theirs"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    configure_triton()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "servd" / "triton")


def test_kernels_fuse_multiplications_with_additions(monkeypatch: pytest.MonkeyPatch):
    knobs = pytest.importorskip("triton").knobs
    if not hasattr(knobs.language, "default_fp_fusion"):
        pytest.skip("this triton always fuses")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert not knobs.language.default_fp_fusion
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    configure_triton()
    assert knobs.language.default_fp_fusion


def test_no_gpu_that_torch_can_use_is_an_error_with_the_build_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"torch \S+, built .* CUDA.*'7'.*--device cpu"):
        count_gpus()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert count_gpus() == 2
