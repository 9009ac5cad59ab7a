"""AsyncLLM over a fake channel: streams, leaving early, overload, a dead engine."""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator

import pytest

from servd.api.engine import async_llm as module
from servd.api.engine import engine_client
from servd.api.engine.async_llm import AsyncLLM
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import Processor
from servd.api.observability.metrics import Metrics
from servd.api.observability.tracer import Tracer
from servd.api.request.request_output import RequestOutput
from servd.api.text.prompt import Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import EngineDeadError, EngineError, InvalidRequest, Overloaded, ShuttingDown
from servd.base.tracing import Mark, now_ns
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config, SchedulerConfig
from servd.messages.engine import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineGone,
    EngineReady,
    FinishReason,
    WorkerReady,
)
from servd.messages.outputs import CompletionOutput
from servd.messages.params import SamplingParams, StructuredOutput
from servd.messages.stats import SchedulerStats
from tests.limits import WAIT_SECONDS

Outputs = AsyncGenerator[RequestOutput, None]
READY = EngineReady(
    WorkerReady("cpu", "float32", "none", 8, 0, 0), max_model_len=1000, block_size=16
)


class FakeClient:
    """The engine's channel with the engine's side in the test's hands; edge-triggered."""

    client = 0
    generation = 0

    def __init__(self) -> None:
        self.sent: list = []
        self.inbox: deque = deque()
        self.event = os.eventfd(0, os.EFD_NONBLOCK)

    def send(self, message) -> None:
        self.sent.append(message)

    def push(self, *messages) -> None:
        self.inbox.extend(messages)
        os.eventfd_write(self.event, 1)

    def drain(self, max_messages: int) -> list:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)
        return [self.inbox.popleft() for _ in range(min(max_messages, len(self.inbox)))]

    def fileno(self) -> int:
        return self.event

    def answer(
        self, text: str, finish: FinishReason | None = None, request_id: str = "r", **fields
    ) -> None:
        output = EngineCoreOutput(request_id, list(text.encode()), finish, **fields)
        self.push(EngineCoreOutputs([output]))

    def aborted(self) -> list[str]:
        aborts = [message for message in self.sent if isinstance(message, AbortRequests)]
        return [request_id for abort in aborts for request_id in abort.request_ids]


@pytest.fixture
async def llm():
    tokenizer = Tokenizer.bytes()
    config = Config().replace(max_waiting_requests=3)
    client = FakeClient()
    processor = Processor(config, FAKE_SPEC, tokenizer, 1000)
    metrics = Metrics("m")
    outputs = OutputProcessor(tokenizer)
    llm = AsyncLLM(config, FAKE_SPEC, [client], processor, outputs, Tracer(), metrics)
    client.inbox.append(READY)  # came before anybody listened: no event tells of it
    llm.start()
    yield llm
    llm.close()
    os.close(client.event)


def generate(llm: AsyncLLM, request_id: str = "r", in_pieces: bool = True, **params) -> Outputs:
    sampling = SamplingParams(temperature=0, **params)
    return llm.generate(Prompt(content="prompt"), sampling, request_id, in_pieces=in_pieces)


async def next_delta(outputs: Outputs) -> CompletionOutput:
    while not (output := await anext(outputs)).outputs:  # it is admitted and processed
        pass
    [delta] = output.outputs
    return delta


async def collect(outputs: Outputs) -> list[CompletionOutput]:
    return [delta async for output in outputs for delta in output.outputs]


async def settle() -> None:
    """Let the event loop look at its descriptors and run what they wake."""
    for _ in range(3):
        await asyncio.sleep(0)


async def start(outputs: Outputs) -> asyncio.Task:
    task = asyncio.create_task(collect(outputs))
    await settle()
    return task


async def test_who_wants_an_answer_whole_is_woken_by_its_end(llm):
    task = asyncio.create_task(collect(generate(llm, in_pieces=False)))
    await settle()
    for text, finish in (("Hello", None), (" wor", None), ("ld", FinishReason.LENGTH)):
        llm.engines[0].client.answer(text, finish)
        await settle()
    [whole] = await task
    assert (whole.text, whole.finish_reason) == ("Hello world", FinishReason.LENGTH)


async def test_deltas_that_wait_are_merged(llm):
    stream = generate(llm, n=2)
    first = asyncio.ensure_future(next_delta(stream))
    await settle()
    llm.engines[0].client.answer("a", request_id="r_0")
    assert (await first).text == "a"
    for text in "bcd":  # the consumer is busy
        llm.engines[0].client.answer(text, request_id="r_0")
        llm.engines[0].client.answer(text.upper(), request_id="r_1")
        await settle()
    llm.engines[0].client.answer("e", FinishReason.STOP, "r_0", num_cached_tokens=4)
    llm.engines[0].client.answer("F", FinishReason.LENGTH, "r_1")
    await settle()
    deltas = {delta.index: delta for delta in await collect(stream)}
    merged = {i: (d.text, d.finish_reason, len(d.token_ids)) for i, d in deltas.items()}
    # The last token ended the request: it is no text.
    assert merged == {0: ("bcd", FinishReason.STOP, 4), 1: ("BCDF", FinishReason.LENGTH, 4)}


async def test_cancelling_before_the_first_token_aborts(llm, caplog):
    task = await start(generate(llm, n=2))
    with caplog.at_level(logging.DEBUG, logger="servd.api"):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert llm.engines[0].client.aborted() == ["r_0", "r_1"]
    assert "r: aborted after 0 tokens" in caplog.text
    llm.engines[0].client.answer("late", request_id="r_0", marks=[Mark("queued", now_ns())])
    await settle()
    assert llm.requests == {}  # late marks do not open the request again


async def test_closing_the_stream_aborts_only_what_runs(llm):
    stream = generate(llm, n=2)
    first = asyncio.ensure_future(next_delta(stream))
    await settle()
    llm.engines[0].client.answer("a", FinishReason.LENGTH, "r_0")
    await first
    await stream.aclose()
    assert llm.engines[0].client.aborted() == ["r_1"]


async def test_closing_aborts_what_runs_though_nobody_takes_its_end(llm):
    reading = asyncio.ensure_future(next_delta(generate(llm)))
    await settle()
    llm.close()
    assert llm.engines[0].client.aborted() == ["r"]
    with pytest.raises(ShuttingDown):
        await reading


async def test_a_stream_that_is_never_read_sends_nothing(llm):
    stream = generate(llm)
    await stream.aclose()
    assert llm.engines[0].client.sent == []


async def test_a_stop_string_aborts_in_the_engine(llm):
    task = await start(generate(llm, stop=["STOP"]))
    llm.engines[0].client.answer("a STO")
    await settle()
    assert llm.engines[0].client.aborted() == []
    llm.engines[0].client.answer("P b")
    deltas = await task
    assert "".join(delta.text for delta in deltas) == "a "
    assert deltas[-1].stop_reason == "STOP"
    assert llm.engines[0].client.aborted() == ["r"]


async def test_an_error_of_one_request(llm):
    task = await start(generate(llm, n=2))
    other = await start(generate(llm, "other"))
    llm.engines[0].client.answer("", FinishReason.ERROR, "r_0", error="the grammar broke")
    with pytest.raises(EngineError, match="the grammar broke") as error:
        await task
    assert not isinstance(error.value, EngineDeadError)
    assert llm.engines[0].client.aborted() == ["r_1"]
    llm.engines[0].client.answer("fine", FinishReason.LENGTH, "other")
    assert (await other)[0].text == "fine"


async def test_a_server_error_ends_only_open_requests(llm, monkeypatch):
    """What was received together with the message that could not be taken will not come again."""
    tasks = [await start(generate(llm, name)) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(llm.output_processor, "process_outputs", lambda *_: 1 / 0)
        llm.engines[0].client.answer("lost", request_id="a")
        for task in tasks:
            with pytest.raises(EngineError, match="see the log"):
                await asyncio.wait_for(task, WAIT_SECONDS)
    assert sorted(llm.engines[0].client.aborted()) == ["a", "b"]
    later = await start(generate(llm, "c"))
    llm.engines[0].client.answer("fine", FinishReason.LENGTH, "c")
    assert (await later)[0].text == "fine"


async def test_an_observer_that_fails_keeps_nothing_running(llm, monkeypatch, caplog):
    monkeypatch.setattr(Metrics, "received", lambda *_: 1 / 0)
    monkeypatch.setattr(Tracer, "stepped", lambda *_: 1 / 0)
    monkeypatch.setattr(Tracer, "ended", lambda *_: 1 / 0)
    first = await start(generate(llm, "a"))
    second = await start(generate(llm, "b"))
    llm.engines[0].client.answer("fine", FinishReason.LENGTH, "a")
    assert (await first)[0].text == "fine"
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert llm.engines[0].client.aborted() == ["b"]
    assert not llm.requests and not llm.engines[0].running
    assert "Tracer failed at the end of a" in caplog.text
    assert "Metrics failed at tokens of a" in caplog.text


async def test_text_before_the_death_is_delivered(llm):
    stream = generate(llm)
    first = asyncio.ensure_future(next_delta(stream))
    await settle()
    last = EngineCoreOutputs([EngineCoreOutput("r", [97])])
    llm.engines[0].client.push(last, EngineGone("gone"))
    assert (await first).text == "a"
    with pytest.raises(EngineDeadError):
        await next_delta(stream)


async def test_fail_ends_open_requests_while_the_engine_lives(llm):
    task = await start(generate(llm))
    llm.fail(ShuttingDown("the server is shutting down"))
    with pytest.raises(ShuttingDown):
        await task
    assert llm.engines[0].client.aborted() == ["r"] and llm.is_ready


async def test_a_request_is_admitted_with_all_its_prompts_or_not_at_all(llm):
    def generate_many(num_prompts: int, request_id: str) -> Outputs:
        prompts = [Prompt(content="prompt")] * num_prompts
        return llm.generate(prompts, SamplingParams(), request_id)

    first = generate_many(2, "r")
    assert (await anext(first)).request_id == "r-0"
    with pytest.raises(Overloaded, match="2 requests are unfinished and this one adds 2,"):
        await anext(generate_many(2, "s"))
    assert llm.num_unfinished == 2
    # One that could never be admitted is not told to come back later.
    with pytest.raises(InvalidRequest, match="4 prompts, the most at once is 3"):
        await anext(generate_many(4, "s"))
    await first.aclose()
    assert llm.num_unfinished == 0


async def test_a_request_id_in_use(llm):
    await start(generate(llm))
    with pytest.raises(InvalidRequest, match="'r'"):
        await next_delta(generate(llm))
    assert llm.engines[0].client.aborted() == []


async def test_a_request_id_that_two_requests_take_at_once(llm):
    first, second = generate(llm), generate(llm)
    await anext(first)
    await anext(second)
    task = await start(first)
    with pytest.raises(InvalidRequest, match="'r'"):
        await next_delta(second)
    llm.engines[0].client.answer("fine", FinishReason.LENGTH)
    assert (await task)[0].text == "fine"
    assert not llm.requests


async def test_long_prompts_do_not_hold_up_the_loop(llm, monkeypatch):
    threads: list[str] = []
    encode = llm.processor.tokenizer.encode

    def spy(*args):
        threads.append(threading.current_thread().name)
        return encode(*args)

    monkeypatch.setattr(llm.processor.tokenizer, "encode", spy)
    monkeypatch.setattr(llm.processor, "max_model_len", 10**6)
    for size in (10, module.MAX_INLINE + 1):
        outputs = llm.generate(Prompt(content="x" * size), SamplingParams(), "r")
        assert len((await anext(outputs)).prompt_token_ids) == size
        await outputs.aclose()
    assert threads[0] == "MainThread" and threads[1].startswith("prepare")


async def test_new_structured_outputs_do_not_hold_up_long_prompts(llm, monkeypatch):
    go_on, threads = threading.Event(), []

    def check(output, client):
        threads.append(threading.current_thread().name)
        go_on.wait(WAIT_SECONDS)

    monkeypatch.setattr(llm.processor.grammars, "check", check)
    params = SamplingParams(structured_output=StructuredOutput("regex", "[a-z]"))
    monkeypatch.setattr(llm.admission, "config", SchedulerConfig())
    streams = [llm.generate(Prompt(content="a"), params, f"r{i}") for i in range(4)]
    tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await settle()
    long = Prompt(content="x" * (module.MAX_INLINE + 1))
    with pytest.raises(InvalidRequest, match="maximum context length"):
        await asyncio.wait_for(anext(llm.generate(long, SamplingParams(), "long")), 60)
    go_on.set()
    await asyncio.gather(*tasks)
    for stream in streams:
        await stream.aclose()
    assert len(threads) == 4 and all(name.startswith("grammar") for name in threads)


@pytest.mark.parametrize(("read_ns", "num_turns"), [(0, 4), (10**12, 1)])
async def test_messages_are_taken_for_a_limited_time(llm, monkeypatch, read_ns, num_turns):
    await settle()
    monkeypatch.setattr(engine_client, "MAX_READ_NS", read_ns)
    turns: list[int] = []  # the turn in which each message was taken
    turn = 0
    monkeypatch.setattr(llm.engines[0], "_take_status", lambda message: turns.append(turn))
    llm.engines[0].client.push(*[SchedulerStats()] * (4 * engine_client.MAX_MESSAGES - 1))
    async with asyncio.timeout(WAIT_SECONDS):
        while len(turns) < 4 * engine_client.MAX_MESSAGES - 1:
            turn += 1
            await asyncio.sleep(0)
    assert len(set(turns)) == num_turns


@pytest.mark.parametrize(
    ("num_prompts", "length", "params"),
    [
        (100, 1, {}),
        (20, 900, {}),
        (8, 1, {"allowed_token_ids": [5] * 1000}),
        (8, 1, {"bad_words": ["w" * 30] * 20}),
    ],
)
async def test_many_prompts_are_prepared_in_a_thread(llm, monkeypatch, num_prompts, length, params):
    """Each takes a while, whatever its length, and all that the parameters take."""
    threads = set()
    process_inputs = llm.processor.process_inputs

    def record(*args):
        threads.add(threading.current_thread())
        return process_inputs(*args)

    monkeypatch.setattr(llm.processor, "process_inputs", record)
    monkeypatch.setattr(llm.admission, "config", SchedulerConfig())
    prompts = [Prompt(content="a" * length) for _ in range(num_prompts)]
    outputs = llm.generate(prompts[:1], SamplingParams(), "r")
    await anext(outputs)
    await outputs.aclose()
    assert threads == {threading.current_thread()}
    threads.clear()
    outputs = llm.generate(prompts, SamplingParams(**params), "r")
    await anext(outputs)
    await outputs.aclose()
    assert threading.current_thread() not in threads
