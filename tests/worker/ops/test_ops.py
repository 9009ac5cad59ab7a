"""Contract of all modules of servd/worker/ops: equal to the definitions in float64."""

import importlib
import math
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from servd.worker import ops
from servd.worker.ops._decode_rows import (
    COLUMN,
    KV_SLOT,
    NEXT_COLUMN,
    NUM_GIVEN,
    NUM_NUMBERS,
    SLOT,
    TOKEN_ID,
    SlotTensors,
)
from servd.worker.ops.reference import ACTIVATIONS, LowRank, Routing, RoutingRule

MODULES = [
    module.name
    for module in pkgutil.iter_modules(ops.__path__)
    if not module.name.startswith("_") and module.name != "target"
]
PRECISION = {
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-9,
}  # torch rounds in between
SHAPES = [(0, 16), (1, 8), (17, 100), (2, 2049)]

each_dtype = pytest.mark.parametrize(
    "dtype", PRECISION, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
pytestmark = [
    # Interpreted kernels compute exp(-x) on the way to a sigmoid, and numpy tells when that is
    # infinite.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),  # see `poisoned`
    pytest.mark.usefixtures("poisoned"),
]


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest, load_module: Callable[[str, str], Any]) -> Any:
    return load_module("servd.worker.ops", request.param)


def random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float = 3.0
) -> torch.Tensor:
    """Contiguous, with NaN in memory before and after."""
    count = math.prod(shape)
    memory = torch.full((count + 128,), torch.nan, dtype=dtype, device=device)
    numbers = memory[64 : 64 + count].view(shape)
    generator = torch.Generator().manual_seed(count)
    return numbers.copy_(torch.randn(shape, generator=generator) * scale)


def check(
    got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, terms: torch.Tensor | None = None
) -> None:
    """`terms`: sum of the magnitudes of what was added up, where that may cancel."""
    assert got.dtype == dtype
    error = (got.double() - exact).abs()
    assert bool(
        (
            error
            <= PRECISION[dtype] * (exact.abs() if terms is None else terms) + PRECISION[dtype] / 4
        ).all()
    )


@each_dtype
@each_shape
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_norms(module, norm, residual, shape, dtype, device):
    x, weight, bias = (random(s, dtype, device) for s in (shape, shape[1:], shape[1:]))
    before = random((shape[0] + 1, shape[1]), dtype, device)[1:] if residual else None
    stream = x.double() if before is None else (x.double() + before.double()).to(dtype).double()
    centred = stream - stream.mean(-1, keepdim=True) if norm == "layer_norm" else stream
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    if norm == "layer_norm":
        got, got_stream = module.layer_norm(x, before, weight, bias, 1e-5)
        check(got, exact + bias.double(), dtype, exact.abs() + bias.double().abs())
    else:
        got, got_stream = module.rms_norm(x, before, weight, 1e-5)
        check(got, exact, dtype)
    check(got_stream, stream, dtype)


def test_rms_norm_of_the_heads_of_a_slice(module: Any, device: torch.device):
    """The keys of Qwen 3: neither contiguous nor of two dimensions."""
    qkv = random((5, 8 * 16), torch.float32, device)
    weight = random((16,), torch.float32, device)
    keys = qkv[:, 4 * 16 : 6 * 16].unflatten(-1, (-1, 16))
    exact = (
        keys.double()
        / (keys.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        * weight.double()
    )
    check(module.rms_norm(keys, None, weight, 1e-6)[0], exact, torch.float32)


@each_dtype
def test_embed(module: Any, dtype: torch.dtype, device: torch.device):
    table = random((9, 20), dtype, device)
    index = torch.tensor([8, 0, 3, 3], device=device)
    assert torch.equal(module.embed(index, table), table[[8, 0, 3, 3]])
    assert module.embed(index[:0], table).shape == (0, 20)


@each_dtype
def test_rotation(module: Any, dtype: torch.dtype, device: torch.device):
    """Angles are made in float32, as the models that were trained with them have them."""
    positions = torch.tensor([[0, 1, 77], [5, 100_000, 3]], device=device).T[:, 1]
    inv_freq = random((18,), torch.float32, device).abs()
    angles = (positions[:, None].float() * inv_freq).double()
    cos, sin = module.rotation(positions, inv_freq, 1.5, dtype)
    check(cos, angles.cos() * 1.5, dtype)
    check(sin, angles.sin() * 1.5, dtype)


def exact_activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """By the definitions, in float64."""
    x = x.double()
    if name == "relu":
        return x.clamp(min=0)
    if name == "silu":
        return x / (1 + (-x).exp())
    if name == "quick_gelu":
        return x / (1 + (-1.702 * x).exp())
    if name == "gelu":
        return x * torch.special.ndtr(x)
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@each_dtype
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("scale", [3.0, 100.0])
def test_activations(module, name, scale, dtype, device):
    for shape in [(1, 8), (3, 1000), (0, 16), (2, 3, 7)]:
        x = random(shape, dtype, device, scale)
        check(module.activate(x, name), exact_activation(x, name), dtype)


@each_dtype
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates(module: Any, name: str, dtype: torch.dtype, device: torch.device):
    for num_tokens, size in [(1, 8), (5, 100), (0, 16), (2, 1500)]:
        x = random((num_tokens, 2 * size), dtype, device)
        first, second = x.split(size, dim=-1)
        exact = exact_activation(first, name).to(dtype).double() * second.double()
        check(module.gate(x, name), exact, dtype)


@each_dtype
def test_the_clamped_gate(module: Any, dtype: torch.dtype, device: torch.device):
    for num_tokens, size in [(1, 8), (5, 100), (0, 16)]:
        x = random((num_tokens, 2 * size), dtype, device, 6.0)
        first, second = (half.double() for half in x.split(size, dim=-1))
        first = first.clamp(max=7.0)
        exact = first / (1 + (-1.702 * first).exp()) * (second.clamp(-7.0, 7.0) + 1)
        check(module.clamped_gate(x, 1.702, 7.0), exact, dtype, exact.abs() * 2)
    x[:] = torch.nan
    assert module.clamped_gate(x, 1.702, 7.0).isnan().all()


@each_dtype
@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "sizes", "max_rank"),
    [(1, 8, [5], 1), (9, 100, [64, 17, 17], 5), (37, 33, [300, 40], 16), (3, 70, [100], 80)],
)
def test_low_rank_additions(module, num_tokens, num_inputs, sizes, max_rank, dtype, device):
    """Places without an adapter, with small ranks, with nothing for a part; tokens without any."""
    if dtype == torch.bfloat16 and device.type == "cpu" and module.__name__.endswith("triton"):
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    num_adapter_slots = 3
    parts = len(sizes)
    width = -(-len(sizes) * max_rank // 16) * 16
    x = random((num_tokens, num_inputs), dtype, device, 0.3)
    before = random((num_tokens, sum(sizes)), dtype, device)
    a = torch.zeros(num_adapter_slots, num_inputs, width, dtype=dtype, device=device)
    b = torch.zeros(num_adapter_slots, max_rank, sum(sizes), dtype=dtype, device=device)
    ends = torch.tensor(sizes).cumsum(0)
    ranks = torch.tensor([[max_rank] * parts, [0] * parts, [1, *[max_rank // 2] * (parts - 1)]])
    exact = torch.zeros(
        num_adapter_slots, num_tokens, sum(sizes), dtype=torch.float64, device=device
    )
    for place, part in [(p, q) for p in range(num_adapter_slots) for q in range(parts)]:
        rank = int(ranks[place, part])
        columns = slice(ends[part] - sizes[part], ends[part])
        first = part * max_rank
        a[place, :, first : first + rank] = random((num_inputs, rank), dtype, device, 0.3)
        b[place, :rank, columns] = random((rank, sizes[part]), dtype, device, 0.3)
        hidden = (x.double() @ a[place].double())[:, first : first + rank]
        exact[place, :, columns] = hidden @ b[place, :rank, columns].double()
    places = torch.arange(num_tokens, device=device) * 7 % 5 - 1
    places[places == 3] = 2
    out = before.clone()
    module.add_low_rank(out, x, LowRank(a, b, ranks, ends), places)
    assert torch.equal(out[places < 1][places[places < 1] < 0], before[places < 0])
    chosen = exact[places.clamp(min=0), torch.arange(num_tokens, device=device)]
    chosen[places < 0] = 0
    terms = before.double().abs() + chosen.abs() + 2
    check(out, before.double() + chosen, dtype, terms)


def test_cuda_has_triton():
    pytest.importorskip("triton")
    assert ops.for_device(torch.device("cuda")) is importlib.import_module(
        "servd.worker.ops.triton"
    )


@each_dtype
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", [(1, 5, 2), (40, 128, 8), (3, 2, 2)], ids=str)
def test_routing(module: Any, renormalize: bool, shape, dtype: torch.dtype, device):
    num_tokens, num_experts, top_k = shape
    logits = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1))
    order = logits.argsort().argsort()  # without two that are equal in 16 bits
    logits = (order * 0.0625 - 3).to(dtype).to(device)
    routing = module.route(logits, RoutingRule(top_k, renormalize))
    exact, experts = logits.double().softmax(dim=-1).topk(top_k)
    if renormalize:
        exact /= exact.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(routing.weights.double(), exact, rtol=1e-6, atol=0)
    sizes = experts.flatten().bincount(minlength=num_experts)
    assert routing.starts.tolist() == [0, *sizes.cumsum(0).tolist()]
    places = routing.places.long()
    assert sorted(places.flatten().tolist()) == list(range(num_tokens * top_k))
    starts = routing.starts.long()
    assert bool((starts[experts] <= places).all() and (places < starts[experts + 1]).all())
    tokens = torch.arange(num_tokens, device=device)[:, None].expand(places.shape)
    assert torch.equal(routing.tokens[places].long(), tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 65])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_experts", "num_groups", "top_groups"), [(12, 1, 1), (20, 4, 2)])
def test_routing_within_groups(
    module, num_tokens, has_bias, num_experts, num_groups, top_groups, device
):
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) if has_bias else None
    on_device = None if bias is None else bias.to(device)
    rule = RoutingRule(3, True, num_groups, top_groups, bias=on_device)
    routing = module.route(logits.to(device), rule)
    chances = logits.double().sigmoid() if has_bias else logits.double().softmax(1)
    starts = routing.starts.cpu().long()
    experts = torch.searchsorted(starts, routing.places.cpu().long(), right=True) - 1
    assert starts[0] == 0 and starts[-1] == 3 * num_tokens
    size = num_experts // num_groups
    for token in range(num_tokens):
        scores = (chances[token] + (0 if bias is None else bias)).tolist()
        groups = [sorted(scores[at : at + size])[::-1] for at in range(0, num_experts, size)]
        ranks = [sum(group[: 2 if has_bias else 1]) for group in groups]
        best = sorted(range(num_groups), key=ranks.__getitem__)[-top_groups:]
        eligible = [expert for expert in range(num_experts) if expert // size in best]
        expected = sorted(eligible, key=scores.__getitem__)[:-4:-1]
        assert experts[token].tolist() == expected
        weights = chances[token, expected]
        torch.testing.assert_close(
            routing.weights[token].double().cpu(), weights / weights.sum(), rtol=1e-5, atol=0
        )
    tokens = torch.arange(num_tokens, device=device).repeat_interleave(3)
    assert torch.equal(routing.tokens[routing.places.long().flatten()].long(), tokens)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_routing_of_many_tokens_and_of_nan(module: Any, device: torch.device):
    """More than a kernel's program reads in one turn. Whatever it is, places are a
    permutation: others are memory of nobody."""
    logits = torch.randn(2500, 5, generator=torch.Generator().manual_seed(0))
    logits[3] = torch.nan
    logits[4, 2] = torch.nan
    routing = module.route(logits.to(device), RoutingRule(2, False))
    places = routing.places.long().cpu()
    assert places.flatten().sort().values.equal(torch.arange(5000))
    assert routing.weights[3:5].isnan().all()
    starts = routing.starts.cpu().long()
    experts = torch.searchsorted(starts, places, right=True) - 1
    assert experts[:3].equal(logits[:3].topk(2).indices)
    assert (experts[:, 0] != experts[:, 1]).all()


@each_dtype
def test_combine(module: Any, dtype: torch.dtype, device: torch.device):
    for num_tokens, top_k, size in [(1, 2, 8), (5, 3, 100), (2, 1, 33)]:
        y = random((num_tokens * top_k, size), dtype, device)
        weights = random((num_tokens, top_k), torch.float32, device)
        places = torch.arange(len(y) - 1, -1, -1, dtype=torch.int32, device=device)
        places = places.view(num_tokens, top_k)
        routing = Routing(places.flatten(), places.flatten(), places, weights)
        terms = y[places.long()].double() * weights.double()[..., None]
        check(module.combine(y, routing), terms.sum(1), dtype, terms.abs().sum(1))
        residual = random((num_tokens, size), dtype, device)
        exact = 0.5 * terms.sum(1) + residual.double()
        size_of_terms = terms.abs().sum(1) + residual.double().abs()
        scaled = routing._replace(factor=0.5)
        check(module.combine(y, scaled, residual), exact, dtype, size_of_terms)
        # Rows of other ranks are undefined.
        starts = torch.tensor([1, 1, len(y) - 1], dtype=torch.int32, device=device)
        is_own = ((places >= 1) & (places < len(y) - 1)).double()[..., None]
        y[[0, -1]] = torch.nan
        exact = (terms * is_own).sum(1)
        local = routing._replace(local_starts=starts)
        check(module.combine(y, local), exact, dtype, terms.abs().sum(1))


@each_dtype
def test_scale(module: Any, dtype: torch.dtype, device: torch.device):
    for shape in [(1, 8), (3, 1001), (0, 16)]:
        x = random(shape, dtype, device)
        residual = random(shape, dtype, device, 1.0)
        check(module.scale(x, 0.25), x.double() * 0.25, dtype)
        exact = x.double() * 0.25 + residual.double()
        terms = x.double().abs() + residual.double().abs()
        check(module.scale(x, 0.25, residual), exact, dtype, terms)


# ---- steps ----


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 1500])  # the last one is more than a kernel's turn
def test_a_decode_step_begins(module: Any, num_tokens: int, device: torch.device):
    """Rows that compute their next token, drafts of others, and padding; against Python's lists."""
    rng = np.random.default_rng(num_tokens)
    block_size = 4
    null = 1600
    tables = rng.integers(0, 90, (2 * null + 2, 6))  # of two groups
    token_ids = rng.integers(-1, 100, (null + 1, 24))
    computed = rng.integers(0, 24, null + 1)
    computed[null] = 0
    inputs = np.zeros((NUM_NUMBERS, num_tokens), dtype=np.int64)
    slots, columns, places, *changes = inputs[:NUM_GIVEN]
    slots[:] = rng.permutation(null)[:num_tokens]
    columns[:] = -1
    changes[0][:] = null
    changes[1][:] = 0
    changes[2][:] = tables[null, 0]
    if num_tokens >= 5:
        slots[-3] = slots[-4]  # one row's
        columns[-4:-2] = (3, 4)
        places[-4:-2] = (1, 2)
        slots[-2:] = null
        columns[-2:] = 0
        rows = rng.permutation(null)[: num_tokens // 2]
        rows[0] = slots[1]
        changes[0][: len(rows)] = rows + (null + 1) * (rows % 2)
        changes[1][: len(rows)] = rng.integers(0, 6, len(rows))
        changes[1][0] = computed[slots[1]] // block_size
        changes[0][0] = slots[1]
        changes[2][: len(rows)] = 100 + np.arange(len(rows))
    tensors = [
        torch.from_numpy(array).to(device=device, dtype=dtype)
        for array, dtype in (
            (inputs, torch.int64),
            (token_ids, torch.int32),
            (computed, torch.int64),
            (tables, torch.int32),
        )
    ]
    step, *state = tensors
    seq_lens = torch.empty(num_tokens, dtype=torch.int32, device=device)
    module.begin_decode(step, seq_lens, SlotTensors(*state), block_size)

    for row, place, block in zip(*changes, strict=True):
        tables[row, place] = block
    rows_of_step = []
    for slot, column in zip(slots.tolist(), columns.tolist(), strict=True):
        if column < 0:
            column = int(computed[slot])
            computed[slot] += 1
        kv_slot = tables[slot, column // block_size] * block_size + column % block_size
        rows_of_step.append([slot, column, column + 1, max(token_ids[slot, column], 0), kv_slot])
    got = step[[SLOT, COLUMN, NEXT_COLUMN, TOKEN_ID, KV_SLOT]].T.tolist()
    assert got == rows_of_step
    assert seq_lens.tolist() == [numbers[2] for numbers in rows_of_step]
    assert state[1].tolist() == computed.tolist() and computed[null] == 0
    assert state[2].tolist() == tables.tolist()
