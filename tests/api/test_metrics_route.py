"""GET /metrics."""

import asyncio
from functools import partial
from itertools import product

import httpx
import pytest
from prometheus_client import parser as plain
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from servd.api.http.middleware import MAX_BODY, count_refusal
from servd.api.observability.metrics import Metrics
from servd.api.server import LAG_WARNING_INTERVAL, TICK, LoopLag
from servd.base.errors import Overloaded
from tests.api.harness import Served, listening, serve


async def values(http: httpx.AsyncClient) -> dict[str, float]:
    """Sums over labels, by sample name."""
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


async def answers(http: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    """(route, method, status) -> how many."""
    counts = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            if sample.name == "http_requests_total":
                labels = sample.labels
                counts[labels["handler"], labels["method"], labels["status"]] = sample.value
    return counts


async def test_answers_are_counted_by_route_and_status():
    async with serve(api_key=["key"]) as served:
        http = served.http
        for path in ("/v1/models", "/v1/models/one", "/nothing", "/health"):
            await http.get(path)
        http.headers["authorization"] = "Bearer key"
        await http.get("/v1/models/one")
        await http.get("/v1/models/two")
        await http.get("/nothing/else")
        await http.get("/v1/completions")
        await http.post("/v1/completions", json={"prompt": ""})
        await http.post("/v1/completions", content=b" " * (MAX_BODY + 1))
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        for _ in range(2):
            await http.post("/v1/completions", json=body)
        served.async_llm.admit = refuse
        await http.post("/v1/completions", json=body)
        expected = {
            ("/v1/models", "GET", "401"): 1,
            ("/v1/models/{name}", "GET", "401"): 1,
            ("none", "GET", "401"): 1,
            ("/v1/models/{name}", "GET", "404"): 2,
            ("none", "GET", "404"): 1,
            ("/v1/completions", "GET", "405"): 1,
            ("/v1/completions", "POST", "400"): 1,
            ("/v1/completions", "POST", "413"): 1,
            ("/v1/completions", "POST", "200"): 2,
            ("/v1/completions", "POST", "429"): 1,
        }
        assert await answers(http) == expected
        seconds = await values(http)
        assert seconds["http_request_duration_seconds_count"] == sum(expected.values())


async def test_a_start_is_no_series_of_server_errors():
    """Probes, and the page, ask /health until the model is loaded."""
    async with serve(is_ready=False) as served:
        for method, path in product(("GET", "HEAD", "POST"), ("/health", "/ping")):
            await served.http.request(method, path)
        assert await answers(served.http) == {}
        assert (await served.http.get("/v1/requests")).json()["data"] == []


def refuse(*_) -> None:
    raise Overloaded("too many")


async def test_refused_requests_are_counted_too(served: Served):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    count = partial(count_refusal, served.app)
    async with listening(served.app, on_refused=count, body_timeout=0.5, header_timeout=0.5) as url:
        port = int(url.rpartition(":")[2])
        for sent, status in (
            ([b"this is not HTTP\r\n\r\n"], b"400"),
            ([head + b"content-length: 9\r\n\r\n"], b"408"),
            ([head + b"content-length: 2\r\n\r\n{}", head], b"408"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for number, data in enumerate(sent):
                if number:
                    await reader.readuntil(b"}}")  # the answer to what is before it
                writer.write(data)
            assert (await reader.read()).startswith(b"HTTP/1.1 %b " % status)
            writer.close()
    counts = await answers(served.http)
    assert counts["none", "none", "400"] == 1
    assert counts["/v1/completions", "POST", "408"] == 1
    assert counts["none", "none", "408"] == 1  # not that of the request before


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (  # what Prometheus 2 sends
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2",
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
        ),
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain; version=0.0.4; charset=utf-8"),
        (  # what Prometheus 3 sends
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,"
            "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,"
            "*/*;q=0.2",
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
    ],
)
async def test_the_format_that_is_asked_for(served: Served, accept: str, content_type: str):
    await served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    answer = await served.http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == content_type
    parser = openmetrics if content_type.startswith("application/openmetrics") else plain
    families = parser.text_string_to_metric_families(answer.text)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["vllm:generation_tokens_total"] == 2 and "vllm_" not in answer.text


def test_event_loop_lag_is_measured_and_logged_occasionally(monkeypatch, caplog):
    metrics = Metrics("m")
    lag = LoopLag(metrics)
    now = 1000.0
    monkeypatch.setattr("servd.api.server.time.monotonic", lambda: now)
    lag.sample(is_starting=True)
    now += TICK + 2.0
    lag.sample(is_starting=True)
    assert not caplog.records
    for late in (0.0, 0.001, 0.5, 0.3, 0.0):
        now += TICK + late
        lag.sample()
    metrics.render()
    labels = {"model_name": "m", "engine": "0"}
    lags = metrics.registry.get_sample_value("servd:event_loop_lag_seconds_sum", labels)
    assert lags == pytest.approx(2.801)
    [record] = caplog.records
    assert "0.50 s" in record.message
    now += LAG_WARNING_INTERVAL
    lag.sample()
    assert len(caplog.records) == 2
