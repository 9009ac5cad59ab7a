"""The contract of all proposers, run over every file of their package: drafts change no output."""

import random
from pathlib import Path
from typing import Any

import pytest

from servd.base import plugins
from servd.messages.engine import EngineCoreRequest, TokenLogprobs
from servd.messages.params import SamplingParams, StructuredOutput
from servd.worker import spec_decode
from tests.core.engines import Log
from tests.core.test_overlap import outputs
from tests.worker.spec_decode import checkpoints
from tests.worker.test_overlap import serve

NAMES = plugins.names(spec_decode.__name__)
MAX_TOKENS = 24
FEW = range(40, 46)
GRAMMAR = StructuredOutput("regex", "([ab]{3}-){9}")
# What all requests have in turn, so that each batch of seven has all of it.
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": dict.fromkeys(FEW, 20.0), "logprobs": 0},
    {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2, "stop_token_ids": [*range(90)]},
    {"bad_words_token_ids": [[i] for i in range(50)] + [[i, i] for i in FEW], "min_tokens": 9},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "logit_bias": dict.fromkeys(FEW, 12.0)},
    {"temperature": 1.0, "structured_output": GRAMMAR, "logprobs": 1},
]


def make_request(number: int) -> EngineCoreRequest:
    """A prompt that says everything twice, and one of SAMPLINGS."""
    draw = random.Random(number)
    prompt = [draw.randrange(100, 199) for _ in range(draw.randint(4, 8))] * 2
    options = {"temperature": 0.0, "max_tokens": MAX_TOKENS} | SAMPLINGS[number % len(SAMPLINGS)]
    params = SamplingParams(seed=number, **options)
    return EngineCoreRequest(str(number), prompt, params, eos_token_ids=[3])


def serve_all(
    folder: Path, batch: int, depth: int, num_blocks: int, speculative: dict[str, Any] | None
) -> Log:
    """All kinds of requests, N at a time."""
    requests = [make_request(i) for i in range(len(SAMPLINGS))]
    requests.append(EngineCoreRequest("cannot enter", [10**6], SamplingParams(max_tokens=9)))
    drafts = {"speculative_config": speculative} if speculative else {}
    return serve(
        folder,
        requests,
        depth,
        num_blocks,
        aborts=False,
        load_format="auto",
        max_num_seqs=batch,
        max_num_batched_tokens=64,
        **drafts,
    )


def assert_equal(log: Log, expected: Log) -> None:
    """Tokens, ends and whose log-probabilities: the same; the numbers: but for rounding."""
    assert log.outputs.keys() == expected.outputs.keys()
    for request_id in log.outputs:
        got, expected_state = (
            [log.outputs[request_id][0].prompt_logprobs, *outputs(log, request_id)]
            for log in (log, expected)
        )
        assert flat(got) == flat(expected_state, within=1e-4)


def flat(value: Any, within: float = 0.0) -> Any:
    """Lists and tuples that can be compared, with numbers that may be so far away."""
    if isinstance(value, list | tuple):
        return [flat(entry, within) for entry in value]
    if isinstance(value, TokenLogprobs):
        numbers = pytest.approx(value.logprobs, abs=within) if within else value.logprobs
        return value.token_ids, numbers, value.rank
    return value


@pytest.fixture(scope="module")
def without_drafts(tiny_llama: Path) -> Log:
    """One request at a time."""
    return serve_all(tiny_llama, 1, 1, 200, None)


@pytest.mark.parametrize(
    ("batch", "num_blocks", "depth"),
    [
        (7, 30, 2),
        pytest.param(1, 200, 1, marks=pytest.mark.slow),
        pytest.param(7, 200, 1, marks=pytest.mark.slow),
        pytest.param(7, 200, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_output(
    name, batch, num_blocks, depth, tiny_llama, tmp_path, counts, without_drafts
):
    make = getattr(checkpoints, name, None)
    config = {"method": name} | (make(tiny_llama, tmp_path) if make else {})
    log = serve_all(tiny_llama, batch, depth, num_blocks, config)
    assert_equal(log, without_drafts)
    assert (log.total("num_preemptions") > 0) == (num_blocks == 30)
    num_drafts, num_kept = (sum(column) for column in zip(*counts, strict=True))
    assert num_drafts > 0
    if make is None:  # a head with random weights guesses nothing
        assert 0 < num_kept < num_drafts
