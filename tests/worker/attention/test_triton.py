"""The Triton backend: split rows, independence of the batch, narrow caches, captured steps."""

import dataclasses

import numpy as np
import pytest
import torch

from servd.worker.attention import AttentionSpec
from servd.worker.attention.triton import TritonBackend
from servd.worker.compat import intercept_launches
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
    monkeypatch.setattr(paged_attention, "MIN_TILE_SPLIT", 32)
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 4)
    monkeypatch.setattr(paged_attention, "MAX_INVARIANT_SPLITS", 4)
    monkeypatch.setattr(paged_attention, "PROGRAMS_PER_SM", 3)


@pytest.fixture
def many_sms(monkeypatch: pytest.MonkeyPatch, short_splits) -> None:
    """So that prompts have fewer tiles than there are multiprocessors."""
    from servd.worker.ops.triton import paged_attention

    monkeypatch.setattr(paged_attention, "num_sms", lambda device: 12)


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


SIZES = ("head_dim", "value_dim", "num_heads", "num_kv_heads")
# SIZES, other fields
HEADS = [
    ((24, None, 4, 2), {}),
    ((80, None, 4, 2), {"soft_cap": 3.0, "has_sinks": True}),
    ((96, None, 3, 3), {"sliding_window": 50}),
    ((112, None, 6, 1), {}),
    ((160, None, 2, 1), {"batch_invariant": True}),
    ((192, None, 2, 1), {"soft_cap": 3.0, "sliding_window": 50}),
    ((512, None, 2, 1), {}),
    ((40, 32, 1, 1), {"sliding_window": 50}),
    ((56, 40, 3, 1), {"soft_cap": 3.0, "has_sinks": True}),
    ((48, 32, 16, 1), {}),
    ((48, 32, 68, 1), {}),  # more heads than lines of a tile
    ((80, 64, 16, 1), {"dtype": torch.float16, "kv_dtype": torch.float16}),
]


@pytest.mark.parametrize(("sizes", "options"), HEADS, ids=str)
@pytest.mark.usefixtures("many_sms")
def test_heads_of_all_sizes_in_drafts_prompts_and_split_rows(spec, sizes, options):
    head_dim, value_dim, num_heads, _ = sizes
    spec = dataclasses.replace(spec, **dict(zip(SIZES, sizes, strict=True)), **options)
    rows = Rows(spec, [(70, 1), (150, 7), (0, 12), (0, 1)], rotary=True, tail=3 if options else 0)
    out = rows.run(TritonBackend(spec), fill=torch.nan)
    assert out.shape == (21, num_heads, value_dim or head_dim) and out.is_contiguous()
    tolerance = 5e-3 if spec.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), rows.expected(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("size", [96, 384, 448])
@pytest.mark.usefixtures("many_sms")
def test_launches_have_a_power_of_two_of_warps(spec, size):
    """Triton's compiler refuses others; its interpreter does not."""
    rows = Rows(dataclasses.replace(spec, head_dim=size), [(70, 1), (0, 12)])
    warps: dict[str, int] = {}

    def launch(kernel, arguments, run) -> None:
        warps[kernel.__name__] = arguments.get("num_warps", 4)
        run()

    with intercept_launches(launch):
        rows.run(TritonBackend(rows.spec))
    assert "merge_kernel" in warps and all(n & (n - 1) == 0 for n in warps.values()), warps


@pytest.mark.usefixtures("many_sms")
def test_tiles_are_split_only_where_the_device_would_be_idle(spec):
    """A long row with many drafts is split, unless prompts have a tile for each program."""
    few_tiles = Rows(spec, [(900, 20)])
    many_tiles = Rows(spec, [(900, 20), (0, 200), (0, 200)])
    for rows, splits in ((few_tiles, 3), (many_tiles, 1)):
        batch = rows.batch(rows.computed, rows.seq_lens)
        metadata = TritonBackend(spec).build_metadata(batch)
        tiles = sum(-(-n // 16) for n in rows.query_lens)  # 32 lines of 2 heads
        assert metadata.work[1, -1] == tiles * splits
        assert metadata.work[3, -1] <= metadata.plan.num_partials
        assert metadata.work[2, -1] <= metadata.plan.num_merged
    invariant = dataclasses.replace(spec, batch_invariant=True)
    batch = few_tiles.batch(few_tiles.computed, few_tiles.seq_lens)
    assert TritonBackend(invariant).build_metadata(batch).work[1, -1] == 2


def test_partial_results_of_many_long_rows_take_little_memory():
    """As many as keep the device busy, not one for each row and split."""
    from servd.worker.ops._attention_batch import AttentionBatch
    from servd.worker.ops.triton.paged_attention import PagedAttention

    attention = PagedAttention(32, 8, 128, torch.float16, torch.device("cpu"), None)
    rows = np.full(256, 1)
    starts = torch.arange(257, dtype=torch.int32)
    lens = torch.full((256,), 2**17, dtype=torch.int32)
    batch = AttentionBatch(rows, rows * 2**17, starts, lens, starts[None], starts[1:].long())
    plan = attention.plan(batch)
    work = attention.work(batch)
    assert work[3, -1] <= plan.num_partials <= 2 * attention.num_wanted[0]


@pytest.mark.parametrize("sizes", [(16, None, 4, 2), (24, 16, 16, 1), (96, None, 3, 1)], ids=str)
@pytest.mark.usefixtures("many_sms")
def test_a_row_is_the_same_to_the_bit_whatever_else_is_in_the_batch(invariant, sizes):
    invariant = dataclasses.replace(invariant, **dict(zip(SIZES, sizes, strict=True)))
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


@pytest.mark.parametrize(("num_pairs", "head_dim"), [(0, 16), (8, 16), (3, 16), (8, 48), (20, 40)])
def test_heads_are_normed_before_they_are_turned(spec, num_pairs, head_dim):
    """Of `num_pairs` pairs; the numbers behind them are stored as they are."""
    spec = dataclasses.replace(spec, head_dim=head_dim)
    rows = Rows(spec, [(0, 5), (7, 3)], rotary=num_pairs > 0)
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
    rotation = rows.rotation(positions)
    if rotation is not None:
        rotation = tuple(part[:, :num_pairs].contiguous() for part in rotation)
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


def test_queries_may_lie_between_gates(spec):
    """As those of Qwen 3-Next, whose heads are not contiguous."""
    rows = Rows(spec, [(0, 5)])
    backend = TritonBackend(spec)
    metadata = backend.build_metadata(rows.batch(rows.computed, rows.seq_lens))
    q, k, v = (torch.cat(x) for x in (rows.q, rows.keys, rows.values))
    rotation = rows.rotation(torch.arange(5, device=spec.device))
    between = torch.stack((q, q + 1), dim=2).unbind(2)[0]
    cache = torch.zeros(backend.kv_cache_shape(rows.num_blocks), device=spec.device)
    turned = [backend.write(x, k, v, cache, metadata, rotation) for x in (q, between)]
    assert between.stride(1) == 2 * spec.head_dim and torch.equal(*turned)


def make_norm(weight: torch.Tensor, eps: float) -> RMSNorm:
    with torch.device(weight.device):
        norm = RMSNorm(len(weight), eps, Parallel())
    norm.weight.data = weight
    return norm
