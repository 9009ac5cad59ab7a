"""OpenTelemetry: a span for each request and, below it, one for each phase, made of its finished
timelines off the event loop. Nothing else imports the SDK.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import servd
from servd.account import STAGE_OF, phases
from servd.api.explanation import stage_ns
from servd.api.request_state import Timeline
from servd.messages import FinishReason
from servd.tracing import now_ns

LAST_EXPORT = 1.0  # seconds for what is not yet exported when the server ends
MAX_PROMPTS = 16  # a request's first ones, whose phases are shown
SECOND = 1e9  # nanoseconds
# Phase of an account -> name of the span.
SPANS = {
    **STAGE_OF,
    "model_load": "model_load",
    "wake_up": "wake_up",
    "grammar_compile": "grammar_compile",
    "tier_read": "tier_read",
    "preemption": "preempted",
    "swapped": "preempted",
    "engine_restart": "engine_restart",
    "slow_reader": "slow_reader",
}
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
PARAMS = ("n", "temperature", "top_p", "top_k", "max_tokens")


class Spans:
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
    def to(cls, endpoint: str) -> Spans:
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def begin(self, headers: Mapping[str, str]) -> RequestSpan:
        """The span of a request that has come with these headers, among them maybe W3C's trace
        context. One that is never ended leaves nothing behind.
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
    """A request while it is served. Made by `Spans.begin`.

    Attributes:
        traceparent: of spans below it, as W3C writes it.
    """

    def __init__(self, span: Span, tracer: Tracer, worker: ThreadPoolExecutor) -> None:
        self._span, self._tracer, self._worker = span, tracer, worker
        ids = span.get_span_context()
        self.traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"

    def end(self, timelines: Sequence[Timeline], status: int = 200) -> None:
        """The request was answered; `timelines` are finished, one for each prompt."""
        if self._span.is_recording() and timelines:
            with suppress(RuntimeError):  # cut off after `Spans.close`, when the server ends
                self._worker.submit(self._end, timelines, status, time.time_ns())

    def _end(self, timelines: Sequence[Timeline], status: int, ended_at: int) -> None:
        span = self._span
        span.set_attribute("http.response.status_code", status)
        span.set_attributes(_attributes(timelines))
        reasons = [choice.finish_reason for one in timelines for choice in one.choices]
        if status >= 500 or FinishReason.ERROR in reasons:
            span.set_status(StatusCode.ERROR)
        offset = time.time_ns() - now_ns()  # from the clock of the marks to Unix time
        below = set_span_in_context(span)
        for timeline in timelines[:MAX_PROMPTS]:
            for name, begin, end in _children(timeline):
                child = self._tracer.start_span(name, below, start_time=begin + offset)
                if name == "tool_parsing":
                    child.set_attribute("servd.busy_seconds", timeline.parsing_ns / SECOND)
                child.end(end + offset)
        span.end(ended_at)


def _children(timeline: Timeline) -> Iterator[tuple[str, int, int]]:
    """Names, begins and ends of the phases; phases of one name in a row are one."""
    named = ((SPANS[phase], begin, end) for phase, begin, end in phases(timeline.marks))
    for name, group in groupby(named, lambda part: part[0]):
        parts = [*group]
        if parts[-1][2] > parts[0][1]:
            yield name, parts[0][1], parts[-1][2]
    if timeline.parsing_ns:
        yield "tool_parsing", timeline.parsed_from_ns, timeline.parsed_to_ns


def _attributes(timelines: Sequence[Timeline]) -> dict[str, AttributeValue]:
    """Those of the conventions for generative AI, and of vLLM and SGLang where these differ."""
    first, choices = timelines[0], [choice for one in timelines for choice in one.choices]
    reasons = [choice.finish_reason or FinishReason.ABORT for choice in choices]
    num_prompt = sum(one.num_prompt_tokens for one in timelines)
    num_output = sum(one.num_output_tokens for one in timelines)
    num_cached = sum(one.num_cached_tokens for one in timelines)
    values: dict[str, AttributeValue | None] = {
        "provider.name": "servd",
        "operation.name": OPERATIONS.get(first.route, "chat"),
        "request.model": first.model,
        "response.model": first.model,
        "request.id": first.request_id,
        "response.id": first.request_id,
        **{f"request.{name}": getattr(first.params_of_span, name, None) for name in PARAMS},
        "response.finish_reasons": [str(reason) for reason in reasons],
        "usage.prompt_tokens": num_prompt,
        "usage.input_tokens": num_prompt,
        "usage.completion_tokens": num_output,
        "usage.output_tokens": num_output,
        "usage.cached_tokens": num_cached,
        "usage.cache_read.input_tokens": num_cached,
        **{f"latency.{name}": ns / SECOND for name, ns in _latencies(first) if ns is not None},
    }
    known = {f"gen_ai.{name}": value for name, value in values.items() if value is not None}
    return {"http.route": first.route, **known}


def _latencies(timeline: Timeline) -> Iterator[tuple[str, int | None]]:
    times = defaultdict(int, stage_ns([timeline]))
    yield "time_in_queue", times["queue"]
    yield "time_in_model_prefill", times["prefill"]
    yield "time_in_model_decode", times["decode"]
    yield "time_in_model_inference", times["prefill"] + times["decode"]
    yield "e2e", timeline.wall_ns
    yield "time_to_first_token", timeline.ttft_ns
