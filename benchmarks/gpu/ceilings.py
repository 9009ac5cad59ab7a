"""What the device can do at best: copying memory, and multiplying bf16 matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Facts = dict[str, float]


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds on the device of one call, after three to warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(device: torch.device, is_tiny: bool) -> Facts:
    """Bytes a second of a large copy, read and written ones together; operations a second of a
    large product.

    On random numbers: zeros are multiplied faster.
    """
    num_bytes, size = (1 << 16, 64) if is_tiny else (4 << 30, 8192)
    source, target = torch.randint(0, 256, (2, num_bytes), dtype=torch.uint8, device=device)
    copy = median_seconds(lambda: target.copy_(source), device, 20)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = median_seconds(lambda: a @ b, device, 20)
    return {"bandwidth": 2 * num_bytes / copy, "matrix_rate": 2 * size**3 / product}
