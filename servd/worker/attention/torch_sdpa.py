"""Reference attention on any device: gathers the blocks of rows of similar length, then calls
scaled_dot_product_attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.attention import AttentionBackend, AttentionBatch, AttentionSpec, _int8
from servd.worker.device.device import upload

# The longest row of a group may have this many times the blocks of the shortest ...
MAX_PADDING = 1.25
FREE_BLOCKS = 4  # ... or have this many blocks more
# Keys (or values) that a group gathers. On a CPU they should still be in its caches when read.
MAX_GATHER_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
MAX_MASK_NUMBERS = 1 << 26  # of a mask that is repeated for several heads


@dataclass(frozen=True)
class Group:
    """Rows with the same number of new tokens and about the same length, computed in one call."""

    num_rows: int
    # int64 [num_rows * query_len], or None: all tokens of the step in order.
    tokens: Tensor | None
    blocks: Tensor  # int64 [num_rows * num_blocks]
    mask: Tensor  # [num_rows, 1, query_len, num_blocks * block_size], 0 or -inf
    # int64 [num_rows, n] each: indices of the tails' keys among the group's keys, and their slots.
    tails: tuple[Tensor, Tensor] | None
    unseen: Tensor  # keys that no query of their row sees, bool [num_rows, num_keys, 1, 1]


@dataclass(frozen=True)
class TorchSdpaMetadata:
    slot_mapping: Tensor
    groups: list[Group]


class TorchSdpaBackend(AttentionBackend[TorchSdpaMetadata]):
    """Treats prefill and decode alike: decode rows are a group of query_len 1."""

    auto_order = {"cuda": 90, "cpu": 90}  # copies what it reads
    supports_tails = True
    num_read_before = 0
    supports_bidirectional = True
    supports_bidirectional_rows = True
    supports_soft_cap = True
    supports_values_in_keys = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        block_bytes = spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        self.max_group_blocks = MAX_GATHER_BYTES[spec.device.type] // block_bytes

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None

    def build_metadata(self, batch: AttentionBatch) -> TorchSdpaMetadata:
        first_blocks = np.zeros_like(batch.seq_lens)
        if self.spec.sliding_window is not None and self.spec.exact_seq_lens:
            first_seen = batch.seq_lens - batch.query_lens - self.spec.sliding_window + 1
            first_blocks = np.maximum(first_seen, 0) // self.spec.block_size
        num_blocks = -(-batch.seq_lens // self.spec.block_size) - first_blocks
        groups = [
            self._build_group(batch, rows, first_blocks[rows], int(num_blocks[rows].max()))
            for rows in self._split(batch.query_lens, num_blocks)
        ]
        return TorchSdpaMetadata(batch.slot_mapping, groups)

    def _split(self, query_lens: np.ndarray, num_blocks: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the row numbers of each group. Bounds the padding and the memory of a group."""
        order = np.lexsort((num_blocks, query_lens))
        start = 0
        for end in range(1, len(order) + 1):
            if end < len(order):
                shortest = num_blocks[order[start]]
                longest = num_blocks[order[end]]
                if (
                    query_lens[order[start]] == query_lens[order[end]]
                    and longest <= max(shortest * MAX_PADDING, shortest + FREE_BLOCKS)
                    and (end + 1 - start) * longest <= self.max_group_blocks
                ):
                    continue
            yield np.sort(order[start:end])
            start = end

    def _build_group(
        self, batch: AttentionBatch, rows: np.ndarray, first_blocks: np.ndarray, num_blocks: int
    ) -> Group:
        device = self.spec.device
        block_size = self.spec.block_size
        query_len = int(batch.query_lens[rows[0]])
        rows_d, first_d = upload(np.stack((rows, first_blocks)), device)
        last_d = batch.seq_lens_device[rows_d] - query_len

        columns = first_d[:, None] + torch.arange(num_blocks, device=device)
        columns.clamp_(max=batch.block_tables.shape[1] - 1)
        blocks = batch.block_tables[rows_d[:, None], columns].flatten().long()

        num_keys = num_blocks * block_size
        keys = (first_d * block_size)[:, None, None] + torch.arange(num_keys, device=device)
        queries = last_d[:, None, None] + torch.arange(query_len, device=device)[:, None]
        window = self.spec.sliding_window
        ends = queries if self.spec.is_causal else queries[:, -1:]
        if batch.bidirectional is not None:
            sees_row = upload(batch.bidirectional[rows], device)[:, None, None]
            ends = torch.where(sees_row, queries[:, -1:], ends)
        is_after = keys > ends
        hidden = is_after if window is None else is_after | (keys <= queries - window)
        if window is not None and not self.spec.is_causal:
            hidden |= keys >= queries + window
        mask = torch.zeros(hidden.shape, dtype=self.spec.dtype, device=device)
        mask.masked_fill_(hidden, -torch.inf)

        tails = None
        if batch.tails is not None:
            keys = torch.arange(-batch.tails.shape[1], 0, device=device) + (
                batch.seq_lens_device[rows_d] - first_d * block_size
            ).unsqueeze(1)
            # The row's last key is the padding.
            keys, slots = (
                torch.where(keys < 0, indices[:, -1:], indices)
                for indices in (keys, batch.tails[rows_d])
            )
            keys += torch.arange(len(rows), device=device)[:, None] * num_blocks * block_size
            tails = keys, slots

        tokens = None
        if len(rows) < len(batch.query_lens):
            starts = batch.query_start_loc[rows_d].long()
            tokens = (starts[:, None] + torch.arange(query_len, device=device)).flatten()
        unseen = hidden.all(1)[:, :, None, None]
        return Group(len(rows), tokens, blocks, mask.unsqueeze(1), tails, unseen)

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: TorchSdpaMetadata,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        blocks = kv_cache.flatten(2)  # [1 or 2, num_blocks, block_size * kv_heads * numbers of one]
        size = self.spec.value_dim or self.spec.head_dim
        out = q.new_empty(*q.shape[:2], size)
        for group in metadata.groups:
            queries = q if group.tokens is None else q[group.tokens]
            gathered = [self._gather(cache_blocks, group) for cache_blocks in blocks]
            attended = self._attention(
                queries.unflatten(0, (group.num_rows, -1)).transpose(1, 2),
                gathered[0],
                gathered[-1][..., -size:],
                group.mask,
                scale,
                sinks,
            ).transpose(1, 2)  # [num_rows, query_len, num_heads, size]
            if group.tokens is None:
                return attended.reshape(out.shape).contiguous()
            out[group.tokens] = attended.flatten(0, 1)
        return out

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Return attention [num_rows, num_heads, query_len, head_dim]; k, v have kv heads."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        if spec.value_dim is not None:  # treat heads as queries: torch would copy the keys for each
            num_heads = min(group, max(MAX_MASK_NUMBERS // mask.numel(), 1))
            mask = mask.repeat(1, 1, num_heads, 1)
            outputs: list[Tensor] = []
            for heads in q.split(num_heads, dim=1):
                lines = heads.flatten(1, 2).unsqueeze(1)
                lines_mask = mask[:, :, : lines.shape[2]]
                out = F.scaled_dot_product_attention(lines, k, v, lines_mask, scale=scale)
                outputs.append(out.squeeze(1).unflatten(1, (heads.shape[1], -1)))
            return torch.cat(outputs, dim=1)
        if sinks is None and spec.soft_cap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=group > 1
            )
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(2, 3)).float() * scale
        if spec.soft_cap is not None:
            scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
        scores = scores + mask
        if sinks is not None:  # a column that only takes part in the softmax
            column = sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=3)
        return scores.softmax(3)[..., : k.shape[2]].to(v.dtype) @ v

    def _gather(self, blocks: Tensor, group: Group) -> Tensor:
        """Return the group's keys or values, [num_rows, kv_heads, num_keys, head_dim]."""
        spec = self.spec
        shape = (-1, spec.num_kv_heads, _int8.row_size(spec.kv_dtype, spec.head_dim))

        def wide(rows: Tensor) -> Tensor:
            is_packed = rows.dtype == torch.int8
            return _int8.unpack(rows, spec.dtype) if is_packed else rows.to(spec.dtype)

        keys = wide(blocks.index_select(0, group.blocks).view(shape))
        if group.tails is not None:
            numbers, slots = group.tails
            keys[numbers] = wide(blocks.view(shape)[slots])
        # Stale data may be NaN, which a weight of zero would not remove.
        keys = keys.unflatten(0, (group.num_rows, -1)).masked_fill_(group.unseen, 0)
        return keys.transpose(1, 2)
