"""Staging: what arrives is what was sent, and no chunk is filled before the device has read it."""

from collections.abc import Callable

import pytest
import torch

from servd.worker.device.staging import Staging


class LazyDevice:
    """Does what it is told when an event is waited for, or at the end."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.most_queued = 0

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class LazyTensor(torch.Tensor):
    """Copies that need not be waited for come later."""

    device_of_test: LazyDevice

    def copy_(self, source, non_blocking: bool = False):
        if not non_blocking:
            return super().copy_(source)
        self.device_of_test.queue.append(
            lambda: torch.Tensor.copy_(self.as_subclass(torch.Tensor), source)
        )
        return self


class LazyEvent:
    def __init__(self, device: LazyDevice) -> None:
        self.device = device
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True
        self.device.most_queued = max(self.device.most_queued, len(self.device.queue))

    def synchronize(self) -> None:
        if self.is_recorded:
            self.device.run()


@pytest.mark.parametrize("shape", [(3, 5), (64, 16), (7,), (100,), (0, 4), (9, 2, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_device_that_reads_late_gets_everything(monkeypatch, shape, transposed):
    device = LazyDevice()
    monkeypatch.setattr(LazyTensor, "device_of_test", device, raising=False)
    monkeypatch.setattr(
        Staging,
        "make_chunk",
        lambda self: (torch.empty(self.chunk_bytes, dtype=torch.uint8), LazyEvent(device)),
    )
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    if transposed and source.dim() == 2:
        source = source.t().contiguous().t()
    target = torch.full(shape, torch.nan)  # another type
    copy = Staging(chunk_bytes=64)
    for _ in range(2):
        copy(target.as_subclass(LazyTensor), source)
    assert device.most_queued <= 2, "never more than there are chunks"
    device.run()
    assert torch.equal(target, source.float())


@pytest.mark.gpu
def test_a_gpu_gets_everything():
    source = torch.randn(5000, 3000, generator=torch.Generator().manual_seed(0))
    target = torch.empty(5000, 3000, dtype=torch.bfloat16, device="cuda")
    Staging()(target, source)
    assert torch.equal(target.cpu(), source.bfloat16())
