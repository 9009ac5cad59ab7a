"""GET /metrics."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.api.harness import Served, until


async def values(http: httpx.AsyncClient) -> dict[str, float]:
    """Sums over labels, by sample name."""
    answer = await http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/plain; version="
    )
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


async def test_counts_equal_the_requests_made(served: Served):
    for stream in (False, True):
        body = {"prompt": ["abc", "de"], "max_tokens": 4, "n": 2, "stream": stream}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    assert (await served.http.post("/v1/completions", json={"prompt": ""})).status_code == 400
    counts = await values(served.http)
    assert counts["vllm:generation_tokens_total"] == 2 * 4 * 4
    assert counts["vllm:request_success_total"] == 8
    assert counts["vllm:time_to_first_token_seconds_count"] == 8


async def test_gauges_return_to_zero_after_an_abort(served: Served):
    served.engine.step_seconds = 0.01
    task = asyncio.create_task(
        served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2000})
    )
    await until(lambda: served.async_llm.stats.num_running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert served.async_llm.num_unfinished == 0
    await served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert (await values(served.http))["vllm:num_requests_running"] == 0
