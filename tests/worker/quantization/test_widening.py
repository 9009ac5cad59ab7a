"""Quantized checkpoints on a device that runs Triton: memory while loading, and widened weights."""

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from servd.base import plugins
from servd.base.cards import Card
from servd.checkpoint.model_spec import read_spec
from servd.worker.device.parallel import Parallel
from servd.worker.layers import _matrix
from servd.worker.layers._matrix import MakeQuantMethod, Matrix, quant_method_of
from servd.worker.layers.cuda_matrix import Fp8Matrix, TiledExperts, TiledMatrix
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.quantized import Quantized, QuantizedMatrix
from servd.worker.layers.weight_stack import WeightStack
from servd.worker.loading.model_loader import (
    build_model,
    count_bytes,
    load_weights,
    quant_method_maker,
)
from servd.worker.ops import target
from servd.worker.runner.compile import compile_layers
from servd.worker.runner.dry_run import Weightless
from servd.worker.runner.model_runner import ModelRunner
from tests.worker.driver import config_for
from tests.worker.quantization import checkpoints
from tests.worker.quantization.test_nvfp4 import COMPRESSED, compressed

SIZE = 256
NF4 = tuple(float(torch.linspace(-1, 1, 16)[i] ** 3) for i in range(16))  # no even grid


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "runs_triton", lambda device: True)


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, key, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def nf4(num_rows: int, size: int = SIZE) -> Quantized:
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(16, (num_rows, size), generator=generator, dtype=torch.uint8)
    scale = torch.rand(num_rows, size // 64, generator=generator)
    return Quantized(codes, scale, None, 64, NF4)


def make(widening: str) -> MakeQuantMethod:
    return MakeQuantMethod(lambda _: None, widening=widening)


def load(widening: str, count: int = 8) -> list[Matrix]:
    matrices = [Matrix((2 * SIZE, SIZE), Parallel(), parts=[SIZE, SIZE]) for _ in range(count)]
    for matrix in matrices:
        for part in range(2):
            matrix.load(nf4(SIZE), part)
        matrix.process_weights(make(widening))
    return matrices


def test_the_16_bit_form_takes_no_memory_before_it_is_needed():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Live() as live:
            matrices = load("never")
    finally:
        torch.set_default_dtype(torch.float32)
    kept = sum(matrix.num_bytes for matrix in matrices)
    assert sum(live.sizes.values()) <= kept + 4096
    assert live.peak <= kept + 2 * (2 * SIZE * SIZE * 2)


def test_widened_weights_are_the_dequantized_ones():
    [matrix] = load("auto", 1)
    expected = torch.cat([nf4(SIZE).dequantize()] * 2)
    assert matrix.quant_method is None and torch.equal(matrix.data, expected)
    with pytest.raises(ValueError, match="come twice"):
        matrix.load(nf4(SIZE), 0)
    x = torch.randn(3, SIZE)
    assert torch.equal(matrix.product(x), x @ expected.t())


def test_widened_experts_share_the_memory_of_their_stack():
    stack = WeightStack(2)
    for number in range(2):
        matrix = Matrix((SIZE, SIZE), Parallel())
        matrix.place = stack, number
        matrix.load(nf4(SIZE))
        matrix.process_weights(make("auto"))
        assert matrix.data_ptr() == stack.tensors["weight"][number].data_ptr()
    expected = nf4(SIZE).dequantize()
    assert torch.equal(stack.tensors["weight"], torch.stack([expected, expected]))


def test_rounded_experts_leave_no_16_bit_form_in_their_stack():
    stack = WeightStack(2)
    matrix = Matrix((SIZE, SIZE), Parallel())
    matrix.place = stack, 0
    matrix.load(torch.randn(SIZE, SIZE))
    matrix.process_weights(MakeQuantMethod(lambda weight: QuantizedMatrix(nf4(SIZE), torch.float)))
    assert "weight" not in stack.tensors


def test_a_format_without_a_kernel_is_named_once(caplog: pytest.LogCaptureFixture):
    _matrix._log_once.cache_clear()
    for _ in range(2):
        assert isinstance(quant_method_of(nf4(8), torch.float32, widening="never"), QuantizedMatrix)
    [record] = caplog.records
    assert "4 bits in groups of 64" in record.getMessage() and "20 times" in record.getMessage()


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_8_bit_floats_with_a_scale_per_row_are_multiplied_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
):
    monkeypatch.setattr(target, "capability", lambda device: capability)
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    quantized = Quantized(codes, torch.rand(32, 1) + 0.5, None, 64)
    matrix = Matrix((32, 64), Parallel())
    matrix.load(quantized)
    matrix.process_weights(make("auto"))
    method = matrix.quant_method
    assert isinstance(method, Fp8Matrix if capability == (9, 0) else TiledMatrix)
    if capability < (9, 0):
        return
    x = torch.randn(5, 64).bfloat16()
    bias = torch.randn(32).bfloat16()
    expected = x.double() @ quantized.dequantize().double().t() + bias.double()
    terms = x.double().abs() @ quantized.dequantize().double().abs().t() + 1
    error = (method.multiply(x, bias).double() - expected).abs()
    assert (error <= (2.0**-4 + 2.0**-7) * terms).all()


@pytest.mark.parametrize(("memory", "widening"), [(1 << 40, "auto"), (1000, "never")])
def test_auto_widens_only_what_fits(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, widening: str
):
    checkpoints.write(tiny_qwen, tmp_path, {"quant_method": "awq"}, lambda stem, weight: None)
    monkeypatch.setattr(target, "card_of", lambda device: Card(memory=memory))
    config = config_for(tmp_path)
    spec = read_spec(tmp_path)
    model = build_model(spec, torch.float16, torch.device("cpu"), Parallel())
    runner = SimpleNamespace(config=config, spec=spec, model=model, device=torch.device("cpu"))
    assert ModelRunner._widening(runner) == widening  # type: ignore[arg-type]


@pytest.mark.parametrize("widening", ["auto", "always", "never"])
def test_a_model_multiplies_its_weights_as_they_are_stored(
    tiny_qwen: Path, tmp_path: Path, widening: str
):
    meant = checkpoints.write(tiny_qwen, tmp_path, COMPRESSED, compressed)
    cpu = torch.device("cpu")
    spec = read_spec(tmp_path)
    model = build_model(spec, torch.float32, cpu, Parallel())
    maker = quant_method_maker(torch.float32, None, str(tmp_path), widening=widening)
    load_weights(model, str(tmp_path), lambda _: None, maker)
    with Weightless(cpu):
        planned = build_model(spec, torch.float32, cpu, Parallel())
        load_weights(planned, str(tmp_path), lambda _: None, maker)
    assert count_bytes(planned) == count_bytes(model)
    weight = dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(weight.quant_method, TiledMatrix) == (widening != "always")
    x = torch.randn(3, weight.part_shapes[0][1])
    expected = x.double() @ meant["model.layers.0.mlp.down_proj.weight"].double().t()
    torch.testing.assert_close(weight.product(x).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounded_weights_use_the_same_kernel(name: str):
    weight = torch.randn(40, 64)
    method = plugins.load("servd.worker.quantization", name, "quantize")(weight)
    assert isinstance(method, TiledMatrix)
    x = torch.randn(3, 64)
    error = method.multiply(x, None) - x @ weight.t()
    assert error.abs().max() < {"int8": 0.3, "int4": 3.0}[name]


def test_compiled_layers_leave_the_kernel_out(monkeypatch: pytest.MonkeyPatch):
    for packed in (TiledMatrix, TiledExperts):
        monkeypatch.setattr(packed, "multiply", packed.multiply)  # restored afterwards
    linear = ReplicatedLinear(SIZE, SIZE, Parallel(), bias=False)
    weight = Quantized(torch.ones(SIZE, SIZE, dtype=torch.int8), torch.ones(SIZE, 1), None, SIZE)
    linear.weight.load(weight)
    linear.weight.process_weights(make("auto"))
    model = nn.ModuleDict({"layers": nn.ModuleList([linear])})
    x = torch.randn(3, SIZE)
    expected = linear(x)
    compile_layers(model, backend="eager")  # type: ignore[arg-type]
    assert torch.equal(linear(x), expected)
