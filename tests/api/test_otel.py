"""OpenTelemetry: one span for each request, with its phases below, in the trace of its client."""

import asyncio
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from servd.api.observability.otel import SpanExporter
from servd.api.request.timeline import Timeline
from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.config.machine import Machine
from servd.config.resolve import resolve
from tests.api.harness import MODEL, serve, until, user

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINT = "http://localhost:4318/v1/traces"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter) -> SpanExporter:
    return SpanExporter(SimpleSpanProcessor(exporter))


async def spans_of(exporter: InMemorySpanExporter, number: int = 1) -> list[ReadableSpan]:
    """All spans, once N requests are exported; each request's own comes after its parts."""

    def ended() -> int:
        return sum(span.name == "llm_request" for span in exporter.get_finished_spans())

    await until(lambda: ended() == number)
    return [*exporter.get_finished_spans()]


async def test_a_request_is_a_span_in_its_clients_trace_with_its_phases_below(exporter, spans):
    async with serve(spans=spans) as served:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
        body = {"messages": user("hi"), "max_tokens": 5, "ignore_eos": True, "top_p": 0.5}
        answer = await served.http.post(CHAT, json=body, headers=headers)
        *parts, span = await spans_of(exporter)
    assert span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
    assert span.parent and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("a") == "b"
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert [part.name for part in parts] == ["prepare", "queue", "prefill", "decode", "write"]
    for part, before in zip(parts, [span, *parts], strict=False):
        assert part.parent and part.parent.span_id == span.context.span_id
        assert f"{part.context.trace_id:032x}" == TRACE
        assert before.start_time <= part.start_time <= part.end_time <= span.end_time
    attributes, usage = span.attributes, answer.json()["usage"]
    assert attributes["gen_ai.request.id"] == answer.json()["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    for names, value in (
        (("usage.prompt_tokens", "usage.input_tokens"), usage["prompt_tokens"]),
        (("usage.completion_tokens", "usage.output_tokens", "request.max_tokens"), 5),
        (("request.model", "response.model"), MODEL),
        (("request.n",), 1),
        (("request.top_p",), 0.5),
        (("operation.name",), "chat"),
    ):
        assert [attributes[f"gen_ai.{name}"] for name in names] == [value] * len(names)
    took = {part.name: (part.end_time - part.start_time) / 1e9 for part in parts}
    for name, part in (
        ("queue", "queue"),
        ("model_prefill", "prefill"),
        ("model_decode", "decode"),
    ):
        assert attributes[f"gen_ai.latency.time_in_{name}"] == pytest.approx(took[part])
    first_token = parts[2].end_time - parts[0].start_time
    assert attributes["gen_ai.latency.time_to_first_token"] >= first_token / 1e9
    assert attributes["gen_ai.latency.e2e"] <= (span.end_time - span.start_time) / 1e9


async def test_without_a_context_each_request_begins_a_trace(exporter, spans):
    async with serve(spans=spans) as served:
        for _ in range(2):
            await served.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})
        await served.http.get("/health")  # no span: nothing was generated
        traces = {span.context.trace_id for span in await spans_of(exporter, 2)}
        accept = {"accept": "application/openmetrics-text"}
        metrics = (await served.http.get("/metrics", headers=accept)).text
    assert len(traces) == 2
    assert {*re.findall(r'trace_id="(\w+)"', metrics)} <= {f"{trace:032x}" for trace in traces}


async def test_what_the_client_does_not_sample_is_not_exported(exporter, spans):
    async with serve(spans=spans) as served:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        answer = await served.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-")
        await served.http.post(COMPLETIONS, json={"prompt": "a"})
        *_, span = await spans_of(exporter)
    assert f"{span.context.trace_id:032x}" != TRACE


async def test_a_preemption_has_a_span(exporter, spans):
    cache = 40 * 16 * FAKE_SPEC.kv_bytes_per_token(4)
    options = {"kv_cache_memory": cache, "max_model_len": 512, "max_num_seqs": 2}
    async with serve(spans=spans, **options) as served:
        body = {"max_tokens": 120, "ignore_eos": True}
        prompts = [{"prompt": c * 300, **body} for c in "ab"]
        await asyncio.gather(*(served.http.post(COMPLETIONS, json=prompt) for prompt in prompts))
        assert "preempted" in {span.name for span in await spans_of(exporter, 2)}


async def test_several_prompts_are_one_span_with_sums(exporter, spans):
    async with serve(spans=spans) as served:
        answer = await served.http.post("/v1/embeddings", json={"input": ["a", "bc", "def"]})
        *parts, span = await spans_of(exporter)
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert [part.name for part in parts].count("prefill") == 3


async def test_a_background_response_is_a_span_once_it_is_made(exporter, spans):
    async with serve(spans=spans) as served:
        body = {"input": "a", "background": True, "max_output_tokens": 16}
        answer = await served.http.post("/v1/responses", json=body)
        *_, span = await spans_of(exporter)
    assert span.attributes["gen_ai.request.id"] == answer.json()["id"]


async def test_spans_reach_a_collector_as_protobuf_over_http(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        spans = SpanExporter.to_endpoint(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        async with serve(spans=spans) as served:
            answer = await served.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3})
        spans.close()
        collector.shutdown()
    [(path, message)] = received
    [resource] = message.resource_spans
    service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
    by_name = {span.name: span for span in resource.scope_spans[0].spans}
    assert (path, service) == ("/v1/traces", "mine")
    assert by_name["decode"].parent_span_id == by_name["llm_request"].span_id
    ids = by_name["llm_request"]
    traced = f"00-{ids.trace_id.hex()}-{ids.span_id.hex()}-"
    assert answer.headers["traceresponse"].startswith(traced)


@pytest.mark.parametrize(
    ("endpoint", "protocol"), [("localhost:4317", "http/protobuf"), (ENDPOINT, "grpc")]
)
def test_an_endpoint_that_cannot_be_exported_to_is_refused(endpoint, protocol, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    config = Config.load({"executor": "fake", "otlp_traces_endpoint": endpoint})
    with pytest.raises(ConfigError, match="4318"):
        resolve(config, FAKE_SPEC, Machine())


def test_without_the_exporter_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("servd.config.checks.observability.OTLP_EXPORTER", "no-such-package")
    config = Config.load({"executor": "fake", "otlp_traces_endpoint": ENDPOINT})
    with pytest.raises(ConfigError, match="pip install no-such-package"):
        resolve(config, FAKE_SPEC, Machine())


def test_a_request_that_is_cut_off_after_the_last_export_leaves_quietly(exporter):
    spans = SpanExporter(SimpleSpanProcessor(exporter))
    span = spans.begin_span({})
    spans.close()
    span.add_timeline(Timeline("x"))
    span.end()
    assert not exporter.get_finished_spans()
