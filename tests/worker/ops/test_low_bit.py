"""Products with packed weights of 4 and 8 bits, in Triton's interpreter, against exact ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from servd.worker.layers.cuda_matrix import Storage, TiledExperts, TiledMatrix
from servd.worker.layers.quantized import FP4, Quantized
from servd.worker.layers.weight_stack import WeightStack
from servd.worker.quantization.gguf import BLOCKS, IQ4_NL

UNSIGNED = tuple(map(float, range(16)))
SIGNED = tuple(map(float, range(-8, 8)))
ROW = 0  # a scale per row
# Name -> table or type of codes, group size, whether there are offsets.
FORMATS: dict[str, tuple[Any, int, bool]] = {
    "gptq": (SIGNED, 128, False),
    "zero points of a checkpoint": (tuple(value - 7 for value in UNSIGNED), 64, False),
    "awq": (UNSIGNED, 128, True),
    "own int4": (UNSIGNED, 32, True),
    "2 bits": (UNSIGNED, 16, True),
    "mxfp4": (FP4, 32, False),
    "mxfp4 of gguf": (BLOCKS["MXFP4"].table, 32, False),
    "nvfp4": (FP4, 16, False),
    "iq4_nl": (IQ4_NL, 32, False),
    "int8": (torch.int8, ROW, False),
    "q6_k": (torch.int8, 16, False),
    "q5_1": (torch.int8, 32, True),
    "int8 with zero points": (torch.int8, 128, True),
    "fp8": (torch.float8_e4m3fn, ROW, False),
    "fp8 blocks": (torch.float8_e4m3fn, 128, False),
    "fp8 groups": (torch.float8_e4m3fn, 64, False),
}


@pytest.fixture(autouse=True)
def _triton(load_module: Callable[[str, str], Any]) -> None:
    load_module("servd.worker.ops", "triton")


def quantized(name: str, shape: tuple[int, int] = (130, 200), seed: int = 0) -> Quantized:
    """A matrix whose scales differ by powers of ten between rows."""
    kind, group_size, has_offset = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    if isinstance(kind, tuple):
        codes = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    elif kind == torch.int8:
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    else:
        every = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
        codes = every[torch.randint(len(every), shape, generator=generator)].view(kind)
    size = group_size or shape[1]
    groups = -(-shape[1] // size)
    rows = 10.0 ** torch.linspace(-5, 3, shape[0])[:, None]
    scale = ((torch.rand(shape[0], groups, generator=generator) + 0.1) * rows).bfloat16()
    offset = None
    if has_offset:
        offset = -(torch.randint(16, scale.shape, generator=generator) * scale.float())
        scale = scale.float()
    return Quantized(codes, scale, offset, size, kind if isinstance(kind, tuple) else None)


def tiled(weight: Quantized) -> TiledMatrix:
    storage = Storage.of(weight)
    assert storage is not None
    return TiledMatrix(weight, storage)


def check(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Within the rounding of scales to 11 bits and of the result. `weight`: dequantized."""
    expected = x.double() @ weight.double().t() + bias.double()
    terms = x.double().abs() @ weight.double().abs().t()
    # An offset is as large as 16 times a scale, and both are rounded.
    error = (got.double() - expected).abs()
    assert (error <= 2.0**-10 * terms + 2.0**-10 * expected.abs() + 2.0**-24).all()


@pytest.mark.parametrize("num_rows", [1, 16, 20, 65])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_a_matrix(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch):
    if num_rows > 16:  # the largest tiles
        monkeypatch.setattr("servd.worker.ops.triton.low_bit.MIN_PROGRAMS", 1)
    weight = quantized(name)
    matrix = tiled(weight)
    x = torch.randn(num_rows, weight.shape[1] + 3)[:, :-3].half()
    x = x.float() if num_rows == 20 else x
    bias = torch.randn(weight.shape[0]).to(x.dtype)
    factor = 1.0 if num_rows == 20 else 2.0**-10  # float16's range
    weight = weight.dequantize() * factor
    matrix.tiles.factor.mul_(factor)
    got = matrix.multiply(x, bias)
    assert got.dtype == x.dtype and got.shape == (num_rows, len(weight))
    check(got, x, weight, bias)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_dequantized_ones(name: str):
    weight = quantized(name)
    index = torch.tensor([3, 129, 3, 64])
    expected = weight.dequantize()
    largest = expected.abs().amax(dim=1, keepdim=True)
    error = (tiled(weight).rows(index) - expected[index]).abs()
    assert (error <= 2.0**-11 * (expected.abs() + largest / 2)[index]).all()


def test_codes_take_as_many_bits_as_the_format():
    for name, bits in {"gptq": 4.25, "own int4": 5, "mxfp4": 4.5, "q6_k": 9, "fp8": 8}.items():
        weight = quantized(name, (128, 4096))
        assert tiled(weight).nbytes * 8 <= (bits + 0.02) * weight.codes.numel()


def test_scattered_columns_are_gathered():
    weight = quantized("gptq")
    columns = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    weight = weight.with_columns(columns)
    matrix = tiled(weight)
    x = torch.randn(5, weight.shape[1])
    check(matrix.multiply(x, None), x, weight.dequantize(), torch.zeros(1))
    torch.testing.assert_close(matrix.rows(torch.tensor([9])), weight.dequantize()[[9]])


@pytest.mark.parametrize(
    ("table", "group_size"),
    [(SIGNED, 24), (tuple(value**2 + 0.5 for value in UNSIGNED), 32)],
    ids=["odd groups", "odd table"],
)
def test_other_formats_have_no_kernel(table: tuple[float, ...], group_size: int):
    codes = torch.zeros(16, 48, dtype=torch.uint8)
    assert Storage.of(Quantized(codes, torch.ones(16, 2), None, group_size, table)) is None


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_gguf_have_a_kernel(name: str):
    """Their scales times factors become scales of float16."""
    block = BLOCKS[name]
    generator = torch.Generator().manual_seed(0)
    shape = (70, 512)
    end = 2 ** (block.num_bits - 1)
    codes = torch.randint(-end, end, shape, generator=generator, dtype=torch.int8)
    if block.table is not None:
        codes = codes.view(torch.uint8) & 15
    groups = (shape[0], shape[1] // block.group_size)
    scale = torch.randint(-128, 128, groups, generator=generator).to(block.scale_dtype)
    offset = scale.flip(0) if block.has_offset else None
    factors = None
    if block.scale_dtype == torch.int8:
        factors = torch.rand(70, 2 * (1 + block.has_offset), generator=generator).half() * 1e-5
    weight = Quantized(codes, scale, offset, block.group_size, block.table, factors=factors)
    x = torch.randn(3, 512)
    check(tiled(weight).multiply(x, None), x, weight.dequantize(), torch.zeros(1))


@pytest.mark.parametrize("name", ["awq", "mxfp4", "int8", "fp8 blocks", "q6_k"])
@pytest.mark.parametrize("counts", [[0, 3, 0, 17, 1, 0], [64, 0, 70, 130, 70, 60]], ids=str)
def test_products_of_experts(name: str, counts: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("servd.worker.ops.triton.low_bit.MIN_PROGRAMS", counts[1] + 20)
    weights = [quantized(name, seed=expert) for expert in range(6)]
    stack = WeightStack(6)
    methods = []
    for number, weight in enumerate(weights):
        matrix = tiled(weight)
        matrix.tiles.factor.mul_(2.0**-10)
        matrix.move(
            lambda *args, at=number: stack.part(args[0], at, *args[1:], torch.device("cpu"))
        )
        methods.append(matrix)
    biases = torch.randn(6, 130)
    experts = TiledExperts.of(methods, stack, biases)
    assert experts is not None
    num_rows = sum(counts)
    x = torch.randn(40, 200).half()
    index = torch.randint(40, (num_rows + 2,), dtype=torch.int32)
    ends = torch.tensor(counts).cumsum(0)
    starts = torch.cat([torch.zeros(1), ends]).int() + 1  # a row before all experts, one after
    got = experts.multiply(x, index, starts)
    assert got.shape == (num_rows + 2, 130)
    for expert, weight in enumerate(weights):
        rows = slice(int(starts[expert]), int(starts[expert + 1]))
        check(got[rows], x[index[rows]], weight.dequantize() * 2.0**-10, biases[expert])


def test_experts_that_differ_are_refused():
    weight = quantized("gptq")
    scattered = tiled(weight.with_columns(torch.arange(weight.shape[1]).flip(0)))
    for method in (tiled(quantized("awq")), scattered, None):
        stack = WeightStack(2)
        tiles = dict(zip(("codes", "scale", "factor"), tiled(weight).tiles, strict=True))
        stack.tensors = {name: torch.stack((x, x)) for name, x in tiles.items()}
        assert TiledExperts.of([tiled(weight), tiled(weight)], stack) is not None
        assert TiledExperts.of([tiled(weight), method], stack) is None
    assert TiledExperts.of([scattered, scattered], stack) is None
