"""draft_model: its logits are those of transformers, so its keys and values are always complete."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from servd.base.errors import ConfigError
from servd.core.draft_length import DraftLengthController
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams, StructuredOutput
from servd.worker.ops import native
from servd.worker.spec_decode.draft_model import DraftModelProposer
from tests.core.engines import Log
from tests.parity.families import CASES, GPT2, LLAMA, logits_of, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.test_overlap import serve

# Draft's families; programs need blocks of 16 and the second one's head_dim.
DRAFTS = {
    "gpt2": (GPT2 | {"vocab_size": 512, "n_layer": 1}, 4),
    "llama": (LLAMA | {"vocab_size": 512, "num_hidden_layers": 1, "head_dim": 16}, 16),
}


# Most of what it allows it forces.
GRAMMAR = StructuredOutput("regex", "(abcdefgh-[0-9])+")


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request, tmp_path_factory) -> tuple[Path, int]:
    """A checkpoint, and a block size."""
    options, block_size = DRAFTS[request.param]
    folder = tmp_path_factory.mktemp("draft")
    return make_checkpoint(folder, request.param, options), block_size


def make_requests(count: int, grammar: StructuredOutput | None) -> list[EngineCoreRequest]:
    """Most of them with the beginning of another one; every third one with the grammar."""
    draw = random.Random(3)
    shared = [draw.randrange(500) for _ in range(40)]
    grammars = [grammar if i % 3 == 2 else None for i in range(count)]
    prompts = [
        shared[: draw.choice([0, 16, 33, 40])] + [draw.randrange(500) for _ in range(1 + 3 * i)]
        for i in range(count)
    ]
    return [
        EngineCoreRequest(
            str(i), prompt, SamplingParams(temperature=0.0, max_tokens=40, structured_output=schema)
        )
        for i, (prompt, schema) in enumerate(zip(prompts, grammars, strict=True))
    ]


def serve_all(
    folder: Path, draft: Path | None, num_tokens: int, depth: int, grammar=None, **options
) -> Log:
    """Seven requests, prompts in chunks, with blocks for N tokens of the target."""
    if draft is not None:
        options["speculative_config"] = {"method": "draft_model", "model": str(draft)}
    return serve(
        folder,
        make_requests(7, grammar),
        depth,
        num_tokens // 4,
        aborts=False,
        load_format="auto",
        max_model_len=160,
        **options,
    )


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "depth"), [(4, 4000, 1), (16, 4000, 2), (16, 360, 2)]
)
def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_llama, block_size, num_tokens, depth, counts
):
    expected = serve_all(tiny_llama, None, 4000, depth, block_size=block_size)
    counts.clear()
    log = serve_all(tiny_llama, tiny_llama, num_tokens, depth, block_size=block_size)
    assert (log.total("num_preemptions") > 0) == (num_tokens == 360)
    assert log.total("prefix_cache_hits") > 0
    assert all(log.token_ids(i) == expected.token_ids(i) for i in expected.outputs)
    num_drafts, num_kept = (sum(column) for column in zip(*counts, strict=True))
    assert num_kept == num_drafts > 7 * 40 // 2


class Recorder:
    """Every draft, with the tokens that it follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafted: list[tuple[list[int], int]] = []
        propose = DraftModelProposer.propose
        monkeypatch.setattr(
            DraftModelProposer, "propose", lambda *args: self.propose(propose, *args)
        )

    def propose(self, method, proposer, slots, *args) -> torch.Tensor:
        drafts = method(proposer, slots, *args)
        for row, slot in enumerate(slots.tolist()):
            tokens = proposer.states.token_ids[slot, : int(proposer.states.num_computed[slot]) + 1]
            for step in range(int((drafts[row] >= 0).sum())):
                before = tokens.tolist() + drafts[row, :step].tolist()
                self.drafted.append((before, int(drafts[row, step])))
        return drafts

    def check(self, folder: Path) -> None:
        """They are the likeliest tokens by the logits of transformers."""
        for before, token in self.drafted:
            logits = logits_of(folder, before)[-1]
            assert logits[token] > logits.max() - 1e-4


@pytest.mark.usefixtures("may_always_draft")
@pytest.mark.parametrize("depth", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_drafts_are_those_of_transformers(tiny_llama, draft, depth, counts, monkeypatch):
    """Chunks, shared beginnings, rows that pause or want fewer drafts than others."""
    folder, block_size = draft
    recorder = Recorder(monkeypatch)
    draw = random.Random(0)
    monkeypatch.setattr(
        DraftLengthController, "num_drafts", lambda *_: draw.choice([0, 0, 1, 3, 5])
    )
    log = serve_all(tiny_llama, folder, 8000, depth, GRAMMAR, block_size=block_size)
    assert log.total("prefix_cache_hits") > 0 and log.total("num_preemptions") == 0
    assert len(recorder.drafted) > 300
    recorder.check(folder)


def test_nothing_is_drafted_past_the_draft_s_context(tiny_llama, draft, counts, monkeypatch):
    folder, block_size = draft
    recorder = Recorder(monkeypatch)
    expected = serve_all(tiny_llama, None, 4000, 1)
    config = {"method": "draft_model", "model": str(folder), "max_model_len": 50}
    log = serve_all(tiny_llama, None, 8000, 1, speculative_config=config, block_size=block_size)
    assert all(log.token_ids(i) == expected.token_ids(i) for i in expected.outputs)
    assert 46 <= max(len(before) for before, _ in recorder.drafted) <= 50
    recorder.check(folder)


def test_requests_outlive_the_learned_positions_of_the_draft(
    tiny_llama, tmp_path, counts, monkeypatch
):
    """Prompts and outputs cross its end."""
    folder = make_checkpoint(tmp_path, "gpt2", DRAFTS["gpt2"][0] | {"n_positions": 32})
    recorder = Recorder(monkeypatch)
    expected = serve_all(tiny_llama, None, 4000, 1)
    log = serve_all(tiny_llama, folder, 8000, 2)
    assert all(log.token_ids(i) == expected.token_ids(i) for i in expected.outputs)
    assert 22 <= max(len(before) for before, _ in recorder.drafted) <= 32
    recorder.check(folder)


@pytest.mark.usefixtures("may_always_draft")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rejected_drafts_of_short_rows_that_pause(tiny_llama, draft, seed, counts, monkeypatch):
    """At depth 2, with too few tokens in a step: the host takes rows for longer."""
    folder, block_size = draft
    recorder = Recorder(monkeypatch)
    draw = random.Random(seed)
    monkeypatch.setattr(DraftLengthController, "num_drafts", lambda *_: draw.choice([0, 0, 0, 5]))
    requests = [
        EngineCoreRequest(str(i), [7 + i], SamplingParams(temperature=0.0, max_tokens=30))
        for i in range(7)
    ]
    config = {"method": "draft_model", "model": str(folder)}
    serve(
        tiny_llama,
        requests,
        2,
        1000,
        aborts=False,
        load_format="auto",
        block_size=block_size,
        max_num_batched_tokens=8,
        speculative_config=config,
    )
    assert len(recorder.drafted) > 20
    recorder.check(folder)


def test_a_row_far_behind_catches_up_and_blocks_no_other(tiny_llama, draft, monkeypatch):
    folder, block_size = draft
    recorder = Recorder(monkeypatch)
    options = {"block_size": block_size, "max_num_batched_tokens": 32}
    driver = Driver(speculative(tiny_llama, folder, **options))
    far = driver.add([5, 6, 7])
    near = driver.add([8, 9])
    driver.generate([far], 60)
    counts: list[tuple[int, int]] = []
    for _ in range(3):
        driver.step({slot: driver.num_left(slot) for slot in (far, near)}, None, {far: 2, near: 2})
        counts.append((len(driver.drafts[far]), len(driver.drafts[near])))
    assert counts == [(0, 2), (2, 2), (2, 2)]
    recorder.check(folder)


def test_programs_run_the_draft_on_a_cpu(tiny_llama: Path, draft, counts, monkeypatch):
    if native.library() is None:
        pytest.skip("servd was installed without a compiler")
    folder, block_size = draft
    forwards: list[int] = []
    run = DraftModelProposer.begin
    monkeypatch.setattr(
        DraftModelProposer,
        "begin",
        lambda self, *args: (forwards.append(len(args[0])), run(self, *args))[1],
    )
    log = serve_all(tiny_llama, folder, 8000, 1, block_size=block_size)
    num_outputs = sum(len(log.token_ids(i)) for i in log.outputs)
    assert (len(forwards) < num_outputs / 4) == (block_size == 16)


def speculative(folder: Path, draft: Path, **options: Any):
    config = {"method": "draft_model", "model": str(draft)}
    return config_for(folder, speculative_config=config, **options)


def test_another_vocabulary_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = make_checkpoint(tmp_path, "gpt2", GPT2)
    with pytest.raises(ConfigError, match="has 199 tokens .* the model has 512: use a draft"):
        Driver(speculative(tiny_llama, folder))


def test_a_draft_that_keeps_a_state_is_refused(tiny_llama: Path, tmp_path: Path):
    options = CASES["qwen3_5_text"]["of four layers"] | {"vocab_size": 512}
    folder = make_checkpoint(tmp_path, "qwen3_5_text", options)
    with pytest.raises(ConfigError, match="draft .* keep a state .* drafts: use a draft"):
        Driver(speculative(tiny_llama, folder))
