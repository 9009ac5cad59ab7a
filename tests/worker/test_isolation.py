"""A forward pass that fails ends the request that it fails of, and no other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from servd import SamplingParams
from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import EngineCoreRequest
from servd.worker.batch.input_batch import InputBatch
from tests.worker.driver import config_for

PROMPTS = {f"r{i}": [*range(10 * i + 5, 10 * i + 5 + size)] for i, size in enumerate((3, 14, 1, 9))}
BAD = 14  # as many tokens has the prompt of which the model fails


class Engine:
    """A whole engine in this process; `fails` says of which parts of a step the model fails."""

    def __init__(self, folder: Path, fails: Callable[[InputBatch], bool], **options: object):
        config = config_for(folder, **options)
        self.spec = read_spec(str(folder))
        executor = UniProcExecutor(config, self.spec, lambda phase, fraction: None)
        self.core = EngineCore(config, self.spec, executor, executor.start())
        runner = executor.worker.runner
        self.forward = runner.forward
        self.fails = fails
        runner.forward = self.checked

    def checked(self, batch: InputBatch) -> torch.Tensor:
        if self.fails(batch):
            raise MemoryError("no room for a tensor")
        return self.forward(batch)

    def run(self, prompts: dict[str, list[int]], num_outputs: int = 12) -> dict[str, list[int]]:
        """The tokens of each; an error is in `errors`."""
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=num_outputs, ignore_eos=True)
        for name, prompt in prompts.items():
            self.core.handle(EngineCoreRequest(name, prompt, params, eos_token_ids=[]))
        tokens: dict[str, list[int]] = {name: [] for name in prompts}
        self.errors: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        while self.core.has_work:
            for outputs in self.core.step().values():
                for output in outputs.all_outputs:
                    tokens[output.request_id] += output.new_token_ids
                    self.cached.setdefault(output.request_id, output.num_cached_tokens)
                    if output.error is not None:
                        self.errors[output.request_id] = output.error
        return tokens


@pytest.fixture
def expected(tiny_gpt2: Path) -> dict[str, list[int]]:
    return Engine(tiny_gpt2, lambda batch: False).run(PROMPTS)


def test_the_request_that_the_model_fails_on_ends_alone(tiny_gpt2, expected, caplog):
    engine = Engine(tiny_gpt2, lambda batch: BAD in batch.query_lens)
    tokens = engine.run(PROMPTS)
    assert tokens == {**expected, "r1": []}
    assert engine.errors.keys() == {"r1"}
    report = engine.errors["r1"].removeprefix("the model failed on this request (MemoryError, ")
    assert report.rstrip(")") in caplog.text  # with the stack
    assert "no room for a tensor" in caplog.text
    # What it left is found by nobody, and its slot and blocks serve others.
    engine.fails = lambda batch: False
    assert engine.run(PROMPTS) == expected and engine.cached["r1"] == 0


def test_a_failure_in_the_middle_of_an_output_ends_it_there(tiny_gpt2, expected):
    longer = len(PROMPTS["r3"]) + 5
    engine = Engine(tiny_gpt2, lambda batch: bool((batch.positions == longer).any()))
    tokens = engine.run({name: PROMPTS[name] for name in ("r0", "r3")}, 8)
    assert engine.errors.keys() == {"r3"}  # r0 does not get so far
    assert tokens["r0"] == expected["r0"][:8] and tokens["r3"] == expected["r3"][:6]


def test_a_step_too_large_for_memory_harms_nobody(tiny_gpt2, expected):
    engine = Engine(tiny_gpt2, lambda batch: batch.tokens.shape[1] > 14)
    assert engine.run(PROMPTS) == expected and not engine.errors


@pytest.mark.parametrize("names", [["r1"], ["r0", "r1", "r2"]])
def test_a_process_in_which_nothing_works_ends(tiny_gpt2, names):
    engine = Engine(tiny_gpt2, lambda batch: True)
    with pytest.raises(MemoryError, match="no room"):
        engine.run({name: PROMPTS[name] for name in names})


def test_whoever_builds_on_the_failed_part_of_a_prompt_fails_with_it(tiny_gpt2):
    """The second part of a prompt fails, whose blocks another one finds in the same step."""
    prompt = [*range(5, 45)]
    engine = Engine(
        tiny_gpt2,
        lambda batch: bool(((batch.positions >= 24) & (batch.positions < 32)).any()),
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    engine.run({"first": prompt, "second": prompt, "other": [9, 8, 7]})
    assert engine.errors.keys() == {"first", "second"}
    engine.fails = lambda batch: False
    again = engine.run({"again": prompt})
    assert not engine.errors
    assert again["again"] == Engine(tiny_gpt2, lambda batch: False).run({"x": prompt})["x"]


def test_rows_with_drafts_are_computed_apart_in_order(tiny_gpt2):
    """Each is several rows of the attention; "b" reads blocks that "a" fills in the same step."""
    text = [7, 8, 9] * 6
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    prompts = {"a": text, "b": [*text, 7], "c": [50]}
    expected = Engine(tiny_gpt2, lambda batch: False, **options).run(prompts, 24)
    engine = Engine(tiny_gpt2, lambda batch: len(batch.query_lens) > 1, **options)
    assert engine.run(prompts, 24) == expected and not engine.errors
