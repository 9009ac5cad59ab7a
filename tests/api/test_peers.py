"""API servers of one engine that tell each other of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from servd.api.engine import peers
from servd.base.tracing import Mark, StepRecord
from tests.api.harness import Served, serve

BODY = {"prompt": "a", "max_tokens": 3}


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Served, Served]]:
    """Two servers, each with an engine of its own, that take each other for peers."""
    async with serve() as one, serve() as other:
        for number, served in enumerate((one, other)):
            await served.app.state.context.peers.listen(folder / f"api-{number}")
        try:
            yield one, other
        finally:
            for served in (one, other):
                served.app.state.context.peers.close()


async def answer_of(served: Served) -> str:
    return (await served.http.post("/v1/completions", json=BODY)).json()["id"]


async def ids(served: Served, query: str) -> list[str]:
    return [r["id"] for r in (await served.http.get(f"/v1/requests?{query}")).json()["data"]]


async def test_each_answers_for_all(tmp_path):
    async with two(tmp_path) as servers:
        made = [await answer_of(servers[i % 2]) for i in range(4)]
        for served in servers:
            assert await ids(served, "recent=9") == made[::-1]
            assert await ids(served, "recent=2") == made[:1:-1]
            assert sorted(await ids(served, "slowest=9")) == sorted(made)
            for each in made:
                url = f"/v1/requests/{each}/timeline"
                timeline = (await served.http.get(url)).json()
                assert timeline["id"] == each and timeline["num_output_tokens"] == 3
                assert timeline == (await servers[0].http.get(url)).json()
                trace = (await served.http.get(url, params={"format": "perfetto"})).json()
                assert trace["traceEvents"]
            steps = (await served.http.get("/v1/steps")).json()["data"]
            assert len(steps) == 12 and steps == sorted(steps, key=lambda step: step["begin_ms"])
            assert (await served.http.get("/v1/requests/none/timeline")).status_code == 404


async def test_a_step_that_two_servers_report_is_listed_once(tmp_path):
    async with two(tmp_path) as servers:
        for served, numbers in zip(servers, ([0, 1, 2], [1, 2, 3]), strict=True):
            served.async_llm.tracer.steps[0] += [StepRecord(n, 10 * n + 1) for n in numbers]
        for query, expected in (("", [0, 1, 2, 3]), ("?recent=2", [2, 3])):
            steps = (await servers[0].http.get(f"/v1/steps{query}")).json()["data"]
            assert [step["step"] for step in steps] == expected


async def test_neighbours_and_requests_before_it_have_ids_if_they_are_the_owners(tmp_path):
    async with serve() as served:
        tracer = served.async_llm.tracer
        own, neighbour = await answer_of(served), await answer_of(served)
        timeline = tracer.recent[own]
        [snapshot] = tracer.take_snapshots([timeline])
        timeline.breakdown = snapshot.breakdown()
        timeline.breakdown.phases["queue_slots"] = 1
        timeline.breakdown.neighbours = {neighbour: 6, "of-another-key": 5}
        begin = timeline.marks[0].at_ns
        queued = next(mark.at_ns for mark in timeline.marks if mark.stage == "queued")
        tracer.recent[neighbour].marks = [Mark("scheduled", begin), Mark("returned", queued + 1)]
        found = (await served.http.get(f"/v1/requests/{own}/timeline")).json()
        assert [each.get("id") for each in found["neighbours"]] == [neighbour, None]
        assert found["behind"] == [neighbour]


async def test_the_prompt_that_was_found_may_be_of_a_peer(tmp_path):
    """Both engines are rank 0, as if they were one."""
    async with two(tmp_path) as (one, other):
        tracer = one.async_llm.tracer
        await answer_of(one)
        made = (await one.http.post("/v1/completions", json={"prompt": "b" * 60})).json()["id"]
        tracer.recent[made].choices[0].num_cached_tokens = 32
        for served in (one, other):
            timeline = (await served.http.get(f"/v1/requests/{made}/timeline")).json()
            found = timeline["prefix_cache"]
            assert (found["num_matched"], found["num_blocks"]) == (2, 3)
            assert found["reason"] == "unknown" and "this API server" in found["text"]


async def test_one_that_is_silent_does_not_hide_what_another_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT", 0.5)
    async with two(tmp_path) as (one, other):
        made = await answer_of(other)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(tmp_path / "api-2"))
            silent.listen()
            answer = await one.http.get(f"/v1/requests/{made}/timeline")
        assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["dead", "silent"])
async def test_a_peer_that_does_not_answer_is_left_out(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT", 0.2)
    async with two(tmp_path) as servers:
        made = [await answer_of(served) for served in servers]
        if kind == "dead":  # its file stays behind
            servers[1].app.state.context.peers._server.close()
            await asyncio.sleep(0)
            assert (tmp_path / "api-1").exists() or (tmp_path / "api-1").touch() is None
        else:
            servers[1].async_llm.run_in_thread = lambda *_: asyncio.sleep(60)
        assert await ids(servers[0], "recent=9") == made[:1]
        assert (await servers[0].http.get(f"/v1/requests/{made[1]}/timeline")).status_code == 404
