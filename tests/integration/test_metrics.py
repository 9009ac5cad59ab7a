"""What /metrics says of real processes, read by Prometheus' own parsers."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import Server
from tests.integration.test_processes import wait_until
from tests.limits import WAIT_SECONDS

OPEN_METRICS = {"accept": "application/openmetrics-text;version=1.0.0"}
AT_REST = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
BODIES = [
    {
        "prompt": "once upon a time " * (1 + i % 7),
        "max_tokens": 1 + i % 9,
        "ignore_eos": True,
        "n": 1 + (i % 5 == 0),
        **({"stream": True, "stream_options": {"include_usage": True}} if i % 2 else {}),
    }
    for i in range(60)
]


def metrics(server: Server, is_open: bool = False) -> dict[str, float]:
    """Sums over labels, in either format."""
    parse = (
        openmetrics.text_string_to_metric_families if is_open else text_string_to_metric_families
    )
    answer = httpx.get(f"{server.url}/metrics", headers=OPEN_METRICS if is_open else {})
    totals = defaultdict[str, float](float)
    for family in parse(answer.raise_for_status().text):
        for sample in family.samples if family.name.startswith("vllm") else ():
            totals[sample.name.partition(":")[2]] += sample.value
    return totals


def usage_of(server: Server, body: dict[str, Any]) -> dict[str, int]:
    """Those of an answer on a connection of its own."""
    answer = httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
    if "stream" not in body:
        return answer.json()["usage"]
    return json.loads(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]


@pytest.mark.parametrize(
    "num_servers",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_counts_are_exact_and_gauges_end_at_zero(start: Callable[..., Server], num_servers: int):
    options = ("--api-server-count", str(num_servers), "--data-parallel-size", "2")
    server = start("--executor", "fake", *options)
    with ThreadPoolExecutor(16) as pool:
        usages = list(pool.map(lambda body: usage_of(server, body), BODIES))
    counts = metrics(server)
    num_choices = sum(int(body["n"]) for body in BODIES)
    num_prompt = sum(
        int(body["n"]) * usage["prompt_tokens"] for body, usage in zip(BODIES, usages, strict=True)
    )
    num_generated = sum(usage["completion_tokens"] for usage in usages)
    assert num_generated == sum(int(body["n"]) * int(body["max_tokens"]) for body in BODIES)
    assert counts["generation_tokens_total"] == num_generated
    assert counts["prompt_tokens_total"] == num_prompt
    for name in (
        "request_success_total",
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_generation_tokens_count",
    ):
        assert counts[name] == num_choices, name
    assert counts["request_params_n_count"] == len(BODIES)
    assert counts["request_generation_tokens_sum"] == num_generated
    assert counts["iteration_tokens_total_sum"] == num_prompt + num_generated
    assert [counts[name] for name in AT_REST] == [0, 0, 0]
    assert counts == metrics(server, is_open=True)

    body = {"prompt": "a", "max_tokens": 8000, "n": 16, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(8):
            stream = httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS
            )
            streams.append(stack.enter_context(stream).raise_for_status().iter_bytes())
            next(streams[-1])
        wait_until(lambda: metrics(server)["num_requests_running"] > 0, "nothing runs")
        if num_servers > 1:  # who can no longer say that its requests are gone
            server.children()["api"].kill()
    del streams
    wait_until(
        lambda: not any(metrics(server)[name] for name in AT_REST), "a gauge has not gone to zero"
    )
    counts = metrics(server)
    assert counts.keys() >= {*AT_REST}
    aborted = counts["request_success_total"] - num_choices
    assert aborted == 8 * 16 if num_servers == 1 else aborted <= 8 * 16
