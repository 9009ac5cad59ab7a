"""fp8 weights: products within the rounding of both factors, and outputs close to exact ones."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import kl_div

from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint.hub import DEMO_FOLDER
from servd.worker.ops import target
from servd.worker.quantization.fp8 import CPU_TORCH, quantize, round_rows
from tests.worker.driver import Driver, config_for

ROUNDING = 2.0**-4  # the most for a number of e4m3
needs_cpu_products = pytest.mark.skipif(
    torch.__version__ < CPU_TORCH, reason=f"torch {CPU_TORCH} has products of fp8 on a CPU"
)


@pytest.fixture
def fp8_device(device: torch.device) -> torch.device:
    """A device on which this torch multiplies 8-bit floats."""
    if device.type == "cpu" and torch.__version__ < CPU_TORCH:
        pytest.skip(f"torch {CPU_TORCH} has products of fp8 on a CPU")
    return device


def test_products_are_exact_but_for_the_rounding_of_both_factors(fp8_device: torch.device):
    device = fp8_device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(device, torch.bfloat16)
    # Outputs of very different sizes: each has its own scale.
    weight = torch.randn(48, 64, generator=generator) * 10.0 ** torch.linspace(-4, 4, 48)[:, None]
    weight = weight.to(device, torch.bfloat16)
    bias = torch.ones(48, device=device, dtype=torch.bfloat16)
    form = quantize(weight)
    assert form is not None and form.nbytes == 48 * 64 + 48 * 4
    exact = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    got = form.multiply(x, bias)
    assert got.dtype == torch.bfloat16
    assert (
        (got.double() - 1 - exact).abs() <= 2 * ROUNDING * terms + 2.0**-8 * (1 + exact.abs())
    ).all()
    index = torch.tensor([3, 40, 3], device=device)
    assert (
        (form.rows(index) - weight[index]).abs()
        <= ROUNDING * weight[index].abs() + 1e-3 * form.scale[index]
    ).all()


def test_tokens_do_not_share_a_scale(fp8_device: torch.device):
    device = fp8_device
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    form = quantize(torch.eye(32, device=device, dtype=torch.bfloat16))
    assert form is not None
    alone = form.multiply(x[:1], None)
    assert torch.equal(form.multiply(torch.cat([x[:1], 1000 * x[1:]]), None)[:1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (7, 100), (3, 2100)], ids=str)
def test_the_kernel_rounds_as_torch_does(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    load_module: Callable[[str, str], Any],
):
    load_module("servd.worker.ops", "triton")
    from servd.worker.ops.triton.round_rows import round_rows as fused

    numbers = torch.randn(shape[0], shape[1] + 5, generator=torch.Generator().manual_seed(2))
    x = (numbers * 10.0 ** torch.arange(shape[0])[:, None]).to(device, dtype)[
        :, :-5
    ]  # rows are apart
    if len(x):
        x[0] = 0
    # On a CPU: on a GPU torch multiplies by the reciprocal of 448.
    rounded, scale = (part.to(device) for part in round_rows(x.cpu()))
    got, got_scale = fused(x)
    assert (
        got.shape == rounded.shape and got.dtype == rounded.dtype and torch.equal(got_scale, scale)
    )
    got = got.float()
    rounded = rounded.float()
    certain = torch.ones_like(rounded, dtype=torch.bool)
    if (
        device.type == "cpu"
    ):  # the interpreter does not carry into the exponent, and cuts off below 2**-6
        certain = (rounded.abs().frexp().mantissa != 0.5) & (rounded.abs() > 2.0**-6)
        certain |= x == 0
    exact = x.float() / scale
    assert ((got - exact).abs() <= (rounded - exact).abs())[certain].all(), (
        "the nearest, of two equally near ones any"
    )
    assert certain.sum() >= 0.8 * certain.numel()


@needs_cpu_products
def test_sizes_that_cannot_be_multiplied_are_left_as_they_are():
    assert quantize(torch.zeros(48, 20)) is None and quantize(torch.zeros(20, 48)) is None


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    class OnCuda:
        device = torch.device("cuda")

    monkeypatch.setattr(target, "capability", lambda device: (8, 0))
    with pytest.raises(
        ConfigError,
        match=r"compute capability 9\.0 \(Hopper\) or later, not 8\.0: use --quantization int8",
    ):
        quantize(OnCuda())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=["weights", "cache"]
)
def test_outputs_are_close_to_those_without(tiny_llama, fp8_device, options):
    device = fp8_device
    logits = []
    for changed in ({}, options):
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        driver = Driver(
            config_for(tiny_llama, device=device.type, dtype=dtype, block_size=16, **changed)
        )
        slot = driver.add([5, 17, 99, 200, 31, 8, 44, 3])
        driver.generate([slot], 2)  # a prompt, and a step of one token
        logits.append(driver.logits[slot][0].log_softmax(-1).cpu())
        assert driver.logits[slot][1].isfinite().all()
    divergence = kl_div(logits[1], logits[0], log_target=True, reduction="sum")
    assert 0 < divergence < 3e-2


@needs_cpu_products
@pytest.mark.parametrize("source", ["tiny_llama", "tiny_gpt2", "demo"])
def test_fp8_on_a_cpu_gives_the_tokens_of_torch(source, tmp_path, request):
    """The CPU's kernels compute in float32, whatever the checkpoint is stored in."""
    folder = DEMO_FOLDER if source == "demo" else request.getfixturevalue(source)
    narrow = shutil.copytree(folder, tmp_path / "narrow")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    drivers = []
    for backend in ("auto", "torch_sdpa"):
        driver = Driver(
            config_for(
                narrow,
                dtype="bfloat16",
                block_size=16,
                quantization="fp8",
                attention_backend=backend,
            )
        )
        slots = [driver.add(list(range(5, 5 + n))) for n in (3, 17, 40)]
        driver.generate(slots, 12)
        assert all(row.isfinite().all() for slot in slots for row in driver.logits[slot])
        drivers.append(driver)
    native, reference = drivers
    for slot in slots:
        steps = zip(
            native.tokens[slot][-12:],
            reference.tokens[slot][-12:],
            native.logits[slot],
            reference.logits[slot],
            strict=True,
        )
        for got_token, wanted_token, got, expected in steps:
            # Another last bit of the attention may round an activation to the next number of e4m3.
            got = got.log_softmax(-1)
            expected = expected.log_softmax(-1)
            assert kl_div(got, expected, log_target=True, reduction="sum") < 3e-2
            if got_token != wanted_token:  # only where the two were about equally likely
                gap = expected[wanted_token] - expected[got_token]
                assert gap <= 2 * (got - expected).abs().max()
                break


FACTOR = 2.0**14  # keys and values of tiny models are about 1: beyond what e4m3 can hold


@pytest.fixture
def with_tensors(tiny_llama: Path, tmp_path: Path):
    """Makes a checkpoint of changed tensors."""

    def make(change) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def grow(tensors: dict[str, torch.Tensor]) -> None:
    """The same model with keys and values FACTOR times as large."""
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            tensor *= FACTOR
        if "q_proj" in name or "o_proj" in name:
            tensor /= FACTOR


def logits_of(folder: Path, kv_cache_dtype: str) -> torch.Tensor:
    """Logits of a prompt and of a step of one token."""
    config = config_for(
        folder, kv_cache_dtype=kv_cache_dtype, block_size=16, attention_backend="torch_sdpa"
    )
    driver = Driver(config)
    slot = driver.add([5, 17, 99, 200, 31, 8, 44, 3])
    driver.generate([slot], 2)
    return torch.stack(driver.logits[slot])


@pytest.mark.parametrize("names", ["{}_scale", "{0}_proj.{0}_scale", "attn.{}_scale"])
def test_scales_of_a_calibrated_checkpoint_are_used(tiny_llama: Path, with_tensors, names: str):
    def calibrated(tensors: dict[str, torch.Tensor]) -> None:
        grow(tensors)
        for layer in [
            name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")
        ]:
            tensors |= {layer + names.format(part): torch.tensor([FACTOR]) for part in "kv"}

    # Powers of two: every number in the cache is the same.
    torch.testing.assert_close(
        logits_of(with_tensors(calibrated), "fp8"), logits_of(tiny_llama, "fp8")
    )
    assert not torch.allclose(
        logits_of(with_tensors(grow), "fp8"), logits_of(tiny_llama, "fp8"), atol=0.1
    )


def test_scales_are_of_no_effect_on_a_wider_cache(tiny_llama: Path, with_tensors):
    folder = with_tensors(
        lambda tensors: tensors.update({"model.layers.0.self_attn.v_scale": torch.tensor(0.3)})
    )
    assert torch.equal(logits_of(folder, "auto"), logits_of(tiny_llama, "auto"))


@pytest.mark.parametrize("name", ["q_scale", "prob_scale", "attn.q_scale", "q_proj.q_scale"])
def test_scales_of_what_is_not_rounded_are_of_no_effect(tiny_llama, with_tensors, name: str):
    scale = {f"model.layers.0.self_attn.{name}": torch.tensor(0.3)}
    folder = with_tensors(lambda tensors: tensors.update(scale))
    assert torch.equal(logits_of(folder, "fp8"), logits_of(tiny_llama, "fp8"))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("self_attn.k_scale", [0.5, 0.5], r"k_scale has shape \[2\], expected one number"),
        ("self_attn.k_scale", [0.0], "has the value 0.0, expected a positive number"),
        ("mlp.k_scale", [0.5], "a tensor 'model.layers.0.mlp.k_scale'"),
        ("mlp.q_scale", [0.5], "a tensor 'model.layers.0.mlp.q_scale'"),
    ],
)
def test_other_scales_are_refused(with_tensors, name: str, value: list[float], reason: str):
    tensor = {f"model.layers.0.{name}": torch.tensor(value)}
    folder = with_tensors(lambda tensors: tensors.update(tensor))
    with pytest.raises(UnsupportedModel, match=reason):
        logits_of(folder, "fp8")
