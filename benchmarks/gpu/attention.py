"""Attention backends against each other: writing and attending of one layer with 8B's heads, over
scattered blocks; with what a graph's kernels are given, where steps of the kind are graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from servd.base import plugins
from servd.worker import attention
from servd.worker.attention import AttentionBatch, AttentionSpec
from servd.worker.runner.graph_runner import MOST_MIXED_TOKENS

# (tokens of the step, tokens in all) per row
WORKLOADS = {
    "decode, 256 rows of 1k": [(1, 1024)] * 256,
    "decode, 32 rows of 8k": [(1, 8192)] * 32,
    "decode, 1 row of 8k": [(1, 8192)],
    "prompt of 8k": [(8192, 8192)],
    "255 decode rows and 2k of a prompt": [(1, 1024)] * 255 + [(2048, 4096)],
    "64 decode rows and 256 of a prompt": [(1, 1024)] * 64 + [(256, 1024)],
}
MAX_MODEL_LEN = 32768  # what graphs are captured for


def measure(device: torch.device, is_tiny: bool) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Name of each backend that is for the device, and seconds by workload, or why it cannot
    run.
    """
    package = attention.__name__
    sizes, dtype = ((4, 2, 16), torch.float32) if is_tiny else ((32, 8, 128), torch.bfloat16)
    spec = AttentionSpec(*sizes, 16, None, dtype, dtype, device)
    for name in attention.auto_backends(device.type):
        backend_class = plugins.load_class(package, name, attention.AttentionBackend)
        reason = backend_class.supports(spec)
        if reason is not None:
            yield name, reason
            continue
        backend = backend_class(spec)
        yield (
            name,
            {
                workload: _seconds(backend, _shorten(rows, is_tiny))
                for workload, rows in WORKLOADS.items()
            },
        )


def as_captured(batch: AttentionBatch) -> AttentionBatch:
    """What the host knows of the step when its graph is captured: bounds."""
    num_rows = len(batch.seq_lens)
    is_decode = (batch.query_lens == 1).all()
    tables = batch.block_tables
    return replace(
        batch,
        block_tables=torch.nn.functional.pad(tables, (0, MAX_MODEL_LEN // 16 - tables.shape[1])),
        query_lens=np.full(num_rows, 1 if is_decode else len(batch.slot_mapping)),
        has_exact_query_lens=bool(is_decode),
        seq_lens=np.full(num_rows, MAX_MODEL_LEN),
    )


def _shorten(rows: list[tuple[int, int]], is_tiny: bool) -> list[tuple[int, int]]:
    return [(-(-new // 256), length // 256) for new, length in rows[-2:]] if is_tiny else rows


def _seconds(
    backend: attention.AttentionBackend[Any], rows: list[tuple[int, int]], repeats: int = 20
) -> float:
    """Device time of one layer, after a first run that loads its kernels."""
    spec = backend.spec
    query_lens, seq_lens = np.ascontiguousarray(np.array(rows).T)
    width = -(-int(seq_lens.max()) // spec.block_size)
    tables = np.random.default_rng(0).permutation(len(rows) * width).reshape(len(rows), width)
    positions = [np.arange(length - new, length) for new, length in rows]
    slots = [
        tables[row, at // spec.block_size] * spec.block_size + at % spec.block_size
        for row, at in enumerate(positions)
    ]
    starts = np.append(0, query_lens.cumsum())

    def on_device(array: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype, device=spec.device)

    batch = AttentionBatch(
        query_lens,
        seq_lens,
        on_device(starts),
        on_device(seq_lens),
        on_device(tables),
        on_device(np.concatenate(slots), torch.int64),
    )
    if backend.supports_graphs and starts[-1] <= MOST_MIXED_TOKENS:
        batch = as_captured(batch)
    metadata = backend.build_metadata(batch)
    random = {"dtype": spec.dtype, "device": spec.device}
    q = torch.randn(starts[-1], spec.num_heads, spec.head_dim, **random)
    k, v = torch.randn(2, starts[-1], spec.num_kv_heads, spec.head_dim, **random)
    angles = torch.randn(starts[-1], spec.head_dim // 2, **random)
    rotation = angles.cos(), angles.sin()
    cache = torch.randn(backend.kv_cache_shape(tables.size), **random)

    def run() -> None:
        queries = backend.write(q, k, v, cache, metadata, rotation)
        backend.attend(queries, cache, metadata, spec.head_dim**-0.5, None)

    return _device_seconds(run, spec.device, repeats)


def _device_seconds(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    """The sum of its kernels' times, whatever the host needs to launch them."""
    run()
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / repeats
