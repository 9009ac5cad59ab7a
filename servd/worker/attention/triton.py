"""Own Triton kernels over the paged KV cache, on any CUDA device; on a CPU in Triton's interpreter,
for tests.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from servd.worker.attention import AttentionBatch, AttentionSpec
from servd.worker.attention import Backend as AttentionBackend

if TYPE_CHECKING:
    from servd.worker.ops.triton.paged_attention import Plan


@dataclass(frozen=True)
class Metadata:
    """The step's batch, and the sizes of its grids."""

    batch: AttentionBatch
    plan: Plan

    @property
    def slot_mapping(self) -> Tensor:
        return self.batch.slot_mapping


class Backend(AttentionBackend[Metadata]):
    """Two kernels per layer, and a third where rows are long enough to be split; see
    `ops/triton/paged_attention.py`.

    A token's result depends on its own request only, not on the rest of the batch.
    """

    auto_order = {"cuda": 20}  # reads the cache in place
    supports_graphs = True
    supports_tails = True
    supports_soft_cap = True
    is_batch_invariant = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        # Only here: the modules need triton, and `supports` must be able to say that there is none.
        from servd.worker.ops.triton import paged_attention, rotary

        self.paged_attention = paged_attention
        self.fused_write = rotary.rotate_and_store  # in the interpreter too
        self.group = spec.num_heads // spec.num_kv_heads

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Needs triton, CUDA or the interpreter, and a head_dim that fills the tiles."""
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton"
        from triton import knobs

        if spec.device.type == "cpu" and not knobs.runtime.interpret:
            return "needs CUDA, not cpu (or TRITON_INTERPRET=1, which is for tests)"
        if spec.device.type == "cuda" and knobs.runtime.interpret:
            return "TRITON_INTERPRET is set: kernels would run on the host"
        if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"needs float32, float16 or bfloat16, not {spec.dtype}"
        if spec.dtype == torch.bfloat16 and spec.device.type == "cpu":
            return "the interpreter cannot multiply bfloat16"
        if spec.head_dim & (spec.head_dim - 1) or not 16 <= spec.head_dim <= 256:
            return f"needs a head_dim that is a power of two from 16 to 256, not {spec.head_dim}"
        if spec.kv_dtype == torch.float8_e4m3fn and spec.device.type == "cuda":
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < (8, 9):
                found = ".".join(map(str, capability))
                return f"a cache in fp8 needs compute capability 8.9 (Ada) or later, not {found}"
        return None

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """The kernels read the batch's own tensors."""
        window = self.spec.sliding_window
        return Metadata(
            batch, self.paged_attention.plan(batch.query_lens, batch.seq_lens, self.group, window)
        )

    def attend(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """One kernel over all rows, and one that merges what was split."""
        batch = metadata.batch
        return self.paged_attention.paged_attention(
            q,
            kv_cache,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens_device,
            metadata.plan,
            scale,
            self.spec.sliding_window,
            batch.tails,
            self.spec.soft_cap,
            sinks,
        )
