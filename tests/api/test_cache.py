"""GET /v1/cache, what stays in the cache, and where its events are told."""

import asyncio
import json
import socket

import pytest

from servd.api.engine.pinned_prefixes import PinnedPrefixes
from servd.base.errors import ConfigError
from tests.api.harness import Served, serve, until, user

TEXT = "a long beginning of a text"


async def test_the_tiers_are_shown_with_what_they_hold():
    async with serve(kv_offloading_size=1 / 1024, block_size=4) as served:
        body = {"prompt": "a long beginning of a text", "max_tokens": 4}
        before = (await served.http.get("/v1/cache")).json()
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        caches = (await served.http.get("/v1/cache")).json()
    assert before["engines"][0]["tiers"][1] == caches["engines"][0]["tiers"][1]
    [engine] = caches["engines"]
    device, host = engine["tiers"]
    assert (device["name"], host["name"], engine["block_size"]) == ("device", "host", 4)
    assert device["max_blocks"] > 0 and host["max_bytes"] == 2**20
    assert host["max_blocks"] == 2**20 // (device["max_bytes"] // device["max_blocks"])
    assert engine["num_swapped"] == host["hits"] == 0


async def cache_of(served: Served, rank: int = 0):
    return (await served.http.get("/v1/cache")).json()["engines"][rank]


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, False),
        ({"retention": 60}, True),
        ({"prompt_cache_retention": "24h"}, True),
        ({"prompt_cache_retention": "in_memory"}, False),
        ({"prompt_cache_retention": "24h", "retention": 0}, False),
    ],
)
async def test_a_prompt_is_kept_for_who_asks(fields, is_kept):
    async with serve(block_size=4, max_num_seqs=1, max_model_len=512) as served:
        body = {"prompt": TEXT, "max_tokens": 2} | fields
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        cache = await cache_of(served)
        assert (cache["pinned"], cache["max_pinned"]) == (len(TEXT) // 4 * is_kept, 32)
        for letter in "xy":  # each has room beside it, both have not
            await served.http.post("/v1/completions", json={"prompt": letter * 300})
        body = {"prompt": TEXT, "max_tokens": 2}
        usage = (await served.http.post("/v1/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 24 * is_kept


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
async def test_other_routes_keep_prompts_too(route):
    body = {"input": TEXT} if route == "/v1/responses" else {"messages": user(TEXT)}
    async with serve(block_size=4) as served:
        limit = "max_output_tokens" if "input" in body else "max_tokens"
        answer = await served.http.post(route, json=body | {"retention": 60, limit: 16})
        assert answer.status_code == 200
        assert (await cache_of(served))["pinned"] > 5


async def test_prompts_of_files_stay_in_every_engine(tmp_path):
    text, chat = tmp_path / "text", tmp_path / "chat.json"
    text.write_text(TEXT)
    chat.write_text(json.dumps({"messages": [{"role": "system", "content": "Be brief. " * 4}]}))
    async with serve(block_size=4, data_parallel_size=2) as served:
        kept = len(TEXT) // 4 + len("Be brief. " * 4) // 4
        work = asyncio.create_task(PinnedPrefixes([str(text), str(chat)]).keep(served.async_llm))

        def num_pinned() -> list[int]:
            caches = [engine.core.scheduler.kv_cache.prefix_cache for engine in served.engines]
            return [len(cache.pinned) for cache in caches]

        await until(lambda: min(num_pinned()) >= kept)
        assert (await served.http.post("/reset_prefix_cache")).status_code == 200
        assert num_pinned() == [0, 0]
        await until(lambda: min(num_pinned()) >= kept)
        served.engines[1].die()
        served.engines[1].follow(1)
        served.engines[1].revive()
        assert num_pinned()[1] == 0
        await until(lambda: min(num_pinned()) >= kept)
        body = {"prompt": TEXT, "max_tokens": 2}
        for rank in ("0", "1"):
            headers = {"X-data-parallel-rank": rank}
            answer = await served.http.post("/v1/completions", json=body, headers=headers)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 24
        work.cancel()


@pytest.mark.parametrize("content", [None, "", "{", '{"messages": []}'])
def test_a_file_that_is_no_prompt_is_named(tmp_path, content):
    path = tmp_path / ("x.json" if content else "x")
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--pin-prefix {path}: "):
        PinnedPrefixes([str(path)])


async def test_a_prompt_that_does_not_fit_is_told_of(tmp_path, caplog):
    path = tmp_path / "long"
    path.write_text("x" * 600)
    async with serve(max_model_len=512) as served:
        work = asyncio.create_task(PinnedPrefixes([str(path)]).keep(served.async_llm))
        await until(lambda: "engine 0 cannot keep it" in caplog.text)
        work.cancel()
    assert f"--pin-prefix {path}" in caplog.text and "512" in caplog.text


async def test_routers_find_the_events_of_each_engine():
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        events, replay = (f"tcp://*:{listener.getsockname()[1]}" for listener in (first, second))
    options = {"enable_kv_cache_events": True, "endpoint": events, "topic": "kv"}
    async with serve() as served:
        assert (await served.http.get("/kv_event_sources")).json() == []
    config = json.dumps(options | {"replay_endpoint": replay})
    async with serve(listen=True, kv_events_config=config) as served:
        sources = (await served.http.get("/kv_event_sources")).json()
        here = "127.0.0.1"
        source = {"data_parallel_rank": 0, "topic": "kv", "endpoint": events.replace("*", here)}
        assert sources == [source | {"replay_endpoint": replay.replace("*", here)}]
    config = json.dumps(options | {"endpoint": "tcp://router:5557"})  # to which the engines connect
    async with serve(kv_events_config=config, data_parallel_size=2) as served:
        sources = (await served.http.get("/kv_event_sources")).json()
        assert [source["endpoint"] for source in sources] == [
            "tcp://router:5557",
            "tcp://router:5558",
        ]
        assert [source["data_parallel_rank"] for source in sources] == [0, 1]
