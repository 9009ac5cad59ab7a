"""OpenTelemetry: a span for each request and, below it, one for each stage, made of its finished
timelines off the event loop. Nothing else imports the SDK.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import servd
from servd.api.observability import latency
from servd.api.request_state import Timeline
from servd.messages import FinishReason
from servd.params import SamplingParams
from servd.tracing import now_ns

LAST_EXPORT = 1.0  # seconds for what is not yet exported when the server ends
MAX_PROMPTS = 16  # a request's first ones, whose stages are shown
SECOND = 1e9  # nanoseconds
# Phases with spans of their own; others are parts of the span of their stage.
OWN_SPANS = {
    "preemption": "preempted",
    "swapped": "preempted",
    **{name: name for name in ("model_load", "wake_up", "grammar_compile", "tier_read")},
    **{name: name for name in ("engine_restart", "slow_reader")},
}
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
PARAMS = ("n", "temperature", "top_p", "top_k", "max_tokens")


class SpanExporter:
    """Makes and exports spans. What the SDK reads of the environment counts: OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and so on.

    Args:
        processor: gets the spans.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        given = OTELResourceDetector().detect().attributes
        own = {"service.name": "servd", "service.version": servd.__version__}
        self._provider = TracerProvider(
            resource=Resource.create({**own, **given}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("servd", servd.__version__)
        self._context = TraceContextTextMapPropagator()
        self._worker = ThreadPoolExecutor(1, "spans")

    @classmethod
    def to_endpoint(cls, endpoint: str) -> SpanExporter:
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def begin(self, headers: Mapping[str, str]) -> RequestSpan:
        """Begin the span of a request that has come with these headers, among them maybe W3C's
        trace context. One that is never ended leaves nothing behind.
        """
        context = self._context.extract(headers)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER)
        return RequestSpan(span, self._tracer, self._worker)

    def close(self) -> None:
        self._worker.shutdown()
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT)


class RequestSpan:
    """A request while it is served. Made by `SpanExporter.begin`.

    Attributes:
        traceparent: of spans below it, as W3C writes it.
    """

    def __init__(self, span: Span, tracer: Tracer, worker: ThreadPoolExecutor) -> None:
        self._span = span
        self._tracer = tracer
        self._worker = worker
        self._timelines: list[Timeline] = []  # one for each prompt
        self._params: SamplingParams | None = None
        ids = span.get_span_context()
        self.traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"

    def add(self, timeline: Timeline, params: SamplingParams | None) -> None:
        """Add the finished timeline of one of its prompts."""
        self._timelines.append(timeline)
        self._params = params

    def end(self, status: int = 200) -> None:
        """Export the span, if the request had a prompt."""
        if self._span.is_recording() and self._timelines:
            with suppress(RuntimeError):  # cut off after `close`, when the server ends
                self._worker.submit(self._end, status, time.time_ns())

    def _end(self, status: int, ended_at: int) -> None:
        span = self._span
        span.set_attribute("http.response.status_code", status)
        span.set_attributes(self._attributes())
        reasons = [choice.finish_reason for one in self._timelines for choice in one.choices]
        if status >= 500 or FinishReason.ERROR in reasons:
            span.set_status(StatusCode.ERROR)
        offset = time.time_ns() - now_ns()  # from the clock of the marks to Unix time
        below = set_span_in_context(span)
        for timeline in self._timelines[:MAX_PROMPTS]:
            for name, begin_ns, end_ns in _parts(timeline):
                child = self._tracer.start_span(name, below, start_time=begin_ns + offset)
                if name == "tool_parsing":
                    child.set_attribute("servd.busy_seconds", timeline.parsing_ns / SECOND)
                child.end(end_ns + offset)
        span.end(ended_at)

    def _attributes(self) -> dict[str, Any]:
        """Those of the conventions for generative AI, and of vLLM and SGLang where these differ."""
        timelines = self._timelines
        first = timelines[0]
        choices = [choice for one in timelines for choice in one.choices]
        num_prompt = sum(one.num_prompt_tokens for one in timelines)
        num_output = sum(one.num_output_tokens for one in timelines)
        num_cached = sum(one.num_cached_tokens for one in timelines)
        breakdown = latency.break_down(first.marks, (), first.request_id)
        prefill_ns = breakdown.stages["prefill"]
        decode_ns = breakdown.stages["decode"]
        values: dict[str, Any] = {
            "provider.name": "servd",
            "operation.name": OPERATIONS.get(first.route, "chat"),
            "request.model": first.model,
            "response.model": first.model,
            "request.id": first.request_id,
            "response.id": first.request_id,
            **{f"request.{name}": getattr(self._params, name, None) for name in PARAMS},
            "response.finish_reasons": [
                str(c.finish_reason or FinishReason.ABORT) for c in choices
            ],
            "usage.prompt_tokens": num_prompt,
            "usage.input_tokens": num_prompt,
            "usage.completion_tokens": num_output,
            "usage.output_tokens": num_output,
            "usage.cached_tokens": num_cached,
            "usage.cache_read.input_tokens": num_cached,
            "latency.time_in_queue": breakdown.stages["queue"] / SECOND,
            "latency.time_in_model_prefill": prefill_ns / SECOND,
            "latency.time_in_model_decode": decode_ns / SECOND,
            "latency.time_in_model_inference": (prefill_ns + decode_ns) / SECOND,
            "latency.e2e": first.wall_ns / SECOND,
            "latency.time_to_first_token": first.ttft_ns and first.ttft_ns / SECOND,
        }
        known = {f"gen_ai.{name}": value for name, value in values.items() if value is not None}
        return {"http.route": first.route, **known}


def _parts(timeline: Timeline) -> Iterator[tuple[str, int, int]]:
    """Names, begins and ends of the spans of a request; those of one name in a row are one."""
    spans = latency.break_down(timeline.marks, (), timeline.request_id).spans
    for name, group in groupby(spans, lambda span: OWN_SPANS.get(span.phase, span.stage)):
        parts = [*group]
        yield name, parts[0].begin_ns, parts[-1].end_ns
    if timeline.parsing_ns:
        yield "tool_parsing", timeline.parsed_from_ns, timeline.parsed_to_ns
