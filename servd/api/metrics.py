"""Prometheus metrics of one API server, under the names that vLLM's dashboards know.

With several API servers the parent sets PROMETHEUS_MULTIPROC_DIR before it starts them;
prometheus-client then keeps all values in files there, and each server's /metrics answers for all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from servd.messages import FinishReason, SchedulerStats
from servd.params import SamplingParams
from servd.tracing import Mark

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
ITL_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
LATENCY_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)

SECOND = 1e9  # nanoseconds


class ChoiceTimes(msgspec.Struct):
    """What is known so far of one running choice. All times are CLOCK_MONOTONIC nanoseconds."""

    arrival_ns: int
    num_prompt_tokens: int
    num_tokens: int = 0  # generated
    last_ns: int = 0  # when the latest tokens came
    marks: dict[str, int] = {}  # the engine's stages of this choice

    def add_marks(self, marks: Sequence[Mark]) -> None:
        """Keep the first time of every stage: after a preemption a request is scheduled again."""
        for mark in marks:
            self.marks.setdefault(mark.stage, mark.at_ns)


class Metrics:
    """All metrics, with the labels `model_name` and `engine` filled in.

    Args:
        model_name: the first served model name.
        max_model_len: largest bucket of the token-count histograms.
        engine: number of the engine.
    """

    def __init__(self, model_name: str, max_model_len: int = 131072, engine: int = 0) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": str(engine)}
        token_buckets = _one_two_five(max_model_len)

        # The engine reports its state to one API server at a time: the newest report is right, a
        # sum is not.
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(
                name, text, labels, registry=self.registry, multiprocess_mode="livemostrecent"
            ).labels(**labels)  # fmt: skip

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets).labels(
                **labels
            )

        self.running = gauge("vllm:num_requests_running", "Requests in the current batch.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.")
        self.kv_cache_usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it."
        )
        self.queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter(
            "vllm:num_preemptions", "Times a running request lost its KV blocks."
        )
        self.prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that got a first token."
        )
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        success = Counter(
            "vllm:request_success",
            "Ended requests.",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
        self.success = {
            reason: success.labels(**labels, finished_reason=str(reason)) for reason in FinishReason
        }

        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.itl = histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens of a request.", ITL_BUCKETS
        )
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time per token after "
                                                          "the first.",
            ITL_BUCKETS,
        )  # fmt: skip
        self.e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "In the engine's waiting queue.", LATENCY_BUCKETS
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "Scheduled to first token.", LATENCY_BUCKETS
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS
        )
        self.inference = histogram(
            "vllm:request_inference_time_seconds", "Scheduled to last token.", LATENCY_BUCKETS
        )
        self.num_prompt = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", token_buckets
        )
        self.num_generated = histogram(
            "vllm:request_generation_tokens", "Tokens generated for it.", token_buckets
        )
        self.max_generated = histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of the longest of its n choices.",
            token_buckets,
        )
        self.n = histogram("vllm:request_params_n", "The parameter n.", N_BUCKETS)
        self.max_tokens = histogram(
            "vllm:request_params_max_tokens", "The parameter max_tokens.", token_buckets
        )
        self.iteration = histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step.", ITERATION_BUCKETS
        )

    def observe_step(self, stats: SchedulerStats) -> None:
        """Take the engine's state after a step; its counters are since the last report."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_cache_usage.set(stats.kv_cache_usage)
        self.queries.inc(stats.prefix_cache_queries)
        self.hits.inc(stats.prefix_cache_hits)
        self.preemptions.inc(stats.num_preemptions)
        if stats.num_scheduled_tokens:
            self.iteration.observe(stats.num_scheduled_tokens)

    def observe_tokens(self, choice: ChoiceTimes, num_tokens: int, now_ns: int) -> None:
        """`num_tokens` new tokens of a choice came together at `now_ns`."""
        if not num_tokens:
            return
        if choice.num_tokens == 0:
            self.ttft.observe((now_ns - choice.arrival_ns) / SECOND)
            self.prompt_tokens.inc(choice.num_prompt_tokens)
        else:
            self.itl.observe((now_ns - choice.last_ns) / SECOND / num_tokens)
        self.generation_tokens.inc(num_tokens)
        choice.num_tokens += num_tokens
        choice.last_ns = now_ns

    def observe_finished(self, choice: ChoiceTimes, reason: FinishReason, now_ns: int) -> None:
        """A choice ended."""
        self.success[reason].inc()
        if reason in (
            FinishReason.ABORT,
            FinishReason.ERROR,
        ):  # their times would say nothing of the engine
            return
        self.e2e.observe((now_ns - choice.arrival_ns) / SECOND)
        self.num_prompt.observe(choice.num_prompt_tokens)
        self.num_generated.observe(choice.num_tokens)
        marks = choice.marks | {
            "finished": choice.marks.get("finished", now_ns)
        }  # a stop string ends it here
        for histogram, begin, end in (
            (self.queue, "queued", "scheduled"),
            (self.prefill, "scheduled", "first_token"),
            (self.decode, "first_token", "finished"),
            (self.inference, "scheduled", "finished"),
        ):
            if begin in marks and end in marks:
                histogram.observe((marks[end] - marks[begin]) / SECOND)
        if "first_token" in marks and choice.num_tokens > 1:
            self.tpot.observe(
                (marks["finished"] - marks["first_token"]) / SECOND / (choice.num_tokens - 1)
            )

    def observe_request(self, params: SamplingParams, choices: Sequence[ChoiceTimes]) -> None:
        """A request ended with all its choices."""
        self.n.observe(params.n)
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)
        self.max_generated.observe(max(choice.num_tokens for choice in choices))

    def render(self) -> tuple[bytes, str]:
        """Body and content type of GET /metrics."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry), CONTENT_TYPE_LATEST


def _one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    return [
        step * 10**exponent
        for exponent in range(len(str(largest)))
        for step in (1, 2, 5)
        if step * 10**exponent <= largest
    ]
