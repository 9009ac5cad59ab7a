"""Rows of random tokens for attention backends: cache, steps, and attention in float64."""

import numpy as np
import torch

from servd.worker.attention import AttentionBackend, AttentionBatch, AttentionSpec
from servd.worker.layers.rotary import Rotation


def dense(
    q,
    keys,
    values,
    window: int | None,
    scale: float,
    is_causal: bool = True,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    sees_row: bool = False,
) -> torch.Tensor:
    """Attention of the last len(q) tokens of one row, in float64. [tokens, heads, head_dim]"""
    groups = q.shape[1] // keys.shape[1]
    q = q.double()
    keys = keys.double().repeat_interleave(groups, 1)
    values = values.double().repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    at_key = torch.arange(len(keys), device=q.device)
    at_query = at_key[len(keys) - len(q) :, None]
    window = window or len(keys)
    ahead = 1 if is_causal else window
    if sees_row:
        ahead = len(keys)
    sees = (at_key > at_query - window) & (at_key < at_query + ahead)
    scores = scores.masked_fill(~sees, -torch.inf)
    totals = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        totals = torch.logaddexp(totals, sinks.double()[:, None, None])
    return torch.einsum("hqk,khd->qhd", (scores - totals).exp(), values)


def rotated(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """[tokens, heads, head_dim], as pairs times complex numbers in float64, what is behind them as
    it is; rounded to the type of x.
    """
    if rotation is None:
        return x
    num_pairs = rotation[0].shape[-1]
    first, second, passed = x.double().tensor_split((num_pairs, 2 * num_pairs), -1)
    turned = (
        torch.complex(first, second) * torch.complex(*(part.double() for part in rotation))[:, None]
    )
    return torch.cat((turned.real, turned.imag, passed), -1).to(x.dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] as a cache of int8 keeps it: float32 for the scale, of a 127th of the largest
    number, and for what is rounded, half to even.
    """
    wide = x.float().numpy()
    scale = np.maximum(np.abs(wide).max(-1, keepdims=True) / np.float32(127), np.float32(1e-12))
    return torch.from_numpy(np.rint(wide / scale).astype(np.float64) * scale)


class Rows:
    """Requests with random queries, keys and values at every position, and scattered blocks.

    Args:
        spec: of the attention.
        lens: (tokens computed before, tokens of this step) per row.
        rotary: queries and keys are turned.
        tail: N of each row's last tokens lie scattered over blocks that are no row's.
        seed: of row r is `seed + r`: equal rows of different batches have equal tokens.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        lens: list[tuple[int, int]],
        rotary: bool = False,
        seed: int = 0,
        tail: int = 0,
    ) -> None:
        self.spec = spec
        self.tail = tail
        self.bidirectional: list[int] = []  # rows whose tokens see each other
        self.computed, self.query_lens = np.array(lens).T
        self.seq_lens = self.computed + self.query_lens
        blocks_of = -(-self.seq_lens // spec.block_size)
        self.num_blocks = int(blocks_of.sum()) + 3 + tail * len(lens)
        shuffled = np.random.default_rng(seed).permutation(self.num_blocks)
        scattered = shuffled[-tail * len(lens) :] * spec.block_size + spec.block_size // 2
        self.tails = scattered[: tail * len(lens)].reshape(len(lens), tail)
        # Past a row's end there is any block of another.
        self.tables = np.random.default_rng(seed).integers(
            0, self.num_blocks, (len(lens), int(blocks_of.max()))
        )
        for row, (end, count) in enumerate(zip(blocks_of.cumsum(), blocks_of, strict=True)):
            self.tables[row, :count] = shuffled[end - count : end]
        generators = [torch.Generator().manual_seed(seed + row) for row in range(len(lens))]
        self.q, self.keys, self.values = (
            [
                self._random(g, int(n), heads, spec.head_dim)
                for g, n in zip(generators, self.seq_lens, strict=True)
            ]
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        # What the cache can hold: rounding is none of the backends' business, but with int8.
        if spec.kv_dtype not in (spec.dtype, torch.int8):
            self.keys, self.values = (
                [x.to(spec.kv_dtype).to(spec.dtype) for x in part]
                for part in (self.keys, self.values)
            )
        self.sinks = None
        if spec.has_sinks:
            self.sinks = self._random(generators[0], spec.num_heads) * 3
        self.angles = None
        if rotary:
            turned = spec.head_dim - (spec.value_dim or 0)
            self.angles = (
                torch.rand(int(self.seq_lens.max()), turned // 2, generator=generators[0]) * 6.3
            )

    def _random(self, generator: torch.Generator, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(self.spec.device, self.spec.dtype)

    def rotation(self, positions: torch.Tensor) -> Rotation | None:
        """cos and sin of these positions."""
        if self.angles is None:
            return None
        angles = self.angles[positions.cpu()].to(self.spec.device)
        return angles.cos().to(self.spec.dtype), angles.sin().to(self.spec.dtype)

    def slots(self, row: int, first: int, last: int) -> np.ndarray:
        """Where tokens [first, last) of a row are in the cache."""
        positions = np.arange(first, last)
        slots = self.tables[row, positions // self.spec.block_size] * self.spec.block_size + (
            positions % self.spec.block_size
        )
        in_tail = positions - (self.seq_lens[row] - self.tail)
        slots[in_tail >= 0] = self.tails[row, in_tail[in_tail >= 0]]
        return slots

    def batch(self, first: np.ndarray, last: np.ndarray) -> AttentionBatch:
        """The step that computes tokens [first, last) of each row that has some."""
        rows = np.flatnonzero(last > first)
        lens = (last - first)[rows]
        device = self.spec.device
        slots = np.concatenate([self.slots(row, first[row], last[row]) for row in rows])
        tails = np.zeros((len(rows), self.tail), dtype=np.int64)
        for tail, row in zip(tails, rows, strict=True):
            tail_slots = self.slots(row, max(last[row] - self.tail, 0), last[row])
            tail[self.tail - len(tail_slots) :] = tail_slots
        return AttentionBatch(
            query_lens=lens,
            seq_lens=last[rows],
            query_start_loc=torch.tensor([0, *lens.cumsum()], dtype=torch.int32, device=device),
            seq_lens_device=torch.tensor(last[rows], dtype=torch.int32, device=device),
            block_tables=torch.tensor(self.tables[rows], dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            tails=torch.tensor(tails, device=device) if self.tail else None,
            bidirectional=np.isin(rows, self.bidirectional) if self.bidirectional else None,
        )

    def write(
        self,
        backend: AttentionBackend,
        cache: torch.Tensor,
        metadata: object,
        first: np.ndarray,
        last: np.ndarray,
    ):
        """Store tokens [first, last) of each row; the queries to attend with."""
        spans = list(zip(first, last, strict=True))
        # Slices of one tensor, as a model's projection makes them: tokens are not contiguous.
        qkv = torch.cat(
            [
                torch.cat([x[row][slice(*span)] for row, span in enumerate(spans)]).flatten(1)
                for x in (self.q, self.keys, self.values)
            ],
            dim=1,
        )
        spec = self.spec
        sizes = [
            heads * spec.head_dim
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        q, k, v = (x.unflatten(1, (-1, spec.head_dim)) for x in qkv.split(sizes, dim=1))
        rotation = self.rotation(torch.cat([torch.arange(*span) for span in spans]))
        return backend.write(q, k, v if spec.value_dim is None else None, cache, metadata, rotation)

    def step(
        self, backend: AttentionBackend, cache: torch.Tensor, first: np.ndarray, last: np.ndarray
    ) -> torch.Tensor:
        """Compute tokens [first, last) of each row; what attention yields, row after row."""
        metadata = backend.build_metadata(self.batch(first, last))
        queries = self.write(backend, cache, metadata, first, last)
        return backend.attend(queries, cache, metadata, self.spec.head_dim**-0.5, self.sinks)

    def run(self, backend: AttentionBackend, fill: float | None = None) -> torch.Tensor:
        """This step, after those before. What is in no row's cache is noise, or `fill`."""
        shape = backend.kv_cache_shape(self.num_blocks)
        spec = self.spec
        noise = (
            self._random(torch.Generator().manual_seed(1), *shape)
            if fill is None
            else torch.full(shape, fill)
        )
        cache = noise.to(spec.device, spec.kv_dtype)
        if self.computed.any():
            nothing = np.zeros_like(self.computed)
            metadata = backend.build_metadata(self.batch(nothing, self.computed))
            self.write(backend, cache, metadata, nothing, self.computed)
        return self.step(backend, cache, self.computed, self.seq_lens)

    def expected(self, rounds: bool = True) -> torch.Tensor:
        """What the step yields, in float64; `rounds`: from a cache of its type."""
        spec = self.spec
        outputs = []
        for row, (computed, length) in enumerate(zip(self.computed, self.seq_lens, strict=True)):
            rotation = self.rotation(torch.arange(length))
            q = rotated(self.q[row], rotation)
            keys = rotated(self.keys[row], rotation)
            values = self.values[row]
            if spec.kv_dtype == torch.int8 and rounds:
                keys = rounded(keys)
                values = rounded(values)
            if spec.value_dim is not None:
                values = keys[..., -spec.value_dim :]
            outputs.append(
                dense(
                    q[computed:],
                    keys,
                    values,
                    spec.sliding_window,
                    spec.head_dim**-0.5,
                    spec.is_causal,
                    spec.soft_cap,
                    self.sinks,
                    row in self.bidirectional,
                )
            )
        return torch.cat(outputs)
