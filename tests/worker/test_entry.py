"""Requests of any content against a real worker: nobody else is harmed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.base.errors import InvalidRequest
from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestOptions
from servd.messages.params import PoolingParams, ReasoningTags, RepetitionDetection, SamplingParams
from servd.worker.sample.sampler import Sampler
from tests.worker.driver import config_for

NUMBERS = [
    -1,
    0,
    1,
    2,
    15,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**400,
    0.5,
    -0.5,
    1e-320,
    1e18,
    1e38,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
]
PROMPT = [5, 6, 7, 8, 9]
EXPECTED = SamplingParams(temperature=0.0, max_tokens=4)

number = st.sampled_from(NUMBERS)
token_ids = st.lists(number, max_size=3) | st.sampled_from(
    [list(range(500)), [1] * 1024, [1] * 8192, [1] * 8193, [511], [512]]
)
texts = st.sampled_from([[], [""], ["a"], ["a" * 1024], ["a" * 1025], ["a"] * 512, ["a"] * 513])
BY_KIND: dict[str, st.SearchStrategy[Any]] = {
    "stop": texts,
    "bad_words": texts,
    "stop_token_ids": token_ids,
    "allowed_token_ids": st.none() | token_ids,
    "logprob_token_ids": token_ids,
    "bad_words_token_ids": st.lists(token_ids, max_size=2)
    | st.sampled_from([[[1] * 32] * 1024, [[1] * 33], [[]]]),
    "logit_bias": st.dictionaries(number, number, max_size=2)
    | st.sampled_from([dict.fromkeys(range(512), -100.0), dict.fromkeys(range(1025), 1.0)]),
    "repetition_detection": st.builds(RepetitionDetection, number, number, number),
    "reasoning_tags": st.builds(ReasoningTags, number, st.none() | number),
    "structured_output": st.none(),
}
FIELDS = {
    field.name: BY_KIND.get(
        field.name, st.booleans() if isinstance(field.default, bool) else st.none() | number
    )
    for field in msgspec.structs.fields(SamplingParams)
}


class Engine:
    """A whole engine in this process, on a tiny model."""

    def __init__(self, folder: Path) -> None:
        config = config_for(folder)
        self.spec = read_spec(str(folder))
        executor = UniProcExecutor(config, self.spec, lambda phase, fraction: None)
        self.core = EngineCore(config, self.spec, executor, executor.start())
        self.num_requests = 0

    def run(
        self,
        params: SamplingParams | PoolingParams,
        prompt: list[int] = PROMPT,
        cache_salt: str | None = None,
    ) -> list[EngineCoreOutput]:
        """All outputs of one request."""
        self.num_requests += 1
        options = RequestOptions(cache_salt=cache_salt)
        request = EngineCoreRequest(
            str(self.num_requests), prompt, params, eos_token_ids=[3], options=options
        )
        self.core.handle(request)
        outputs: list[EngineCoreOutput] = []
        while self.core.has_work:
            for message in self.core.step().values():
                outputs += message.all_outputs
        for request_id in {output.request_id for output in outputs}:  # one for each choice
            ends = [o.finish_reason for o in outputs if o.request_id == request_id]
            assert ends[-1] is not None
            assert ends[:-1] == [None] * (len(ends) - 1)
        return outputs

    def still_answers(self) -> bool:
        """A request gets the tokens that it got at first."""
        answer = [token for o in self.run(EXPECTED) for token in o.new_token_ids]
        self.first_answer = getattr(self, "first_answer", answer)
        return answer == self.first_answer


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    made = Engine(tiny_llama)
    assert made.still_answers()
    return made


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_any_parameters_are_refused_or_served(engine: Engine, fields: dict[str, Any]):
    params = SamplingParams(**fields)
    refusal = None
    try:
        params.validate(engine.spec.vocab_size)
    except InvalidRequest as error:
        refusal = error
        assert error.param in FIELDS
        assert len(str(error)) < 300
    try:
        encoded = msgspec.msgpack.encode(EngineCoreRequest("a", PROMPT, params))
        params = msgspec.msgpack.decode(encoded, type=EngineCoreRequest).params
    except (OverflowError, msgspec.ValidationError):
        assert refusal is not None
        return  # it could not even be sent
    outputs = engine.run(params)
    # What is refused and comes in all the same is an error of this request only.
    assert (outputs[-1].finish_reason is FinishReason.ERROR) == (refusal is not None)
    assert engine.still_answers()


@pytest.mark.parametrize("name", [n for n in FIELDS if n not in BY_KIND])
def test_every_number_alone(engine: Engine, name: str):
    for value in NUMBERS:
        test_any_parameters_are_refused_or_served.hypothesis.inner_test(engine, {name: value})


@pytest.mark.parametrize("prompt", [[2**31], [2**64], [-1], [512]])
def test_a_token_outside_the_vocabulary_fails_only_that_request(engine: Engine, prompt: list[int]):
    for params in (EXPECTED, PoolingParams(), PoolingParams(pooling="all")):
        [output] = engine.run(params, [*PROMPT, *prompt])
        assert output.finish_reason is FinishReason.ERROR
    assert engine.still_answers()


def test_a_bug_while_a_request_enters_fails_only_that_request(engine: Engine, monkeypatch):
    """Also while another one decodes, and in the middle of chunked prefill."""
    add = Sampler.add

    def broken(self, slot, params, *arguments):
        add(self, slot, params, *arguments)
        if params.seed == 13:
            raise RuntimeError("a bug with /a/path")

    monkeypatch.setattr(Sampler, "add", broken)
    neighbour = EngineCoreRequest("n", PROMPT, EXPECTED, eos_token_ids=[3])
    alone = [token for o in engine.run(EXPECTED) for token in o.new_token_ids]
    engine.core.handle(neighbour)
    outputs = engine.core.step()[0].all_outputs
    bad = SamplingParams(seed=13, logprobs=2, prompt_logprobs=1, repetition_penalty=1.5)
    engine.core.handle(EngineCoreRequest("b", PROMPT * 20, bad))
    while engine.core.has_work:
        outputs += [o for message in engine.core.step().values() for o in message.all_outputs]
    [failed] = [o for o in outputs if o.request_id == "b"]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "the worker failed on this request (RuntimeError)"
    assert [t for o in outputs if o.request_id == "n" for t in o.new_token_ids] == alone
    assert engine.still_answers() and engine.core.executor.worker.runner.failed == {}


def test_a_request_that_fails_leaves_nothing_false_in_the_prefix_cache(engine: Engine):
    """Its blocks are found by the hashes of its tokens, so they have to hold what those yield."""
    prompt = [token_id % 500 + 4 for token_id in range(7, 1000, 13)]  # several blocks
    refused = SamplingParams(temperature=0.0, max_tokens=4, top_k=-5)
    tokens = []
    for salt, params, last in [
        ("alone", EXPECTED, []),
        ("bad parameter", refused, []),
        ("bad token", EXPECTED, [512]),
    ]:
        engine.run(params, prompt + last, salt)
        outputs = engine.run(EXPECTED, prompt, salt)
        assert (outputs[0].num_cached_tokens > 0) == (salt == "alone")  # what failed shares nothing
        tokens.append([token for o in outputs for token in o.new_token_ids])
    assert tokens[1] == tokens[2] == tokens[0]
