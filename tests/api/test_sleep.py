"""Routes of sleep. What the engine does: tests/core/test_engine_core_proc.py."""

import asyncio
from typing import Any

import msgspec

from servd.api.engine import engine_client
from servd.base.tracing import now_ns
from servd.messages.engine import CollectiveRpc
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
        assert served.engine.sent == [CollectiveRpc("sleep"), CollectiveRpc("wake_up")]
        metrics = (await served.http.get("/metrics")).text
        for operation in ("sleep", "wake"):
            name = "vllm:sleep_mode_operation_duration_seconds_count"
            assert f'{name}{{operation="{operation}"}} 1.0' in metrics
            in_flight = "vllm:sleep_mode_operations_in_flight"
            assert f'{in_flight}{{operation="{operation}"}} 0.0' in metrics
        refused = await served.http.post("/sleep?level=0")
        assert refused.status_code == 400 and "level must be 1 or 2" in refused.text
        assert (await served.http.post("/sleep?model=other")).status_code == 404
        assert not await state("GET", "/is_sleeping")


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


async def test_many_who_wait_for_sleep_cost_nothing(monkeypatch):
    """An answer may take a minute, and whoever may ask can do so often."""
    async with serve() as served:
        monkeypatch.setattr(served.engine, "send", lambda message: None)  # it has too much to do
        loop, num_timers = asyncio.get_running_loop(), 0
        tasks = [asyncio.create_task(served.http.post("/sleep")) for _ in range(200)]
        await asyncio.sleep(0.2)
        call_at = type(loop).call_at

        def counted(self, *arguments, **options):
            nonlocal num_timers
            num_timers += 1
            return call_at(self, *arguments, **options)

        monkeypatch.setattr(type(loop), "call_at", counted)
        await asyncio.sleep(0.3)
        assert num_timers < 50
        monkeypatch.undo()
        served.engine.tell(msgspec.structs.replace(served.engine.ready, is_asleep=True))
        assert {(await task).json()["is_sleeping"] for task in tasks} == {True}


async def test_an_engine_that_dies_instead_of_sleeping_is_not_waited_for(monkeypatch):
    async with serve() as served:
        sent: list[Any] = []
        monkeypatch.setattr(served.engine, "send", sent.append)
        task = asyncio.create_task(served.http.post("/sleep"))
        await until(lambda: sent)
        served.engine.die()
        assert (await task).status_code == 503


async def test_a_model_that_takes_long_to_load_again_is_no_stall(monkeypatch):
    async with serve() as served:
        await served.http.post("/v1/completions", json={"prompt": "a"})
        await served.http.post("/sleep")
        served.engine.may_step.clear()
        task = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "b"}))
        await until(lambda: served.async_llm.engines[0].running)
        later = now_ns() + 10**12
        monkeypatch.setattr(engine_client, "now_ns", lambda: later)
        assert (await served.http.get("/health")).json()["activity"] == "asleep"
        served.engine.tell(msgspec.structs.replace(served.engine.ready, is_asleep=False))
        await until(lambda: not served.async_llm.engines[0].status.is_asleep)
        health = await served.http.get("/health")  # its first step is not over yet
        assert health.status_code == 200 and health.json()["num_unfinished"] == 1
        served.engine.may_step.set()
        assert (await task).status_code == 200


async def test_a_page_of_another_site_puts_nothing_to_sleep():
    """A form has no body of JSON, and needs none here. Nor may it have a gateway load a model."""
    async with serve(allowed_origins=["https://known.example"]) as served:
        for headers, status in (
            ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "cross-site", "origin": "https://known.example"}, 200),
            ({"sec-fetch-site": "same-origin", "origin": "https://servd"}, 200),
            ({}, 200),
        ):
            for path in ("/sleep", "/wake_up"):
                answer = await served.http.post(path, headers=headers)
                assert answer.status_code == status, (path, headers)
        headers = {"sec-fetch-site": "cross-site"}
        assert (await served.http.get("/health", headers=headers)).status_code == 200
