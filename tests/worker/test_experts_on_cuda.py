"""Models with experts compute the same tokens by a GPU's kernels, which are interpreted here."""

import os
import zlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import MakeQuantMethod, Matrix
from servd.worker.layers.experts import SparseMoE, grouped_quant_method, share_memory
from servd.worker.models.deepseek_v2 import OfHeads
from servd.worker.ops import target
from servd.worker.runner.gpu_model_runner import count_active_weights
from tests.parity.families import CASES, greedy, logits_of, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.ops.test_low_bit import quantized
from tests.worker.quantization.test_mxfp4 import write as write_mxfp4

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
        reason="needs TRITON_INTERPRET=1",
    ),
    # In rows of other ranks, which are never used.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]
PROMPT = [5, 90, 17, 3, 122, 8, 64]
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
PLAIN = MakeQuantMethod(lambda _: None)


@pytest.fixture(autouse=True)
def cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "runs_triton", lambda device: True)
    monkeypatch.setattr("servd.worker.ops.native.library", lambda: None)


@pytest.mark.parametrize(
    ("family", "variant"), [(family, variant) for family in FAMILIES for variant in CASES[family]]
)
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str, variant: str):
    folder = make_checkpoint(tmp_path, family, CASES[family][variant])
    driver = Driver(config_for(folder))
    slot = driver.add(PROMPT)
    driver.generate([slot], 3, chunk=5)
    assert driver.tokens[slot] == greedy(folder, PROMPT, 3)
    expected = logits_of(folder, driver.tokens[slot])[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.stack(driver.logits[slot]), expected, atol=1e-4, rtol=0)


def test_tokens_of_packed_experts_are_those_of_transformers(tmp_path: Path):
    driver = Driver(config_for(write_mxfp4(tmp_path)))
    slot = driver.add(PROMPT)
    driver.generate([slot], 3, chunk=5)
    tokens = driver.tokens[slot]
    expected = logits_of(tmp_path / "plain", tokens)[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.stack(driver.logits[slot]), expected, atol=1e-4, rtol=0)


def test_experts_of_several_formats_are_dequantized():
    """And nothing keeps the memory of what was packed."""
    from servd.worker.ops.triton.experts import ExpertMatrices

    matrices = [Matrix((48, 64), Parallel()) for _ in range(3)]
    stack = share_memory(matrices)
    weights = [quantized(name, (48, 64)) for name in ("mxfp4", "int8", "mxfp4")]
    for matrix, weight in zip(matrices, weights, strict=True):
        matrix.load(weight)
        matrix.process_weights(PLAIN)
    method = grouped_quant_method(matrices)
    assert isinstance(method, ExpertMatrices) and stack.tensors.keys() == {"weight"}
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    expert = [0, 1, 1, 1, 2]
    expected = torch.stack(
        [weights[e].dequantize() @ row for e, row in zip(expert, x, strict=True)]
    )
    torch.testing.assert_close(method.multiply(x, None, starts), expected, atol=1e-5, rtol=2e-3)


def test_experts_without_a_kernel_are_dequantized_while_loading(caplog: pytest.LogCaptureFixture):
    """Whatever --widen-weights states: the first step must not find too little memory."""
    [matrix] = matrices = [Matrix((48, 64), Parallel())]
    stack = share_memory(matrices)
    weight = replace(quantized("int8", (48, 64)), scale=torch.rand(48, 8), group_size=8)
    matrix.load(weight)
    matrix.process_weights(PLAIN._replace(widening="never"))
    assert torch.equal(stack.tensors["weight"][0], weight.dequantize()) and not caplog.records


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """With random numbers, which depend on the name of a weight alone."""
    for name, weight in module.named_parameters():
        if weight.numel():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.load(torch.randn(weight.shape, generator=draw))  # type: ignore[operator]
            if isinstance(weight, Matrix):
                weight.process_weights(PLAIN)
    return module


@pytest.mark.parametrize("num_tokens", [1, 65])
def test_ranks_with_whole_experts_add_up(monkeypatch, num_tokens: int):
    """Each rank computes its experts, with their biases; no rank adds the rows of others."""
    layers = [
        filled(
            SparseMoE(24, 40, 5, 2, True, "silu", Parallel(rank, 2, has_whole_experts=True), True)
        )
        for rank in range(2)
    ]
    alone = filled(SparseMoE(24, 40, 5, 2, True, "silu", Parallel(), bias=True))
    x = torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(Parallel, "all_reduce", lambda parallel, out: out)
    torch.testing.assert_close(sum(layer(x) for layer in layers), alone(x), atol=1e-3, rtol=1e-5)


def test_ranks_count_as_many_active_weights():
    """They decide which steps are graphs, and all ranks take part in the sums within graphs."""
    counts = {
        count_active_weights(
            SparseMoE(24, 40, 5, 2, True, "silu", Parallel(rank, 2, has_whole_experts=True))  # type: ignore[arg-type]
        )
        for rank in range(2)
    }
    halves = SparseMoE(24, 40, 5, 2, True, "silu", Parallel(0, 2))
    assert counts == {count_active_weights(halves)}  # type: ignore[arg-type]


def test_matrices_of_heads_are_one_product():
    """Of rows that are a slice of the queries, into memory in the order of tokens."""
    heads = filled(OfHeads(3, 8, 5))
    queries = torch.randn(7, 3, 12)
    out = heads(queries[:, :, 4:])
    expected = torch.einsum("thi,hoi->tho", queries[:, :, 4:], torch.stack([*heads.weights]))
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()


def test_heads_are_not_quantized():
    heads = OfHeads(2, 4, 4)
    for weight in heads.weights:
        weight.load(torch.eye(4))
        weight.process_weights(MakeQuantMethod(lambda _: 1 / 0))  # type: ignore[arg-type]
    x = torch.randn(3, 2, 4)
    assert torch.equal(heads(x), x)
