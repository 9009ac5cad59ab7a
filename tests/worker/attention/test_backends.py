"""Contract of all attention backends: a mixed batch over a paged cache equals dense attention in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from servd import plugins
from servd.errors import ConfigError
from servd.worker.attention import PREFERENCE, make_backend
from servd.worker.attention._base import AttentionBatch, AttentionSpec
from servd.worker.ops.native import library

BACKENDS = plugins.names("servd.worker.attention")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[DTYPE]

# (tokens computed before, tokens of this step) per row
BATCHES = {
    "decode": [(1, 1), (17, 1), (63, 1), (16, 1), (15, 1)],
    "prefill": [(0, 1), (0, 16), (0, 37)],
    "mixed": [(40, 1), (0, 23), (5, 1), (16, 16), (33, 9), (0, 1), (129, 1), (7, 23)],
    "one row": [(3, 4)],
    "long": [(2100, 1), (1020, 9), (255, 2)],
}
SHAPES = {"mha": (4, 4, 32), "gqa": (8, 2, 16), "mqa": (6, 1, 64)}


def dense(q, keys, values, window: int | None, scale: float) -> torch.Tensor:
    """Causal attention of the last len(q) tokens of one row, in float64. [tokens, heads, head_dim] each."""
    groups = q.shape[1] // keys.shape[1]
    q, keys, values = (
        q.double(),
        keys.double().repeat_interleave(groups, 1),
        values.double().repeat_interleave(groups, 1),
    )
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    at_key = torch.arange(len(keys), device=q.device)
    at_query = at_key[len(keys) - len(q) :, None]
    sees = (at_key <= at_query) & (at_key > at_query - (window or len(keys)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("window", [None, 1, 20], ids=lambda w: f"window={w}")
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_dense_attention(name: str, rows: str, shape: str, block_size: int, window: int | None):
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, block_size, window, DTYPE, DTYPE, DEVICE)
    reason = plugins.load("servd.worker.attention", name, "Backend").supports(spec)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    _, backend = make_backend(name, spec)

    generator = torch.Generator(DEVICE).manual_seed(7)
    computed, query_lens = np.array(BATCHES[rows]).T
    seq_lens = computed + query_lens
    blocks_of = -(-seq_lens // block_size)
    num_blocks = int(blocks_of.sum()) + 3
    shuffled = torch.randperm(num_blocks, generator=generator, device=DEVICE).int()
    tables = torch.randint(0, num_blocks, (len(seq_lens), int(blocks_of.max())), device=DEVICE, dtype=torch.int32)
    for row, (start, count) in enumerate(zip(blocks_of.cumsum() - blocks_of, blocks_of, strict=True)):
        tables[row, :count] = shuffled[start : start + count]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE).to(DTYPE)

    def slots(row: int, first: int, end: int) -> torch.Tensor:
        positions = torch.arange(first, end, device=DEVICE)
        return tables[row, positions // block_size].long() * block_size + positions % block_size

    q = random(int(query_lens.sum()), num_heads, head_dim)
    keys = [random(int(n), num_kv_heads, head_dim) for n in seq_lens]
    values = [random(int(n), num_kv_heads, head_dim) for n in seq_lens]
    cache = random(*backend.kv_cache_shape(num_blocks))  # what is not this batch's is noise
    starts = torch.tensor([0, *query_lens.cumsum()], dtype=torch.int32, device=DEVICE)

    def written(first: np.ndarray, last: np.ndarray, queries: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Put tokens [first, last) of each row in the cache, as a step that computes them does."""
        lens = last - first
        rows = np.flatnonzero(lens)
        batch = AttentionBatch(
            query_lens=lens[rows],
            seq_lens=last[rows],
            query_start_loc=torch.tensor([0, *lens[rows].cumsum()], dtype=torch.int32, device=DEVICE),
            seq_lens_device=torch.tensor(last[rows], dtype=torch.int32, device=DEVICE),
            block_tables=tables[torch.tensor(rows, device=DEVICE)],
            slot_mapping=torch.cat([slots(r, first[r], last[r]) for r in rows]),
        )
        metadata = backend.build_metadata(batch)
        k, v = (torch.cat([x[r][first[r] : last[r]] for r in rows]) for x in (keys, values))
        return backend.write(queries, k, v, cache, metadata, None), metadata

    if computed.any():
        written(np.zeros_like(computed), computed, random(int(computed.sum()), num_heads, head_dim))
    queries, metadata = written(computed, seq_lens, q)
    scale = head_dim**-0.5
    out = backend.attend(queries, cache, metadata, scale)

    assert out.shape == q.shape and out.is_contiguous()
    expected = torch.cat(
        [dense(q[starts[row] : starts[row + 1]], keys[row], values[row], window, scale) for row in range(len(seq_lens))]
    )
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE, rtol=0)


def test_auto_knows_every_backend():
    assert sorted({name for names in PREFERENCE.values() for name in names}) == BACKENDS


def test_a_backend_that_cannot_run_says_why():
    spec = AttentionSpec(4, 4, 32, 16, None, torch.float32, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--attention-backend varlen: needs CUDA, not cpu"):
        make_backend("varlen", spec)
    with pytest.raises(ConfigError, match="there are: native, torch_sdpa, triton, varlen"):
        make_backend("nonsense", spec)
    assert make_backend("auto", spec)[0] == ("native" if library() else "torch_sdpa")
