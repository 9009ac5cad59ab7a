"""servd's Triton kernels over the paged KV cache, on CUDA; on a CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from servd.worker.attention import AttentionBackend, AttentionBatch, AttentionSpec
from servd.worker.ops import target

if TYPE_CHECKING:
    from servd.worker.ops.triton.paged_attention import Plan

MAX_SIZE = 512  # numbers of a value
MAX_ROPE = 128  # more numbers of a key that holds its value


@dataclass(frozen=True)
class TritonMetadata:
    batch: AttentionBatch
    plan: Plan
    work: Tensor  # see work_list

    @property
    def slot_mapping(self) -> Tensor:
        return self.batch.slot_mapping


class TritonBackend(AttentionBackend[TritonMetadata]):
    """Runs several kernels per layer: one writes keys and values, one or two compute attention, and
    one more merges the results of rows that are long enough to be split.
    """

    auto_order = {"cuda": 20}  # reads the cache in place
    supports_graphs = True
    supports_tails = True
    num_read_before = 0
    supports_soft_cap = True
    supports_values_in_keys = True
    supports_batch_invariance = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        # Imported here because these need triton, and `supports` must work without it.
        from servd.worker.ops.triton.paged_attention import PagedAttention
        from servd.worker.ops.triton.rotary import rotate_and_store

        # in the interpreter too
        self.fused_write = rotate_and_store
        self.fuses_norms = self.rotates_parts = True
        self.is_batch_invariant = spec.batch_invariant
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
        options = spec.sliding_window, spec.batch_invariant, spec.value_dim
        self.attention = PagedAttention(*sizes, spec.dtype, spec.device, *options)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot run: no triton, CUDA or interpreter, or wrong head_dim."""
        if importlib.util.find_spec("triton") is None:
            return "needs the package triton"
        from triton import knobs

        if spec.device.type == "cpu" and not knobs.runtime.interpret:
            return "needs CUDA, not cpu (or TRITON_INTERPRET=1, which is for tests)"
        is_real = spec.device.type == "cuda" and target.ASSUMED.get() is None
        if is_real and knobs.runtime.interpret:
            return "TRITON_INTERPRET is set: kernels would run on the host"
        if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"needs float32, float16 or bfloat16, not {spec.dtype}"
        if spec.dtype == torch.bfloat16 and spec.device.type == "cpu":
            return "the interpreter cannot multiply bfloat16"
        size = spec.value_dim or spec.head_dim
        if spec.head_dim % 8 or size % 8 or size > MAX_SIZE or spec.head_dim > size + MAX_ROPE:
            return f"needs a head_dim that is a multiple of 8 up to {MAX_SIZE}, not {spec.head_dim}"
        if spec.kv_dtype == torch.int8:
            return "needs a cache of floats: --kv-cache-dtype fp8 has 8 bits"
        if spec.kv_dtype == torch.float8_e4m3fn and spec.device.type == "cuda":
            capability = target.capability(spec.device)
            if capability < (8, 9):
                version = ".".join(map(str, capability))
                return f"a cache in fp8 needs compute capability 8.9 (Ada) or later, not {version}"
        return None

    def build_metadata(self, batch: AttentionBatch) -> TritonMetadata:
        return TritonMetadata(batch, self.attention.plan(batch), self.attention.work(batch))

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: TritonMetadata,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        step = metadata.batch, metadata.plan, metadata.work
        return self.attention(q, kv_cache, *step, scale, self.spec.soft_cap, sinks)
