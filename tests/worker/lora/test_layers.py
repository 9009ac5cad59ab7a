"""What ranks keep of an adapter adds up to the whole of it."""

import pytest
import torch

from servd.base import plugins
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import MakeQuantMethod
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.lora.layers import AdaptedMatrix, AdapterRows
from servd.worker.ops import native

RANK = 3
NUM_TOKENS = 5


def adapted(layer, tokens: torch.Tensor, part: int | None, a, b) -> torch.Tensor:
    """What place 1 adds to a layer without weights; token 0 has no place."""
    layer.weight.data.zero_()
    rows = AdapterRows(torch.tensor([-1, 1, 1, 0, 1]), is_active=True)
    matrix = AdaptedMatrix(layer.weight, rows, 2, 4, torch.float32)
    for share in matrix.shares(part, a, b):
        matrix.put(1, *share)
    return matrix.multiply(tokens, None)


@pytest.mark.parametrize("part", [None, 0, 1])
def test_ranks_of_a_column_parallel_layer_have_slices_of_each_part(part):
    sizes = [7, 4]
    tokens = torch.randn(NUM_TOKENS, 6)
    a = torch.randn(RANK, 6)
    b = torch.randn(11 if part is None else sizes[part], RANK)
    whole = torch.zeros(NUM_TOKENS, 11)
    columns = slice(0, 11) if part is None else [slice(0, 7), slice(7, 11)][part]
    whole[[1, 2, 4], columns] = (tokens @ a.T @ b.T)[[1, 2, 4]]
    outputs = []
    for rank in range(2):
        layer = ColumnParallelLinear(6, sizes, Parallel(rank, 2), bias=False)
        outputs.append(adapted(layer, tokens, part, a, b).split(layer.local_features, dim=1))
    got = [torch.cat(of_ranks, dim=1) for of_ranks in zip(*outputs, strict=True)]
    torch.testing.assert_close(torch.cat([got[0][:, :7], got[1]], dim=1), whole)


def test_ranks_of_a_row_parallel_layer_add_up():
    tokens = torch.randn(NUM_TOKENS, 9)
    a = torch.randn(RANK, 9)
    b = torch.randn(4, RANK)
    whole = torch.zeros(NUM_TOKENS, 4)
    whole[[1, 2, 4]] = (tokens @ a.T @ b.T)[[1, 2, 4]]
    slices = torch.nn.functional.pad(tokens, (0, 1)).chunk(2, dim=1)
    got = sum(
        adapted(RowParallelLinear(9, 4, Parallel(rank, 2), bias=False), slices[rank], None, a, b)
        for rank in range(2)
    )
    torch.testing.assert_close(got, whole)


def test_a_step_without_adapters_adds_nothing():
    layer = RowParallelLinear(9, 4, Parallel(), bias=False)
    layer.weight.data.normal_()
    rows = AdapterRows(torch.full((NUM_TOKENS,), -1))
    matrix = AdaptedMatrix(layer.weight, rows, 2, 4, torch.float32)
    matrix.ops = None  # type: ignore[assignment]  # whoever asks for an operation fails
    tokens = torch.randn(NUM_TOKENS, 9)
    assert torch.equal(matrix.multiply(tokens, None), tokens @ layer.weight.T)


@pytest.mark.parametrize(
    ("quantization", "has_library"), [("int8", True), ("int8", False), ("int4", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_is_added_to_a_quantized_matrix(monkeypatch, quantization, dtype, has_library):
    if not has_library:
        monkeypatch.setattr(native, "library", lambda: None)
    layer = RowParallelLinear(64, 48, Parallel(), bias=False)
    layer.weight.data.normal_()
    quantize = plugins.load("servd.worker.quantization", quantization, "quantize")
    layer.weight.process_weights(MakeQuantMethod(quantize))
    tokens = torch.randn(NUM_TOKENS, 64)
    a = torch.randn(RANK, 64)
    b = torch.randn(48, RANK)
    plain = layer.weight.product(tokens)
    rows = AdapterRows(torch.tensor([-1, 1, 1, 0, 1]), is_active=True)
    matrix = AdaptedMatrix(layer.weight, rows, 2, 4, dtype)
    for share in matrix.shares(None, a.to(dtype), b.to(dtype)):
        matrix.put(1, *share)
    added = tokens @ a.to(dtype).float().T @ b.to(dtype).float().T
    added[[0, 3]] = 0
    torch.testing.assert_close(matrix.multiply(tokens, None) - plain, added, atol=1e-3, rtol=1e-3)
