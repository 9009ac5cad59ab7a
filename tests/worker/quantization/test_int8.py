"""8 bits made while loading: of turned rows, by every instruction set that this CPU has."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from servd.checkpoint import quantization_config
from servd.worker.layers import packed
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.packed import PackedMatrix
from servd.worker.loading import model_loader
from servd.worker.ops import native
from servd.worker.quantization import int8
from tests.worker.cpu_kernels import EXACT_SUMS, INTEGER_SUMS, forced
from tests.worker.driver import Driver, config_for

SIZES = (1, 2, 3, 64, 100, 576, 2500)


@pytest.fixture(params=native.CAPABILITIES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from forced(request.param, monkeypatch)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", SIZES)
def test_turned_rows_have_the_same_products_and_can_be_turned_back(size: int):
    x = random(5, size)
    w = random(7, size)
    turned = packed.spread(x)
    products = turned.double() @ packed.spread(w).double().T
    torch.testing.assert_close(products, x.double() @ w.double().T, rtol=0, atol=1e-5 * size**0.5)
    torch.testing.assert_close(packed.spread(turned, is_inverse=True), x, rtol=0, atol=1e-5)
    assert torch.equal(packed.spread(x[3:4]), turned[3:4])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", SIZES[3:])
@pytest.mark.parametrize("start", [0, -1, 40], ids=str)
def test_what_is_large_in_one_place_or_everywhere_is_spread(size: int, start: int):
    x = torch.stack([torch.zeros(size), torch.ones(size), torch.arange(size) % 2 * 2.0 - 1])
    x[0, start] = 1
    turned = packed.spread(x)
    peaks = turned.abs().amax(1) / turned.square().mean(1).sqrt()
    assert bool((peaks < 6).all())  # of its root mean square


def test_all_instruction_sets_turn_to_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    results = []
    for name in native.CAPABILITIES:
        monkeypatch.setenv(native.SWITCH, name)
        native.library.cache_clear()
        if native.library() is not None:
            results.append(packed.spread(random(4, 2500)))
    native.library.cache_clear()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
def test_few_large_activations_leave_the_others_exact(x_dtype: torch.dtype):
    weight = random(50, 576)
    x = random(9, 576)
    x[:, [5, 300]] *= 50
    weight[:, [5, 300]] /= 50  # as models have it: what is large is multiplied with small numbers
    form = int8.quantize(weight, x_dtype)
    expected = x.double() @ weight.double().T
    error = (form.multiply(x, None) - expected).norm() / expected.norm()
    rounded = (weight / (scale := weight.abs().amax(1) / 127)[:, None]).round().to(torch.int8)
    plain = PackedMatrix(rounded, scale, x_dtype).multiply(x, None) - expected
    assert error < 0.06
    if x_dtype == torch.int8 and native.loaded_library().name in INTEGER_SUMS:
        assert plain.norm() > 0.1 * expected.norm()
    rows = form.rows(torch.tensor([49, 3]))
    assert (rows - weight[[49, 3]]).norm() < 0.01 * weight[[49, 3]].norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1025, 4099, 16384])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.int8], ids=str)
def test_the_largest_sums_are_those_of_integers(size: int, x_dtype: torch.dtype):
    """Codes and activations at their ends, of one sign or of both."""
    codes = torch.tensor([[-128], [127]]).expand(2, size).contiguous()
    codes = torch.cat([codes, 127 - 255 * (torch.arange(size) % 2).unsqueeze(0)])
    x = torch.tensor([[127], [-127]]).expand(2, size).contiguous()
    x = torch.cat([x, 127 - 254 * (torch.arange(size) % 2).unsqueeze(0)])
    form = PackedMatrix(codes.to(torch.int8), torch.ones(3), x_dtype)
    error = form.multiply(x.float(), None).double() - x @ codes.T
    sums_integers = EXACT_SUMS if x_dtype == torch.float32 else INTEGER_SUMS
    rounded = 1e-6 if native.loaded_library().name in sums_integers else 2**-24 * size
    assert bool((error.abs() <= rounded * 127 * 128 * size).all())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_activations_are_rounded_where_it_was_asked_for_rounded_weights(tiny_llama, quantization):
    def num_terms(**options: str) -> set[int]:
        config = config_for(tiny_llama, block_size=16, quantization=quantization, **options)
        parameters = Driver(config).worker.runner.model.named_parameters()
        return {w.quant_method.num_terms for _, w in parameters if isinstance(w, Matrix)}

    if native.library() is None:
        pytest.skip("no compiled kernels: activations are float32 with torch's products")
    assert num_terms() == num_terms(cpu_activation_dtype="int8") == {1}
    assert num_terms(cpu_activation_dtype="float32") == {packed.EXACT_TERMS}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, torch.float32),
        ({"quantization": "int8"}, torch.bfloat16),
        ({"quantization": "int4"}, torch.bfloat16),
        ({"quantization": "int8", "cpu_activation_dtype": "float32"}, torch.float32),
        ({"quantization": "int8", "dtype": "float16"}, torch.float16),
        ({"quantization": "int8", "kv_cache_dtype": "float16"}, torch.float16),
    ],
    ids=str,
)
def test_keys_and_values_have_16_bits_where_activations_are_rounded(tiny_llama, options, expected):
    config = config_for(tiny_llama, block_size=16, **{"dtype": "float32", **options})
    runner = Driver(config).worker.runner
    assert {cache.dtype for cache in runner.kv_caches} == {expected}


def test_activations_stay_exact_with_a_checkpoint_that_is_quantized(tiny_llama: Path):
    got = {
        name: model_loader.quant_method_maker(torch.float32, None, str(tiny_llama), name).x_dtype
        for name in ("auto", "float32", "int8")
    }
    assert got == {"auto": torch.float32, "float32": torch.float32, "int8": torch.int8}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_stay_none(broken: float):
    weight = random(4, 64)
    weight[2, 5] = broken
    products = int8.quantize(weight).multiply(torch.ones(1, 64), None)
    assert products[0].isfinite().tolist() == [True, True, False, True]


def test_activations_are_rounded_for_gguf_as_by_its_other_readers(tmp_path: Path):
    quantized = {
        "model_type": "llama",
        "quantization_config": {"quant_method": "gguf", "has_blocks": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert quantization_config.rounds_activations("auto", None, str(tmp_path))
    assert not quantization_config.rounds_activations("float32", None, str(tmp_path))
