"""GET /health, /ping, /version and /load."""

from __future__ import annotations

import asyncio

import pytest

import servd
from servd.messages import EngineDead, EngineReady, EngineStatus
from tests.api.harness import Served, serve, until


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_from_loading_to_ready_to_dead(path):
    async with serve(is_ready=False) as served:
        served.engine.tell(EngineStatus("loading weights", 0.5))
        await until(lambda: served.async_llm.status == EngineStatus("loading weights", 0.5))
        loading = await served.http.get(path)
        assert loading.status_code == 503
        body = loading.json()
        assert (body["status"], body["phase"], body["progress"]) == (
            "loading",
            "loading weights",
            0.5,
        )
        assert 0 <= body["elapsed_seconds"] < 60
        served.engine.tell(EngineReady(served.engine.worker, 4096, 16))
        await until(lambda: served.async_llm.is_ready)
        ready = await served.http.get(path)
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert (await served.http.head(path)).status_code == 200
        posted = await served.http.post(path)  # SageMaker's ping may be one
        assert posted.status_code == (200 if path == "/ping" else 405)
        served.engine.tell(EngineDead("killed"))
        await until(lambda: not served.async_llm.is_ready)
        dead = await served.http.get(path)
        assert (dead.status_code, dead.json()) == (503, {"status": "dead", "reason": "killed"})


async def test_no_path_of_the_server_is_shown(served: Served):
    """/health needs no key."""
    reason = "cannot read /home/me/model/x.safetensors: 17 bytes at 0x7f12ab34cd56, not ./a/b"
    served.engine.tell(EngineDead(reason))
    await until(lambda: not served.async_llm.is_ready)
    health = await served.http.get("/health")
    completion = await served.http.post("/v1/completions", json={"prompt": "a"})
    assert health.status_code == completion.status_code == 503
    for answer in (health, completion):
        assert "17 bytes" in answer.text
        for secret in ("home", "model", "0x7f", "a/b"):
            assert secret not in answer.text


async def test_version(http):
    assert (await http.get("/version")).json() == {"version": servd.__version__}


async def test_load_counts_running_requests(served: Served):
    async def load() -> int:
        return (await served.http.get("/load")).json()["server_load"]

    assert await load() == 0
    served.engine.may_step.clear()
    bodies = [{"prompt": "a"}, {"prompt": ["a", "b"]}]
    running = [
        asyncio.create_task(served.http.post("/v1/completions", json=body)) for body in bodies
    ]
    await until(lambda: served.async_llm.num_unfinished == 3)
    assert await load() == 3
    served.engine.may_step.set()
    await asyncio.gather(*running)
    assert await load() == 0


async def test_load_returns_to_zero_after_errors(served: Served):
    refused = await served.http.post("/v1/completions", json={"prompt": []})
    assert refused.status_code == 400
    served.engine.may_step.clear()
    running = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": ["a", "b"]}))
    await until(lambda: served.async_llm.num_unfinished == 2)
    served.engine.tell(EngineDead("killed"))
    assert (await running).status_code >= 500
    assert (await served.http.get("/load")).json() == {"server_load": 0}
