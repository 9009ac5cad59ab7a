"""GPTQ: products with the inputs that it was shown, against float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from servd.worker.calibration.gptq import correct_drift, quantize

SIZE = 48


def made(rows: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix, and inputs [n, size] whose numbers go together, some far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, size, generator=generator)
    mixed = torch.randn(size // 2, size, generator=generator)
    x = torch.randn(1000, size // 2, generator=generator) @ mixed
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    return weight, x * 4.0 ** torch.randn(size, generator=generator)


def products(y: Tensor, x: Tensor) -> Tensor:
    """Sums of y^T x over halves."""
    return torch.stack([a.t() @ b for a, b in zip(y.chunk(2), x.chunk(2), strict=True)])


def error(weight: Tensor, other: Tensor, x: Tensor) -> float:
    """Of products with x, over their size; in float64."""
    exact = x.double() @ weight.double().t()
    return float((x.double() @ other.double().t() - exact).norm() / exact.norm())


def nearest(weight: Tensor, group_size: int, max_code: int) -> Tensor:
    """Rounded to nearest, between the least and the largest number of a group, in float64."""
    groups = weight.double().unflatten(1, (-1, group_size))
    low = groups.amin(2, keepdim=True)
    high = groups.amax(2, keepdim=True)
    scale = (high - low) / max_code
    return (((groups - low) / scale).round() * scale + low).flatten(1)


@pytest.mark.parametrize(("bits", "times"), [(4, 3.0), (8, 1.5)], ids=str)
def test_products_are_better_than_with_the_nearest_numbers(bits: int, times: float):
    weight, x = made(40, 192)
    codes = quantize(weight, products(x, x), bits, 32)
    simple = error(weight, nearest(weight, 32, (1 << bits) - 1), x)
    assert error(weight, codes.dequantize(), x) < simple / times


def test_gptq_rounds_to_nearest_for_independent_inputs():
    weight, _ = made(16, 64)
    codes = quantize(weight, torch.eye(64).expand(2, -1, -1), 4, 32)
    grid = torch.arange(-8.0, 8.0) * codes.scale[..., None]
    distance = weight.view(16, 2, 32, 1) - grid[:, :, None]
    got = codes.dequantize().view(16, 2, 32)
    best = grid[:, :, None].expand_as(distance).gather(3, distance.abs().argmin(3, keepdim=True))
    assert torch.equal(got, best.squeeze(3))
    assert error(weight, got.flatten(1), torch.eye(64)) < 0.1


def test_numbers_of_the_format_are_exact_in_its_types():
    weight, x = made(20, 64)
    weight[3] = 0
    weight[4, :32] = 0.37
    weight[5] *= 1e-6
    for bits in (4, 8):
        codes = quantize(weight, products(x, x), bits, 32)
        assert torch.equal(codes.codes, codes.codes.round()) and codes.codes.min() >= 0
        assert codes.codes.max() < 1 << bits
        assert torch.equal(codes.scale, codes.scale.bfloat16().float())
        assert bool((codes.scale != 0).all()) and bool(codes.dequantize().isfinite().all())
        assert torch.equal(codes.dequantize()[3], torch.zeros(64))
        assert error(weight[4:6], codes.dequantize()[4:6], x) < 0.1


def test_inputs_that_never_come_do_not_matter():
    weight, x = made(8, 64)
    x[:, 7] = 0
    changed = weight.clone()
    changed[:, 7] = weight[:, 6]
    assert error(weight, quantize(changed, products(x, x), 4, 32).dequantize(), x) < 0.1


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch):
    weight, x = made(24, 64)
    whole = quantize(weight, products(x, x), 4, 32).dequantize()
    monkeypatch.setattr("servd.worker.calibration.gptq.ROWS", 10)
    assert (quantize(weight, products(x, x), 4, 32).dequantize() - whole).abs().mean() < 1e-3


def test_it_makes_up_for_inputs_that_have_changed():
    weight, y = made(16, 64)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    x = y + 0.3 * y.std(0) * noise
    exact = y.double() @ weight.double().t()

    def distance(drift: Tensor | None) -> float:
        rounded = quantize(weight, products(x, x), 8, 32, drift).dequantize()
        return float((x.double() @ rounded.double().t() - exact).norm() / exact.norm())

    assert distance(products(y - x, x)) < 0.9 * distance(None)


Draw = Callable[..., Tensor]
# What a matrix was made for, and how that has changed.
CHANGES: dict[str, Callable[[Tensor, Draw], tuple[Tensor, Tensor]]] = {
    "not at all": lambda y, _: (y, y),
    "less noise": lambda y, draw: (y + 0.2 * draw(*y.shape), y),
    "more noise": lambda y, draw: (y, y + 0.2 * draw(*y.shape)),
    "by a rule": lambda y, draw: (y, y + 0.1 * y @ draw(SIZE, SIZE) / SIZE**0.5),
    "in two directions": lambda y, draw: (y, y + 0.01 * y @ draw(SIZE, 2) @ draw(2, SIZE)),
}


@pytest.mark.parametrize("per_column", [0.5, 1, 2, 5, 20])
@pytest.mark.parametrize("kind", CHANGES)
def test_gptq_generalizes_to_new_inputs(kind, per_column):
    """Least squares alone are 1.7 times as far off as nothing with one input for two columns, and
    1.09 times with five for each, where there is only noise."""
    num_shown = int(per_column * SIZE)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator)
        weight = draw(32, SIZE)
        mixed = draw(SIZE, SIZE) / SIZE**0.5
        y, x = CHANGES[kind](draw(num_shown + 2000, SIZE) @ mixed, draw)
        moments = products(x[:num_shown], x[:num_shown])
        drift = products((y - x)[:num_shown], x[:num_shown])
        change = correct_drift(weight, moments, drift)
        exact = y[num_shown:] @ weight.t()
        before, after = (
            float((x[num_shown:] @ candidate.t() - exact).norm())
            for candidate in (weight, weight + change)
        )
        by_chance = 1.02 if per_column < 1 else 1.005  # halves of 12 inputs may agree
        assert after <= by_chance * before, (seed, after / before)
        if kind == "by a rule" and per_column >= 1:
            assert after < 0.5 * before
