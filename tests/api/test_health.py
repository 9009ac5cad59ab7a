"""GET /health, /ping, /version and /load."""

import asyncio

import msgspec
import pytest

import servd
from servd.api.engine import engine_client
from servd.api.engine.progress import progress
from servd.api.request.request_state import Unfinished
from servd.base.tracing import StepRecord, now_ns
from servd.messages.engine import STALLED, EngineGone, EngineReady, EngineStatus
from tests.api.harness import Served, requests_sent, serve, until


async def test_of_many_requests_it_looks_at_some(monkeypatch):
    """Anybody may ask, without a key."""
    monkeypatch.setattr(engine_client, "REQUESTS_LOOKED_AT", 2)
    async with serve() as served:
        served.engine.may_step.clear()
        body = {"prompt": ["a"] * 5, "max_tokens": 1}
        running = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await until(lambda: len(served.engine.sent) == 5)
        health = (await served.http.get("/health")).json()
        assert (health["activity"], health["num_unfinished"]) == ("prefill", 5)
        served.engine.may_step.set()
        await running


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_from_loading_to_ready_to_dead(path):
    async with serve(is_ready=False) as served:
        served.engine.tell(EngineStatus("loading weights", 0.5))
        await until(lambda: served.async_llm.status == EngineStatus("loading weights", 0.5))
        loading = await served.http.get(path)
        assert loading.status_code == 503
        body = loading.json()
        state = body["status"], body["phase"], body["progress"]
        assert state == ("loading", "loading weights", 0.5)
        assert 0 <= body["elapsed_seconds"] < 60
        page = await served.http.get(path, params={"always_ok": True})
        assert (page.status_code, page.json()["phase"]) == (200, "loading weights")
        served.engine.tell(EngineReady(served.engine.worker, 4096, 16))
        await until(lambda: served.async_llm.is_ready)
        ready = await served.http.get(path)
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert (await served.http.head(path)).status_code == 200
        posted = await served.http.post(path)  # SageMaker's ping may be one
        assert posted.status_code == (200 if path == "/ping" else 405)
        served.engine.tell(EngineGone("killed"))
        await until(lambda: not served.async_llm.is_ready)
        dead = await served.http.get(path)
        assert (dead.status_code, dead.json()) == (503, {"status": "dead", "reason": "killed"})


async def test_a_hung_engine_is_reported_as_stalled(served: Served):
    served.engine.tell(EngineStatus(STALLED))
    await until(lambda: served.async_llm.progress().status == "stalled")
    health = await served.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stalled")
    waiting = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a"}))
    served.engine.die()
    await until(lambda: served.async_llm.is_restarting)
    assert (await served.http.get("/health")).json()["status"] == "restarting"
    served.engine.revive()
    assert (await waiting).status_code == 200
    await until(lambda: served.async_llm.is_ready)
    assert (await served.http.get("/health")).json()["status"] == "ready"


async def test_why_the_engine_is_slow_is_said():
    async with serve(is_ready=False) as served:
        worker = msgspec.structs.replace(served.engine.worker, warning="no kernels: install g++")
        served.engine.tell(EngineReady(worker, 4096, 16))
        await until(lambda: served.async_llm.is_ready)
        health = (await served.http.get("/health")).json()
        assert (health["status"], health["warning"]) == ("ready", "no kernels: install g++")


async def test_idle_a_long_prompt_and_decoding(served: Served):
    async def health():
        answer = await served.http.get("/health")
        assert answer.status_code == 200 and answer.json()["status"] == "ready"
        return answer.json()["activity"], answer.json()["num_unfinished"]

    assert await health() == ("idle", 0)
    served.engine.may_step.clear()
    body = {"prompt": "a" * 3000, "max_tokens": 1000}
    running = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await until(lambda: served.engine.sent)
    assert await health() == ("prefill", 1)
    served.engine.step_seconds = 0.002
    served.engine.may_step.set()
    choices = served.async_llm.requests
    await until(lambda: any(running.num_output_tokens for running in choices.values()))
    assert await health() == ("decoding", 1)
    running.cancel()
    await until(lambda: served.async_llm.num_unfinished == 0)
    assert await health() == ("idle", 0)


STEPS = [
    StepRecord(i, i * 10**8, collected_ns=i * 10**8 + 5 * 10**7, num_tokens=10) for i in range(9)
]
PREFILLS = [*STEPS, StepRecord(9, 9 * 10**8, collected_ns=10**9, num_tokens=10, prefills={"a": 9})]
LONG, SHORT = Unfinished(0, 5000, has_begun=False), Unfinished(0, 5000, has_begun=True)
PICTURE = Unfinished(0, 50, has_begun=False, has_pictures=True)


@pytest.mark.parametrize(
    ("requests", "steps", "seconds", "activity"),
    [
        ([], PREFILLS, 9999, "idle"),
        ([SHORT], PREFILLS, 5, "decoding"),
        ([SHORT], PREFILLS, 30, "stalled"),  # a step of one token takes at most 0.1 s
        ([SHORT, LONG], PREFILLS, 30, "prefill"),  # one of 2048 takes 20
        ([SHORT, LONG], PREFILLS, 300, "stalled"),
        ([SHORT, PICTURE], PREFILLS, 300, "prefill"),  # a vision tower may be slow
        ([PICTURE], PREFILLS, 1200, "stalled"),
        ([LONG], STEPS, 120, "prefill"),  # nothing is known of prompts
        ([LONG], [], 120, "prefill"),
        ([LONG], [], 1200, "stalled"),
        ([Unfinished(0, 9, has_begun=False, is_due=False)], STEPS, 9999, "idle"),
    ],
)
def test_what_is_a_stall(requests, steps, seconds, activity):
    progress_now = progress(requests, steps, 2048, 10**9 + int(seconds * 1e9))
    assert progress_now.activity == activity
    assert (progress_now.status == "stalled") == (activity == "stalled")
    assert isinstance(progress_now.reason, str) == (activity == "stalled")


async def test_an_engine_that_stands_still_is_not_healthy(served: Served, monkeypatch):
    await served.http.post("/v1/completions", json={"prompt": "a"})
    served.engine.may_step.clear()
    running = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a"}))
    await until(lambda: len(requests_sent(served.engine)) == 2)
    later = now_ns() + 10**12
    monkeypatch.setattr(engine_client, "now_ns", lambda: later)
    answer = await served.http.get("/health")
    assert answer.status_code == 503 and answer.json()["status"] == "stalled"
    assert "no step has ended for 1000 s" in answer.json()["reason"]
    served.engine.may_step.set()
    await running
    assert (await served.http.get("/health")).json()["status"] == "ready"


async def test_no_path_of_the_server_is_shown(served: Served):
    """/health needs no key."""
    reason = "cannot read /home/me/model/x.safetensors: 17 bytes at 0x7f12ab34cd56, not ./a/b"
    served.engine.tell(EngineGone(reason))
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
