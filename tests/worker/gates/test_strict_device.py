"""Every family in every format, with adapters, drafts and grammars, on a simulated CUDA device: its
kernels are interpreted, and it refuses what a CUDA graph cannot capture. Steps are graphs, and have
the outputs of steps without.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servd.messages.engine import GrammarOutput
from servd.worker.runner import graph_runner
from servd.worker.sample.sampler import Sampler
from tests.parity.families import CASES, keeps_state, make_checkpoint
from tests.worker.driver import GREEDY, Driver, config_for
from tests.worker.gates.simulated import use_simulated_device
from tests.worker.recorded import NotCapturable, record

FORMATS = [None, "int8", "int4", "fp8"]
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"enable_lora": True, "max_loras": 1},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "grammar": {},
}
FAMILIES = [name for name in CASES if not keeps_state(name)]
# What differs most: dense, experts, latent attention, experts with biases and groups of layers.
QUICK = {
    "llama": {("int8", "adapters")},
    "deepseek_v3": {(None, "drafts")},
    "gpt_oss": {("int4", "grammar")},
}
CONTRACT = [
    pytest.param(
        family,
        variant,
        quantization,
        extra,
        marks=[] if is_quick else pytest.mark.slow,
        id=f"{family}-{variant}-{quantization}-{extra}",
    )
    for family in FAMILIES
    for number, (variant, options) in enumerate(CASES[family].items())
    # Triton's attention computes heads whose size is a multiple of 8.
    if options.get("head_dim", 8) % 8 == 0 and options.get("n_embd") != 48
    for quantization, extra in itertools.product(FORMATS, EXTRAS)
    for is_quick in [number == 0 and (quantization, extra) in QUICK.get(family, ())]
    # Every variant, and of the first one every format and every extra.
    if is_quick
    or (quantization, extra) == (None, "plain")
    or (number == 0 and (quantization is None or extra == "plain"))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, str], Path] = {}

    def find(family: str, variant: str) -> Path:
        if (family, variant) not in made:
            folder = tmp_path_factory.mktemp(family)
            options = CASES[family][variant]
            if "layer_types" not in options:
                options = options | {"num_hidden_layers": 2}
            made[family, variant] = make_checkpoint(folder, family, options)
        return made[family, variant]

    return find


@pytest.fixture
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated_device(monkeypatch)
    monkeypatch.setattr(graph_runner, "decode_sizes", lambda size: [size])
    monkeypatch.setattr(graph_runner, "mixed_sizes", lambda size: [size])
    monkeypatch.setattr(Sampler, "examples", [GREEDY])  # others warm up what is not of the model


def serve(folder: Path, extra: str, **options: Any) -> tuple[Driver, list[list[int]]]:
    """Two requests, with chunks of prompts; a grammar of the second allows odd tokens."""
    driver = Driver(
        config_for(
            folder,
            attention_backend="triton",
            block_size=16,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=64,
            **EXTRAS[extra],
            **options,
        )
    )
    slots = [driver.add([7, 8, 9, 7, 8]), driver.add([4] * 7)]
    odd = np.full(-(-driver.spec.vocab_size // 32), 0xAAAAAAAA, dtype=np.uint32).tobytes()
    while short := [slot for slot in slots if len(driver.tokens[slot]) < 9]:
        chunks = {slot: min(driver.num_left(slot), 4) for slot in short}
        mask = None
        if extra == "grammar" and slots[1] in chunks:
            mask = GrammarOutput([list(chunks).index(slots[1])], [0], odd)
        num_drafts = 2 if extra == "drafts" else 0
        driver.step(chunks, mask, dict.fromkeys(short, num_drafts))
    return driver, [driver.tokens[slot][:9] for slot in slots]


@pytest.mark.parametrize(("family", "variant", "quantization", "extra"), CONTRACT)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of padding, which may be anything
def test_graphs_compute_what_is_computed_without(
    checkpoint, few_graphs, family, variant, quantization, extra
):
    folder = checkpoint(family, variant)
    driver, tokens = serve(folder, extra, quantization=quantization)
    assert driver.worker.runner.graphs is not None
    assert tokens == serve(folder, extra, quantization=quantization, enforce_eager=True)[1]
    if extra == "grammar":
        assert all(token % 2 for token in tokens[1][7:])


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
