"""Slow requests whose cause is known: the breakdown names it as the longest phase.

Time is virtual and passes only where a test lets it pass, so that a busy machine adds nothing.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from servd.api.http.http_protocol import TimedFlow
from servd.core.executor.fake import FakeExecutor
from servd.core.structured_output.manager import GrammarManager
from tests.adapters import write_adapter
from tests.api.harness import Served, listening, serve, until
from tests.api.test_lora import serve_adapters
from tests.limits import WAIT_SECONDS

COMPLETIONS = "/v1/completions"
STEP, TOKEN = 0.001, 0.0003  # seconds of a step, and of each token of it


class Clock:
    """Virtual nanoseconds. Each reading takes one, so that no two are the same."""

    def __init__(self) -> None:
        self.ns = time.monotonic_ns()

    def __call__(self) -> int:
        self.ns += 1
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What all of servd reads."""
    clock = Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith("servd.") and hasattr(module, "now_ns"):
            monkeypatch.setattr(module, "now_ns", clock)
    return clock


@pytest.fixture
def slow_steps(monkeypatch, clock: Clock) -> Callable[[Callable[[Any], float]], None]:
    """Makes steps of the fake executor take time."""
    forward = FakeExecutor._forward

    def install(seconds: Callable[[Any], float]) -> None:
        def slow_forward(executor: FakeExecutor, scheduled: Any) -> Any:
            result = forward(executor, scheduled)
            clock.sleep(seconds(scheduled))
            return result

        monkeypatch.setattr(FakeExecutor, "_forward", slow_forward)

    install(lambda scheduled: STEP + TOKEN * scheduled.total_num_scheduled_tokens)
    return install


async def post(served: Served, prompt: str, max_tokens: int, **body: Any) -> str:
    """The id of a finished request."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **body}
    answer = await served.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    return answer.json()["id"]


async def start_beside(served: Served, *args: Any, **body: Any) -> asyncio.Task[str]:
    """A request that reaches the engine between two steps of what runs there."""
    served.engine.may_step.clear()
    num_sent = len(served.engine.sent)
    task = asyncio.create_task(post(served, *args, **body))
    await until(lambda: len(served.engine.sent) == num_sent + 1)
    served.engine.may_step.set()
    return task


async def phases_of(served: Served, request_id: str) -> list[str]:
    """Largest first."""
    url = f"/v1/requests/{request_id}/timeline"
    timeline = (await served.http.get(url)).json()
    assert sum(p["ms"] for p in timeline["phases"]) == pytest.approx(timeline["wall_ms"], abs=0.1)
    return [phase["phase"] for phase in timeline["phases"]]


async def has_token(served: Served) -> None:
    choices = served.async_llm.requests
    async with asyncio.timeout(WAIT_SECONDS):
        while not any(choice.num_output_tokens for choice in choices.values()):
            await asyncio.sleep(0)  # steps take no real time: look after each


async def test_a_later_request_that_overtook_is_among_those_waited_for(slow_steps):
    async with serve(max_num_seqs=1, scheduling_policy="priority") as served:
        tasks = [asyncio.create_task(post(served, "a", 40))]
        await has_token(served)
        served.engine.may_step.clear()
        for priority, max_tokens in ((5, 5), (1, 80)):
            tasks.append(asyncio.create_task(post(served, "b", max_tokens, priority=priority)))
            await until(lambda: len(served.engine.sent) == len(tasks))
        served.engine.may_step.set()
        first, background, urgent = await asyncio.gather(*tasks)
        for request, behind in ((urgent, [first]), (background, [urgent, first])):
            timeline = (await served.http.get(f"/v1/requests/{request}/timeline")).json()
            assert timeline["longest_wait"] == "queue_slots" and timeline["behind"] == behind


@pytest.mark.parametrize(
    ("options", "body", "phase"),
    [
        ({"max_num_batched_tokens": 64}, {"prompt": "a" * 4000}, "prefill"),
        ({"max_num_batched_tokens": 64}, {"prompt": "a" * 4000, "n": 3}, "prefill"),
        ({"max_num_seqs": 1}, {"prompt": "b"}, "queue_slots"),
    ],
)
async def test_a_client_that_left_before_the_first_token(slow_steps, options, body, phase):
    """What the engine did for the request is known, although no output carried it."""
    num_steps = 0

    def count(scheduled: Any) -> float:
        nonlocal num_steps
        num_steps += 1
        return STEP + TOKEN * scheduled.total_num_scheduled_tokens

    slow_steps(count)
    async with serve(**options) as served:
        beside = []
        if phase == "queue_slots":
            beside = [asyncio.create_task(post(served, "a", 4000))]
            await has_token(served)
        served.engine.step_seconds = 0.001
        call = served.http.post(COMPLETIONS, json=body, headers={"x-request-id": "own"})
        task = asyncio.create_task(call)
        await until(lambda: len(served.async_llm.requests) > len(beside))
        first = num_steps
        await until(lambda: num_steps >= first + 20)
        task.cancel()
        await asyncio.gather(task, *beside, return_exceptions=True)
        tracer = served.async_llm.tracer
        await until(
            lambda: "queued" in {mark.stage for mark in tracer.find_request("own", "").marks}
        )
        timeline = (await served.http.get("/v1/requests/own/timeline")).json()
        assert (await phases_of(served, "own"))[0] == phase
        assert timeline["outcome"] == "abort"
        metrics = (await served.http.get("/metrics")).text.splitlines()
        name = "servd:aborted_request_latency_seconds_count"
        [count] = [line for line in metrics if line.startswith(name)]
        assert float(count.split()[-1]) == body.get("n", 1)


async def test_an_engine_that_sleeps(slow_steps, clock):
    async with serve() as served:
        await post(served, "a", 5)
        await served.http.post("/sleep")
        served.engine.may_step.clear()
        task = asyncio.create_task(post(served, "b", 5))
        await until(lambda: served.async_llm.engines[0].running)
        clock.sleep(0.5)  # it loads its weights
        await served.http.post("/wake_up")
        served.engine.may_step.set()
        assert (await phases_of(served, await task))[0] == "wake_up"


async def test_a_place_for_its_adapter(slow_steps, tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / "adapters" / name, seed=seed)
    async with serve_adapters(tmp_path, max_loras=1) as (served, _):
        first = asyncio.create_task(post(served, "x", 60, model="a"))
        await has_token(served)
        request_id = await (await start_beside(served, "x", 5, model="b"))
        assert (await phases_of(served, request_id))[0] == "queue_adapters"
        timeline = (await served.http.get(f"/v1/requests/{request_id}/timeline")).json()
        assert timeline["behind"] == [await first] and timeline["model"] == "b"


async def test_an_engine_that_dies(slow_steps, clock):
    async with serve() as served:
        first = asyncio.create_task(post(served, "a", 60))
        await has_token(served)
        served.async_llm.engines[0].loading_since -= 1000
        served.engine.die()
        await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
        late = asyncio.create_task(post(served, "b", 5))
        await until(lambda: len(served.async_llm.engines[0].running) == 2)
        clock.sleep(0.5)
        health = (await served.http.get("/health")).json()
        assert health["status"] == "restarting" and 0 < health["elapsed_seconds"] < 500
        served.engine.revive()
        for task in (first, late):
            assert (await phases_of(served, await task))[0] == "engine_restart"


QUESTIONS = [{"type": "predicate", "instructions": f"Is it {i}?"} for i in range(5)]
PARTED = {
    COMPLETIONS: {"prompt": "a", "use_beam_search": True, "n": 3, "max_tokens": 10},
    "/v1/decisions": {"input": "a", "questions": QUESTIONS},
}


@pytest.mark.parametrize(("path", "body"), PARTED.items(), ids=PARTED)
async def test_parts_of_a_request_count_in_its_breakdown(slow_steps, path, body):
    async with serve(max_num_seqs=8) as served:
        assert (await served.http.post(path, json=body)).status_code == 200
        (request_id,) = served.async_llm.tracer.recent
        timeline = (await served.http.get(f"/v1/requests/{request_id}/timeline")).json()
        shares = {phase["phase"]: phase["share"] for phase in timeline["phases"]}
        assert shares["prefill"] > 0.5 and shares["unaccounted"] < 0.1
        assert timeline["num_steps"] > 1 and timeline["neighbours"] == []


async def test_a_grammar(monkeypatch, clock):
    compile_grammar = GrammarManager._compile
    may_compile = threading.Event()
    may_compile.set()

    def slow_compile(manager: GrammarManager, output: Any) -> Any:
        assert may_compile.wait(WAIT_SECONDS)
        clock.sleep(0.3)
        return compile_grammar(manager, output)

    monkeypatch.setattr(GrammarManager, "_compile", slow_compile)
    async with serve() as served:
        await post(served, "a", 1, guided_regex="a")  # what the first one loads
        may_compile.clear()
        task = asyncio.create_task(post(served, "a", 5, guided_regex="[abc]{9}"))
        await until(lambda: served.engine.core.grammars.is_compiling)
        may_compile.set()
        assert (await phases_of(served, await task))[0] == "grammar_compile"


@pytest.mark.usefixtures("may_always_draft")
async def test_rejected_drafts(slow_steps, monkeypatch):
    def wrong_drafts(executor: FakeExecutor, state: int, max_drafts: int) -> list[int]:
        return [0] * max_drafts  # it only ever says letters and spaces

    slow_steps(lambda scheduled: 0.02 * scheduled.total_num_scheduled_tokens)
    monkeypatch.setattr(FakeExecutor, "_draft", wrong_drafts)
    async with serve(speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as served:
        controller = served.engine.core.scheduler.draft_length
        limits = [0]
        monkeypatch.setattr(controller, "num_drafts", lambda acceptance: limits[0])
        await post(served, "a", 5)  # what steps without drafts take
        limits[0] = 4
        request_id = await post(served, "b", 16)
        assert (await phases_of(served, request_id))[0] == "rejected_drafts"


async def test_a_client_that_does_not_read(clock, monkeypatch):
    generated = asyncio.Event()
    late: list[TimedFlow] = []
    drain = TimedFlow.drain

    async def slow_drain(flow: TimedFlow) -> None:
        if flow.write_paused and generated.is_set() and not late:
            late.append(flow)
            # Runs while this drain waits: to end, it needs a later turn of the loop.
            asyncio.get_running_loop().call_soon(clock.sleep, 3.0)
        await drain(flow)

    monkeypatch.setattr(TimedFlow, "drain", slow_drain)
    async with serve() as served, listening(served.app, send_buffer=4096) as url:
        body = json.dumps({"prompt": "a", "max_tokens": 300, "stream": True, "logprobs": 20})
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall((head + body).encode())
            await until(lambda: served.async_llm.num_unfinished)
            running = served.async_llm.requests
            await until(lambda: running and not any(state.is_open for state in running.values()))
            generated.set()
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(None, client.recv, 65536):
                pass
        await until(lambda: not served.async_llm.requests)
        assert late
        (timeline,) = served.async_llm.tracer.recent
        assert (await phases_of(served, timeline))[0] == "slow_reader"
