"""What tests of kernels share: devices, memory full of NaN, the modules that can run here."""

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from servd.worker.ops import native


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def sync_mode() -> Callable[[str], AbstractContextManager[None]]:
    """In `with sync_mode("error")` what waits for a CUDA device raises."""

    @contextmanager
    def switch(mode: str) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch states that the mode is a prototype
            torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return switch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Whatever torch allocates is filled with NaN, or the greatest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def exact_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter sums products in order, so that an element has the same bits in a
    product of any shape. It uses NumPy's otherwise, which chooses how to sum by shape and CPU.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(_: Any, a: Any, b: Any, initial: Any, *__: Any) -> Any:
        total = initial.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., :, k, None] * b.data[..., None, k, :]
        return interpreter.TensorHandle(total, initial.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def load_module(device: torch.device) -> Callable[[str, str], Any]:
    """(package, name) -> a module of operations; skips where it cannot run on the device."""

    def load(package: str, name: str) -> Any:
        if name == "triton":
            pytest.importorskip("triton")
            interpreted = os.environ.get("TRITON_INTERPRET") == "1"
            if (device.type == "cpu") != interpreted:
                pytest.skip(f"triton on {device.type} with TRITON_INTERPRET={int(interpreted)}")
        if name == "native" and (device.type != "cpu" or native.library() is None):
            pytest.skip("native is for CPUs, and for servd installed with a compiler")
        return importlib.import_module(f"{package}.{name}")

    return load
