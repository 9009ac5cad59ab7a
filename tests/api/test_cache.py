"""GET /v1/cache."""

from __future__ import annotations

from tests.api.harness import serve


async def test_the_tiers_are_shown_with_what_they_hold():
    async with serve(kv_offloading_size=1 / 1024, block_size=4) as served:
        body = {"prompt": "a long beginning of a text", "max_tokens": 4}
        before = (await served.http.get("/v1/cache")).json()
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        found = (await served.http.get("/v1/cache")).json()
    assert before["engines"][0]["tiers"][1] == found["engines"][0]["tiers"][1]
    [engine] = found["engines"]
    device, host = engine["tiers"]
    assert (device["name"], host["name"], engine["block_size"]) == ("device", "host", 4)
    assert device["max_blocks"] > 0 and host["max_bytes"] == 2**20
    assert host["max_blocks"] == 2**20 // (device["max_bytes"] // device["max_blocks"])
    assert engine["num_swapped"] == host["hits"] == 0


async def test_a_cache_that_is_reset_has_no_prefix():
    async with serve(block_size=4) as served:

        async def num_cached() -> int:
            body = {"prompt": "a long beginning of a text", "max_tokens": 4}
            answer = (await served.http.post("/v1/completions", json=body)).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await num_cached(), await num_cached() > 0] == [0, True]
        assert (await served.http.post("/reset_prefix_cache")).status_code == 200
        assert await num_cached() == 0
