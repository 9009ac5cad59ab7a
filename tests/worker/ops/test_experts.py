"""Products of several experts: those of each by itself, in every form; routing."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from servd.worker.layers import packed
from servd.worker.layers._matrix import QuantMethod
from servd.worker.layers.experts import OneByOne
from servd.worker.layers.packed import PackedMatrix
from servd.worker.ops import native
from servd.worker.quantization import int4, int8
from tests.worker.cpu_kernels import forced

NUM_EXPERTS = 6
SIZE = 1000
FORMS = {
    "float32": PackedMatrix,
    "bfloat16": lambda weight: PackedMatrix(weight.bfloat16()),
    "int8": int8.quantize,
    "int4": int4.quantize,
    "int4, int8": lambda weight: int4.quantize(weight, torch.int8),
}


@pytest.fixture(params=native.CAPABILITIES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from forced(request.param, monkeypatch)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def bounds(*counts: int) -> Tensor:
    """The first row of each expert, and the end."""
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", FORMS)
def test_each_expert_multiplies_its_own_rows(form: str):
    matrices: list[QuantMethod] = [
        FORMS[form](random(33 + i, SIZE)[:33]) for i in range(NUM_EXPERTS)
    ]
    x = random(40, SIZE)
    counts = (3, 0, 131, 1, 14, 0)
    starts = bounds(*counts)
    index = (torch.arange(sum(counts)) * 7 % 40).int()
    for rows in (index, None):
        inputs = x if rows is not None else x[index]
        got = packed.ExpertMatrices(matrices).multiply(inputs, rows, starts)  # type: ignore[arg-type]
        parts = x[index].split(counts)
        for part, alone, matrix in zip(got.split(counts), parts, matrices, strict=True):
            assert torch.equal(part, matrix.multiply(alone, None))
        some = packed.ExpertMatrices(matrices[1:4]).multiply(inputs, rows, starts[1:5])  # type: ignore[arg-type]
        assert torch.equal(some[starts[1] : starts[4]], got[starts[1] : starts[4]])


@pytest.mark.usefixtures("kernels")
def test_rows_outside_of_x_are_refused():
    matrices = [PackedMatrix(random(8, 16)) for _ in range(2)]
    experts = packed.ExpertMatrices(matrices)
    x = random(3, 16)
    with pytest.raises(IndexError, match=r"index\[1\] is 3"):
        experts.multiply(x, torch.tensor([0, 3], dtype=torch.int32), bounds(1, 1))
    with pytest.raises(IndexError, match=r"starts\[2\] is 5"):
        experts.multiply(x, None, bounds(1, 4))


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="needs TRITON_INTERPRET=1",
)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "counts", [(3, 0, 20, 1), (0, 0, 0, 2), (130, 70, 64, 0), (0, 0, 0), (300, 0, 180)], ids=str
)
def test_triton_multiplies_the_rows_of_each(dtype: torch.dtype, counts: tuple[int, ...]):
    from servd.worker.ops.triton.experts import ExpertMatrices

    matrices = random(len(counts), 140, 100).to(dtype)
    biases = random(len(counts), 140)
    x = random(30, 100).to(dtype)
    starts = bounds(*counts)
    index = (torch.arange(sum(counts)) * 7 % 30).int()
    parts = zip(x[index].double().split(counts), matrices.double(), biases.double(), strict=True)
    expected = torch.cat([part @ matrix.T + bias for part, matrix, bias in parts])
    for rows in (index, None):
        inputs = x if rows is not None else x[index]
        got = ExpertMatrices(matrices, biases).multiply(inputs, rows, starts)
        precision = {"atol": 2e-2 if dtype.itemsize == 2 else 1e-4, "rtol": 1e-3}
        torch.testing.assert_close(got.double(), expected, **precision)
        plain = ExpertMatrices(matrices).multiply(inputs, rows, starts)
        of_rows = biases.double().repeat_interleave(torch.tensor(counts), dim=0)
        torch.testing.assert_close(plain.double(), expected - of_rows, **precision)
        # Of a rank with some of the experts.
        some = ExpertMatrices(matrices[1:3], biases[1:3]).multiply(inputs, rows, starts[1:4])
        rows_of_both = slice(starts[1], starts[3])
        torch.testing.assert_close(some[rows_of_both].double(), expected[rows_of_both], **precision)


@interpreted
@pytest.mark.usefixtures("exact_dot")
def test_bits_of_a_row_do_not_depend_on_its_place():
    from servd.worker.ops.triton.experts import ExpertMatrices

    experts = ExpertMatrices(random(3, 70, 100).half())
    x = random(50, 100).half()
    starts = bounds(33, 0, 17)
    order = torch.cat([torch.randperm(33), 33 + torch.randperm(17)])
    got = experts.multiply(x, None, starts)
    assert torch.equal(experts.multiply(x, order.int(), starts), got[order])


@interpreted
@pytest.mark.parametrize("num_rows", [0.1, 16, 60, 5000])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_fit_into_shared_memory(num_rows: float, capability: tuple[int, int]):
    from servd.worker.ops.triton.experts import tile_for

    limit = {8: 163, 9: 227, 10: 227}.get(capability[0], 99) if capability != (8, 9) else 99
    for itemsize in (2, 4):
        tile = tile_for(num_rows, itemsize, capability)
        numbers = (tile["ROWS"] + tile["COLUMNS"]) * tile["DEPTH"] * tile["num_stages"]
        assert numbers * itemsize <= limit * 1024


def test_one_by_one_is_the_same():
    from servd.worker.device.parallel import Parallel
    from servd.worker.layers._matrix import Matrix

    matrices = [Matrix((9, 20), Parallel()) for _ in range(3)]
    for i, matrix in enumerate(matrices):
        matrix.data.copy_(random(9 + i, 20)[:9])
    x = random(4, 20)
    index = torch.tensor([3, 0, 1, 1, 2], dtype=torch.int32)
    got = OneByOne(matrices).multiply(x, index, bounds(2, 0, 3))
    expected = torch.cat([x[[3, 0]] @ matrices[0].T, x[[1, 1, 2]] @ matrices[2].T])
    torch.testing.assert_close(got, expected)
    of_last = OneByOne(matrices[2:]).multiply(x, index, bounds(2, 0, 3)[2:])
    torch.testing.assert_close(of_last[2:], expected[2:])
