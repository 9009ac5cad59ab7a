"""An engine that dies under its API server: requests wait for the next one and go on there."""

import asyncio
import json
from typing import Any

import pytest

from servd.messages.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from tests.api.harness import MODEL, Served, serve
from tests.limits import WAIT_SECONDS

PROMPT = {"model": MODEL, "prompt": "Once upon a time", "ignore_eos": True}


async def until(condition, what: str = "") -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def ask(served: Served, **body: Any) -> dict[str, Any]:
    answer = await served.http.post("/v1/completions", json={**PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in ("choices", "usage")}


async def die_after(served: Served, num_steps: int, task: asyncio.Task) -> None:
    """Let the engine die after N steps, and start it again."""
    engine = served.engine
    begin = engine.core.scheduler._num_steps
    await until(lambda: engine.core.scheduler._num_steps >= begin + num_steps or task.done())
    engine.die()
    await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
    engine.revive()


# Requests of all kinds, whose answers have to be the same over the death of an engine.
BODIES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7, "logprobs": 2},
    "choices": {"n": 3, "seed": 1, "logprobs": 1},
    "stop": {"stop": ["e", "qq"], "max_tokens": 200},
    "grammar": {"structured_outputs": {"regex": "[a-z]{30}-[0-9]{20}"}, "ignore_eos": False},
    "echo": {"echo": True, "logprobs": 1},
    "prompts": {"prompt": ["one", "two", "three"]},
}


@pytest.mark.parametrize("num_steps", [1, 2, 20])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_an_answer_is_the_same_over_a_death(body, num_steps):
    body = {"max_tokens": 60, **body}
    async with serve() as served:
        expected = await ask(served, **body)
        task = asyncio.create_task(ask(served, **body))
        await die_after(served, num_steps, task)
        assert without_ids(await task) == without_ids(expected)
        assert not served.engine.core.scheduler.requests


async def test_a_stream_goes_on_without_a_token_lost_or_repeated():
    async with serve() as served:
        options = {"include_usage": True}
        body = {**PROMPT, "max_tokens": 300, "stream": True, "stream_options": options}
        expected = (await ask(served, max_tokens=300))["choices"][0]["text"]

        async def read() -> list[dict[str, Any]]:
            async with served.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
            return [json.loads(line.removeprefix("data: ")) for line in lines]

        task = asyncio.create_task(read())
        for _ in range(4):
            await die_after(served, 40, task)
        chunks = await task
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
        assert text == expected
        assert chunks[-1]["usage"]["completion_tokens"] == 300


async def test_what_a_dead_engine_still_says_is_void():
    async with serve() as served:
        expected = await ask(served, max_tokens=800)
        num_steps = served.engine.core.scheduler._num_steps
        task = asyncio.create_task(ask(served, max_tokens=800, request_id="r"))
        await until(lambda: served.engine.core.scheduler._num_steps > num_steps + 5)
        served.engine.die()
        await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
        (request_id,) = served.async_llm.engines[0].running
        late = EngineCoreOutput(request_id, [120, 121], FinishReason.STOP)
        served.engine.tell(EngineCoreOutputs([late], generation=0))
        served.engine.revive()
        assert without_ids(await task) == without_ids(expected)


async def test_new_requests_wait_for_the_next_engine_within_bounds():
    async with serve(max_waiting_requests=2) as served:
        served.engine.die()
        await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
        health = await served.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "restarting"
        tasks = [asyncio.create_task(ask(served, max_tokens=5)) for _ in range(2)]
        await until(lambda: served.async_llm.num_unfinished == 2)
        refused = await served.http.post("/v1/completions", json=PROMPT)
        assert refused.status_code == 429 and "retry-after" in refused.headers
        tasks[0].cancel()
        await until(lambda: served.async_llm.num_unfinished == 1)
        served.engine.revive()
        assert (await tasks[1])["usage"]["completion_tokens"] == 5
        assert (await served.http.get("/health")).status_code == 200
        assert served.async_llm.num_unfinished == 0


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_request_that_engines_die_of_ends_alone(place):
    """However many others are in its step, and whenever it came."""
    async with serve() as served:
        expected = [await ask(served, max_tokens=50, seed=i) for i in range(3)]
        served.engine.may_step.clear()
        tasks = []
        for i in range(3):
            body = {**PROMPT, "max_tokens": 50, "seed": i}
            tasks.append(asyncio.create_task(served.http.post("/v1/completions", json=body)))
            await until(lambda: len(served.async_llm.engines[0].running) == len(tasks))
        poison = list(served.async_llm.engines[0].running)[place]
        num_deaths = 0
        for _ in range(20):
            for request in served.engine.core.scheduler.requests:
                assert request in served.async_llm.engines[0].running
            if poison not in served.async_llm.engines[0].running:
                break
            if poison in served.engine.core.scheduler.requests:
                num_deaths += 1
                served.engine.die(served.engine.core.scheduler.requests)
                await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
                served.engine.revive()
                await until(lambda: not served.async_llm.engines[0].recovery.is_restarting)
            else:  # this one gets on, and the next suspect follows
                for outputs in served.engine.core.step().values():
                    outputs.generation = served.engine.generation
                    served.engine.tell(outputs)
                await asyncio.sleep(0.01)
        assert num_deaths == 2
        served.engine.may_step.set()
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code == 500 for answer in answers] == [i == place for i in range(3)]
        assert "(report " in answers[place].json()["error"]["message"]
        for i in {0, 1, 2} - {place}:
            assert without_ids(answers[i].json()) == without_ids(expected[i])
        assert not served.async_llm.engines[0].recovery.is_trying


@pytest.mark.parametrize("num_others", [0, 2])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_poison_ends_with_500_and_the_others_go_on(num_others: int, num_tokens: int):
    """An engine dies of a request's step, after a few of its tokens; others decode meanwhile."""
    async with serve() as served:
        recovery = served.async_llm.engines[0].recovery
        running = served.async_llm.engines[0].running
        served.engine.may_step.clear()
        tasks = []
        for i in range(num_others + 1):
            body = {**PROMPT, "max_tokens": 40, "seed": i}
            tasks.append(asyncio.create_task(served.http.post("/v1/completions", json=body)))
            await until(lambda: len(running) == len(tasks))
        poison = [*running][-1]
        num_deaths = 0
        while poison in running and num_deaths < 5:
            core = served.engine.core
            scheduled = core.scheduler.requests
            has_tokens = poison in scheduled and num_tokens <= scheduled[poison].num_output_tokens
            if has_tokens:
                num_deaths += 1
                is_prompt = {name for name in scheduled if not running[name].choices[0].marks}
                served.engine.die(is_prompt if num_deaths == 1 else scheduled)
                await until(lambda: recovery.is_restarting)
                served.engine.revive()
                await until(lambda: not recovery.is_restarting)
            else:
                for outputs in core.step().values():
                    outputs.generation = served.engine.generation
                    served.engine.tell(outputs)
                await asyncio.sleep(0.01)
        served.engine.may_step.set()
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200] * num_others + [500]
        assert num_deaths == 2


@pytest.mark.parametrize("while_loading", [False, True])
async def test_a_request_that_waits_through_deaths_is_no_suspect(while_loading: bool):
    async with serve() as served:
        expected = await ask(served, max_tokens=20)
        served.engine.may_step.clear()
        task = asyncio.create_task(ask(served, max_tokens=20))
        await until(lambda: served.async_llm.engines[0].running)
        for generation in range(1, 6):
            if not while_loading:
                await until(lambda: served.engine.core.scheduler.requests)
            served.engine.die(["another"])
            await until(lambda i=generation: served.engine.generation == i)
            if not while_loading or generation == 5:
                served.engine.revive()
        await until(lambda: not served.async_llm.engines[0].recovery.is_restarting)
        served.engine.may_step.set()
        assert without_ids(await task) == without_ids(expected)


async def test_gauges_are_zero_while_there_is_no_engine():
    async with serve() as served:
        task = asyncio.create_task(ask(served, max_tokens=2000))
        await until(lambda: served.async_llm.engines[0].stats.num_running)
        served.engine.die()
        await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
        text = (await served.http.get("/metrics")).text
        labels = '{engine="0",model_name="org/fake-model"}'
        assert f"vllm:num_requests_running{labels} 0.0" in text
        assert f"servd:engine_restarts_total{labels} 1.0" in text
        task.cancel()
