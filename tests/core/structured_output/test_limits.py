"""Generated forms, from harmless to enormous: refused with a reason, or they end as they should."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from servd.checkpoint.hub import find_model
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec, read_spec
from servd.config import Config
from servd.core.engine_core import EngineCore
from servd.core.executor.fake import FakeExecutor
from servd.core.structured_output.checker import try_grammar
from servd.core.structured_output.manager import Compiled
from servd.core.structured_output.vocabulary import load_vocabulary
from servd.messages.engine import EngineCoreRequest, FinishReason
from servd.messages.params import SamplingParams, StructuredOutput
from tests.core.engines import Log
from tests.limits import WAIT_SECONDS

MAX_TOKENS = 120
# The same examples in each run, shown as they are found: one may take a second.
GENEROUS = settings(
    deadline=None,
    derandomize=True,
    max_examples=10,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Model:
    """A vocabulary, and engines whose tokens are random but allowed."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.config = Config.load(
            {
                "max_num_seqs": 4,
                "max_num_batched_tokens": 64,
                "max_model_len": 256,
                "block_size": 16,
                "async_scheduling": False,
            }
        )
        self.vocabulary = load_vocabulary(self.config, spec)
        self.loaded: Future[Any] = Future()
        self.loaded.set_result(self.vocabulary)

    def run(self, output: StructuredOutput, num_requests: int = 3) -> list[Reply]:
        """Some outputs of a form that has passed the check."""
        executor = FakeExecutor(self.config, self.spec, lambda phase, fraction: None)
        engine = EngineCore(self.config, self.spec, executor, executor.start())
        news: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        engine.grammars.on_compiled = news.put
        engine.grammars._vocabulary = self.loaded
        for i in range(num_requests):
            params = SamplingParams(max_tokens=MAX_TOKENS, structured_output=output)
            eos = self.spec.eos_token_ids
            engine.handle(EngineCoreRequest(f"r{i}", [i], params, eos_token_ids=eos))
        engine.handle(news.get(timeout=WAIT_SECONDS))
        engine.grammars._threads.shutdown()
        log = Log()
        while engine.has_work:
            log.step(engine)
        return [self.reply(log, f"r{i}") for i in range(num_requests)]

    def reply(self, log: Log, request_id: str) -> Reply:
        last, token_ids = log.outputs[request_id][-1], log.token_ids(request_id)
        assert last.error is None and last.finish_reason is not None
        text = [i for i in token_ids if i not in self.spec.eos_token_ids]
        return Reply(
            self.vocabulary.decode_bytes(text).decode(errors="replace"),
            len(token_ids),
            last.finish_reason,
            last.stop_reason,
        )


@dataclass
class Reply:
    """What a client sees."""

    text: str
    num_tokens: int
    finish_reason: FinishReason
    stop_reason: int | str | None


MODELS: dict[str, Model] = {}


@pytest.fixture(params=["bytes", "demo"])
def model(request: pytest.FixtureRequest) -> Model:
    """Loaded once."""
    if request.param not in MODELS:
        is_demo = request.param == "demo"
        MODELS[request.param] = Model(read_spec(find_model("demo")) if is_demo else FAKE_SPEC)
    return MODELS[request.param]


def ends_well(model: Model, output: StructuredOutput, is_valid: Any) -> str:
    """How it ended: "refused", or the finish reasons."""
    reason = try_grammar(output, model.vocabulary)
    if reason is not None:
        assert reason.strip()
        return f"refused: {reason}"
    replies = model.run(output)
    for reply in replies:
        if reply.finish_reason is FinishReason.STOP:
            assert reply.stop_reason is None and is_valid(reply.text), reply
        else:
            assert reply.finish_reason is FinishReason.LENGTH
            was_cut = isinstance(reply.stop_reason, str)
            assert was_cut or reply.num_tokens == MAX_TOKENS, reply
    return " ".join(sorted({f"{r.finish_reason.value}:{r.stop_reason}" for r in replies}))


# ---- JSON schemas ----

SPECIAL = ["<tool_call>", "</think>", "<|im_end|>", "<|endoftext|>", "<eos>", "<unknown>"]
words = st.sampled_from([*SPECIAL, "a", "größe", 'say "hi"', "\\", "\n", "東京 😀", "a <think> b"])
names = st.one_of(words, st.integers(0, 9999).map("p{}".format))
sizes = st.sampled_from([0, 1, 2, 7, 60, 1000, 100_000])
scalars = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(
        lambda kind: {"type": kind}
    ),
    words.map(lambda word: {"const": word}),
    st.lists(words, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.builds(
        lambda n, k: {"enum": [f"{k}{i * 7919 % 100_003}" for i in range(n)]},
        st.sampled_from([1, 300, 3000]),
        words,
    ),
    sizes.map(lambda n: {"type": "string", "maxLength": n}),
    sizes.map(lambda n: {"type": "string", "minLength": n}),
    st.sampled_from(["^[a-z]{1,9}$", "^(a|b)*a(a|b){9}$", "^([a-c]{1,30} ){1,30}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
)
# Inside one another, these would make gigabytes of JSON.
wide = st.one_of(
    st.builds(
        lambda n, value: {"properties": {f"p{i}": value for i in range(n)}, "type": "object"},
        st.sampled_from([20, 300, 1400]),
        scalars.filter(lambda schema: len(schema.get("enum", [])) <= 300),
    ),
    st.builds(
        lambda n, value: {"anyOf": [*({"const": i} for i in range(n)), value]},
        st.sampled_from([2, 50, 1500]),
        scalars,
    ),
)
schemas = st.recursive(
    st.one_of(scalars, wide),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, is_required, is_open: {
                "type": "object",
                "properties": properties,
                "required": list(properties) if is_required else [],
                "additionalProperties": is_open,
            },
            st.dictionaries(names, inner, max_size=4),
            st.booleans(),
            st.booleans(),
        ),
        st.builds(
            lambda item, low, high: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + high,
            },
            inner,
            sizes,
            sizes,
        ),
    ),
    max_leaves=3,
)


@GENEROUS
@given(schema=schemas)
@example(schema={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(999)}})
@example(schema={"const": "<tool_call>"})
def test_json_schemas(model, schema):
    validator = jsonschema.Draft202012Validator(schema)
    output = StructuredOutput("json", json.dumps(schema))
    ends_well(model, output, lambda text: validator.is_valid(json.loads(text)))


# ---- regular expressions and grammars: two ways to write the same ----

Ends = Callable[[str, int], set[int]]


@dataclass
class Pattern:
    """A pattern as Lark, as a regular expression, and as what it says: where in a text it may end
    if it begins at an index. Python's `re` would take hours for some.
    """

    lark: str
    regex: str
    ends: Ends

    def matches(self, text: str) -> bool:
        return len(text) in self.ends(text, 0)


def literal(text: str) -> Pattern:
    return Pattern(
        json.dumps(text, ensure_ascii=False),
        re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text),
        lambda whole, start: {start + len(text)} if whole.startswith(text, start) else set(),
    )


def characters(regex: str) -> Pattern:
    single = re.compile(regex)
    return Pattern(
        f"/{regex}/", regex, lambda text, start: {start + 1} if single.match(text, start) else set()
    )


def sequence(parts: list[Pattern]) -> Pattern:
    def ends(text: str, start: int) -> set[int]:
        reached = {start}
        for part in parts:
            reached = _advance(part, text, reached)
        return reached

    return Pattern(
        " ".join(f"({p.lark})" for p in parts), "".join(f"({p.regex})" for p in parts), ends
    )


def alternatives(parts: list[Pattern]) -> Pattern:
    return Pattern(
        " | ".join(f"({p.lark})" for p in parts),
        "|".join(f"({p.regex})" for p in parts),
        lambda text, start: set().union(*(p.ends(text, start) for p in parts)),
    )


def repeated(part: Pattern, low: int, more: int) -> Pattern:
    @cache
    def ends(text: str, start: int) -> set[int]:
        reached, states = {start}, set()
        for times in range(low + more + 1):
            if times >= low:
                states |= reached
            reached = _advance(part, text, reached)
            if not reached:
                break
        return states

    times = f"{{{low},{low + more}}}"
    return Pattern(f"({part.lark}){times}", f"({part.regex}){times}", ends)


def _advance(part: Pattern, text: str, starts: set[int]) -> set[int]:
    return set().union(*(part.ends(text, start) for start in starts))


patterns = st.recursive(
    st.one_of(
        words.map(literal),
        st.sampled_from(["[a-z]", "[0-9]", "[^<>]", "[a-c ]"]).map(characters),
        st.just(alternatives([literal("a"), literal("aa")])),
        st.sampled_from([2, 100, 2500]).map(
            lambda n: alternatives([literal(f"item {i * 7919 % 100_003}") for i in range(n)])
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(sequence),
        st.lists(inner, min_size=1, max_size=3).map(alternatives),
        st.builds(repeated, inner, st.sampled_from([0, 1, 5, 40]), st.sampled_from([1, 9, 50])),
    ),
    max_leaves=4,
)
NESTED = repeated(repeated(characters("[a-z]"), 1, 29), 1, 29)


@GENEROUS
@given(pattern=patterns)
@example(pattern=repeated(NESTED, 1, 29))
@example(pattern=sequence([literal("<tool_call>"), NESTED, literal("</tool_call>")]))
def test_regular_expressions(model, pattern):
    ends_well(model, StructuredOutput("regex", pattern.regex), pattern.matches)


@GENEROUS
@given(pattern=patterns)
@example(pattern=sequence([literal("<|im_end|>"), literal("x")]))
def test_grammars(model, pattern):
    ends_well(model, StructuredOutput("grammar", f"start: {pattern.lark}"), pattern.matches)


@GENEROUS
@given(choices=st.lists(words, min_size=1), n=st.sampled_from([0, 500, 4000]))
def test_choices(model, choices, n):
    choices = [*choices, *(f"item {i * 7919 % 100_003}" for i in range(n))]
    ending = ends_well(model, StructuredOutput("choice", json.dumps(choices)), choices.__contains__)
    assert ending == "stop:None"
