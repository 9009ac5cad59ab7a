"""4 bits made while loading: the nearest of 16 numbers, matrix by matrix, in recorded steps."""

from pathlib import Path

import pytest
import torch

from servd.base.errors import ConfigError
from servd.worker.layers._matrix import Matrix
from servd.worker.loading import model_loader
from servd.worker.ops import native
from servd.worker.quantization.int4 import quantize
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from tests.worker.cpu_kernels import forced
from tests.worker.driver import Driver, config_for


@pytest.mark.parametrize("shape", [(8, 64), (1030, 100), (3, 5)], ids=str)
def test_each_weight_becomes_one_of_16_numbers_near_it(shape: tuple[int, int]):
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(shape, generator=generator)
        * 10.0 ** torch.arange(-3, 2).repeat(shape[0])[: shape[0], None].float()
    )
    weight[1] = 0.25
    rounded = quantize(weight).rows(torch.arange(shape[0]))
    for start in range(0, shape[1], 32):
        group = weight[:, start : start + 32]
        got = rounded[:, start : start + 32]
        size = group.amax(1, keepdim=True) - group.amin(1, keepdim=True)
        # A step, and what scale and offset lose in 16 bits.
        limit = size / 15 + 2.0**-8 * (size + group.abs().amax(1, keepdim=True))
        assert bool(((got - group).abs() <= limit).all())
        assert all(len(set(row.tolist())) <= 16 for row in got)


def test_int4_error_is_below_min_max_rounding():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    groups = weight.double().view(64, 16, 32)
    low = groups.amin(2, keepdim=True)
    high = groups.amax(2, keepdim=True)
    simple = ((groups - low) * 15 / (high - low)).round() * (high - low) / 15 + low
    got = quantize(weight).rows(torch.arange(64)).double().view(64, 16, 32)
    assert (got - groups).norm() < 0.95 * (simple - groups).norm()


def fit_once_more(
    groups: torch.Tensor, counts: torch.Tensor, rounded: torch.Tensor
) -> torch.Tensor:
    """The least-squares line through a group's numbers over its own codes; float64."""
    low = rounded.amin(-1, keepdim=True)
    steps = rounded - low
    shares = counts / counts.sum(-1, keepdim=True)
    centre = (steps * shares).sum(-1, keepdim=True)
    mean = (groups * shares).sum(-1, keepdim=True)
    deviations = steps - centre
    slope = (deviations * shares * groups).sum(-1, keepdim=True)
    slope /= (deviations.square() * shares).sum(-1, keepdim=True)
    return mean + slope * deviations


@pytest.mark.parametrize("switch", native.CAPABILITIES)
@pytest.mark.parametrize("is_weighed", [False, True])
def test_scales_are_fitted_to_their_codes(switch: str, is_weighed: bool, monkeypatch):
    """A better scale and offset for the chosen codes would gain almost nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 96, generator=generator)
    weight[7] = 0.25
    importance = torch.rand(96, generator=generator) if is_weighed else None
    for _ in forced(switch, monkeypatch):
        rounded = quantize(weight, importance=importance).rows(torch.arange(300))
    assert torch.equal(rounded[7], weight[7])
    groups = weight.double().view(-1, 32)
    fitted = rounded.double().view(-1, 32)
    counts = torch.ones(96) if importance is None else importance
    counts = counts.double().repeat(300).view(-1, 32)
    is_varied = fitted.amax(1) > fitted.amin(1)
    groups = groups[is_varied]
    fitted = fitted[is_varied]
    counts = counts[is_varied]
    best = fit_once_more(groups, counts, fitted)
    errors = [(counts * (values - groups).square()).sum() for values in (fitted, best)]
    assert errors[1] <= errors[0] <= 1.03 * errors[1]


def test_without_kernels_it_says_what_to_do(monkeypatch):
    for _ in forced("off", monkeypatch):
        with pytest.raises(ConfigError, match="needs servd.s CPU kernels"):
            quantize(torch.ones(8, 64))


def test_the_table_of_the_vocabulary_has_8_bits(tiny_llama: Path):
    driver = Driver(config_for(tiny_llama, quantization="int4", block_size=16))
    forms = {
        name: w.quant_method
        for name, w in driver.worker.runner.model.named_parameters()
        if isinstance(w, Matrix)
    }
    tables = {name for name in forms if "embed" in name or "lm_head" in name}
    other = type(quantize(torch.ones(64, 64)))
    assert len(tables) == 2 and {n for n, f in forms.items() if type(f) is not other} == tables


@pytest.mark.parametrize("switch", native.CAPABILITIES)
def test_outputs_are_close_to_those_without(tiny_llama, switch, monkeypatch):
    for _ in forced(switch, monkeypatch):
        logits = []
        for quantization in (None, "int4"):
            driver = Driver(config_for(tiny_llama, quantization=quantization, block_size=16))
            slot = driver.add([5, 17, 99, 200, 31, 8, 44, 3])
            driver.generate([slot], 3)
            logits.append(torch.stack(driver.logits[slot][:1]).log_softmax(-1))
            runner = driver.worker.runner
            if switch != "off":
                assert isinstance(runner, CPUModelRunner) and runner.graphs is not None
                assert runner.graphs.is_recordable and runner.graphs.graphs
        divergence = torch.nn.functional.kl_div(*reversed(logits), log_target=True, reduction="sum")
        assert 0 < divergence < 0.1


def test_a_matrix_takes_its_form_before_the_next_is_read(tiny_llama, monkeypatch):
    """Or the whole model would be there in the checkpoint's type first."""
    unformed = []
    load = Matrix.load

    def spy(self: Matrix, *args: object) -> None:
        load(self, *args)  # type: ignore[arg-type]
        model = driver_model[0]
        unformed.append(
            sum(
                isinstance(w, Matrix)
                and w.quant_method is None
                and len(w.missing) < len(w.part_shapes)
                for _, w in model.named_parameters()
            )
        )

    driver_model = []
    build = model_loader.build_model
    monkeypatch.setattr(
        model_loader,
        "build_model",
        lambda *args: driver_model.append(build(*args)) or driver_model[0],
    )
    monkeypatch.setattr(Matrix, "load", spy)
    Driver(config_for(tiny_llama, quantization="int4"))
    assert unformed and max(unformed) <= 3  # one layer's: q, k, v and gate, up come in any order
