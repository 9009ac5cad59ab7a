"""Routes of sleep. What the engine does: tests/core/test_engine_core_proc.py."""

from __future__ import annotations

import asyncio

import msgspec

from servd.api import engine_client
from servd.messages import Sleep, WakeUp
from servd.tracing import now_ns
from tests.api.harness import serve, until


async def test_a_server_sleeps_and_wakes():
    async with serve() as served:

        async def state(method: str, path: str) -> bool:
            answer = await served.http.request(method, path)
            assert answer.status_code == 200, answer.text
            metrics = (await served.http.get("/metrics")).text
            (line,) = [x for x in metrics.splitlines() if 'sleep_state="discard_all"' in x]
            assert answer.json()["is_sleeping"] == (line.split()[-1] == "1.0")
            return answer.json()["is_sleeping"]

        assert not await state("GET", "/is_sleeping")
        assert await state("POST", "/sleep?level=2") and await state("GET", "/is_sleeping")
        assert not await state("POST", "/wake_up") and not await state("GET", "/is_sleeping")
        assert [type(message) for message in served.engine.sent] == [Sleep, WakeUp]
        refused = await served.http.post("/sleep?level=0")
        assert refused.status_code == 400 and "level must be 1 or 2" in refused.text


async def test_a_request_is_admitted_while_the_model_sleeps():
    async with serve() as served:
        await served.http.post("/sleep")
        answer = await served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200
        assert (await served.http.get("/health")).status_code == 200


async def test_an_engine_that_is_not_ready_cannot_sleep():
    async with serve(is_ready=False) as served:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert (await served.http.request(method, path)).status_code == 503


async def test_a_model_that_takes_long_to_load_again_is_no_stall(monkeypatch):
    async with serve() as served:
        await served.http.post("/v1/completions", json={"prompt": "a"})
        await served.http.post("/sleep")
        served.engine.may_step.clear()
        asked = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "b"}))
        await until(lambda: served.async_llm.engines[0].running)
        later = now_ns() + 10**12
        monkeypatch.setattr(engine_client, "now_ns", lambda: later)
        assert (await served.http.get("/health")).json()["activity"] == "idle"
        served.engine.tell(msgspec.structs.replace(served.engine.ready, is_asleep=False))
        await until(lambda: not served.async_llm.engines[0].status.is_asleep)
        health = await served.http.get("/health")  # its first step is not over yet
        assert health.status_code == 200 and health.json()["num_unfinished"] == 1
        served.engine.may_step.set()
        assert (await asked).status_code == 200
