"""OpenTelemetry: exports a span for each request and, below it, a span for each stage. Spans are
made of finished timelines, off the event loop. No other module imports the SDK.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import servd
from servd.api.request.latency import Breakdown, Span, break_down
from servd.api.request.timeline import Timeline
from servd.base.tracing import now_ns
from servd.messages.engine import FinishReason
from servd.messages.params import SamplingParams

LAST_EXPORT = 1.0  # seconds to export the remaining spans when the server ends
MAX_PROMPTS = 16  # the first prompts of a request; only their stages are shown
# Phases with spans of their own; others are parts of the span of their stage.
OWN_SPANS = {"model_load", "wake_up", "grammar_compile", "tier_read", "engine_restart"}
OWN_SPANS |= {"slow_reader", "preemption", "swapped"}
OWN_SPANS |= {"picture_fetch", "picture_queue", "picture_decode", "picture_process"}
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
PARAMS = ("n", "temperature", "top_p", "top_k", "max_tokens")


class SpanExporter:
    """An exporter of spans. The SDK reads its environment variables: OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and so on.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        detected = OTELResourceDetector().detect().attributes
        defaults = {"service.name": "servd", "service.version": servd.__version__}
        resource = Resource.create({**defaults, **detected})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._context = TraceContextTextMapPropagator()
        self.tracer = self._provider.get_tracer("servd", servd.__version__)
        self.thread = ThreadPoolExecutor(1, "spans")

    @classmethod
    def to_endpoint(cls, endpoint: str) -> SpanExporter:
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def begin_span(self, headers: Mapping[str, str]) -> RequestSpan:
        """Return the new span of a request. `headers` may have W3C's trace context. A span that
        never ends needs no cleanup.
        """
        return RequestSpan(self, self._context.extract(headers))

    def close(self) -> None:
        self.thread.shutdown()
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT)


class RequestSpan:
    """The span of a request. `traceparent` is W3C's header for spans below this span."""

    def __init__(self, exporter: SpanExporter, context: Any) -> None:
        self._exporter = exporter
        self._span = exporter.tracer.start_span("llm_request", context, SpanKind.SERVER)
        self._timelines: list[Timeline] = []  # one for each prompt
        self._params: SamplingParams | None = None
        ids = self._span.get_span_context()
        self.traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"

    def add_timeline(self, timeline: Timeline) -> None:
        """Add the timeline of one of the request's prompts, which is about to be finished."""
        self._timelines.append(timeline)
        self._params = timeline.params

    def end(self, status: int = 200) -> None:
        """End and export the span, if the request had a prompt."""
        if self._span.is_recording() and self._timelines:
            with suppress(RuntimeError):  # cut off after `close`, when the server ends
                self._exporter.thread.submit(self._export, status, time.time_ns())

    def _export(self, status: int, ended_at: int) -> None:
        span = self._span
        timelines = self._timelines[:MAX_PROMPTS]
        breakdowns = [break_down(timeline.marks, (), timeline.request_id) for timeline in timelines]
        offset_ns = time.time_ns() - now_ns()  # from the clock of the marks to Unix time
        below = set_span_in_context(span)
        for breakdown in breakdowns:
            for name, group in groupby(breakdown.spans, key=_name):
                parts = [*group]
                begin_ns = parts[0].begin_ns + offset_ns
                child = self._exporter.tracer.start_span(name, below, start_time=begin_ns)
                child.end(parts[-1].end_ns + offset_ns)
        attributes = self._attributes(breakdowns[0])
        span.set_attribute("http.route", self._timelines[0].route)
        span.set_attribute("http.response.status_code", status)
        span.set_attributes({f"gen_ai.{k}": v for k, v in attributes.items() if v is not None})
        if status >= 500 or FinishReason.ERROR in attributes["response.finish_reasons"]:
            span.set_status(StatusCode.ERROR)
        span.end(ended_at)

    def _attributes(self, breakdown: Breakdown) -> dict[str, Any]:
        """Return attributes by the GenAI conventions, and vLLM's and SGLang's if they differ."""
        timelines = self._timelines
        first = timelines[0]
        reasons = [choice.finish_reason for timeline in timelines for choice in timeline.choices]
        num_prompt = sum(timeline.num_prompt_tokens for timeline in timelines)
        num_output = sum(timeline.num_output_tokens for timeline in timelines)
        num_cached = sum(timeline.num_cached_tokens for timeline in timelines)
        seconds = {stage: ns / 1e9 for stage, ns in breakdown.stages.items()}
        return {
            "provider.name": "servd",
            "operation.name": OPERATIONS.get(first.route, "chat"),
            "request.model": first.model,
            "response.model": first.model,
            "request.id": first.request_id,
            "response.id": first.request_id,
            **{f"request.{name}": getattr(self._params, name, None) for name in PARAMS},
            "response.finish_reasons": [str(reason or FinishReason.ABORT) for reason in reasons],
            "usage.prompt_tokens": num_prompt,
            "usage.input_tokens": num_prompt,
            "usage.completion_tokens": num_output,
            "usage.output_tokens": num_output,
            "usage.cached_tokens": num_cached,
            "usage.cache_read.input_tokens": num_cached,
            "latency.time_in_queue": seconds["queue"],
            "latency.time_in_model_prefill": seconds["prefill"],
            "latency.time_in_model_decode": seconds["decode"],
            "latency.time_in_model_inference": seconds["prefill"] + seconds["decode"],
            "latency.e2e": first.wall_ns / 1e9,
            "latency.time_to_first_token": None if first.ttft_ns is None else first.ttft_ns / 1e9,
        }


def _name(span: Span) -> str:
    """Return the name of the exported span. Consecutive spans of one name are exported as one."""
    if span.phase not in OWN_SPANS:
        return span.stage
    return "preempted" if span.phase in ("preemption", "swapped") else span.phase
