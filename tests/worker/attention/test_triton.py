"""The Triton backend: split rows, independence of the batch, narrow caches, captured steps."""

import dataclasses

import numpy as np
import pytest
import torch

from servd.worker.attention import AttentionSpec
from servd.worker.attention.triton import TritonBackend
from servd.worker.device.parallel import Parallel
from servd.worker.layers.norm import RMSNorm
from servd.worker.ops.reference import rotate
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
    if (reason := TritonBackend.supports(spec)) is not None:
        pytest.skip(reason)
    return spec


@pytest.fixture
def invariant(spec) -> AttentionSpec:
    return dataclasses.replace(spec, batch_invariant=True)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short rows are split: 32 keys at least, 4 splits at most. Programs are few."""
    from servd.worker.ops.triton import paged_attention

    monkeypatch.setattr(paged_attention, "MIN_SPLIT", 32)
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 4)
    monkeypatch.setattr(paged_attention, "PROGRAMS_PER_SM", 3)


# One split; three; more keys than 4 times 32; several query tokens, of which the first see nothing
# of the last split.
SPLIT_LENS = [(9, 1), (79, 1), (300, 1), (62, 4), (40, 9), (0, 1)]


@pytest.mark.parametrize(("window", "batch_invariant"), [(None, False), (50, True)])
@pytest.mark.usefixtures("short_splits")
def test_split_rows_equal_dense_attention_over_a_poisoned_cache(spec, window, batch_invariant):
    spec = dataclasses.replace(spec, sliding_window=window, batch_invariant=batch_invariant)
    rows = Rows(spec, SPLIT_LENS, rotary=True)
    out = rows.run(TritonBackend(rows.spec), fill=torch.nan)
    torch.testing.assert_close(out.double(), rows.expected(), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("short_splits")
def test_a_row_is_the_same_to_the_bit_whatever_else_is_in_the_batch(invariant):
    together = Rows(invariant, SPLIT_LENS)
    out = together.run(TritonBackend(invariant)).split(together.query_lens.tolist())
    for row in (2, 3, 4):
        alone = Rows(invariant, SPLIT_LENS[row : row + 1], seed=row)
        assert torch.equal(alone.run(TritonBackend(invariant)), out[row])


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.usefixtures("short_splits")
def test_chunks_of_a_prompt_yield_what_the_whole_yields_to_the_bit(spec):
    spec = dataclasses.replace(spec, sliding_window=40)
    rows = Rows(spec, [(0, 90)], rotary=True)
    backend = TritonBackend(spec)
    whole = rows.run(backend)
    cache = torch.full(backend.kv_cache_shape(rows.num_blocks), torch.nan, device=spec.device)
    chunks = [
        rows.step(backend, cache, np.array([first]), np.array([last]))
        for first, last in [(0, 37), (37, 90)]
    ]
    assert torch.equal(torch.cat(chunks), whole)


class Bounded(TritonBackend):
    """The host knows of each row no more than that it has 60 tokens at most, or 4,096 in all."""

    def build_metadata(self, batch):
        longest = np.full(len(batch.seq_lens), 60)
        return super().build_metadata(
            dataclasses.replace(
                batch, seq_lens=longest * 0 + 4096, query_lens=longest, has_exact_query_lens=False
            )
        )


@pytest.mark.parametrize(
    ("lens", "batch_invariant"),
    [([(9, 1), (79, 1), (60, 1)], False), (SPLIT_LENS[1:4], True), ([(0, 37), (60, 9)], False)],
)
@pytest.mark.usefixtures("short_splits")
def test_a_plan_of_upper_bounds_serves_every_step(spec, lens, batch_invariant):
    """A captured step is planned for the longest rows, and runs on whatever tensors hold."""
    spec = dataclasses.replace(spec, batch_invariant=batch_invariant)
    exact = Rows(spec, lens)
    backend = TritonBackend(spec)
    bounded = Bounded(spec)
    batch = exact.batch(exact.computed, exact.seq_lens)
    assert bounded.build_metadata(batch).plan != backend.build_metadata(batch).plan
    assert torch.equal(exact.run(bounded), exact.run(backend))


@pytest.mark.usefixtures("short_splits")
def test_rows_and_tokens_of_padding_change_nothing(spec):
    rows = Rows(spec, SPLIT_LENS)
    backend = Bounded(spec)
    batch = rows.batch(rows.computed, rows.seq_lens)
    starts = batch.query_start_loc
    tables = batch.block_tables
    padded = dataclasses.replace(
        batch,
        seq_lens=np.append(batch.seq_lens, [1, 1]),
        query_start_loc=torch.cat((starts, starts[-1:].expand(2))),
        seq_lens_device=torch.cat((batch.seq_lens_device, batch.seq_lens_device[-1:].expand(2))),
        block_tables=torch.cat((tables, tables[-1:].expand(2, -1))),
    )
    cache = torch.randn(
        backend.kv_cache_shape(rows.num_blocks), generator=torch.Generator().manual_seed(1)
    ).to(spec.device)
    q = torch.cat([x[first:] for x, first in zip(rows.q, rows.computed, strict=True)])
    expected = backend.attend(q, cache, backend.build_metadata(batch), 0.3, None)
    more = torch.cat((q, q.new_full((5, *q.shape[1:]), torch.nan)))
    out = backend.attend(more, cache, backend.build_metadata(padded), 0.3, None)
    assert torch.equal(out[: len(q)], expected)
    assert out[len(q) :].isnan().all(), "nobody has written there"


def test_writing_leaves_everything_else_alone(spec):
    rows = Rows(spec, [(0, 5), (0, 3)], rotary=True)
    backend = TritonBackend(spec)
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


@pytest.mark.parametrize("rotary", [False, True])
def test_heads_are_normed_before_they_are_turned(spec, rotary):
    rows = Rows(spec, [(0, 5), (7, 3)], rotary=rotary)
    eps = 1e-5
    q, k, v = (
        torch.cat([x[first:] for x, first in zip(row_starts, rows.computed, strict=True)])
        for row_starts in (rows.q, rows.keys, rows.values)
    )
    metadata = TritonBackend(spec).build_metadata(rows.batch(rows.computed, rows.seq_lens))
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(spec.head_dim, generator=generator).to(spec.device) for _ in range(2)]
    norms = tuple(make_norm(weight, eps) for weight in weights)
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9], device=spec.device)
    rotation = rows.rotation(positions) if rotary else None
    exact = [
        x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        for x, weight in zip((q, k), weights, strict=True)
    ]
    if rotation is not None:
        exact = [rotate(x, tuple(part.double() for part in rotation)) for x in exact]
    fused = TritonBackend(spec)
    apart = TritonBackend(spec)
    apart.fuses_norms = False
    for backend in (fused, apart):
        cache = torch.full(backend.kv_cache_shape(rows.num_blocks), torch.nan, device=spec.device)
        turned = backend.write(q, k, v, cache, metadata, rotation, norms)
        stored = cache.view(2, -1, *k.shape[1:])[:, metadata.slot_mapping]
        for got, expected in zip((turned, *stored), (*exact, v.double()), strict=True):
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def make_norm(weight: torch.Tensor, eps: float) -> RMSNorm:
    with torch.device(weight.device):
        norm = RMSNorm(len(weight), eps, Parallel())
    norm.weight.data = weight
    return norm
