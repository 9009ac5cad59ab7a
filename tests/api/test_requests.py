"""GET /v1/requests, /v1/requests/{id}/timeline and /v1/steps, also of peers."""

import asyncio
import contextlib
import re
import socket
from array import array
from collections.abc import AsyncIterator
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.engine import peers
from servd.api.observability.prefix_misses import common_length, explain_prefix
from servd.api.request.choice import Choice
from servd.api.request.timeline import Timeline
from servd.base.tracing import Mark, StepRecord, now_ns
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import CacheConfig
from servd.messages.engine import EngineCoreOutput
from tests.adapters import write_adapter
from tests.api.harness import ALIAS, Served, events, output_text, serve, until, user
from tests.api.hostile import VALID
from tests.api.test_lora import serve_adapters

COMPLETIONS = "/v1/completions"


async def timeline_of(served: Served, request_id: str, **query: str):
    answer = await served.http.get(f"/v1/requests/{request_id}/timeline", params=query)
    assert answer.status_code == 200
    return answer.json()


async def test_the_timeline_of_a_request_sums_to_its_wall_time(served: Served):
    body = {"messages": user("hi"), "max_tokens": 3}
    answer = await served.http.post("/v1/chat/completions", json=body)
    timeline = await timeline_of(served, answer.json()["id"])
    stages = [mark["stage"] for mark in timeline["marks"]]
    assert stages == [
        "received",
        "parsed",
        "templated",
        "tokenised",
        "sent",
        "queued",
        "scheduled",
        "first_token",
        "finished",
        "returned",
        "detokenised",
        "written",
        "done",
    ]
    wall = timeline["wall_ms"]
    assert wall > 0
    for parts in ([m["took_ms"] for m in timeline["marks"]], [p["ms"] for p in timeline["phases"]]):
        assert sum(parts) == pytest.approx(wall, abs=0.02)
    assert sum(phase["share"] for phase in timeline["phases"]) == pytest.approx(1, abs=0.01)
    assert timeline["spans"][0]["begin_ms"] == 0 and timeline["spans"][-1]["end_ms"] == wall
    assert timeline["num_steps"] == len(timeline["steps"]) == 3
    assert timeline["num_prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert timeline["num_output_tokens"] == 3 and timeline["status"] == "finished"
    old = await served.http.get(f"/debug/requests/{answer.json()['id']}")
    assert old.json() == timeline


async def test_recent_and_slowest_requests(served: Served):
    for i in range(3):
        body = {"prompt": "a", "max_tokens": 4}
        await served.http.post(COMPLETIONS, json=body, headers={"x-request-id": f"r{i}"})
    served.engine.may_step.clear()
    running = asyncio.create_task(served.http.post(COMPLETIONS, json={"prompt": "running"}))
    await until(lambda: len(served.async_llm.requests) == 1)
    recent = (await served.http.get("/v1/requests?recent=2")).json()["data"]
    served.engine.may_step.set()
    await running
    assert [request["status"] for request in recent] == ["running", "finished"]
    assert recent[0]["wall_ms"] > 0 and "r2" in recent[1]["id"]
    everything = (await served.http.get("/v1/requests")).json()["data"]
    slowest = (await served.http.get("/v1/requests?slowest=1")).json()["data"]
    assert len(everything) == 4
    assert slowest == [max(everything, key=lambda request: request["wall_ms"])]
    assert slowest[0]["route"] == COMPLETIONS


async def test_the_id_of_an_answer_to_several_prompts_finds_the_first(served: Served):
    answer = await served.http.post(COMPLETIONS, json={"prompt": ["a", "bcd"], "max_tokens": 2})
    url = f"/v1/requests/{answer.json()['id']}/timeline"
    timeline = await served.http.get(url)
    assert timeline.status_code == 200
    assert timeline.json()["num_prompt_tokens"] == 1


async def test_requests_belong_to_their_key():
    async with serve(api_key=["mine", "theirs"]) as served:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        body = {"prompt": "ab" * 9}
        posts = [served.http.post(COMPLETIONS, json=body, headers=key) for key in (mine, theirs)]
        answer, _ = await asyncio.gather(*posts)
        url = f"/v1/requests/{answer.json()['id']}/timeline"
        timeline = await served.http.get(url, headers=mine)
        assert (await served.http.get(url, headers=theirs)).status_code == 404
        assert "id" not in timeline.json()["neighbours"][0]  # it is the other key's
        for kind in ("recent", "slowest"):
            listed = await served.http.get(f"/v1/requests?{kind}=9", headers=mine)
            assert [request["id"] for request in listed.json()["data"]] == [answer.json()["id"]]


async def test_neighbours_are_named(served: Served):
    bodies = [{"prompt": text * 9} for text in ("ab", "cd")]
    calls = [served.http.post(COMPLETIONS, json=body) for body in bodies]
    first, second = await asyncio.gather(*calls)
    timeline = await timeline_of(served, first.json()["id"])
    assert [n["id"] for n in timeline["neighbours"]] == [second.json()["id"]]
    assert timeline["neighbours"][0]["num_prompt_tokens"] == 18


async def test_each_request_is_listed_with_its_outcome(listening_server: Served):
    served, http = listening_server, listening_server.http

    async def listed() -> dict[str, dict]:
        return {
            request["id"]: request for request in (await http.get("/v1/requests")).json()["data"]
        }

    async def ask(status: int, **body) -> dict:
        answer = await http.post(COMPLETIONS, json={"prompt": "a", **body})
        assert answer.status_code == status
        name = answer.headers["x-request-id"]
        timeline = await timeline_of(served, name)
        assert timeline["id"] in (await listed()) and name in timeline["id"]
        assert timeline["http_status"] == status
        return timeline

    assert (await ask(200, max_tokens=3))["outcome"] == "length"
    stopped = await ask(200, max_tokens=50, stop=[output_text("a", 9)[4:6]])
    assert (stopped["outcome"], stopped["status"]) == ("stop", "finished")
    for field, value in (("temperature", "x"), ("model", "none"), ("max_tokens", 10**6)):
        refused = await ask(404 if field == "model" else 400, **{field: value})
        assert refused["outcome"] == refused["status"] == "refused"
    assert (await http.post(COMPLETIONS, content=b"{")).status_code == 400
    for stream in (False, True):
        served.engine.may_step.clear()
        body = {"prompt": "a", "max_tokens": 500, "stream": stream}
        headers = {"x-request-id": f"left-{stream}"}
        task = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=headers))
        await until(lambda: served.async_llm.num_unfinished)
        running = await timeline_of(served, f"left-{stream}")
        assert running["status"] == "running" and "outcome" not in running
        task.cancel()
        await until(lambda: not served.async_llm.requests)
        served.engine.may_step.set()
        assert (await timeline_of(served, f"left-{stream}"))["outcome"] == "abort"
    late = await http.post(COMPLETIONS, json={"prompt": "a", "timeout": 1e-6})
    assert late.status_code == 504
    assert (await timeline_of(served, late.headers["x-request-id"]))["outcome"] == "error"
    outcomes = [request["outcome"] for request in (await listed()).values()]
    assert sorted(set(outcomes)) == ["abort", "error", "length", "refused", "stop"]
    assert {request["owner"] for request in (await listed()).values()} == {""}
    slowest = (await http.get("/v1/requests?slowest=20")).json()["data"]
    assert "refused" not in {request["outcome"] for request in slowest}


async def test_a_stream_that_fails_in_the_middle_is_an_error(served: Served):
    served.engine.step_seconds = 0.02
    body = {"prompt": "a", "max_tokens": 4000, "stream": True, "timeout": 0.3, "ignore_eos": True}
    answer = await served.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200 and "deadline_exceeded" in answer.text
    timeline = await timeline_of(served, answer.headers["x-request-id"])
    assert (timeline["outcome"], timeline["status"]) == ("error", "error")


@pytest.mark.parametrize("chosen", [None, "my-own"])
async def test_the_id_of_the_header_is_as_good_as_that_of_the_body(served: Served, chosen):
    http, headers = served.http, {"x-request-id": chosen} if chosen else {}
    body = {"prompt": ["a", "b"], "max_tokens": 2}
    answer = await http.post(COMPLETIONS, json=body, headers=headers)
    name = answer.headers["x-request-id"]
    assert (await timeline_of(served, name))["id"] == f"{answer.json()['id']}-1"
    body = {"input": "a", "max_output_tokens": 2}
    answer = await http.post("/v1/responses", json=body, headers=headers)
    name, made = answer.headers["x-request-id"], answer.json()
    assert (await timeline_of(served, name))["id"] == made["id"]
    assert (await http.get(f"/v1/responses/{name}")).json() == made
    assert (await http.get(f"/v1/responses/{name}/input_items")).status_code == 200
    following = {**body, "previous_response_id": name}
    assert (await http.post("/v1/responses", json=following)).status_code == 200
    assert (await http.delete(f"/v1/responses/{name}")).json()["id"] == made["id"]
    assert (await http.get(f"/v1/responses/{made['id']}")).status_code == 404


async def test_perfetto(served: Served):
    answer = await served.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5})
    timeline = await timeline_of(served, answer.json()["id"])
    trace = await timeline_of(served, answer.json()["id"], format="perfetto")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [e["name"] for e in events if e["tid"] == 1] == [s["phase"] for s in timeline["spans"]]
    assert [e["args"]["step"] for e in events if e["tid"] == 2] == [0, 1, 2, 3, 4]
    total = sum(e["dur"] for e in events if e["tid"] == 1)
    assert total == pytest.approx(timeline["wall_ms"] * 1000, abs=20)
    url = f"/v1/requests/{answer.json()['id']}/timeline?format=svg"
    assert (await served.http.get(url)).status_code == 400


CHATS = "/v1/chat/completions"
BODIES = [(CHATS, {"messages": user("hi")}), (COMPLETIONS, {"prompt": ["abc", "defg"], "n": 2})]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_server_timing_names_the_stages(served: Served, path, body):
    served.engine.step_seconds = 0.01
    answer = await served.http.post(path, json={**body, "max_tokens": 5})
    stages = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(stages) == ["prepare", "queue", "prefill", "decode", "write", "total"]
    times = {name: float(ms) for name, ms in stages.items()}
    assert times["decode"] >= 40
    assert sum(times.values()) == pytest.approx(2 * times["total"], abs=0.01)
    assert "timings" not in answer.json()


TIMED = "/v1/embeddings /pooling /v1/rerank /v1/messages /v1/responses"


@pytest.mark.parametrize("path", TIMED.split())
async def test_every_answer_of_the_engine_has_server_timing(served: Served, path):
    answer = await served.http.post(path, json={"model": ALIAS, **VALID[path]})
    stages = [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")]
    assert {"prepare", "queue", "prefill", "total"} <= {*stages}
    assert "server-timing" not in (await served.http.get("/health")).headers


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("include_usage", [False, True])
async def test_timings_in_the_form_of_llama_server(served: Served, path, body, include_usage):
    served.engine.step_seconds = 0.01
    body = {**body, "max_tokens": 5, "timings_per_token": True}
    whole = (await served.http.post(path, json=body)).json()
    timings = whole["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == whole["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
    assert timings["predicted_ms"] >= 40
    predicted = timings["predicted_per_token_ms"] * timings["predicted_n"]
    assert predicted == pytest.approx(timings["predicted_ms"], rel=0.01)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    streamed = events((await served.http.post(path, json={**body, "stream": True, **options})).text)
    assert streamed[-1]["timings"].keys() == timings.keys() and streamed[-1]["choices"] == []
    assert ("usage" in streamed[-1]) == include_usage
    assert not any("timings" in chunk for chunk in streamed[:-1])


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.usefixtures("may_always_draft")
@pytest.mark.parametrize("level", ["summary", "detailed"])
@pytest.mark.parametrize(("path", "body"), [BODIES[0], (COMPLETIONS, {"prompt": "abc"})])
async def test_an_answer_tells_what_became_of_its_drafts(path, body, level, monkeypatch):
    options = {"per_request_spec_decode_metrics": level, "speculative_config": DRAFTS}
    async with serve(**options) as served:
        controller = served.engine.core.scheduler.draft_length
        monkeypatch.setattr(controller, "num_drafts", lambda acceptance: 3)
        body = {**body, "max_tokens": 40}
        whole = (await served.http.post(path, json=body)).json()
        drafts = whole["metrics"]["speculative_decoding"]
        steps, kept = drafts["num_spec_steps"], drafts["num_accepted_draft_tokens"]
        histogram = drafts["acceptance_histogram"]
        assert (
            drafts["num_spec_tokens"] == 3 and len(histogram) == 4 and sum(histogram) == steps > 0
        )
        assert 0 < kept == sum(at * count for at, count in enumerate(histogram))
        assert kept < drafts["num_draft_tokens"] <= 3 * steps
        assert drafts["mean_acceptance_length"] == pytest.approx(1 + kept / steps)
        assert drafts["draft_acceptance_rate"] == pytest.approx(kept / drafts["num_draft_tokens"])
        if level == "detailed":
            assert [drafts["per_step_accepted"].count(n) for n in range(4)] == histogram
            assert sum(drafts["per_step_drafted"]) == drafts["num_draft_tokens"]
        else:
            assert "per_step_accepted" not in drafts and "per_step_drafted" not in drafts
        stream_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        streamed = events((await served.http.post(path, json=stream_body)).text)
        assert streamed[-1]["metrics"]["speculative_decoding"] == drafts
        assert not any("metrics" in chunk for chunk in streamed[:-1])
        several = (await served.http.post(path, json={**body, "n": 2})).json()
        assert "metrics" not in several


async def test_without_drafts_in_a_request_its_metrics_are_neutral():
    options = {"per_request_spec_decode_metrics": "summary", "speculative_config": DRAFTS}
    async with serve(**options) as served:
        answer = await served.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        drafts = answer.json()["metrics"]["speculative_decoding"]
        assert drafts["mean_acceptance_length"] == 1 and drafts["draft_acceptance_rate"] == 0
        assert drafts["acceptance_histogram"] == [0, 0, 0, 0]


async def test_an_answer_that_a_stop_string_ends_has_its_times():
    async with serve(script="abcdefgh") as served:
        served.engine.step_seconds = 0.01
        body = {"prompt": "a", "stop": "e", "timings_per_token": True}
        answer = await served.http.post(COMPLETIONS, json=body)
        assert answer.json()["timings"]["predicted_ms"] >= 30


PREFIX = "The capital of France is the city which "  # two full blocks of 16 bytes, and 8 more


async def prefix_cache_of(served: Served, prompt: str, **body: object):
    request = {"prompt": prompt, "max_tokens": 1, **body}
    answer = await served.http.post(COMPLETIONS, json=request)
    return (await timeline_of(served, answer.json()["id"]))["prefix_cache"]


async def test_why_no_more_of_a_prompt_was_cached(served: Served):
    first = await prefix_cache_of(served, PREFIX + "everybody likes")
    assert (first["num_matched"], first["num_blocks"], first["reason"]) == (0, 3, "unknown")
    again = await prefix_cache_of(served, PREFIX + "everybody likes")
    assert (again["num_matched"], again["reason"]) == (3, "complete")
    other = await prefix_cache_of(served, PREFIX + "nobody knows well")
    assert (other["num_matched"], other["num_blocks"]) == (2, 3)
    difference = other["difference"]
    assert (difference["index"], difference["text"], difference["other_text"]) == (40, "n", "e")
    assert other["reason"] == "different_token" and "'n'" in other["text"]
    salted = await prefix_cache_of(served, PREFIX + "everybody likes", cache_salt="s")
    assert (salted["num_matched"], salted["reason"]) == (0, "salt")
    longer = await prefix_cache_of(served, PREFIX + "everybody likes, and more")
    assert (longer["num_matched"], longer["reason"]) == (3, "last_block")
    body = {"prompt": PREFIX + "has", "max_tokens": 30}  # 43 tokens, and 29 of the output
    answer = (await served.http.post(COMPLETIONS, json=body)).json()
    text = answer["choices"][0]["text"]
    follow_up = await prefix_cache_of(served, body["prompt"] + text + " - and more of it")
    assert (follow_up["num_matched"], follow_up["reason"]) == (4, "last_block")
    assert "72 tokens" in follow_up["text"]
    read = await prefix_cache_of(served, PREFIX, prompt_logprobs=1)
    assert (read["num_matched"], read["reason"]) == (0, "prompt_is_read")


def test_cached_blocks_without_a_checkpoint_of_the_states():
    choice = Choice(0, num_prompt_tokens=100)
    output = EngineCoreOutput("r", [1], num_cached_tokens=32, num_uncovered_tokens=48)
    choice.add_report(output)
    choice.add_report(EngineCoreOutput("r", [1]))
    timeline = Timeline("r", choices=[choice], tokens=array("I", range(100)))
    report = explain_prefix(timeline, [timeline], CacheConfig(), str)
    assert (report.num_matched, report.num_uncovered) == (2, 3)
    assert report.reason == "no_checkpoint"
    assert re.findall(r"\d+", report.text) == ["48", "32"]
    # Most of a longer prompt has another reason.
    earlier = Timeline(
        "a", choices=[choice], tokens=array("I", [*range(85), 7]), marks=[Mark("", 0)]
    )
    timeline.tokens = array("I", range(400))
    timeline.marks = [Mark("", 1), Mark("scheduled", 1)]
    report = explain_prefix(timeline, [timeline, earlier], CacheConfig(), str)
    assert (report.num_uncovered, report.reason) == (3, "different_token")
    assert report.difference and report.difference.index == 85


async def test_a_prompt_that_was_evicted():
    memory = 8 * 16 * FAKE_SPEC.kv_bytes_per_token(4)
    async with serve(kv_cache_memory=memory, max_model_len=128) as served:
        await prefix_cache_of(served, "a" * 100)
        await prefix_cache_of(served, "b" * 100)
        reuse = await prefix_cache_of(served, "a" * 100)
        assert reuse["num_matched"] < reuse["num_blocks"] == 6
        assert reuse["reason"] == "evicted"
        assert 0 <= reuse["evicted_seconds_ago"] < 60


async def test_what_another_adapter_or_an_emptied_cache_has_not(tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / "adapters" / name, seed=seed)
    async with serve_adapters(tmp_path) as (served, _):
        for model, reason in (("a", "unknown"), ("a", "complete"), ("b", "adapter")):
            reuse = await prefix_cache_of(served, "a" * 100, model=model)
            assert reuse["reason"] == reason, reuse
        served.engine.die()
        await until(lambda: served.async_llm.is_restarting)
        served.engine.revive()
        await until(lambda: served.async_llm.is_ready)
        assert (await prefix_cache_of(served, "a" * 100, model="a"))["reason"] == "emptied"
        assert (await prefix_cache_of(served, "a" * 100, model="a"))["reason"] == "complete"


async def test_a_cache_that_is_off():
    async with serve(enable_prefix_caching=False) as served:
        assert (await prefix_cache_of(served, "a" * 100))["reason"] == "disabled"


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_common_length(a, b):
    pairs = zip(a, b, strict=False)
    common = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
    assert common_length(array("I", a), array("I", b)) == len(common)


# ---- API servers of one engine that tell each other of their requests ----

BODY = {"prompt": "a", "max_tokens": 3}


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Served, Served]]:
    """Two servers, each with an engine of its own, that take each other for peers."""
    async with serve() as first, serve() as second:
        for number, served in enumerate((first, second)):
            await served.app.state.context.peers.listen(folder / f"api-{number}")
        try:
            yield first, second
        finally:
            for served in (first, second):
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
            for request_id in made:
                url = f"/v1/requests/{request_id}/timeline"
                timeline = (await served.http.get(url)).json()
                assert timeline["id"] == request_id and timeline["num_output_tokens"] == 3
                first = (await servers[0].http.get(url)).json()
                assert first.pop("created") == pytest.approx(timeline.pop("created"), abs=0.1)
                assert timeline == first
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


async def test_tokens_are_counted_by_the_second_and_once_for_all_servers(tmp_path):
    second = 1_000_000_000
    async with two(tmp_path) as servers:
        now = now_ns() // second
        times = ((300, 5), (100, 3), (20, 4), (20, 2))  # seconds ago, tokens of answers
        records = [
            StepRecord(
                number,
                (now - ago) * second,
                collected_ns=(now - ago) * second + second // 2,
                num_tokens=tokens + 7 + 2,
                prefills={"a": 7},
                num_drafts=3,
                num_accepted=1,
            )
            for number, (ago, tokens) in enumerate(times)
        ]
        servers[0].async_llm.tracer.stepped(records, None, 0)
        servers[1].async_llm.tracer.stepped(records[:-1], None, 0)
        servers[1].async_llm.tracer.stepped([], None, 1)
        # A chunk of a prompt takes from 11.5 to 8.5 seconds ago: as many tokens in each second.
        begin_ns = (now - 12) * second + second // 2
        end_ns = begin_ns + 3 * second
        chunk = StepRecord(9, begin_ns, collected_ns=end_ns, num_tokens=400, prefills={"b": 400})
        servers[0].async_llm.tracer.stepped([chunk], None, 0)
        for served in servers:
            answer = (await served.http.get("/v1/steps?recent=1")).json()
            rates = answer["tokens_per_second"]
            assert len(rates) == 120 and [count for count in rates if count] == [3, 6]
            assert rates.index(6) - rates.index(3) == 80
            prompts = answer["prompt_tokens_per_second"]
            assert [count for count in prompts if count] == [7, 14, 100, 100, 100, 100]
            assert prompts.index(14) == rates.index(6) == prompts.index(100) - 8


async def test_a_server_forgets_seconds_in_which_it_generated(served: Served):
    tracer = served.async_llm.tracer
    for second in range(1, 400):
        at_ns = second * 1_000_000_000
        tracer.stepped([StepRecord(second, at_ns, collected_ns=at_ns, num_tokens=1)], None, 0)
    assert sorted(tracer.tokens) == [*range(279, 400)]  # 120 and the current one


async def test_timelines_name_only_requests_of_the_same_owner(tmp_path):
    async with serve() as served:
        tracer = served.async_llm.tracer
        request_id, neighbour = await answer_of(served), await answer_of(served)
        timeline = tracer.recent[request_id]
        [snapshot] = tracer.take_snapshots([timeline])
        timeline.breakdown = snapshot.breakdown()
        timeline.breakdown.phases["queue_slots"] = 1
        timeline.breakdown.neighbours = {neighbour: 6, "of-another-key": 5}
        begin = timeline.marks[0].at_ns
        queued = next(mark.at_ns for mark in timeline.marks if mark.stage == "queued")
        tracer.recent[neighbour].marks = [Mark("scheduled", begin), Mark("returned", queued + 1)]
        answer = (await served.http.get(f"/v1/requests/{request_id}/timeline")).json()
        assert [entry.get("id") for entry in answer["neighbours"]] == [neighbour, None]
        assert answer["behind"] == [neighbour]


async def test_the_prompt_that_was_found_may_be_of_a_peer(tmp_path):
    """Both engines are rank 0, as if they were one."""
    async with two(tmp_path) as (first, other):
        tracer = first.async_llm.tracer
        await answer_of(first)
        made = (await first.http.post("/v1/completions", json={"prompt": "b" * 60})).json()["id"]
        tracer.recent[made].choices[0].num_cached_tokens = 32
        for served in (first, other):
            timeline = (await served.http.get(f"/v1/requests/{made}/timeline")).json()
            reuse = timeline["prefix_cache"]
            assert (reuse["num_matched"], reuse["num_blocks"]) == (2, 3)
            assert reuse["reason"] == "unknown" and "this API server" in reuse["text"]


async def test_one_that_is_silent_does_not_hide_what_another_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT", 0.5)
    async with two(tmp_path) as (first, other):
        made = await answer_of(other)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(tmp_path / "api-2"))
            silent.listen()
            answer = await first.http.get(f"/v1/requests/{made}/timeline")
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
