"""GPUModelRunner on a CPU: operations recorded with their addresses and run again, as a CUDA graph
does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from servd.worker.attention import AttentionBatch, torch_sdpa
from servd.worker.attention import native as _native  # noqa: F401 - keeps the library it imports
from servd.worker.cpu_model_runner import CPUModelRunner
from servd.worker.gpu_model_runner import GPUModelRunner
from tests.parity.families import LLAMA


class Recorder(TorchDispatchMode):
    """Notes every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record(run: Callable[[], None]) -> Callable[[], None]:
    """What it returns runs the operations of `run`, not its Python: what came from the host stays
    as it was.
    """
    with Recorder() as recorder:
        run()

    def replay() -> None:
        for func, args, kwargs, out in recorder.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if (
                    isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr()
                ):  # neither a view nor in place
                    old.copy_(new)

    return replay


class GraphBackend(torch_sdpa.Backend):
    """Where lengths are known on the device only, tokens attend over all columns of their row's
    block table, so that no number comes from the host.
    """

    supports_graphs = True

    def build_metadata(self, batch: AttentionBatch) -> Any:
        is_captured = not batch.has_exact_query_lens or (batch.query_lens == 1).all()
        return batch if is_captured else super().build_metadata(batch)

    def attend(self, q, kv_cache, metadata, scale, sinks):
        if not isinstance(metadata, AttentionBatch):
            return super().attend(q, kv_cache, metadata, scale, sinks)
        tokens, starts = torch.arange(len(q)), metadata.query_start_loc
        rows = torch.searchsorted(starts[1:].contiguous(), tokens, right=True, out_int32=True)
        is_padding = rows >= len(starts) - 1
        rows = rows.clamp(max=len(starts) - 2)
        seq_lens = metadata.seq_lens_device[rows]
        positions = seq_lens - starts[rows + 1] + tokens  # of each token in its row
        shape = (len(q), -1, self.spec.num_kv_heads, self.spec.head_dim)
        groups = self.spec.num_heads // self.spec.num_kv_heads
        parts = kv_cache[:, metadata.block_tables[rows]].view(2, *shape)
        if metadata.tails is not None:
            numbers = torch.arange(-metadata.tails.shape[1], 0) + seq_lens[:, None]
            tails = kv_cache.flatten(1, 2)[:, metadata.tails[rows]]
            parts[:, tokens[:, None], numbers.clamp(min=0)] = tails
        # [tokens, keys, heads, head_dim] each
        keys, values = parts.repeat_interleave(groups, 3)
        scores = torch.einsum("rhd,rkhd->rhk", q, keys) * scale
        at = torch.arange(keys.shape[1])
        hidden = at > positions[:, None]
        if self.spec.sliding_window is not None:
            hidden |= at <= positions[:, None] - self.spec.sliding_window
        values = values.masked_fill(hidden[:, :, None, None], 0)  # may be NaN, of others
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("rhk,rkhd->rhd", weights, values)
        return out.masked_fill(is_padding[:, None, None], torch.nan)  # anything


class RecordedRunner(GPUModelRunner):
    """Takes the place of a CPUModelRunner."""

    def to_host(self, parts):
        """A copy: the next step is sampled to the same memory."""
        return CPUModelRunner.to_host(self, [copy.deepcopy(part) for part in parts])

    def load_model(self, progress: Callable[[float], None]) -> None:
        super().load_model(progress)
        self.backend = GraphBackend(self.backend.spec)

    def recorder(self):
        return record


def use_recorded_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on a CPU get a RecordedRunner. What is not an operation of torch cannot be recorded,
    so it is off.
    """
    monkeypatch.setattr("servd.worker.worker.CPUModelRunner", RecordedRunner)
    if find_spec("servd.worker.ops.native"):
        monkeypatch.setattr("servd.worker.ops.native.library", lambda: None)


def write_config(folder: Path, **options: Any) -> Path:
    """A tiny Llama for load_format dummy."""
    config = LLAMA | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | options
    (folder / "config.json").write_text(json.dumps(config))
    return folder
