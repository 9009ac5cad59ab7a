"""GrammarManager in an engine: outputs have their form, and nobody waits for a compilation."""

from __future__ import annotations

import json
import queue
import re
import string
import threading
from typing import Any

import pytest

from servd.core.engine_core import EngineCore
from servd.core.structured_output import cache, grammar, manager
from servd.messages.engine import AbortRequests, EngineCoreOutput, EngineCoreRequest, FinishReason
from servd.messages.params import StructuredOutput
from tests.core.engines import Log, make_engine, make_request, solo
from tests.limits import WAIT_SECONDS

REGEX = StructuredOutput("regex", "[a-z]{3}-[0-9]{2}")
SCHEMA = StructuredOutput(
    "json",
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)


class Driver:
    """Steps an engine and hands it what was compiled, when told to."""

    def __init__(self, engine: EngineCore, *requests: EngineCoreRequest) -> None:
        self.engine = engine
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.log = Log()
        engine.grammars.on_compiled = self.news.put
        for request in requests:
            engine.handle(request)

    def compiled(self) -> None:
        """Wait for one grammar."""
        self.engine.handle(self.news.get(timeout=WAIT_SECONDS))

    def run(self) -> Log:
        """Until nothing is left."""
        while self.engine.grammars.is_compiling:
            self.compiled()
        return self.log.run(self.engine)


def last(log: Log, request_id: str) -> EngineCoreOutput:
    return log.outputs[request_id][-1]


def text(log: Log, request_id: str) -> str:
    return bytes(token_id for token_id in log.token_ids(request_id) if token_id < 256).decode()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [64, 13], ids=["roomy", "preempting"])
def test_outputs_have_their_form_whatever_runs_beside_them(depth, num_blocks):
    free = [make_request(f"free{i}", [i, 2, 3], max_tokens=20) for i in range(3)]
    bound = [
        make_request(f"bound{i}", [9, i], max_tokens=40, structured_output=REGEX) for i in range(3)
    ]
    engine = make_engine(num_blocks, depth)
    log = Driver(engine, *free, *bound).run()
    for request in free:
        assert log.token_ids(request.request_id) == solo(request)
    reference = Driver(make_engine(), *bound).run()
    for i in range(3):
        assert re.fullmatch(REGEX.value, text(log, f"bound{i}"))
        assert log.token_ids(f"bound{i}") == reference.token_ids(f"bound{i}")
        assert last(log, f"bound{i}").finish_reason is FinishReason.STOP
    assert bool(log.total("num_preemptions")) is (num_blocks == 13)


def test_a_request_takes_no_slot_while_its_grammar_compiles():
    engine = make_engine(max_num_seqs=1)
    driver = Driver(
        engine, make_request("bound", [1], structured_output=REGEX), make_request("free", [1])
    )
    driver.log.run(engine)
    assert driver.log.finished("free") and not driver.log.finished("bound")
    driver.run()
    assert re.fullmatch(REGEX.value, text(driver.log, "bound"))


def test_one_compilation_serves_waiting_and_later_requests():
    engine = make_engine()
    driver = Driver(
        engine,
        *[make_request(f"r{i}", [i], max_tokens=30, structured_output=REGEX) for i in range(3)],
    )
    driver.compiled()
    assert not engine.grammars.is_compiling
    engine.handle(make_request("later", [7], max_tokens=30, structured_output=REGEX))
    driver.run()
    assert all(
        re.fullmatch(REGEX.value, text(driver.log, name)) for name in ("r0", "r1", "r2", "later")
    )


def test_requests_that_wait_for_their_grammars_count_as_deferred():
    engine = make_engine()
    driver = Driver(
        engine,
        make_request("a", [1], structured_output=REGEX),
        make_request("b", [1], structured_output=SCHEMA),
    )

    def num_deferred() -> int:
        [outputs] = engine.step().values()
        return outputs.stats.num_deferred

    assert num_deferred() == 2
    engine.handle(AbortRequests(["b"]))
    assert num_deferred() == 1
    driver.run()
    assert driver.log.finished("a") and engine.grammars.num_waiting == 0


def test_an_aborted_request_does_not_come_back():
    engine = make_engine()
    driver = Driver(engine, make_request("gone", [1], structured_output=REGEX))
    engine.handle(AbortRequests(["gone"]))
    driver.run()
    assert not driver.log.outputs["gone"]


def test_a_grammar_that_cannot_be_compiled_ends_its_request():
    broken = StructuredOutput("regex", "(")
    log = Driver(
        make_engine(), make_request("a", [1], structured_output=broken), make_request("b", [1])
    ).run()
    assert last(log, "a").finish_reason is FinishReason.ERROR
    assert "unclosed group" in (last(log, "a").error or "")
    assert last(log, "b").finish_reason is FinishReason.LENGTH


def test_waiting_requests_keep_their_grammars(monkeypatch):
    """Compiled again, they would stop the step loop; and once nobody needs them, they are gone."""
    monkeypatch.setattr(cache, "MAX_GRAMMARS", 1)
    engine = make_engine(max_num_seqs=1)
    forms = [f"[a-z]{{{n}}}" for n in range(3, 9)]
    driver = Driver(
        engine,
        *[
            make_request(
                form, [1], 30, structured_output=StructuredOutput("regex", form), eos_token_ids=[]
            )
            for form in forms
        ],
    )
    while engine.grammars.is_compiling:
        driver.compiled()
    monkeypatch.setattr(engine.grammars._cache, "_compile", None)
    driver.log.run(engine)
    assert all(re.fullmatch(form, text(driver.log, form)) for form in forms)
    engine.executor.steps.clear()  # the test's own record
    assert len(engine.grammars._cache._in_use) <= 1


@pytest.mark.parametrize("depth", [1, 2])
def test_the_form_begins_after_its_token(depth):
    begin = ord("a")
    output = StructuredOutput(REGEX.kind, REGEX.value, starts_after=[begin])
    request = make_request("a", [1, 2], max_tokens=60, structured_output=output)
    reasoning = bytes(solo(request)).decode().partition("a")[0]
    assert 0 < len(reasoning) < 40
    log = Driver(make_engine(depth=depth), request).run()
    before, _, after = text(log, "a").partition("a")
    assert before == reasoning
    assert re.fullmatch(REGEX.value, after)


def test_an_output_does_not_end_before_its_form_has_begun():
    begin, end = ord("a"), ord(" ")
    free = bytes(solo(make_request("a", [1, 2], max_tokens=60)))
    assert 0 < free.index(end) < free.index(begin), "the end would come first"
    output = StructuredOutput(REGEX.kind, REGEX.value, starts_after=[begin])
    request = make_request(
        "a", [1, 2], max_tokens=200, eos_token_ids=[end], structured_output=output
    )
    log = Driver(make_engine(128, max_model_len=256), request).run()
    before, _, after = text(log, "a").partition("a")
    assert " " not in before
    assert re.fullmatch(REGEX.value, after)


def test_a_complete_output_ends_without_an_end_token():
    request = make_request("a", [1], max_tokens=6, eos_token_ids=[], structured_output=REGEX)
    log = Driver(make_engine(), request).run()
    assert len(log.token_ids("a")) == 6  # as long as max_tokens allows, and yet not cut off
    assert last(log, "a").finish_reason is FinishReason.STOP
    assert last(log, "a").ended_by_grammar and last(log, "a").stop_reason is None


def test_max_tokens_cuts():
    log = Driver(make_engine(), make_request("a", [1], max_tokens=5, structured_output=REGEX)).run()
    assert last(log, "a").finish_reason is FinishReason.LENGTH
    assert not last(log, "a").ended_by_grammar


def test_an_output_that_leaves_its_form_is_cut_before_that_token(monkeypatch):
    """As when logit_bias or allowed_token_ids leave none of the tokens that the grammar allows."""
    engine = make_engine()
    sample = engine.executor.sample_tokens
    monkeypatch.setattr(engine.executor, "sample_tokens", lambda bitmask: sample(None))
    digits = StructuredOutput("regex", "[0-9]+")
    log = Driver(
        engine, make_request("a", [1], structured_output=digits), make_request("b", [1])
    ).run()
    assert last(log, "a").finish_reason is FinishReason.LENGTH
    assert "structure" in str(last(log, "a").stop_reason) and not log.token_ids("a")
    assert last(log, "b").finish_reason is FinishReason.LENGTH


class Broken:
    """A matcher of the library that fails when it is asked for something."""

    def __init__(self, method: str, error: BaseException | None) -> None:
        self.method, self.error = method, error

    def compute_bitmask(self) -> bytes:
        return self._answer("compute_bitmask", EVERYTHING)

    def consume_token(self, token_id: int) -> bool:
        return self._answer("consume_token", self.method != "consume_token")

    def compute_ff_tokens(self) -> list[int]:
        return self._answer("compute_ff_tokens", [])

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "Too many items (limit 7)"

    def deep_copy(self) -> Broken:
        return self

    def _answer(self, method: str, answer: Any) -> Any:
        if method == self.method and self.error is not None:
            raise self.error
        return answer


EVERYTHING = bytes(32 * [255] + [0])


@pytest.mark.parametrize("error", [RuntimeError("bug"), BaseException("panic"), None])
@pytest.mark.parametrize("method", ["compute_bitmask", "consume_token", "compute_ff_tokens"])
@pytest.mark.parametrize("num_ends", [0, 256], ids=["continues", "would end"])
def test_a_grammar_that_fails_while_decoding_ends_only_its_request(method, error, num_ends):
    """Even where the token after the failure would have ended it, the output is not complete."""
    if method == "compute_ff_tokens" and error is None:
        pytest.skip("it can only raise")
    engine = make_engine()
    first = ord("a")  # what follows the prompt; whatever comes next may be an end
    ends = [i for i in range(num_ends) if i != first]
    bound = make_request("a", [1], structured_output=REGEX, eos_token_ids=ends)
    driver = Driver(engine, bound, make_request("b", [1]))
    driver.compiled()
    compiled = engine.grammars._cache.find(REGEX)
    assert compiled is not None
    compiled._origin = Broken(method, error)  # type: ignore[assignment]
    compiled.first_mask = EVERYTHING
    log = driver.run()
    reason = "parser items" if error is None else type(error).__name__
    assert last(log, "a").finish_reason is FinishReason.LENGTH and last(log, "a").error is None
    assert reason in str(last(log, "a").stop_reason)
    assert log.token_ids("a") == ([] if method == "consume_token" else [first])
    assert last(log, "b").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("options", [{}, {"MAX_TOKENS_AGAIN": 30}], ids=["too often", "too long"])
def test_an_exhausted_grammar_ends_its_request_and_is_dropped(monkeypatch, options):
    """Its outputs share its states: at the limit, every later request would fail."""
    monkeypatch.setattr(grammar, "LIMITS", {"max_lexer_states": 40})
    for name, value in options.items():
        monkeypatch.setattr(manager, name, value)
    digits = StructuredOutput("regex", "[0-9]{200}")
    engine = make_engine()
    for name, max_tokens in {"a": 20, "b": 60, "c": 20}.items():
        log = Driver(
            engine, make_request(name, [1], max_tokens=max_tokens, structured_output=digits)
        ).run()
        assert last(log, name).finish_reason is FinishReason.LENGTH
        if name == "b":
            assert "too many states" in str(last(log, name).stop_reason)
            assert 20 < len(log.token_ids(name)) < 60
        else:
            assert last(log, name).stop_reason is None and len(log.token_ids(name)) == 20


BRANCHES = "|".join(
    f"{letter}[{letter}{letter.upper()}]{{20}}" for letter in string.ascii_lowercase
)


def branching(num_requests: int) -> list[EngineCoreRequest]:
    """Outputs that have hardly any state in common, and 20 each besides the 80 of the beginning."""
    output = StructuredOutput("regex", BRANCHES)
    return [
        make_request(f"r{i}", [i], max_tokens=30, structured_output=output)
        for i in range(num_requests)
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [64, 11], ids=["roomy", "preempting"])
def test_outputs_continue_at_the_grammar_state_limit(monkeypatch, depth, num_blocks):
    reference = Driver(make_engine(), *branching(16)).run()
    monkeypatch.setattr(grammar, "LIMITS", {"max_lexer_states": 200})
    compiled = []
    compile_one = manager.GrammarManager._compile
    monkeypatch.setattr(
        manager.GrammarManager,
        "_compile",
        lambda self, output: compiled.append(1) or compile_one(self, output),
    )
    engine = make_engine(num_blocks, depth, max_num_seqs=3)
    log = Driver(engine, *branching(16)).run()
    for i in range(16):
        assert re.fullmatch(BRANCHES, text(log, f"r{i}")), last(log, f"r{i}").stop_reason
        assert log.token_ids(f"r{i}") == reference.token_ids(f"r{i}")
    assert bool(log.total("num_preemptions")) is (num_blocks == 11)
    assert len(compiled) > 2 and len(engine.grammars._cache._recent) == 1


def test_a_slow_grammar_is_compiled_once(monkeypatch):
    """Neither for outputs that go on nor for those that wait; for later ones, in a thread."""
    monkeypatch.setattr(grammar, "LIMITS", {"max_lexer_states": 200})
    monkeypatch.setattr(cache, "RECOMPILE_LIMIT", 0.0)
    compile_one, threads = manager.GrammarManager._compile, []

    def spy(self, output):
        threads.append(threading.current_thread())
        return compile_one(self, output)

    monkeypatch.setattr(manager.GrammarManager, "_compile", spy)
    engine = make_engine(max_num_seqs=3)
    log = Driver(engine, *branching(16), make_request("free", [1])).run()
    assert re.fullmatch(BRANCHES, text(Driver(engine, *branching(1)).run(), "r0"))
    assert len(threads) == 2 and threading.main_thread() not in threads
    ends = [last(log, f"r{i}") for i in range(16)]
    assert {end.finish_reason for end in ends} == {FinishReason.STOP, FinishReason.LENGTH}
    assert all(
        "too many states" in str(end.stop_reason)
        for end in ends
        if end.finish_reason is FinishReason.LENGTH
    )
    assert last(log, "free").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_masks_take_turns(monkeypatch, depth):
    """Twelve of a tenth of a second: a step waits for one of them, and all outputs are the same."""
    slow = [
        make_request(f"slow{i}", [i], max_tokens=9, structured_output=REGEX, eos_token_ids=[])
        for i in range(6)
    ]
    fast = StructuredOutput("regex", "[a-z]{30}")
    other = make_request("fast", [7], max_tokens=30, structured_output=fast, eos_token_ids=[])
    free = make_request("free", [8], max_tokens=30)
    reference = Driver(make_engine(depth=depth), *slow, other, free).run()

    clock, masks = [0.0], []
    bitmask = grammar.Matcher.bitmask

    def tick(self):
        mask = bitmask(self)
        if mask is not self._first_mask:
            is_slow = self in [
                row.matcher for row in engine.grammars._rows.values() if row.grammar is regex
            ]
            clock[0] += 0.1 if is_slow else 0.001
            masks.append(is_slow)
        return mask

    engine = make_engine(depth=depth)
    driver = Driver(engine, *slow, other, free)
    while engine.grammars.is_compiling:
        driver.compiled()
    regex = engine.grammars._cache.find(REGEX)
    monkeypatch.setattr(manager.Matcher, "bitmask", tick)
    monkeypatch.setattr(manager.time, "perf_counter", lambda: clock[0])
    num_slow = []
    while engine.has_work:
        masks.clear()
        driver.log.step(engine)
        num_slow.append(sum(masks))
    for request in (*slow, other, free):
        name = request.request_id
        assert driver.log.token_ids(name) == reference.token_ids(name)
    # All of them once, before it is known how slow they are; and while they take turns, all others
    # go on.
    assert sorted(num_slow)[-2:] == [1, 6]
    assert len(num_slow) < 6 * 6 + 8


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_whatever_a_compilation_raises_ends_its_request(monkeypatch, kind):
    """A panic of the library is a BaseException."""

    def fail(*_):
        raise kind("bug")

    monkeypatch.setattr(grammar, "_compile", fail)
    log = Driver(make_engine(), make_request("a", [1], structured_output=REGEX)).run()
    assert last(log, "a").finish_reason is FinishReason.ERROR
    assert kind.__name__ in (last(log, "a").error or "")


class OutOfFuel:
    """A matcher whose grammar has no states left; replayed, it rejects what it accepted before."""

    is_complete = False

    def __init__(self, error: grammar.GrammarError) -> None:
        self.error = error

    def accept(self, token_id: int) -> None:
        raise self.error

    def matcher(self) -> OutOfFuel:
        return OutOfFuel(grammar.GrammarError("token 3 doesn't satisfy the grammar"))


def test_a_failed_grammar_replay_reports_the_limit():
    used_up: Any = OutOfFuel(grammar.UsedUp("too many lexer states"))
    row: Any = manager.GrammarRow(used_up, used_up, (), None, lambda row: row, token_ids=[3])
    row.accept(5)
    assert row.end is not None and "too many lexer states" in (row.end.error or "")
