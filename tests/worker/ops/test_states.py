"""Recurrent states by every instruction set and by torch: equal to their definitions, token by
token in float64. By the library, equal bits however prompts are cut, batched and saved.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from servd.worker import ops
from servd.worker.ops import native
from servd.worker.ops._state_rows import Decay, Filter, StateRows
from tests.worker.cpu_kernels import forced

NUM_SLOTS = 6
LENGTHS = (1, 70, 3, 1, 9)
SLOTS = (4, 0, 5, 2, 1)
BEGINS = (True, False, True, False, True)
SAVES = {2: 1, 40: 0, 79: 2}  # end -> checkpoint; the rows end after 1, 71, 74, 75 and 84 tokens
# groups, heads, key_dim, value_dim: vectors and panels, whole and not.
SHAPES = [(1, 1, 1, 1), (2, 6, 12, 10), (1, 2, 16, 131), (3, 3, 7, 64)]


@pytest.fixture(params=[*native.CAPABILITIES, "off"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for _ in forced(request.param, monkeypatch):
        yield ops.for_device(torch.device("cpu"))


@pytest.fixture(params=native.CAPABILITIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for _ in forced(request.param, monkeypatch):
        yield native


class Inputs(NamedTuple):
    """Arguments of an operation: those with a row for each token, and its options."""

    name: str
    by_token: dict[str, Tensor | None]
    options: dict[str, Any]
    state_shape: tuple[int, ...]

    def run(self, module: Any, rows: StateRows, tokens: slice = slice(None)) -> Tensor:
        parts = {key: None if x is None else x[tokens] for key, x in self.by_token.items()}
        if self.name == "linear_scan":
            return module.linear_scan(**parts, decay=Decay(**self.options), rows=rows)
        is_gated = parts["before"] is not None
        factors = (parts["before"], parts["after"]) if is_gated else None
        return module.convolve(parts["x"], Filter(**self.options), factors, rows)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def scan_inputs(shape: tuple[int, ...], kind: str, num_tokens: int = sum(LENGTHS)) -> Inputs:
    """Parts of rows with NaN between them, like those of a fused projection."""
    groups, heads, key_dim, value_dim = shape
    sizes = [groups * key_dim, groups * key_dim, heads * value_dim, heads, heads]
    whole = random(num_tokens, sum(sizes) + 4)
    q, k, v, a, b, padding = whole.split([*sizes, 4], dim=1)
    padding.fill_(torch.nan)
    q, k = (x.unflatten(1, (groups, key_dim)) for x in (q, k))
    k /= k.norm(dim=-1, keepdim=True)
    by_token = {"q": q, "k": k, "v": v.unflatten(1, (heads, value_dim)), "a": a}
    is_mamba = kind == "mamba"
    by_token["b"] = None if is_mamba else b
    options = {
        "dt_bias": random(heads),
        "A": random(heads, seed=1).exp(),
        "D": random(heads, seed=2) if is_mamba else None,
        "dt_limits": (0.3, 0.9) if is_mamba else (0.0, math.inf),
    }
    return Inputs("linear_scan", by_token, options, (heads, key_dim, value_dim))


def convolution_inputs(
    channels: int, size: int, is_gated: bool, num_tokens: int = sum(LENGTHS)
) -> Inputs:
    x, before, after = random(num_tokens, 3 * channels).split(channels, dim=1)
    options = {
        "weight": random(size, channels).t(),
        "bias": None if is_gated else random(channels),
        "activation": None if is_gated else "silu",
    }
    by_token = {"x": x, "before": before if is_gated else None}
    by_token["after"] = after if is_gated else None
    return Inputs("convolve", by_token, options, (size - 1, channels))


def state_rows(
    inputs: Inputs,
    lengths: Sequence[int] = LENGTHS,
    slots: Sequence[int] = SLOTS,
    begins: Sequence[bool] = BEGINS,
    saves: dict[int, int] = SAVES,
) -> StateRows:
    """Columns of a wider memory. States of requests that begin are NaN."""
    size = math.prod(inputs.state_shape)
    memory = random(NUM_SLOTS, size + 9)
    query_lens = torch.tensor(lengths)
    is_first = torch.tensor(begins)
    for slot, is_new in zip(slots, begins, strict=True):
        if is_new:
            memory[slot] = torch.nan
    return StateRows(
        memory.narrow(1, 5, size),
        torch.tensor(slots),
        query_lens,
        torch.where(is_first, query_lens, query_lens + 3),
        lambda: is_first,
        torch.full((3, size + 3), torch.nan).narrow(1, 2, size),
        torch.tensor([*saves.items()], dtype=torch.int64).view(-1, 2),
    )


def scan_token(state: Tensor, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    heads = len(state)
    q, k = (x[name].repeat_interleave(heads // len(x[name]), dim=0) for name in "qk")
    v = x["v"]
    dt = (1 + (x["a"] + x["dt_bias"]).exp()).log().clamp(*x["dt_limits"])
    state = state * (-x["A"] * dt).exp()[:, None, None]
    if x["b"] is None:
        change = v * dt[:, None]
    else:
        change = (v - torch.einsum("hk,hkv->hv", k, state)) / (1 + (-x["b"]).exp())[:, None]
    state = state + torch.einsum("hk,hv->hkv", k, change)
    out = torch.einsum("hk,hkv->hv", q, state)
    return state, out if x["D"] is None else out + x["D"][:, None] * v


def convolve_token(state: Tensor, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    value = x["x"] if x["before"] is None else x["x"] * x["before"]
    window = torch.cat((state, value[None]))
    out = (window * x["weight"].t()).sum(0)
    out = out if x["bias"] is None else out + x["bias"]
    out = out if x["activation"] is None else out / (1 + (-out).exp())
    return window[1:], out if x["after"] is None else out * x["after"]


def exact(inputs: Inputs, rows: StateRows) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Return outputs, states of the rows after them, and checkpoints, in float64."""

    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) else x

    compute = {"linear_scan": scan_token, "convolve": convolve_token}[inputs.name]
    options = {key: double(x) for key, x in inputs.options.items()}
    saves = dict(rows.saves.tolist())
    outputs = []
    states = []
    checkpoints = {}
    begins = rows.begins().tolist()
    for row, length in enumerate(rows.query_lens.tolist()):
        state = rows.states[rows.slots[row]].double().view(inputs.state_shape)
        state = torch.zeros_like(state) if begins[row] else state
        for _ in range(length):
            if len(outputs) in saves:
                checkpoints[saves[len(outputs)]] = state.flatten()
            token = {
                key: None if x is None else x[len(outputs)].double()
                for key, x in inputs.by_token.items()
            }
            state, out = compute(state, options | token)
            outputs.append(out)
        states.append(state.flatten())
    return torch.stack(outputs), torch.stack(states), checkpoints


CASES = [scan_inputs(shape, kind) for shape in SHAPES for kind in ("delta", "mamba")] + [
    convolution_inputs(channels, size, is_gated)
    for channels, size, is_gated in (
        (1, 2, True),
        (70, 3, True),
        (131, 4, False),
        (5, 8, True),
        (5, 9, False),
    )
]


@pytest.mark.parametrize("inputs", CASES, ids=lambda case: f"{case.name}{case.state_shape}")
def test_operations_equal_their_definition(module: Any, inputs: Inputs):
    rows = state_rows(inputs)
    before = rows.states.clone()
    outputs, states, checkpoints = exact(inputs, rows)
    got = inputs.run(module, rows)

    def check(got: Tensor, expected: Tensor) -> None:
        scale = float(expected.abs().max())
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5 * scale)

    check(got, outputs)
    check(rows.states[rows.slots], states)
    assert torch.equal(rows.states[3], before[3])
    for number, checkpoint in checkpoints.items():
        check(rows.checkpoints[number], checkpoint)
    assert len(checkpoints) == len(SAVES)


@pytest.mark.parametrize("inputs", CASES[:-1], ids=lambda case: f"{case.name}{case.state_shape}")
def test_bits_do_not_depend_on_chunks_batches_and_saves(library: Any, inputs: Inputs):
    whole = state_rows(inputs, saves={})
    expected = inputs.run(library, whole)
    saved = state_rows(inputs)
    assert torch.equal(inputs.run(library, saved), expected)
    assert torch.equal(saved.states[saved.slots], whole.states[whole.slots])
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    saves = {end: saved.checkpoints[number] for end, number in SAVES.items()}
    for row, (start, stop) in enumerate(pairwise(starts)):
        # Alone, in chunks that end where the state was saved, and elsewhere.
        fresh = state_rows(inputs, saves={})
        cuts = sorted({start, *range(start + 5, stop, 7), *saves} & {*range(start, stop)})
        for begin, end in pairwise([*cuts, stop]):
            alone = fresh._replace(
                slots=fresh.slots[row : row + 1],
                query_lens=torch.tensor([end - begin]),
                seq_lens=torch.tensor([end - start + (0 if BEGINS[row] else 3)]),
                saves=torch.zeros(0, 2, dtype=torch.int64),
            )
            got = inputs.run(library, alone, slice(begin, end))
            assert torch.equal(got, expected[begin:end])
            if end in saves:
                assert torch.equal(fresh.states[SLOTS[row]], saves[end])
        assert torch.equal(fresh.states[SLOTS[row]], whole.states[SLOTS[row]])


WRONG = [
    {"slots": torch.tensor([4, 0, NUM_SLOTS, 2, 1])},
    {"slots": torch.tensor([4, 0, -1, 2, 1])},
    {"query_lens": torch.tensor([1, 70, 3, 1, 10])},
    {"query_lens": torch.tensor([1, 70, 3, 1, 8])},
    {"query_lens": torch.tensor([1, 71, 3, -1, 10])},
    {"saves": torch.tensor([[2, 3]])},
    {"saves": torch.tensor([[2, -1]])},
    {"saves": torch.tensor([[40, 0], [2, 1]])},
    {"saves": torch.tensor([[-3, 0]])},
]


@pytest.mark.parametrize(
    "wrong", WRONG, ids=lambda wrong: str([x.tolist() for x in wrong.values()])
)
@pytest.mark.parametrize("inputs", [CASES[2], CASES[-3]], ids=["scan", "convolution"])
def test_a_wrong_index_raises_and_writes_nothing(library: Any, inputs: Inputs, wrong: Any):
    rows = state_rows(inputs)
    before = rows.states.clone()
    with pytest.raises(IndexError):
        inputs.run(library, rows._replace(**wrong))
    assert torch.equal(rows.states.nan_to_num(7.0), before.nan_to_num(7.0))
    assert bool(rows.checkpoints.isnan().all())


@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 10), (2, 1, 64), (7, 133)], ids=str)
def test_gated_norm(module: Any, shape: tuple[int, ...], gates_first: bool):
    x = random(*shape)
    gate = random(shape[0], 2 * math.prod(shape[1:]))[:, : math.prod(shape[1:])].view(shape)
    weight = random(shape[-1])
    factor = gate.double() / (1 + (-gate.double()).exp())
    y = x.double() * factor if gates_first else x.double()
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    expected = y if gates_first else y * factor
    got = module.gated_norm(x, gate, weight, 1e-5, gates_first)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate_size", [1, 37])
def test_multiply_sigmoid(module: Any, gate_size: int):
    x = random(5, 37)
    gate = random(5, 80)[:, :gate_size]
    expected = x.double() / (1 + (-gate.double()).exp())
    got = module.multiply_sigmoid(x, gate)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
