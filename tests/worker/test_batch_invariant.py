"""--batch-invariant: logits of a request have the same bits whatever else is in its steps."""

import importlib
from pathlib import Path

import pytest
import torch

from servd.base.errors import ConfigError
from servd.worker import worker as worker_module
from servd.worker.attention import AttentionSpec
from servd.worker.attention.triton import TritonBackend
from servd.worker.runner.batch_invariant import make_batch_invariant
from tests.worker.cpu_kernels import forced
from tests.worker.driver import Driver, config_for
from tests.worker.recorded import write_config

pytest.importorskip("triton")
PROMPTS = [[5, 6, 7], [9] * 40, [1, 2], list(range(70))]


@pytest.fixture(autouse=True)
def no_cpu_kernels(monkeypatch: pytest.MonkeyPatch):
    """As on CUDA: matrices are tensors."""
    yield from (None for _ in forced("off", monkeypatch))


def driver_for(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Driver:
    """As on CUDA, with Triton's interpreter."""
    load = worker_module.CPUModelRunner.load_model

    def load_model(self, progress):
        load(self, progress)
        make_batch_invariant(self)

    monkeypatch.setattr(worker_module.CPUModelRunner, "load_model", load_model)
    return Driver(config_for(folder, load_format="dummy", **options))


@pytest.mark.usefixtures("exact_dot")
def test_logits_are_the_same_to_the_bit_alone_and_among_others(tmp_path, device, monkeypatch):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if reason := TritonBackend.supports(AttentionSpec(4, 2, 16, 16, None, dtype, dtype, device)):
        pytest.skip(reason)
    from servd.worker.ops.triton import paged_attention

    monkeypatch.setattr(paged_attention, "MIN_SPLIT", 32)  # so that the long ones are split
    folder = write_config(tmp_path, num_hidden_layers=1, head_dim=16)
    options = {"attention_backend": "triton", "block_size": 16}
    if device.type == "cpu":
        driver = driver_for(folder, monkeypatch, **options)
    else:
        options |= {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16"}
        driver = Driver(config_for(folder, batch_invariant=True, **options))
    together = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(together, 3)
    for slot, prompt in zip(together, PROMPTS, strict=True):
        alone = driver.add(prompt)
        driver.generate([alone], 3)
        assert driver.outputs(alone) == driver.outputs(slot)
        assert torch.equal(torch.stack(driver.logits[alone]), torch.stack(driver.logits[slot]))
        driver.free(alone)


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_equals_float64_and_its_rows_are_those_of_fewer(bias, device, load_module):
    load_module("servd.worker.ops", "triton")  # or skip
    product = importlib.import_module("servd.worker.ops.triton.product").product
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, 2 * 100, generator=generator).to(device)[:, :100]  # a slice of columns
    weight = torch.randn(70, 100, generator=generator).to(device)
    biases = torch.randn(70, generator=generator).to(device)
    bias_or_none = biases if bias else None
    whole = product(x, weight, bias_or_none)
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias_or_none is None else bias_or_none.double()
    )
    torch.testing.assert_close(whole.double(), exact, atol=1e-4, rtol=0)
    for rows in (slice(0, 1), slice(63, 66), slice(129, 130)):
        assert torch.equal(product(x[rows], weight, bias_or_none), whole[rows])
    assert product(x[:0], weight, bias_or_none).shape == (0, 70)


def test_what_depends_on_the_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="attention backend torch_sdpa depends on the batch"):
        driver_for(write_config(tmp_path), monkeypatch, attention_backend="torch_sdpa")
