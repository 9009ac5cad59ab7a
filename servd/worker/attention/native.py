"""Attention on a CPU by ops/cpu/attention.cpp, which reads the paged KV cache in place, in 8 to 32
bits, and accumulates in float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servd.worker.attention import AttentionBackend, AttentionBatch, AttentionSpec, _int8
from servd.worker.ops.native import TYPES, call, library
from servd.worker.ops.reference import Rotation

MAX_HEAD_DIM = 256
MAX_VALUE_DIM = 512
# Types that the kernels are compiled for.
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
VECTOR = 16  # elements of the widest vector: block size and head dimension are multiples of it


@dataclass(frozen=True)
class NativeMetadata:
    slot_mapping: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    tails: Tensor | None
    bidirectional: Tensor | None  # int64 [num_rows]


class NativeBackend(AttentionBackend[NativeMetadata]):
    """Makes one call per layer for the whole mixed batch. The result for a token does not depend on
    the rest of the batch.
    """

    auto_order = {"cpu": 10}
    supports_tails = True
    num_read_before = 0
    supports_bidirectional = True
    supports_bidirectional_rows = True
    supports_soft_cap = True
    supports_values_in_keys = True
    is_batch_invariant = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.type = TYPES[spec.kv_dtype]
        if spec.value_dim is None:
            self.fused_write = self.rotate_and_store
            self.fuses_norms = False
            self.rotates_parts = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"needs a CPU, not {spec.device.type}"
        if library() is None:
            return (
                "no CPU kernels: installed without a C++ compiler, older than their sources, or "
                "switched off"
            )
        if spec.dtype != torch.float32:
            return f"computes in float32, not {spec.dtype}"
        if spec.kv_dtype not in KV_DTYPES:
            return f"needs a cache of int8, or of floats of 16 or 32 bits, not {spec.kv_dtype}"
        if spec.value_dim is not None:
            if spec.head_dim % VECTOR or spec.value_dim % VECTOR or spec.value_dim > MAX_VALUE_DIM:
                return (
                    f"needs keys and values of multiples of {VECTOR} numbers, values of up to "
                    f"{MAX_VALUE_DIM}, not {spec.head_dim} and {spec.value_dim}"
                )
            if spec.kv_dtype == torch.int8:
                return "needs a cache of floats where values are a part of the keys"
        elif spec.head_dim % VECTOR or spec.head_dim > MAX_HEAD_DIM:
            return (
                f"needs a head_dim that is a multiple of {VECTOR} up to {MAX_HEAD_DIM}, not "
                f"{spec.head_dim}"
            )
        if spec.block_size % VECTOR:
            return f"needs blocks of a multiple of {VECTOR} tokens"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a layer's cache: keys [blocks, kv_heads, head_dim, block_size],
        values [blocks, kv_heads, block_size, head_dim]. In int8, scales, float32 [block_size],
        follow each head. Keys that contain the values have the layout of values.
        """
        spec = self.spec
        if spec.value_dim is not None:
            return super().kv_cache_shape(num_blocks)
        size = spec.block_size * _int8.row_size(spec.kv_dtype, spec.head_dim)
        return (2, num_blocks, spec.num_kv_heads, size)

    def build_metadata(self, batch: AttentionBatch) -> NativeMetadata:
        query_lens = torch.from_numpy(batch.query_lens)
        seq_lens = torch.from_numpy(batch.seq_lens)
        tables = batch.block_tables.contiguous()
        bidirectional = None
        if batch.bidirectional is not None:
            bidirectional = torch.from_numpy(batch.bidirectional.astype(np.int64))
        lens = query_lens, seq_lens
        return NativeMetadata(batch.slot_mapping, *lens, tables, batch.tails, bidirectional)

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        kv_cache: Tensor,
        slots: Tensor,
        rotation: Rotation | None,
    ) -> Tensor:
        spec = self.spec
        assert v is not None
        q, k, v = (
            x if x.stride(2) == 1 and x.stride(1) == spec.head_dim else x.contiguous()
            for x in (q, k, v)
        )
        cos, sin = rotation or (None, None)
        turned = None if rotation is None else torch.empty(q.shape)
        pairs = 0 if cos is None else cos.shape[1]
        inputs = q, q.stride(0), k, k.stride(0), v, v.stride(0)
        cache = *kv_cache, kv_cache.shape[1], slots
        sizes = len(q), spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size
        call("write_kv", self.type, *inputs, turned, cos, sin, pairs, *cache, *sizes)
        return q if turned is None else turned

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        if self.spec.value_dim is not None:
            super().move(kv_cache, sources, targets)
            return
        size = self.spec.block_size
        numbers, scales = kv_cache.tensor_split([size * self.spec.head_dim], dim=-1)
        keys = numbers[0].unflatten(-1, (-1, size))
        rows = [numbers[1].unflatten(-1, (size, -1))]
        if scales.shape[-1]:
            rows.extend(scales.unflatten(-1, (size, -1)))
        (block, offset), (to_block, to_offset) = (
            (slots // size, slots % size) for slots in (sources, targets)
        )
        keys[to_block, :, :, to_offset] = keys[block, :, :, offset]
        for cache in rows:
            cache[to_block, :, to_offset] = cache[block, :, offset]

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: NativeMetadata,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        spec = self.spec
        tables = metadata.block_tables
        size = spec.value_dim or spec.head_dim
        keys, values = kv_cache if spec.value_dim is None else (kv_cache[0], None)
        out = torch.empty(*q.shape[:2], size)
        queries = q, q.stride(0), len(q)
        cache = keys, values, kv_cache.shape[1]
        rows = tables, tables.shape[1], metadata.query_lens, metadata.seq_lens, len(tables)
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim, size, spec.block_size
        window = spec.sliding_window or 0, int(spec.is_causal)
        tails = (None, 0) if metadata.tails is None else (metadata.tails, metadata.tails.shape[1])
        scores = scale, spec.soft_cap or 0.0, sinks, metadata.bidirectional
        call("attend", self.type, *queries, *cache, *rows, *sizes, *window, *tails, *scores, out)
        return out
