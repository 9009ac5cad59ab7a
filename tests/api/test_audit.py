"""/debug/audit: quiet where all is well, also while requests run; it sees what is not."""

import asyncio
from typing import Any

import pytest

from servd.api.routes import audit as audit_module
from servd.core.audit import problems
from servd.core.engine_core import EngineCore
from servd.messages.engine import AbortRequests, EngineAudit, EngineCoreOutputs
from servd.messages.stats import SchedulerStats
from tests.api.harness import Served, serve, until
from tests.core.engines import make_engine, make_request


async def report(served: Served) -> dict[str, Any]:
    answer = await served.http.get("/debug/audit")
    assert answer.status_code == 200
    return answer.json()


async def test_a_running_server_agrees_with_its_engine(served: Served):
    served.engine.step_seconds = 0.002
    grammar = {"guided_regex": "[ab]{500}"}
    bodies = [{"n": 3}, {}, grammar, {"stop": "x"}, {"prompt_logprobs": 2}]
    tasks = []
    for i, body in enumerate(bodies * 4):
        request_body = {"prompt": f"text {i}", "max_tokens": 400, **body}
        tasks.append(asyncio.create_task(served.http.post("/v1/completions", json=request_body)))
    num_seen = 0
    for i in range(40):
        if i == 20:
            for task in tasks[:10]:
                task.cancel()
        result = await report(served)
        assert result["problems"] == []
        num_seen = max(num_seen, result["engine_requests"])
        await asyncio.sleep(0.002)
    assert num_seen > 5
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not served.async_llm.num_unfinished)
    result = await report(served)
    assert result["problems"] == [] and result["engine_requests"] == 0
    assert result["server"]["requests"] == result["server"]["admitted"] == 0
    assert result["server"]["files"] > 3 and result["server"]["threads"] >= 1


async def test_an_answer_that_comes_too_late_harms_nobody(served: Served, monkeypatch):
    async_llm, held = served.async_llm, []
    monkeypatch.setattr(audit_module, "TIMEOUT", 0.01)
    monkeypatch.setattr(served.engine, "send", held.append)
    refused = await served.http.get("/debug/audit")
    assert refused.status_code == 503
    waiting = asyncio.create_task(served.http.get("/debug/audit"))
    await until(lambda: len(held) == 2)
    first, second = held
    assert first.number != second.number
    # Its time is up, and the route does not know yet.
    async_llm.engines[0].answers[second.number].cancel()
    async_llm.engines[0]._take_status(EngineAudit(second.number, [], [], 0))
    waiting.cancel()


async def test_requests_that_one_end_alone_has_are_named(served: Served):
    served.engine.may_step.clear()
    body = {"prompt": "hi", "max_tokens": 5}
    task = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await until(lambda: served.engine.sent)
    [name] = served.async_llm.requests
    core = served.engine.core
    core.handle(AbortRequests([name]))  # nobody here has asked for it
    problems = str((await report(served))["problems"])
    assert f"open here, and not in the engine: ['{name}']" in problems
    core.handle(make_request("stranger", [1, 2, 3]))
    problems = str((await report(served))["problems"])
    assert "in the engine, and not open here: ['stranger']" in problems
    core.handle(AbortRequests(["stranger"]))
    task.cancel()


def leak_a_block(engine: EngineCore) -> None:
    engine.scheduler.kv_cache.pool.ref_counts[3] += 1


def lose_a_slot(engine: EngineCore) -> None:
    engine.scheduler.free_slots.pop()


def forget_a_request(engine: EngineCore) -> None:
    engine.scheduler.running.clear()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak_a_block, "blocks [3] have [1] references"),
        (lose_a_slot, "the slots are [0, 2, 3"),
        (forget_a_request, "1 requests, but 0 run and 0 wait"),
    ],
)
def test_what_is_damaged_is_named(damage, words):
    engine = make_engine()
    engine.handle(make_request("a", [1, 2, 3, 4, 5], max_tokens=4))
    engine.step()
    assert problems(engine) == []
    if damage is lose_a_slot:
        assert len(engine.scheduler.running) == 1
    if damage is leak_a_block:
        assert 3 not in engine.scheduler.requests["a"].block_ids
    damage(engine)
    assert words in "; ".join(problems(engine))


async def test_requests_while_there_is_no_engine_get_a_clear_error():
    async with serve(is_ready=False) as served:
        answer = await served.http.get("/debug/audit")
        assert answer.status_code == 503 and answer.headers["retry-after"]


async def test_a_server_that_has_heard_of_nothing_for_long_hears_of_now():
    async with serve() as served:
        served.engine.tell(EngineCoreOutputs([], SchedulerStats(num_running=3, kv_cache_usage=0.5)))
        # From another server, say.
        await until(lambda: served.async_llm.engines[0].stats.num_running == 3)
        assert (await report(served))["problems"] == []
        text = (await served.http.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="org/fake-model"} 0.0' in text
