"""The CPU kernel: equal bits however a prompt is divided, little memory for long contexts."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servd.worker.attention import AttentionBatch, AttentionSpec
from servd.worker.attention.native import KV_DTYPES, NativeBackend
from servd.worker.ops.native import library
from tests.worker.attention.paged import Rows

SPEC = AttentionSpec(4, 2, 16, 16, None, torch.float32, torch.float32, torch.device("cpu"))

pytestmark = pytest.mark.skipif(library() is None, reason="servd was installed without a compiler")


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_chunks_of_a_prompt_yield_what_the_whole_yields_to_the_bit(window, kv_dtype):
    """Chunks of one part of the context and of several, and of few queries and many."""
    spec = dataclasses.replace(SPEC, sliding_window=window, kv_dtype=kv_dtype)
    rows = Rows(spec, [(0, 2100)], rotary=True)
    backend = NativeBackend(rows.spec)
    whole = rows.run(backend)
    cache = torch.zeros(backend.kv_cache_shape(rows.num_blocks), dtype=kv_dtype)
    cuts = [0, 37, 1024, 1030, 2000, 2001, 2100]
    chunks = [
        rows.step(backend, cache, np.array([first]), np.array([last]))
        for first, last in zip(cuts, cuts[1:], strict=False)
    ]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_drafts_beside_a_token_change_no_bit_of_it(kv_dtype: torch.dtype, num_drafts: int):
    """Each token of a row with drafts is a row of its own, over the blocks that they share."""
    computed = [3, 14, 254, 1020]
    lens = [(n, num_drafts + 1) for n in computed]
    rows = Rows(dataclasses.replace(SPEC, kv_dtype=kv_dtype), lens, rotary=True)
    backend = NativeBackend(rows.spec)
    first = np.array(computed)
    shape = backend.kv_cache_shape(rows.num_blocks)
    caches = torch.zeros(2, *shape, dtype=kv_dtype)
    for cache in caches:
        rows.step(backend, cache, np.zeros_like(first), first)
    alone = [rows.step(backend, caches[0], first + i, first + i + 1) for i in range(num_drafts + 1)]
    whole = rows.batch(first, rows.seq_lens)
    rows_of_tokens = np.repeat(np.arange(len(lens)), num_drafts + 1)
    seq_lens = (first[:, None] + np.arange(1, num_drafts + 2)).flatten()
    drafts = dataclasses.replace(
        whole,
        query_lens=np.ones_like(rows_of_tokens),
        seq_lens=seq_lens,
        seq_lens_device=torch.from_numpy(seq_lens).int(),
        query_start_loc=torch.arange(len(rows_of_tokens) + 1, dtype=torch.int32),
        block_tables=whole.block_tables[rows_of_tokens],
    )
    metadata = backend.build_metadata(drafts)
    queries = rows.write(backend, caches[1], metadata, first, rows.seq_lens)
    beside = backend.attend(queries, caches[1], metadata, SPEC.head_dim**-0.5, None)
    assert torch.equal(beside, torch.stack(alone, dim=1).flatten(0, 1))
    assert torch.equal(caches[0], caches[1])


def batch(**changes: Any) -> AttentionBatch:
    """Rows of 3 and 1 tokens in blocks 4 and 5, and 1 and 0, of 6."""
    arrays = {
        "query_lens": np.array([3, 1]),
        "seq_lens": np.array([20, 17]),
        "block_tables": torch.tensor([[4, 5], [1, 0]], dtype=torch.int32),
        "slot_mapping": torch.tensor([81, 82, 83, 0]),
    }
    return AttentionBatch(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens_device=torch.tensor([20, 17], dtype=torch.int32),
        **(arrays | changes),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([81, 96, 83, 0])}, "write_kv: slot_mapping[1] is 96"),
        ({"slot_mapping": torch.tensor([81, 82, -1, 0])}, "write_kv: slot_mapping[2] is -1"),
        (
            {"block_tables": torch.tensor([[4, 5], [1, 6]], dtype=torch.int32)},
            "attend: block_tables[3] is 6, not in [0, 6)",
        ),
        ({"seq_lens": np.array([20, 33])}, "attend: seq_lens[1] is 33, not in [1, 33)"),
        ({"query_lens": np.array([21, 1])}, "attend: query_lens[0] is 21, not in [1, 21)"),
        ({"query_lens": np.array([0, 1])}, "attend: query_lens[0] is 0, not in [1, 21)"),
        ({"query_lens": np.array([3, 2])}, "attend: query_lens.sum() is 5, at most 4 are there"),
    ],
)
def test_a_step_outside_of_the_cache_is_an_error_that_names_it(changes, message):
    backend = NativeBackend(SPEC)
    cache = torch.zeros(backend.kv_cache_shape(6))
    q = torch.ones(4, 4, 16)
    kv = torch.ones(4, 2, 16)

    def step(batch: AttentionBatch) -> torch.Tensor:
        metadata = backend.build_metadata(batch)
        return backend.attend(
            backend.write(q, kv, kv, cache, metadata, None), cache, metadata, 1.0, None
        )

    with pytest.raises(IndexError, match=f"^{re.escape(message)}"):
        step(batch(**changes))
    assert step(batch()).isfinite().all()


def test_blocks_that_are_not_read_may_be_any():
    """Those before a window are another's by now, and those past the end never were the row's."""
    backend = NativeBackend(dataclasses.replace(SPEC, sliding_window=16))
    tables = torch.full((1, 60), 1 << 30, dtype=torch.int32)
    tables[0, 49] = 0  # which the window is in
    batch = AttentionBatch(
        query_lens=np.array([1]),
        seq_lens=np.array([800]),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_device=torch.tensor([800], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor([15]),
    )
    cache = torch.zeros(backend.kv_cache_shape(1))
    out = backend.attend(torch.ones(1, 4, 16), cache, backend.build_metadata(batch), 1.0, None)
    assert torch.equal(out, torch.zeros(1, 4, 16))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_what_is_in_blocks_before_a_window_is_not_read(kv_dtype: torch.dtype):
    """Nor does it change a bit where the window begins."""
    spec = dataclasses.replace(SPEC, sliding_window=100, kv_dtype=kv_dtype)
    rows = Rows(spec, [(1400, 1), (611, 1), (355, 9), (1023, 2)])
    backend = NativeBackend(spec)
    cache = torch.zeros(backend.kv_cache_shape(rows.num_blocks), dtype=kv_dtype)
    nothing = np.zeros_like(rows.computed)
    rows.step(backend, cache, nothing, rows.computed)
    expected = rows.step(backend, cache, rows.computed, rows.seq_lens)
    for row, computed in enumerate(rows.computed):
        given_back = rows.tables[row, : (computed - 99) // 16]
        cache.view(torch.uint8)[:, given_back] = 255  # NaN, as floats and as scales
    again = rows.step(backend, cache, rows.computed, rows.seq_lens)
    assert torch.equal(again, expected) and bool(expected.isfinite().all())


def test_a_prompt_takes_no_memory_for_every_part_of_its_context():
    """A window keeps the work small; 16 queries and 4 million keys would have 300 MB of sums."""
    spec = AttentionSpec(64, 1, 16, 16, 16, torch.float32, torch.float32, torch.device("cpu"))
    num_tokens = 16
    num_keys = 1 << 22
    backend = NativeBackend(spec)
    cache = torch.zeros(backend.kv_cache_shape(1))
    metadata = backend.build_metadata(
        AttentionBatch(
            query_lens=np.array([num_tokens]),
            seq_lens=np.array([num_keys]),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens_device=torch.tensor([num_keys], dtype=torch.int32),
            block_tables=torch.zeros(1, num_keys // 16, dtype=torch.int32),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        )
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_kilobytes()
    backend.attend(torch.ones(num_tokens, 64, 16), cache, metadata, 1.0, None)
    assert peak_kilobytes() - before < 100_000


def peak_kilobytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0])
