"""Attention by FlashInfer (https://docs.flashinfer.ai), planned once per step; CUDA only, extra
`servd[flashinfer]`.
"""

import importlib
import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servd.worker.attention import AttentionBatch, AttentionSpec
from servd.worker.attention import Backend as AttentionBackend
from servd.worker.device.device import upload

HEAD_DIMS = (64, 128, 256)
# Workspace for split rows; the recommended 128 MiB are too small for 64 heads.
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Metadata:
    slot_mapping: Tensor


class Backend(AttentionBackend[Metadata]):
    """Runs one kernel per layer for the whole mixed batch: decode rows are prompts of one token.

    CUDA graphs are not possible: the host makes a plan from the lengths of the rows, so a captured
    plan is valid for its own step only.
    """

    auto_order = {"cuda": 30}  # without graphs

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self.wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD"
        )
        self.plan_copied = torch.cuda.Event() if spec.device.type == "cuda" else None

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot run: no package, old GPU, wrong type or head_dim."""
        if spec.device.type != "cuda":
            return f"needs CUDA, not {spec.device.type}"
        if (capability := torch.cuda.get_device_capability(spec.device)) < (8, 0):
            found = ".".join(map(str, capability))
            return f"needs compute capability 8.0 (Ampere) or later, not {found}"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, not {spec.dtype}"
        if spec.kv_dtype != spec.dtype:
            return f"needs a cache of {spec.dtype}, not {spec.kv_dtype}"
        if spec.head_dim not in HEAD_DIMS:
            return f"needs a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {spec.head_dim}"
        if not spec.exact_seq_lens:
            return (
                "its planner must know how many drafts of the step before were kept: add "
                "--no-async-scheduling"
            )
        if importlib.util.find_spec("flashinfer") is None:
            return "needs the package flashinfer-python: pip install 'servd[flashinfer]'"
        return None

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """Run the planner on the host, for the step's rows and pages; return the metadata."""
        spec = self.spec
        num_pages = -(-batch.seq_lens // spec.block_size)
        page_starts = _starts(num_pages)
        rows = np.repeat(np.arange(len(num_pages)), num_pages)
        columns = np.arange(page_starts[-1]) - np.repeat(page_starts[:-1], num_pages)
        entries = upload(rows * batch.block_tables.shape[1] + columns, spec.device)
        if self.plan_copied is not None:
            # The planner's results leave by pinned memory, which the next call overwrites: with two
            # steps in flight, the copy of the previous results may not have begun.
            self.plan_copied.synchronize()
        self.wrapper.plan(
            torch.from_numpy(_starts(batch.query_lens)),
            torch.from_numpy(page_starts),
            batch.block_tables.flatten()[entries],
            torch.from_numpy(((batch.seq_lens - 1) % spec.block_size + 1).astype(np.int32)),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            sm_scale=1.0,  # may differ between layers: see `attend`
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
        )
        if self.plan_copied is not None:
            self.plan_copied.record(torch.cuda.current_stream(spec.device))
        return Metadata(batch.slot_mapping)

    def attend(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Run one kernel over all rows. The softmax scale is applied through the keys' scale."""
        return self.wrapper.run(q.contiguous(), (kv_cache[0], kv_cache[1]), k_scale=scale)


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return exclusive prefix sums of n lengths, int32 [n + 1]."""
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)
