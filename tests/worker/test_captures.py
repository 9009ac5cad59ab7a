"""Every family in every format, with adapters and with drafts, on a device that refuses what a CUDA
graph cannot capture: steps are graphs with the outputs of steps without, or a warning explains it.
"""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from servd.worker.runner import gpu_model_runner, graph_runner
from tests.parity.families import CASES, keeps_state, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.recorded import NotCapturable, record, use_recorded_runner

FORMATS = [None, "int8", "int4", "fp8"]
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"enable_lora": True, "max_loras": 1},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
}
FAMILIES = [name for name in CASES if not keeps_state(name)]
# What differs most: dense, experts, latent attention, experts with biases and groups of layers.
QUICK = {
    "llama": {("int8", "adapters"), (None, "drafts"), ("fp8", "plain")},
    "mixtral": {("int4", "plain"), (None, "adapters")},
    "deepseek_v3": {("fp8", "drafts"), (None, "plain")},
    "gpt_oss": {("int8", "plain"), (None, "drafts")},
}
CONTRACT = [
    pytest.param(
        family,
        variant,
        quantization,
        extra,
        marks=[]
        if variant is first and (quantization, extra) in QUICK.get(family, ())
        else pytest.mark.slow,
        id=f"{family}-{variant}-{quantization}-{extra}",
    )
    for family in FAMILIES
    for first in [next(iter(CASES[family]))]
    for variant, quantization, extra in itertools.product(CASES[family], FORMATS, EXTRAS)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, str], Path] = {}

    def find(family: str, variant: str) -> Path:
        if (family, variant) not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family, variant] = make_checkpoint(folder, family, CASES[family][variant])
        return made[family, variant]

    return find


@pytest.fixture
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recorded_runner(monkeypatch)
    monkeypatch.setattr(graph_runner, "decode_sizes", lambda size: [2, size])
    monkeypatch.setattr(graph_runner, "mixed_sizes", lambda size: [size])


def serve(folder: Path, **options: Any) -> tuple[Driver, list[list[int]]]:
    """Two requests, with chunks of prompts and with drafts where the options have any."""
    driver = Driver(
        config_for(folder, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, **options)
    )
    slots = [driver.add([7, 8, 9, 7, 8]), driver.add([4] * 11)]
    num_drafts = 2 if "speculative_config" in options else 0
    while short := [slot for slot in slots if len(driver.tokens[slot]) < 10]:
        chunks = {slot: min(driver.num_left(slot), 8) for slot in short}
        driver.step(chunks, max_new_drafts=dict.fromkeys(short, num_drafts))
    return driver, [driver.tokens[slot][:10] for slot in slots]


@pytest.mark.parametrize(("family", "variant", "quantization", "extra"), CONTRACT)
def test_steps_are_graphs_or_a_warning_says_why_not(
    checkpoint, few_graphs, caplog, family, variant, quantization, extra
):
    folder = checkpoint(family, variant)
    options = EXTRAS[extra] | {"quantization": quantization}
    caplog.set_level(logging.WARNING, "servd.worker")
    driver, tokens = serve(folder, **options)
    warnings = [message for message in caplog.messages if message.startswith("no CUDA graphs: ")]
    graphs = driver.worker.runner.graphs
    assert (graphs is None) == bool(warnings) and len(warnings) <= 1
    assert tokens == serve(folder, enforce_eager=True, **options)[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.__setitem__(x > 1, torch.zeros(1)),
        lambda x: x[[0, 1]],
        lambda x: torch.tensor([1.0]),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.as_tensor([1.0]),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: range(x.long().max()),
        lambda x: torch.where(x > 1),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x),
    ],
)
def test_the_simulated_device_refuses_what_a_graph_cannot_capture(call):
    """Otherwise the tests above would show nothing."""
    x = torch.arange(3.0)
    call(x.clone())
    with pytest.raises(NotCapturable):
        record(lambda: call(x))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_graphs_count_the_weights_of_a_token(checkpoint, quantization: str | None):
    """Not those of experts that it does not have, and numbers, whatever bytes they have."""
    folder = checkpoint("mixtral", "experts")
    model = serve(folder, quantization=quantization)[0].worker.runner.model
    config = json.loads((folder / "config.json").read_text())
    expected = 0.0
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_of_experts = ".experts." in name
        share = config["num_experts_per_tok"] / config["num_local_experts"]
        if tensor.dim() > 1:
            expected += tensor.numel() * (share if is_of_experts else 1)
    assert gpu_model_runner.count_active_weights(model) == int(expected)
