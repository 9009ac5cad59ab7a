"""Contract of all backends: a mixed batch over a paged cache equals dense attention in float64."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from servd.base import plugins
from servd.base.cards import CARDS
from servd.base.errors import ConfigError
from servd.worker.attention import (
    AttentionBackend,
    AttentionSpec,
    _int8,
    auto_backends,
    make_backend,
    torch_sdpa,
)
from servd.worker.ops import target
from servd.worker.ops.native import library
from tests.worker.attention.paged import Rows, rounded

BACKENDS = plugins.names("servd.worker.attention")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
CPU = torch.device("cpu")
DEVICES = [("cpu", torch.float32), *(("cuda", dtype) for dtype in TOLERANCE)]

# (tokens computed before, tokens of this step) per row
BATCHES = {
    "decode": [(1, 1), (17, 1), (63, 1), (16, 1), (15, 1)],
    "prefill": [(0, 1), (0, 16), (0, 37)],
    "mixed": [(40, 1), (0, 23), (5, 1), (16, 16), (33, 9), (0, 1), (129, 1), (7, 23)],
    "one row": [(3, 4)],
    "long": [(1100, 1), (520, 9), (255, 2)],
}
# Query heads, kv heads, head_dim, and whether positions turn queries and keys.
SHAPES = {"mha": (4, 4, 32, False), "gqa": (8, 2, 16, True), "mqa": (6, 1, 64, True)}
CASES = list(product(BATCHES, SHAPES, (1, 16), (None, 1, 20)))
# Triton's interpreter takes a second for each, its compiler too: every choice still occurs in some.
FEWER = {("triton", "cpu"): CASES[::11], ("triton", "cuda"): CASES[::2]}


def backend_for(name: str, spec: AttentionSpec) -> Any:
    """The class of a backend; skips the test with its reason where it cannot run."""
    backend_class = plugins.load_class("servd.worker.attention", name, AttentionBackend)
    if (reason := backend_class.supports(spec)) is not None:
        pytest.skip(f"{name}: {reason}")
    return backend_class


def check(rows: Rows, backend: Any, atol: float = 1e-5) -> None:
    out = rows.run(backend)
    torch.testing.assert_close(out.double(), rows.expected(), atol=atol, rtol=0)


def _parameters():
    for (device, dtype), name in product(DEVICES, BACKENDS):
        for case in FEWER.get((name, device), CASES):
            batch, shape, block_size, window = case
            dtype_name = str(dtype).removeprefix("torch.")
            label = f"{name}-{device}-{dtype_name}-{batch}-{shape}-{block_size}-window={window}"
            marks = [pytest.mark.gpu] if device == "cuda" else []
            yield pytest.param(name, torch.device(device), dtype, *case, marks=marks, id=label)


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "batch", "shape", "block_size", "window"), [*_parameters()]
)
def test_equals_dense_attention(name, device, dtype, batch, shape, block_size, window):
    *sizes, rotary = SHAPES[shape]
    spec = AttentionSpec(*sizes, block_size, window, dtype, dtype, device)
    backend_for(name, spec)
    _, backend = make_backend(name, spec)
    rows = Rows(spec, BATCHES[batch], rotary)

    out = rows.run(backend)

    assert (
        out.shape == (rows.query_lens.sum(), spec.num_heads, spec.head_dim) and out.is_contiguous()
    )
    torch.testing.assert_close(out.double(), rows.expected(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_of_an_encoder_see_those_after_them(name, shape, window):
    *sizes, rotary = SHAPES[shape]
    options = {"device": torch.device("cpu"), "is_causal": False}
    spec = AttentionSpec(*sizes, 16, window, torch.float32, torch.float32, **options)
    backend = plugins.load_class("servd.worker.attention", name, AttentionBackend)
    if not backend.supports_bidirectional or backend.supports(spec) is not None:
        with pytest.raises(ConfigError):
            make_backend(name, spec)
        return
    rows = Rows(spec, [(0, 1), (0, 37), (0, 16), (0, 300)], rotary)
    check(rows, make_backend(name, spec)[1])


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    ("batch", "soft_cap", "has_sinks"),
    [
        ("mixed", 3.0, True),
        ("long", 3.0, True),
        *(
            pytest.param(batch, *case, marks=pytest.mark.slow)
            for batch in ("mixed", "long")
            for case in ((0.5, False), (None, True))
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BACKENDS)
def test_soft_caps_and_sinks(name, device, batch, soft_cap, has_sinks):
    dtype = torch.float32
    spec = AttentionSpec(
        *(8, 2, 16, 16, 20 if batch == "mixed" else None, dtype, dtype, torch.device(device)),
        soft_cap=soft_cap,
        has_sinks=has_sinks,
    )
    if not backend_for(name, spec).supports_soft_cap:
        with pytest.raises(ConfigError, match="caps its scores"):
            make_backend(name, spec)
        return
    rows = Rows(spec, BATCHES[batch], rotary=True)
    check(rows, make_backend(name, spec)[1])


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    ("tail", "window"),
    [
        (5, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 20), (1, None), (5, 3)]),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_last_tokens_of_rows_may_lie_anywhere(name, device, tail, window):
    """As drafts of a tree do: each sees those before it on its own branch. In float32 it is the
    same as if they lay one after another: to the bit on a CPU, on a GPU but for how its compiler
    contracts products and sums.
    """
    spec = AttentionSpec(8, 2, 16, 16, window, torch.float32, torch.float32, torch.device(device))
    backend_class = backend_for(name, spec)
    if not backend_class.supports_tails:
        pytest.skip(f"{name} has no tails")
    lens = [(40, 1), (0, 23), (257, 1), (16, 16), (0, 1), (1026, 1), (2, 1)]
    rows, in_order = (Rows(spec, lens, rotary=True, tail=n) for n in (tail, 0))
    out = rows.run(backend_class(spec))
    torch.testing.assert_close(out.double(), rows.expected(), atol=1e-5, rtol=0)
    tolerance = 1e-6 if device == "cuda" else 0
    torch.testing.assert_close(out, in_order.run(backend_class(spec)), atol=tolerance, rtol=0)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    ("batch", "tail", "block_size", "kv_dtype"),
    [
        ("mixed", 0, 16, torch.float32),
        ("mixed", 5, 16, torch.float16),
        ("mixed", 0, 1, torch.float32),
        ("long", 0, 16, torch.bfloat16),
        ("mixed", 0, 16, torch.float8_e4m3fn),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BACKENDS)
def test_values_may_be_a_part_of_the_keys(name, device, batch, tail, block_size, kv_dtype):
    dtype = torch.float32
    value_dim = 32 if name == "triton" else 288  # an interpreter computes it
    spec = AttentionSpec(
        *(17, 1, value_dim + 16, block_size, None, dtype, kv_dtype, torch.device(device)),
        value_dim=value_dim,
    )
    backend_class = plugins.load_class("servd.worker.attention", name, AttentionBackend)
    if not backend_class.supports_values_in_keys:
        with pytest.raises(ConfigError):
            make_backend(name, spec)
        return
    if (reason := backend_class.supports(spec)) is not None:
        pytest.skip(f"{name}: {reason}")
    rows = Rows(spec, BATCHES[batch], rotary=True, tail=tail)
    backend = backend_class(spec)
    if kv_dtype != dtype:  # keys are rounded after they are turned, where tests do not round
        rows.angles = None
    out = rows.run(backend)
    assert out.shape == (rows.query_lens.sum(), 17, value_dim)
    torch.testing.assert_close(out.double(), rows.expected(), atol=1e-5, rtol=0)
    assert backend.kv_cache_shape(1)[0] == 1


def test_masks_of_latent_attention_are_not_repeated_for_all_heads(monkeypatch):
    """128 heads of a prompt of 8,192 tokens would take 17 GB."""
    monkeypatch.setattr(torch_sdpa, "MAX_MASK_NUMBERS", 2 * 37 * 48)
    compute = torch.nn.functional.scaled_dot_product_attention
    masks = []

    def record(q, k, v, mask, **options):
        masks.append(mask.numel())
        return compute(q, k, v, mask, **options)

    monkeypatch.setattr(torch_sdpa.F, "scaled_dot_product_attention", record)
    spec = AttentionSpec(5, 1, 24, 16, None, torch.float32, torch.float32, CPU, value_dim=16)
    check(Rows(spec, [(0, 37), (11, 1)], rotary=True), torch_sdpa.TorchSdpaBackend(spec))
    assert masks == [16 * 5, 2 * 37 * 48, 2 * 37 * 48, 37 * 48]


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    "kv_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str
)
@pytest.mark.parametrize("name", BACKENDS)
def test_moved_keys_and_values_are_found_where_they_went(name, kv_dtype):
    spec = AttentionSpec(4, 2, 16, 16, None, torch.float32, kv_dtype, torch.device("cpu"))
    backend_class = backend_for(name, spec)
    if not backend_class.supports_tails:
        pytest.skip(f"{name} has no tails")
    rows = Rows(spec, [(0, 34), (0, 7)], tail=4)
    backend = backend_class(spec)
    first = np.zeros_like(rows.seq_lens)
    last = rows.seq_lens
    cache = torch.zeros(backend.kv_cache_shape(rows.num_blocks)).to(kv_dtype)
    expected = rows.step(backend, cache, first, last)
    slots = []
    for rows.tail in (4, 0):
        slots.append(np.concatenate([rows.slots(row, n - 4, n) for row, n in enumerate(last)]))

    backend.move(cache, *(torch.from_numpy(part) for part in slots))

    metadata = backend.build_metadata(rows.batch(first, last))
    out = backend.attend(torch.cat(rows.q), cache, metadata, spec.head_dim**-0.5, None)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_of_a_picture_see_each_other(name, window, shape):
    *sizes, rotary = SHAPES[shape]
    spec = AttentionSpec(*sizes, 16, window, torch.float32, torch.float32, CPU)
    backend_class = backend_for(name, spec)
    if not backend_class.supports_bidirectional_rows:
        pytest.skip(f"{name}: rows are causal")
    rows = Rows(spec, [(40, 1), (0, 23), (16, 16), (33, 30), (1100, 40), (7, 23)], rotary)
    rows.bidirectional = [1, 3, 4]
    check(rows, backend_class(spec))


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_cache_may_be_narrower(name: str, device: str, kv_dtype: torch.dtype):
    spec = AttentionSpec(4, 2, 16, 16, None, torch.float32, kv_dtype, torch.device(device))
    backend_class = backend_for(name, spec)
    rows = Rows(spec, [(79, 1), (16, 2), (0, 9)])
    check(rows, backend_class(spec))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("batch", ["decode", "mixed", "long"])
@pytest.mark.parametrize("name", ["native", "torch_sdpa"])
def test_a_cache_of_int8_has_a_scale_for_each_token_and_head(name, batch, window, shape):
    """As good as float64 from the same cache; and its rounding costs what the docs say."""
    *sizes, rotary = SHAPES[shape]
    spec = AttentionSpec(*sizes, 16, window, torch.float32, torch.int8, torch.device("cpu"))
    backend_class = backend_for(name, spec)
    rows = Rows(spec, BATCHES[batch], rotary)
    # Of tokens and heads that differ: one scale for all would lose the small ones.
    for part in (rows.keys, rows.values):
        for row, x in enumerate(part):
            part[row] = x * 2.0 ** torch.randint(
                -9, 2, x.shape[:2], generator=torch.Generator().manual_seed(row)
            ).unsqueeze(2)
    out = rows.run(backend_class(spec)).double()
    # A key that is turned differs in its last bit, and that can decide how a number is rounded.
    torch.testing.assert_close(out, rows.expected(), atol=2e-2 if rotary else 1e-5, rtol=0)
    exact = rows.expected(rounds=False)
    assert 0 < (out - exact).norm() / exact.norm() < 0.013


def test_a_cache_of_int8_keeps_its_numbers_to_a_254th_of_the_largest():
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(
        -2, 1
    ).view(3, 1)
    x[3, 1] = 0
    x[4, 1, 5] = torch.inf
    x[5, 1, 6] = torch.nan
    packed = _int8.pack(x)
    assert packed.shape == (50, 3, _int8.row_size(torch.int8, 64)) and packed.dtype == torch.int8
    got = _int8.unpack(packed, torch.float32)
    assert bool(got[4:6, 1].isnan().all())
    got[4:6, 1] = x[4:6, 1] = 0
    limit = x.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)
    assert bool(((got - x).abs() <= limit).all())
    assert torch.equal(got.double(), rounded(x).float().double())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_that_an_8_bit_cache_cannot_hold_become_its_largest(name: str, device: str):
    spec = AttentionSpec(
        1, 1, 16, 16, None, torch.float32, torch.float8_e4m3fn, torch.device(device)
    )
    backend_class = backend_for(name, spec)
    rows = Rows(spec, [(0, 2)])
    backend = backend_class(spec)
    metadata = backend.build_metadata(batch := rows.batch(rows.computed, rows.seq_lens))
    k = torch.tensor([[[1000.0] * 8 + [-3.0] * 8], [[-449.0] * 16]], device=device)
    cache = torch.zeros(backend.kv_cache_shape(rows.num_blocks), dtype=spec.kv_dtype, device=device)
    backend.write(k, k, -k, cache, metadata, None)
    stored = cache.view(2, -1, 16)[:, batch.slot_mapping].float()
    assert torch.equal(stored, torch.stack([k, -k]).flatten(2).clamp(-448, 448))


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("block_size", [48, 80])
@pytest.mark.parametrize("name", BACKENDS)
def test_blocks_of_any_size(name: str, block_size: int):
    """Also of one that fits no piece of the context in which a kernel works."""
    spec = AttentionSpec(
        4, 2, 16, block_size, None, torch.float32, torch.float32, torch.device("cpu")
    )
    backend_class = backend_for(name, spec)
    rows = Rows(spec, [(300, 1), (520, 5), (0, 100)])
    check(rows, backend_class(spec))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_auto_asks_the_backends_in_their_order(device):
    orders = [
        plugins.load_class("servd.worker.attention", name, AttentionBackend).auto_order[device]
        for name in auto_backends(device)
    ]
    assert orders == sorted(set(orders)), "two have the same turn"
    assert auto_backends(device)[-1] == "torch_sdpa", "which can run everything"


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(80, None), (96, None), (192, None), (512, None), (576, 512)]
)
def test_cuda_computes_heads_that_people_serve_with_our_kernels(head_dim, value_dim):
    pytest.importorskip("triton")
    dtype = torch.bfloat16
    spec = AttentionSpec(
        *(16, 1, head_dim, 16, None, dtype, dtype, torch.device("cuda")), value_dim=value_dim
    )
    with target.assume(CARDS["h100"]):
        name, backend = make_backend("auto", spec)
    assert name == "triton" and backend.supports_graphs


def test_a_backend_that_cannot_run_says_why():
    spec = AttentionSpec(4, 4, 32, 16, None, torch.float32, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--attention-backend triton: needs a head_dim that is a"):
        make_backend("triton", replace(spec, head_dim=20))
    with pytest.raises(ConfigError, match=f"there are: {', '.join(BACKENDS)}"):
        make_backend("nonsense", spec)
    assert make_backend("auto", spec)[0] == ("native" if library() else "torch_sdpa")
