"""Contract of all modules of servd/worker/sample/ops: Python's integers, or float64."""

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch

from servd.worker.sample import ops
from servd.worker.sample.fixed_point import MAX_VOCAB_SIZE, WEIGHT_ONE
from servd.worker.sample.logit_edits import IN_PROMPT, Biased, Bitmasks, LogitEdits, Penalized

MODULES = [module.name for module in pkgutil.iter_modules(ops.__path__)]
SHAPES = [(1, 7), (3, 100), (2, 5000)]  # the last one is more than one block of a kernel

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(params=MODULES)
def module(request, load_module) -> Any:
    return load_module("servd.worker.sample.ops", request.param)


def between_nans(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy, with NaN in memory before and after."""
    memory = torch.full((numbers.numel() + 128,), torch.nan, device=device)
    return memory[64:-64].view(numbers.shape).copy_(numbers)


def random_logits(shape: tuple[int, int], device: torch.device, scale: float = 3.0) -> torch.Tensor:
    """A slice of columns, as the logits of a padded vocabulary are."""
    memory = torch.full((shape[0], shape[1] + 5), torch.nan, device=device)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * scale
    return memory[:, : shape[1]].copy_(logits)


def random_weights(shape: tuple[int, int], device: torch.device, scale: float) -> torch.Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).double() * scale
    logits = (logits * 8).round() / 8  # so that there are ties
    return between_nans(
        ((logits - logits.amax(-1, keepdim=True)).exp() * WEIGHT_ONE).float(), device
    )


# ---- choose ----


@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_token_is_written(module, shape, dtype, device):
    n, vocab = shape
    draw = np.random.default_rng(shape[1])
    logits = random_logits(shape, device).to(dtype)
    logits[0, vocab // 2 :] = logits[0].max()  # the first of equals
    token_ids = torch.full((n + 2, 9), -5, dtype=torch.int32, device=device)
    slots = draw.permutation(n + 2)[:n]
    columns = draw.integers(0, 9, n)
    tensors = (torch.from_numpy(part).to(device) for part in (slots, columns))
    chosen = module.choose(logits, *tensors, token_ids)
    expected = logits.double().cpu().numpy().argmax(1)
    assert chosen.tolist() == expected.tolist() and chosen.dtype == torch.int64
    written = np.full((n + 2, 9), -5)
    written[slots, columns] = expected
    assert token_ids.tolist() == written.tolist()


def test_a_token_whose_logit_is_not_finite_is_told(module, device):
    logits = random_logits((5, 5000), device)
    logits[0, 4500] = torch.inf
    logits[1, 3] = torch.nan
    logits[1, 4700] = torch.inf
    logits[2, :] = -torch.inf
    logits[3, :] = -torch.inf
    logits[3, 4999] = -1e30
    token_ids = torch.zeros(5, 1, dtype=torch.int32, device=device)
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    chosen = module.choose(logits, torch.arange(5, device=device), zeros, token_ids)
    assert chosen[:4].tolist() == [~4500, ~3, 0, 4999] and chosen[4] >= 0
    assert token_ids[:4, 0].tolist() == [4500, 3, 0, 4999]


# ---- logit edits ----


def random_biases(
    shape: tuple[int, int], seed: int, device: torch.device
) -> tuple[Biased, np.ndarray]:
    """For all rows but the last: on an eighth of the tokens, shuffled; and as a matrix."""
    n, vocab = shape
    rng = np.random.default_rng(seed)
    biased_ids = [
        rng.permutation(vocab)[: vocab // 8 + 1 if row < max(n - 1, 1) else 0] for row in range(n)
    ]
    dense = np.zeros(shape, dtype=np.float32)
    for row, token_ids in enumerate(biased_ids):
        dense[row, token_ids] = rng.uniform(-100, 100, len(token_ids))
    starts = np.cumsum([0, *map(len, biased_ids)])
    values = np.concatenate([dense[row, token_ids] for row, token_ids in enumerate(biased_ids)])
    tensors = [
        torch.from_numpy(array).to(device) for array in (starts, np.concatenate(biased_ids), values)
    ]
    return Biased(*tensors), dense


@each_shape
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "bitmask"])
@pytest.mark.parametrize("rows", [None, "some", "all"])
def test_shift_equals_float64(module, shape, has_bias, masked, rows, device):
    n, vocab = shape
    rng = np.random.default_rng(vocab)
    logits = random_logits(shape, device)
    exact = logits.double().cpu().numpy()
    biased = bitmasks = penalized = None
    if has_bias:
        biased, dense = random_biases(shape, vocab, device)
        exact = exact + dense
    if masked:
        allowed = rng.random((n, -(-vocab // 32) * 32)) < 0.5
        allowed[:, vocab // 2] = True
        words = np.packbits(allowed, axis=1, bitorder="little").view("<i4")
        mask_rows = rng.permutation(np.arange(-1, n - 1))  # one row has no grammar
        words = torch.from_numpy(words.copy()).to(device)
        bitmasks = Bitmasks(words, torch.from_numpy(mask_rows.astype(np.int32)).to(device))
        allowed = allowed[mask_rows] | (mask_rows == -1)[:, None]
        exact = np.where(allowed[:, :vocab], exact, -np.inf)
    if rows is not None:
        penalized_rows = np.arange(n) if rows == "all" else np.array([n - 1])
        slots = rng.permutation(n + 2)[: len(penalized_rows)]
        outputs = rng.integers(0, 3, (n + 2, vocab))
        prompt = rng.random((n + 2, vocab)) < 0.2
        factors = rng.uniform(0.5, 2.0, (n + 2, 3)).astype(np.float32)
        for row, slot in zip(penalized_rows, slots, strict=True):
            x = exact[row]
            repetition, frequency, presence = factors[slot].astype(np.float64)
            x = np.where(
                (outputs[slot] > 0) | prompt[slot],
                np.where(x > 0, x / repetition, x * repetition),
                x,
            )
            exact[row] = x - frequency * outputs[slot] - np.where(outputs[slot] > 0, presence, 0)
        counts = torch.from_numpy((outputs + IN_PROMPT * prompt).astype(np.int32)).to(device)
        index = slice(None) if rows == "all" else torch.from_numpy(penalized_rows).to(device)
        penalized = Penalized(
            index, torch.from_numpy(slots).to(device), counts, torch.from_numpy(factors).to(device)
        )
    best = module.edit_logits(logits, LogitEdits(biased, bitmasks, penalized))
    np.testing.assert_allclose(logits.cpu().numpy(), exact, rtol=1e-5, atol=1e-5)
    assert best.tolist() == logits.argmax(-1).tolist()


@each_shape
def test_a_mask_of_narrow_logits_changes_its_row_alone(module, shape, device):
    if module.__name__.endswith("native"):
        pytest.skip("logits of a CPU's kernels have 32 bits")
    logits = random_logits(shape, device).half()
    exact = logits.clone()
    words = torch.zeros(1, -(-shape[1] // 32), dtype=torch.int32, device=device)
    words[0, 0] = 8
    rows = torch.full((shape[0],), -1, dtype=torch.int32, device=device)
    rows[-1] = 0
    best = module.edit_logits(logits, LogitEdits(bitmasks=Bitmasks(words, rows)))
    exact[-1] = -torch.inf
    exact[-1, 3] = logits[-1, 3]
    assert torch.equal(logits, exact) and best.tolist() == exact.argmax(-1).tolist()


@each_shape
def test_the_best_token_of_narrow_logits_is_that_of_the_same_in_float32(module, shape, device):
    logits = random_logits(shape, device).bfloat16()
    wide = logits.float()
    wide[0, :3] = torch.tensor([0.0, -0.0, -torch.inf])
    wide[0, 5] = torch.inf
    logits = torch.full((shape[0], shape[1] + 5), torch.nan, device=device).bfloat16()
    logits = logits[:, : shape[1]].copy_(wide)
    assert module.edit_logits(logits, LogitEdits()).tolist() == wide.argmax(-1).tolist()
    assert torch.equal(logits.float(), wide)


def test_the_best_token_is_the_first_nan_or_the_first_maximum(module, device):
    nan = torch.nan
    inf = torch.inf
    rows = [
        [1.0, 3.0, 3.0, -2.0],
        [-inf, -inf, -inf, -inf],
        [-inf, -5.0, -3.0, -3.0],
        [-0.0, 0.0, -1.0, -0.0],
        [1.0, inf, nan, nan],
        [1.0, inf, inf, 7.0],
    ]
    assert module.edit_logits(torch.tensor(rows, device=device), LogitEdits()).tolist() == [
        1,
        0,
        2,
        0,
        2,
        1,
    ]


# ---- weights ----


@each_shape
def test_weights_are_relative_probabilities(module: Any, shape, device: torch.device):
    logits = random_logits(shape, device)
    logits[:, 3] = -torch.inf
    temperatures = torch.linspace(0.3, 2.0, shape[0], device=device)
    weights = module.to_weights(logits, logits.amax(-1), temperatures)
    exact = (
        (logits - logits.amax(-1, keepdim=True))
        .double()
        .div(temperatures.double().unsqueeze(1))
        .exp()
    )
    torch.testing.assert_close(weights.double() / WEIGHT_ONE, exact, rtol=2e-5, atol=0)
    assert weights.amax(-1).tolist() == [WEIGHT_ONE] * shape[0]


# ---- top-k and top-p ----


def exact_limit(weights: list[float], lowest: float, k: int, p: float) -> float:
    """From the definition: sort, take k, take as many as hold the share p; in Python's integers."""
    candidates = sorted((w for w in weights if w >= lowest), reverse=True)
    if k > 0:
        candidates = candidates[:k]
    limit = p * float(sum(int(w) for w in candidates))
    more_probable = 0
    last = lowest
    for w in candidates:
        if float(more_probable) >= limit:
            break
        more_probable = more_probable + int(w)
        last = w
    return last


NARROWINGS = [
    (0, 1.0, 0.1),
    (0, 0.9, 0.0),
    (0, 0.3, 0.001),
    (0, 1e-9, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.5),
    (40, 0.7, 0.0),
    (300, 1.0, 0.001),
    (3000, 0.8, 0.0),
    (9999, 0.95, 0.0),
]


@pytest.mark.parametrize(("vocab", "scale"), [(7, 0.5), (5000, 0.0), (5000, 5.0)])
def test_narrow_equals_the_definition(module, vocab, scale, device):
    """scale 0: all are equal, and more than a kernel keeps in registers."""
    weights = random_weights((1, vocab), device, scale)
    cases = [(k, p, min_p * WEIGHT_ONE) for k, p, min_p in NARROWINGS]
    top_k = torch.tensor([k for k, _, _ in cases], device=device)
    top_p = torch.tensor([p for _, p, _ in cases], dtype=torch.float64, device=device)
    lowest = torch.tensor([low for _, _, low in cases], device=device)
    got = module.filter_top_k_top_p(weights.repeat(len(cases), 1), lowest, top_k, top_p)
    row = weights[0].cpu().numpy()
    for case, limit in zip(cases, got.tolist(), strict=True):
        k, p, low = case
        exact = exact_limit(row.tolist(), np.float32(low), k, p)
        assert limit >= np.float32(low)
        # Limits differ in name only if the same tokens that can be drawn are kept.
        drawable = row[row >= 1]
        assert (drawable >= limit).sum() == (drawable >= exact).sum(), case


@pytest.mark.parametrize("seed", range(3))
def test_narrow_equals_the_reference_bit_for_bit(module, seed, device):
    rng = np.random.default_rng(seed)
    rows = 4
    vocab = int(rng.integers(2, 6000))
    weights = random_weights((rows, vocab), device, float(rng.uniform(0.1, 6)))
    lowest = torch.from_numpy(rng.choice([0.0, 0.001, 0.1], rows) * WEIGHT_ONE).float().to(device)
    top_k = torch.from_numpy(rng.choice([0, 1, 50, 1000], rows)).to(device)
    top_p = torch.from_numpy(rng.choice([0.1, 0.9, 0.999, 1.0], rows)).to(device)
    reference = importlib.import_module("servd.worker.sample.ops.reference")
    assert torch.equal(
        module.filter_top_k_top_p(weights, lowest, top_k, top_p),
        reference.filter_top_k_top_p(weights, lowest, top_k, top_p),
    )


# ---- draw ----


def exact_draw(weights: list[float], lowest: float, seed: int, position: int) -> int:
    """The inverse of the cumulative distribution, in Python's integers."""
    integers = [int(w) if w >= lowest else 0 for w in weights]
    target = int(uniform(seed, position) * float(sum(integers)))
    return int(np.searchsorted(np.cumsum(integers, dtype=np.int64), target, side="right"))


def uniform(seed: int, position: int) -> float:
    """splitmix64 on Python's integers."""

    def splitmix64(state: int, index: int) -> int:
        z = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return (splitmix64(splitmix64(seed % 2**64, 0), position) >> 11) / 2**53


@each_shape
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_draw_equals_the_definition(module, shape, scale, device):
    weights = random_weights((1, shape[1]), device, scale)
    seeds = torch.tensor([0, -(2**63), 2**63 - 1, 5, 6, 7], device=device)
    positions = torch.tensor([0, 1, 2**31, 3, 99, 12345], device=device)
    lowest = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 1.0], device=device) * WEIGHT_ONE
    got = module.draw(weights.repeat(6, 1), lowest, seeds, positions)
    rows = zip(got.tolist(), lowest.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    row = weights[0].tolist()
    for token, low, seed, position in rows:
        assert token == exact_draw(row, low, seed, position)
        assert row[token] >= max(low, 1)


@pytest.mark.parametrize("u, token", [(0.0, 2), (1 - 2.0**-53, 4)])
def test_draws_at_0_and_1_give_the_first_and_last_token(monkeypatch, u, token):
    reference = importlib.import_module("servd.worker.sample.ops.reference")
    monkeypatch.setattr(
        reference, "uniform", lambda seeds, _: torch.full(seeds.shape, u, dtype=torch.float64)
    )
    weights = torch.tensor([[0.0, 0.0, 5.0, WEIGHT_ONE, 1.0, 0.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert reference.draw(weights, torch.zeros(1), zero, zero).tolist() == [token]


def test_draw_from_the_largest_vocabulary(module: Any, device: torch.device):
    """The sum of the integers does not overflow."""
    weights = torch.full((2, MAX_VOCAB_SIZE), WEIGHT_ONE, device=device)
    numbers = torch.tensor([3, 4], device=device)
    got = module.draw(weights, torch.zeros(2, device=device), numbers, numbers)
    assert got.tolist() == [int(uniform(n, n) * MAX_VOCAB_SIZE) for n in (3, 4)]


# ---- score ----


@each_shape
def test_scores_equal_float64(module: Any, shape, device: torch.device):
    logits = random_logits(shape, device)
    logits[:, 1] = -torch.inf
    token_ids = torch.arange(shape[0], device=device)
    log_totals, ranks = module.score(logits, token_ids)
    exact = logits.double()
    torch.testing.assert_close(log_totals.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert (
        ranks.tolist() == ((exact > exact.gather(1, token_ids.unsqueeze(1))).sum(-1) + 1).tolist()
    )


def test_cuda_has_triton():
    pytest.importorskip("triton")
    assert ops.for_device(torch.device("cuda")) is importlib.import_module(
        "servd.worker.sample.ops.triton"
    )
