"""The Triton backend: split rows, independence of the batch, narrow caches, what a captured step
relies on.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from servd.worker.attention import AttentionSpec
from servd.worker.attention.triton import Backend
from tests.worker.attention.paged import Rows

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

FLOAT32_SPEC = AttentionSpec(4, 2, 16, 16, None, torch.float32, torch.float32, torch.device("cpu"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def spec(request) -> AttentionSpec:
    spec = dataclasses.replace(FLOAT32_SPEC, device=torch.device(request.param))
    if (reason := Backend.supports(spec)) is not None:
        pytest.skip(reason)
    return spec


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short rows are split: 32 keys at least, 4 splits at most."""
    from servd.worker.ops.triton import paged_attention

    monkeypatch.setattr(paged_attention, "MIN_SPLIT", 32)
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 4)


# One split; three; more keys than 4 times 32; several query tokens, of which the first see nothing
# of the last split.
SPLIT_LENS = [(9, 1), (79, 1), (300, 1), (62, 4), (40, 9), (0, 1)]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("short_splits")
def test_split_rows_equal_dense_attention_over_a_poisoned_cache(spec, window):
    rows = Rows(dataclasses.replace(spec, sliding_window=window), SPLIT_LENS, rotary=True)
    out = rows.run(Backend(rows.spec), fill=torch.nan)
    torch.testing.assert_close(out.double(), rows.expected(), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("short_splits")
def test_a_row_is_the_same_to_the_bit_whatever_else_is_in_the_batch(spec):
    together = Rows(spec, SPLIT_LENS)
    out = together.run(Backend(spec)).split(together.query_lens.tolist())
    for row in (2, 3, 4):
        alone = Rows(spec, SPLIT_LENS[row : row + 1], seed=row)
        assert torch.equal(alone.run(Backend(spec)), out[row])


@pytest.mark.usefixtures("short_splits")
def test_chunks_of_a_prompt_yield_what_the_whole_yields_to_the_bit(spec):
    spec = dataclasses.replace(spec, sliding_window=40)
    rows, backend = Rows(spec, [(0, 90)], rotary=True), Backend(spec)
    whole = rows.run(backend)
    cache = torch.full(backend.kv_cache_shape(rows.num_blocks), torch.nan, device=spec.device)
    chunks = [
        rows.step(backend, cache, np.array([first]), np.array([last]))
        for first, last in [(0, 37), (37, 90)]
    ]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.usefixtures("short_splits")
def test_a_plan_of_upper_bounds_serves_every_decode_step(spec):
    """A captured step is planned for the longest rows; then its kernels run on whatever the
    device's tensors hold.
    """
    lens = [(9, 1), (79, 1), (60, 1)]  # at most 3 splits, of 4
    exact, backend = Rows(spec, lens), Backend(spec)
    plan = backend.build_metadata(exact.batch(exact.computed, exact.seq_lens)).plan

    class Bounded(Backend):
        def build_metadata(self, batch):
            return super().build_metadata(
                dataclasses.replace(batch, seq_lens=np.full_like(batch.seq_lens, 4096))
            )

    bounded = Bounded(spec)
    assert bounded.build_metadata(exact.batch(exact.computed, exact.seq_lens)).plan != plan
    assert torch.equal(exact.run(bounded), exact.run(backend))


def test_writing_leaves_everything_else_alone(spec):
    rows, backend = Rows(spec, [(0, 5), (0, 3)], rotary=True), Backend(spec)
    batch = rows.batch(rows.computed, rows.seq_lens)
    slots = batch.slot_mapping.clone()
    slots[2] = -1  # padding
    metadata = backend.build_metadata(dataclasses.replace(batch, slot_mapping=slots))
    q, k, v = (torch.cat(x) for x in (rows.q, rows.keys, rows.values))
    before = [x.clone() for x in (q, k, v)]
    cache = torch.full(backend.kv_cache_shape(rows.num_blocks), torch.nan, device=spec.device)
    assert backend.write(q, k, v, cache, metadata, None) is q
    backend.write(q, k, v, cache, metadata, rows.rotation(torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
    written = cache.view(2, -1, spec.num_kv_heads * spec.head_dim).isnan().logical_not()
    expected = torch.zeros_like(written)
    expected[:, slots[slots >= 0]] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 80}, "power of two from 16 to 256, not 80"),
        ({"head_dim": 8}, "power of two from 16 to 256, not 8"),
        ({"dtype": torch.float64}, "not torch.float64"),
    ],
)
def test_an_unsupported_case_names_the_reason(spec, change, reason):
    assert reason in (Backend.supports(dataclasses.replace(spec, **change)) or "")


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "needs CUDA, not cpu" in (Backend.supports(FLOAT32_SPEC) or "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in (
        Backend.supports(dataclasses.replace(FLOAT32_SPEC, device=torch.device("cuda"))) or ""
    )
