"""Several engines behind one API server (--data-parallel-size)."""

import asyncio
import random
from typing import Any

import httpx
import msgspec
import pytest

from servd.messages.engine import AbortRequests, EngineCoreRequest, EngineGone, EngineReady
from tests.api.harness import (
    MODEL,
    InProcessEngine,
    Served,
    output_text,
    requests_sent,
    serve,
    until,
)
from tests.api.test_restart import BODIES

BODY = {"model": MODEL, "prompt": "once", "max_tokens": 200, "ignore_eos": True}


def prompts(engine: InProcessEngine) -> list[str]:
    """The prompts that an engine was sent, in order."""
    return [bytes(message.prompt_token_ids).decode() for message in requests_sent(engine)]


async def post(served: Served, rank: object = None, **body: Any) -> httpx.Response:
    headers = {}
    if rank is not None:
        headers["X-data-parallel-rank"] = rank if isinstance(rank, bytes) else str(rank)
    return await served.http.post("/v1/completions", json={**BODY, **body}, headers=headers)


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


async def test_a_rank_that_is_asked_for_gets_the_request():
    async with serve(data_parallel_size=3) as served:
        for rank in (2, 0, 2):
            [text] = texts(await post(served, rank))
            assert text == output_text("once", 200)
        assert [len(prompts(engine)) for engine in served.engines] == [1, 0, 2]
        for wrong in (3, -1, "one", "", "²".encode(), "9" * 5000, "0" * 5000):
            answer = await post(served, wrong)
            assert answer.status_code == 400, answer.text
            assert "must be from 0 to 2" in answer.json()["error"]["message"]
    async with serve() as served:
        assert (await post(served, 0)).status_code == 200
        assert (await post(served, 1)).status_code == 400


async def test_prompts_of_a_request_are_spread_and_their_choices_stay_together():
    async with serve(data_parallel_size=2) as served:
        names = ["one", "two", "three", "four"]
        answer = await post(served, prompt=names, n=2, seed=1)
        assert texts(answer) == [output_text(prompt, 200) for prompt in names for _ in range(2)]
        sent = [prompts(engine) for engine in served.engines]
        assert sorted(sum(sent, [])) == sorted(names) and len(sent[0]) == len(sent[1]) == 2


async def test_a_client_that_leaves_ends_its_requests_where_they_are():
    async with serve(data_parallel_size=2) as served:
        for engine in served.engines:
            engine.step_seconds = 0.01
        tasks = [asyncio.create_task(post(served, rank, max_tokens=4000)) for rank in (0, 1)]
        schedulers = [engine.core.scheduler for engine in served.engines]
        await until(lambda: all(scheduler.requests for scheduler in schedulers))
        tasks[1].cancel()
        await until(lambda: not schedulers[1].requests)
        assert schedulers[0].requests
        aborts = [
            [m for m in engine.sent if isinstance(m, AbortRequests)] for engine in served.engines
        ]
        assert not aborts[0] and len(aborts[1]) == 1
        tasks[0].cancel()
        await until(lambda: not schedulers[0].requests)


async def test_the_death_of_an_engine_concerns_its_own_requests_alone():
    async with serve(data_parallel_size=2) as served:
        expected = [texts(await post(served, prompt=f"p{i}")) for i in range(4)]
        for engine in served.engines:
            engine.sent.clear()
            engine.step_seconds = 0.002
        tasks = [asyncio.create_task(post(served, i % 2, prompt=f"p{i}")) for i in range(4)]
        dying, other = served.engines
        begin = dying.core.scheduler._num_steps
        await until(lambda: dying.core.scheduler._num_steps >= begin + 20)
        dying.die()
        lost, kept = served.async_llm.engines
        await until(lambda: lost.recovery.is_restarting)
        assert not kept.recovery.is_restarting
        health = await served.http.get("/health")
        assert health.status_code == 200 and health.json()["engines"][0] == "restarting"
        assert texts(await post(served, prompt="new")) == [output_text("new", 200)]
        assert "new" in prompts(other), "who names no rank does not wait"
        waiting = asyncio.create_task(post(served, 0, prompt="late"))
        await until(lambda: len(lost.running) == 3)
        dying.revive()
        assert [texts(await task) for task in tasks] == expected
        assert texts(await waiting) == [output_text("late", 200)]
        assert sorted(prompts(dying)) == ["late", "p0", "p0", "p2", "p2"]
        assert sorted(prompts(other)) == ["new", "p1", "p3"], "nothing was sent again"


@pytest.mark.parametrize("num_steps", [2, 25])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_requests_of_a_dead_engine_go_on_in_another_at_once(body, num_steps):
    async with serve(data_parallel_size=2) as served:
        body = {"max_tokens": 60, **body}
        expected = (await post(served, **body)).json()
        for engine in served.engines:
            engine.sent.clear()
            engine.step_seconds = 0.001
        tasks = [asyncio.create_task(post(served, **body)) for _ in range(4)]
        dying, other = served.engines
        begin = dying.core.scheduler._num_steps
        await until(lambda: dying.core.scheduler._num_steps >= begin + num_steps)
        lost = {*served.async_llm.engines[0].running}
        dying.die()
        answers = [(await task).json() for task in tasks]  # it is not started again before
        assert [answer["choices"] for answer in answers] == [expected["choices"]] * 4
        assert [answer["usage"] for answer in answers] == [expected["usage"]] * 4
        again = {m.request_id for m in other.sent if getattr(m, "output_token_ids", None)}
        assert lost and again == lost
        balancer = served.async_llm.load_balancer  # which prompts leave in turns of the loop
        await until(lambda: balancer.pending == pytest.approx([0, 0]))
        for answer in answers:
            name = answer["id"] if "prompt" not in body else f"{answer['id']}-0"
            timeline = await served.http.get(f"/v1/requests/{name}/timeline")
            assert timeline.status_code == 200, timeline.text
        dying.revive()
        await until(lambda: served.async_llm.engines[0].is_ready)
        assert not [m for m in dying.sent[len(lost) :] if isinstance(m, EngineCoreRequest)]
        assert (await served.http.get("/debug/audit")).json()["problems"] == []


async def test_a_watched_request_that_moves_is_watched_there_and_nowhere_when_it_ends():
    async with serve(data_parallel_size=2) as served:
        for engine in served.engines:
            engine.step_seconds = 0.001
        headers, body = {"x-servd-watch": "1"}, {"prompt": "a", "max_tokens": 60}
        calls = [served.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
        tasks = [asyncio.create_task(call) for call in calls]
        lost, kept = served.async_llm.engines
        await until(lambda: lost.num_watched and kept.num_watched)
        served.engines[0].die()
        await until(lambda: kept.num_watched == 2)
        await asyncio.gather(*tasks)
        await until(lambda: not lost.running and not kept.running)
        assert lost.num_watched == kept.num_watched == 0


async def test_what_an_engine_may_have_died_of_is_the_death_of_no_other():
    async with serve(data_parallel_size=2) as served:
        for engine in served.engines:
            engine.may_step.clear()
        tasks = [asyncio.create_task(post(served, prompt=f"p{i}")) for i in range(6)]
        await until(lambda: sum(len(engine.running) for engine in served.async_llm.engines) == 6)
        dying, other = served.engines
        lost, kept = served.async_llm.engines
        computing, *waiting = lost.running
        num_sent = len(prompts(other))
        dying.die([computing])
        await until(lambda: waiting and kept.running.keys() >= {*waiting})
        assert [*lost.running] == [computing]
        assert len(prompts(other)) == num_sent + len(waiting)
        dying.revive()
        for engine in served.engines:
            engine.may_step.set()
        for i, task in enumerate(tasks):
            assert texts(await task) == [output_text(f"p{i}", 200)]


async def test_requests_move_to_free_slots_alone():
    """Behind a queue they might wait for longer than for the next engine."""
    async with serve(data_parallel_size=2, max_num_seqs=2) as served:
        for engine in served.engines:
            engine.step_seconds = 0.002
        lost, kept = served.async_llm.engines
        busy = [asyncio.create_task(post(served, 1, max_tokens=4000)) for _ in range(2)]
        await until(lambda: kept.stats.num_running == 2)
        tasks = [asyncio.create_task(post(served, prompt=f"p{i}")) for i in range(2)]
        await until(lambda: lost.stats.num_running == 2)
        served.engines[0].die()
        await until(lambda: lost.recovery.is_restarting)
        assert len(lost.running) == 2 and kept.num_free_slots == 0
        busy[0].cancel()
        for i, task in enumerate(tasks):  # in the place that became free, one after the other
            assert texts(await task) == [output_text(f"p{i}", 200)]
        assert not busy[1].done()
        busy[1].cancel()


async def test_requests_move_to_an_engine_that_is_awake():
    """One that sleeps would have to load the model first, as the next one does."""
    async with serve(data_parallel_size=3) as served:
        for engine in served.engines:
            engine.may_step.clear()
        tasks = [asyncio.create_task(post(served, prompt=f"p{i}")) for i in range(3)]
        lost, awake, asleep = served.async_llm.engines
        await until(lambda: lost.running and awake.running and asleep.running)
        (kept,) = awake.running
        (request_id,) = asleep.running
        number = served.async_llm.requests[request_id].prompt_token_ids[1] - ord("0")
        tasks.pop(number).cancel()
        await until(lambda: not asleep.running)
        served.engines[2].tell(msgspec.structs.replace(served.engines[2].ready, is_asleep=True))
        await until(lambda: asleep.is_asleep)
        (moved,) = lost.running
        served.engines[0].die()
        await until(lambda: not lost.running)
        assert {*awake.running} == {kept, moved}
        served.engines[1].may_step.set()
        assert [(await task).status_code for task in tasks] == [200, 200]


async def test_an_engine_that_sleeps_is_woken_when_no_other_has_a_free_slot():
    async with serve(data_parallel_size=3, max_num_seqs=2) as served:
        for rank in (0, 2):
            engine = served.engines[rank]
            engine.tell(msgspec.structs.replace(engine.ready, is_asleep=True))
        await until(lambda: all(served.async_llm.engines[rank].is_asleep for rank in (0, 2)))
        for i in range(6):  # it has no work, and by its share it has had too little
            assert (await post(served, prompt=f"p{i}")).status_code == 200
        assert [len(prompts(engine)) for engine in served.engines] == [0, 6, 0]
        assert (await post(served, 2)).status_code == 200, "asked for by name"
        served.engines[1].may_step.clear()
        busy = [asyncio.create_task(post(served, prompt=f"busy{i}")) for i in range(3)]
        await until(lambda: sum(len(prompts(engine)) for engine in served.engines) == 10)
        assert [len(prompts(engine)) for engine in served.engines] in ([1, 8, 1], [0, 8, 2])
        served.engines[1].may_step.set()
        assert [(await task).status_code for task in busy] == [200] * 3


async def test_who_waits_for_all_engines_goes_on_in_the_first_that_is_there():
    async with serve(data_parallel_size=2) as served:
        for engine in served.engines:
            engine.die()
        await until(lambda: served.async_llm.is_restarting)
        tasks = [asyncio.create_task(post(served, prompt=f"p{i}")) for i in range(4)]
        await until(lambda: all(engine.running for engine in served.async_llm.engines))
        served.engines[1].revive()
        for i, task in enumerate(tasks):
            assert texts(await task) == [output_text(f"p{i}", 200)]
        assert not prompts(served.engines[0])
        assert sorted(prompts(served.engines[1])) == ["p0", "p1", "p2", "p3"], "each is sent once"


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_engines_that_die_over_and_over_lose_nothing(is_async: bool):
    """While requests come, end, and are left, in more choices than there are slots."""
    draw = random.Random(1)
    async with serve(data_parallel_size=3, max_num_seqs=6, async_scheduling=is_async) as served:
        for engine in served.engines:
            engine.step_seconds = 0.001

        async def ask(number: int) -> None:
            body = {"prompt": f"p{number}", "n": draw.randint(1, 3), "max_tokens": 100}
            asking = post(served, temperature=0, **body)
            try:
                timeout = draw.random() * 0.3 if draw.random() < 0.3 else None
                answer = await asyncio.wait_for(asking, timeout)
            except TimeoutError:
                return
            assert texts(answer) == [output_text(f"p{number}", 100)] * body["n"]
            assert answer.json()["usage"]["completion_tokens"] == 100 * body["n"]

        async with asyncio.TaskGroup() as group:
            for number in range(48):
                group.create_task(ask(number))
                await asyncio.sleep(0.01)
                if number % 6 == 0:
                    rank = draw.randrange(3)
                    served.engines[rank].die()
                    await until(lambda: served.async_llm.engines[rank].recovery.is_restarting)  # noqa: B023
                elif number % 6 == 3:
                    served.engines[rank].revive()
        assert not any(engine.running for engine in served.async_llm.engines)
        assert served.async_llm.load_balancer.pending == pytest.approx([0, 0, 0], abs=1e-6)
        assert (await served.http.get("/debug/audit")).json()["problems"] == []


async def test_an_empty_prefix_cache_attracts_nobody():
    """Neither after a death nor after sleep."""
    async with serve(data_parallel_size=2) as served:
        router, text = served.async_llm.load_balancer, "a long beginning " * 20
        for rank, engine in enumerate(served.engines):
            assert (await post(served, rank, prompt=text, max_tokens=1)).status_code == 200
            request = requests_sent(engine)[-1]
            hashes = router.hash_prefixes(request)
            assert router.count_cached(rank, hashes) > 300
            if rank:
                assert (await served.http.post("/sleep")).json() == {"is_sleeping": True}
            else:
                engine.die()
                await until(lambda: served.async_llm.engines[0].recovery.is_restarting)
                engine.revive()
                await until(lambda: served.async_llm.engines[0].is_ready)
            assert router.count_cached(rank, hashes) == 0


async def test_ready_when_all_engines_are_and_the_shortest_context_counts():
    async with serve(data_parallel_size=2, is_ready=False) as served:
        first, second = served.engines
        first.tell(EngineReady(first.worker, 100, 16))
        await until(lambda: served.async_llm.engines[0].is_ready)
        assert (await served.http.get("/health")).status_code == 503
        assert (await post(served)).status_code == 503
        second.tell(EngineReady(second.worker, 50, 16))
        await until(lambda: served.async_llm.is_ready)
        assert (await served.http.get("/health")).json()["engines"] == ["idle", "idle"]
        assert (await post(served, max_tokens=60)).status_code == 400
        assert (await post(served, max_tokens=40)).status_code == 200


async def test_pages_tell_the_engines_apart():
    async with serve(data_parallel_size=2) as served:
        ids = [(await post(served, rank, max_tokens=3)).json()["id"] for rank in (0, 1, 1)]
        metrics = (await served.http.get("/metrics")).text
        for name, counts in (
            ("generation_tokens_total", (3, 6)),
            ("request_success_total", (1, 2)),
        ):
            for rank, count in enumerate(counts):
                begin = f'vllm:{name}{{engine="{rank}"'
                values = [line for line in metrics.splitlines() if line.startswith(begin)]
                values = [float(line.rpartition(" ")[2]) for line in values]
                assert sum(values) == count, metrics
        assert metrics.count("# TYPE vllm:generation_tokens_total") == 1
        steps = (await served.http.get("/v1/steps")).json()["data"]
        assert sorted(step["engine"] for step in steps) == [0] * 3 + [1] * 6
        for rank, name in zip((0, 1, 1), ids, strict=True):
            timeline = (await served.http.get(f"/v1/requests/{name}/timeline")).json()
            assert {step["engine"] for step in timeline["steps"]} == {rank}
            assert timeline["num_steps"] == 3
        audit = (await served.http.get("/debug/audit")).json()
        assert audit["problems"] == [], audit
        served.engines[1].core.scheduler.kv_cache.pool.ref_counts[0] += 1
        [problem] = (await served.http.get("/debug/audit")).json()["problems"]
        assert problem.startswith("engine 1: blocks [0] have [1] references")
        served.engines[1].core.scheduler.kv_cache.pool.ref_counts[0] -= 1


@pytest.mark.parametrize("size", [1, 2])
async def test_when_the_tree_gives_up_an_engine_every_request_ends(size):
    async with serve(data_parallel_size=size) as served:
        for engine in served.engines:
            engine.may_step.clear()
        tasks = [asyncio.create_task(post(served, rank)) for rank in range(size)]
        await until(lambda: all(engine.running for engine in served.async_llm.engines))
        for engine in served.engines:
            engine.tell(EngineGone("it died too often"))
        answers = [await task for task in tasks]
        for answer in [*answers, await post(served)]:
            assert answer.status_code >= 500 and "it died too often" in answer.text
        assert (await served.http.get("/health")).json()["status"] == "dead"
        for engine in served.engines:
            engine.may_step.set()


async def test_a_conversation_stays_where_its_beginning_is_and_leaves_no_work_behind():
    async with serve(data_parallel_size=2) as served:
        texts = {name: f"{name} " * 30 for name in ("one", "other")}
        for _ in range(4):
            for name, prompt in texts.items():
                answer = await post(served, prompt=prompt, max_tokens=20)
                [choice] = answer.json()["choices"]
                texts[name] = prompt + choice["text"] + "And then? "
        owners = [
            {prompt.partition(" ")[0] for prompt in prompts(engine)} for engine in served.engines
        ]
        assert sorted(map(len, owners)) == [1, 1], owners
        router = served.async_llm.load_balancer
        assert router and router.pending == pytest.approx([0, 0])
        metrics = (await served.http.get("/metrics")).text
        lines = metrics.splitlines()
        hits = [line for line in lines if line.startswith("vllm:prefix_cache_hits_t")]
        assert len(hits) == 2 and all(float(line.split()[-1]) > 300 for line in hits)


async def test_requests_of_other_engines_explain_no_wait():
    async with serve(data_parallel_size=2, max_num_seqs=1) as served:
        for engine in served.engines:
            engine.may_step.clear()
        tasks = [asyncio.create_task(post(served, rank, prompt="a" * 40)) for rank in (0, 1, 1)]
        await until(lambda: sum(len(prompts(engine)) for engine in served.engines) == 3)
        for engine in served.engines:
            engine.may_step.set()
        _, other, queued = [(await task).json()["id"] for task in tasks]
        timeline = (await served.http.get(f"/v1/requests/{queued}/timeline")).json()
        assert timeline["behind"] == [other]
        late = (await post(served, 1, prompt="b" * 40)).json()["id"]
        moved = (await post(served, 0, prompt="b" * 40)).json()["id"]
        for name, reason in ((late, "different_token"), (moved, "engine")):
            timeline = (await served.http.get(f"/v1/requests/{name}/timeline")).json()
            assert timeline["prefix_cache"]["reason"] == reason, timeline["prefix_cache"]
        assert late in timeline["prefix_cache"]["text"]
