"""Decode steps as graphs: what is repeated is what would have been computed, to the bit."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from servd.worker.models.gpt2 import GPT2MLP
from servd.worker.models.llama import LlamaMLP
from servd.worker.ops import native
from servd.worker.runner.cpu_graph_runner import CPUGraphRunner, Memory, NotRecordable, OnlyViews
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import Driver, config_for

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="servd was installed without a compiler"
)

FAMILIES = [
    ("gpt2", "tied"),
    ("llama", "llama3 rope"),
    ("gemma2", "caps"),
    ("gemma3_text", "layer types"),
    ("olmo2", "of heads"),
    ("qwen3_moe", "renormalized"),
    ("phi3", "window"),
    ("granitemoehybrid", "experts, no positions"),
    ("lfm2", "untied, biases, a size"),
    ("lfm2_moe", "biased router"),
    ("lfm2_moe", "plain router"),
    ("lfm3", "neither"),
    ("mamba2", "groups"),
    ("qwen3_5_moe_text", "experts"),
    ("qwen3_5_text", "of four layers"),
    ("qwen3_next", "experts"),
    ("qwen3_next", "some layers dense"),
]
PLAIN = {"block_size": 16}
RECORDED = [(*family, PLAIN) for family in FAMILIES] + [
    ("llama", "llama3 rope", {"block_size": 32, "dtype": "bfloat16"}),
    ("gemma2", "caps", {"block_size": 48, "dtype": "float16"}),
    ("qwen3_moe", "renormalized", PLAIN | {"quantization": "int8", "kv_cache_dtype": "int8"}),
]


def graphs_of(driver: Driver) -> CPUGraphRunner | None:
    assert isinstance(driver.worker.runner, CPUModelRunner)
    return driver.worker.runner.graphs


def churn(driver: Driver, seed: int = 4) -> list[tuple[list[int], torch.Tensor]]:
    """Requests come, grow and go at random; tokens and logits of each."""
    draw = random.Random(seed)
    running: list[int] = []
    done = []
    for _ in range(60):
        if len(running) < 8 and draw.random() < 0.5:
            slot = driver.add([draw.randrange(199) for _ in range(draw.randrange(1, 40))])
            driver.step({slot: len(driver.tokens[slot])})
            running.append(slot)
        draw.shuffle(running)
        chosen = running[: draw.randrange(1, 9)]
        if chosen:
            driver.step(dict.fromkeys(chosen, 1))
        if running and draw.random() < 0.2:
            slot = running.pop()
            logits = torch.stack(driver.logits[slot])
            done.append((driver.free(slot), logits))
    return done


@pytest.mark.parametrize(("model_type", "variant", "options"), RECORDED)
def test_steps_have_the_bits_of_single_calls(checkpoints, model_type, variant, options):
    folder: Path = checkpoints(model_type, variant)
    driver, by_calls = (
        Driver(config_for(folder, **options, enforce_eager=eager)) for eager in (False, True)
    )
    graphs = graphs_of(driver)
    assert graphs is not None and graphs_of(by_calls) is None
    results = churn(driver)
    expected = churn(by_calls)
    assert graphs_of(driver) is graphs and graphs.is_recordable and len(graphs.graphs) > 5
    assert len(results) > 5
    for (tokens, logits), (expected_tokens, expected_logits) in zip(results, expected, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(logits, expected_logits)


@pytest.mark.parametrize(
    ("model_type", "variant"), [("gemma3_text", "layer types"), ("mistral", "window")]
)
def test_layers_with_a_window_have_tables_of_their_own(checkpoints, model_type: str, variant: str):
    """Programs get them anew for each step: blocks are given back, and others' meanwhile."""
    folder = checkpoints(model_type, variant)
    results = []
    for eager, gives_back in ((False, True), (True, False)):
        driver = Driver(config_for(folder, block_size=16, enforce_eager=eager))
        assert 7 in driver.ready.kv_windows
        driver.gives_back = gives_back
        results.append(churn(driver))
        if gives_back:
            assert (graphs := graphs_of(driver)) is not None and len(graphs.graphs) > 5
    for (tokens, logits), (expected_tokens, expected_logits) in zip(*results, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(logits, expected_logits)


def test_layers_share_their_memory(checkpoints, tmp_path: Path):
    driver = Driver(config_for(checkpoints("gpt2", "tied"), block_size=16))
    churn(driver)
    graphs = graphs_of(driver)
    assert graphs is not None
    num_buffers = len(graphs.memory.buffers)
    folder = make_checkpoint(tmp_path, "gpt2", CASES["gpt2"]["tied"] | {"n_layer": 9})
    deep = Driver(config_for(folder, block_size=16))
    churn(deep)
    assert (graphs := graphs_of(deep)) is not None
    assert len(graphs.memory.buffers) == num_buffers


def test_memory_is_free_when_no_view_of_it_is_left():
    memory = Memory(max_num_rows=4)
    first = memory.take((2, 6), num_rows=2)
    view = first[:, :3]
    del first
    second = memory.take((2, 6), num_rows=2)
    second.fill_(1)
    view.zero_()
    assert bool((second == 1).all())
    del view
    third = memory.take((2, 6), num_rows=2)
    assert third.data_ptr() != second.data_ptr() and len(memory.buffers) == 2


def test_recording_does_not_import_torchs_compiler():
    """It takes seconds, which the first request would wait for."""
    code = (
        "import sys, torch; from servd.worker.runner.cpu_graph_runner import OnlyViews\n"
        "tokens = torch.zeros(4)\n"
        "with OnlyViews(): tokens.view(2, 2)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    "copies",
    [
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(-1),
        lambda x: x.t().flatten(),
        lambda x: x.double(),
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: torch.empty(3),
    ],
)
def test_what_takes_memory_or_changes_it_is_not_recorded(copies):
    x = torch.zeros(4, 5)
    with torch.inference_mode(), OnlyViews():
        views = [
            *x.chunk(3, dim=-1),
            x.view(5, 4),
            x.t(),
            x.contiguous(),
            x.flatten(),
            x[1:],
            x.unflatten(0, (2, 2)),
        ]
        with pytest.raises(NotRecordable):
            copies(x)
    assert all(view.untyped_storage().data_ptr() == x.data_ptr() for view in views)


@pytest.mark.parametrize(
    ("family", "mlp"),
    [(("gpt2", "tied"), GPT2MLP), (("qwen3_5_text", "of four layers"), LlamaMLP)],
    ids=["gpt2", "states"],
)
def test_a_model_that_does_more_runs_call_by_call(checkpoints, monkeypatch, caplog, family, mlp):
    """Otherwise what torch computes would be missing from the second step on. The layers before
    have updated their states: the step must begin with the former ones.
    """
    folder = checkpoints(*family)
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: forward(self, x * 0.5))
    driver, by_calls = (
        Driver(config_for(folder, block_size=16, enforce_eager=eager)) for eager in (False, True)
    )
    with caplog.at_level("INFO", logger="servd.worker"):
        results = churn(driver)
    assert "which is slower: aten.mul.Tensor is not of the native library" in caplog.text
    graphs = graphs_of(driver)
    assert graphs is not None and not graphs.is_recordable
    for (tokens, logits), (expected_tokens, expected_logits) in zip(
        results, churn(by_calls), strict=True
    ):
        assert tokens == expected_tokens
        assert torch.equal(logits, expected_logits)
