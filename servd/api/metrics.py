"""Prometheus metrics of one API server, under the names that vLLM's dashboards know.

With several API servers the parent sets PROMETHEUS_MULTIPROC_DIR before it starts them;
prometheus-client then keeps all values in files there, and each server's /metrics answers for all.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from servd.config import Config
from servd.messages import EngineCoreOutput, EngineReady, FinishReason, SchedulerStats
from servd.params import SamplingParams

Buckets = tuple[float, ...]

# fmt: off
TTFT_BUCKETS: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
ITL_BUCKETS: Buckets = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
LATENCY_BUCKETS: Buckets = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
BLOCK_BUCKETS: Buckets = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600,
    1200, 1800,
)
HTTP_BUCKETS: Buckets = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
LAG_BUCKETS: Buckets = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
ITERATION_BUCKETS: Buckets = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: on
N_BUCKETS: Buckets = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS: Buckets = (0, 1, 2, 5, 10, 20)

GAUGES = {
    "vllm:num_requests_running": "Requests in the current batch.",
    "vllm:num_requests_waiting": "Requests that wait to be scheduled.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
}
COUNTERS = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Times a running request lost its KV blocks.",
    "vllm:prompt_tokens": "Prompt tokens of requests that got a first token.",
    "vllm:prompt_tokens_cached": "Those of them that were in the prefix cache.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:spec_decode_num_drafts": "Steps of a request that verified drafts.",
    "vllm:spec_decode_num_draft_tokens": "Drafts that were verified.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts that were what the model says.",
}
# Name -> text, and for each label the values that it has.
LABELLED: dict[str, tuple[str, dict[str, Sequence[str]]]] = {
    "vllm:request_success": ("Ended requests.", {"finished_reason": [*FinishReason]}),
    "vllm:prompt_tokens_by_source": (
        "Prompt tokens, as far as they were computed and as far as they were cached.",
        {"source": ["local_compute", "local_cache_hit"]},
    ),
    "vllm:admission_rejections": (
        "Requests that were refused before anything was done for them, by the limit.",
        {
            "reason": [
                "loading",
                "draining",
                "max_waiting_requests",
                "max_waiting_tokens",
                "max_connections",
                "max_concurrency",
                "requests_per_minute",
                "deadline",
            ]
        },
    ),
    "vllm:tool_call_parser_invocations": (
        "Choices that were searched for tool calls.",
        {
            "mode": ["streaming", "non_streaming"],
            "outcome": ["tool_call", "no_tool_call"],
            "request_type": ["chat_completions", "responses", "other"],
        },
    ),
}
HISTOGRAMS: dict[str, tuple[str, Buckets | None]] = {  # None: up to the context's length
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", TTFT_BUCKETS),
    "vllm:inter_token_latency_seconds": ("Time between tokens of a request.", ITL_BUCKETS),
    "vllm:request_time_per_output_token_seconds": (
        "A request's mean time per token after the first.", ITL_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("In the engine's waiting queue.", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": ("Scheduled to first token.", LATENCY_BUCKETS),
    "vllm:request_decode_time_seconds": ("First to last token.", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": ("Scheduled to last token.", LATENCY_BUCKETS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", None),
    "vllm:request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were not in the prefix cache.", None),
    "vllm:request_generation_tokens": ("Tokens generated for it.", None),
    "vllm:request_max_num_generation_tokens": ("Tokens of the longest of its n choices.", None),
    "vllm:request_num_preemptions": ("Times it lost its KV blocks.", PREEMPTION_BUCKETS),
    "vllm:request_params_n": ("The parameter n.", N_BUCKETS),
    "vllm:request_params_max_tokens": ("The parameter max_tokens.", None),
    "vllm:kv_block_lifetime_seconds": (
        "From its first token to its eviction, of blocks in the sample (--kv-cache-metrics).",
        BLOCK_BUCKETS),
    "vllm:kv_block_idle_before_evict_seconds": (
        "From its last use to its eviction.", BLOCK_BUCKETS),
    "vllm:kv_block_reuse_gap_seconds": (
        "Between two times that the prefix cache had it, before its eviction.", BLOCK_BUCKETS),
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", ITERATION_BUCKETS),
    "servd:event_loop_lag_seconds": (
        "How late an API server's event loop came to a timer, sampled ten times a second.",
        LAG_BUCKETS),
}  # fmt: skip
TALLIED = ("vllm:inter_token_latency_seconds", "vllm:iteration_tokens_total")
CACHE_FACTS = (
    "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching",
    "gpu_memory_utilization",
)  # fmt: skip
STAGES = {  # histogram -> the marks that it lies between
    "vllm:request_queue_time_seconds": ("queued", "scheduled"),
    "vllm:request_prefill_time_seconds": ("scheduled", "first_token"),
    "vllm:request_decode_time_seconds": ("first_token", "finished"),
    "vllm:request_inference_time_seconds": ("scheduled", "finished"),
}

SECOND = 1e9  # nanoseconds
OPEN_METRICS = "application/openmetrics-text"


class ChoiceTimes(msgspec.Struct):
    """What is known so far of one running choice. All times are CLOCK_MONOTONIC nanoseconds."""

    arrival_ns: int
    num_prompt_tokens: int
    num_tokens: int = 0  # generated
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    evicted_at_ns: int = 0  # see EngineCoreOutput
    last_ns: int = 0  # when the latest tokens came
    finish_reason: FinishReason | None = None  # None also if its client left
    marks: dict[str, int] = {}  # the engine's stages of this choice
    exemplar: dict[str, str] | None = None  # for OpenMetrics: what leads to its trace

    def add(self, output: EngineCoreOutput) -> None:
        """Take what an output says about this choice besides its tokens."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.evicted_at_ns = max(self.evicted_at_ns, output.evicted_at_ns)
        for mark in output.marks:
            # The first time counts: after a preemption a request is scheduled again.
            self.marks.setdefault(mark.stage, mark.at_ns)
            self.num_preemptions += mark.stage == "preempted"


class TalliedHistogram(Histogram):
    """Keeps the values that come with every token until `flush`: the library takes microseconds for
    each.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._counts = Tally[int]()  # values by bucket
        self._amount = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a value; exemplars are not kept."""
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._amount += amount

    def flush(self) -> None:
        """Hand on what was counted."""
        for bucket, count in self._counts.items():
            self._buckets[bucket].inc(count)
        self._counts.clear()
        self._sum.inc(self._amount)
        self._amount = 0.0


class EngineRestarts(Collector):
    """How many engines came after the first. Every API server knows the whole number: a sum over
    them would count each restart several times.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.count = 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by the library."""
        family = CounterMetricFamily(
            "servd:engine_restarts",
            "Times the engine died and was started again.",
            labels=[*self.labels],
        )
        family.add_metric([*self.labels.values()], self.count)
        yield family


class AdapterGauge:
    """Which adapters run and wait; its value is the Unix time at which it was so."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self.labels = labels
        self.max_loras = 0  # 0: there are none
        self._names: tuple[str, str] | None = None  # as last written
        self._gauge = Gauge(
            "vllm:lora_requests_info",
            "Adapters of requests that run, and of those that wait for a place; the time of it.",
            [*labels, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )

    def write(self, stats: SchedulerStats) -> None:
        """Publish the engine's last report."""
        if not self.max_loras:
            return
        running, waiting = sorted(stats.running_adapters), sorted(stats.waiting_adapters)
        names = ",".join(running), ",".join(waiting)
        if names != self._names:
            self._gauge.clear()  # or there would be a series for each set of names
            self._names = names
        labels = (*self.labels.values(), str(self.max_loras), *names)
        self._gauge.labels(*labels).set_to_current_time()


class Metrics:
    """All metrics, with the labels `model_name` and `engine` filled in.

    Args:
        model_name: the first served model name.
        max_model_len: largest bucket of the token-count histograms.
        engine: number of the engine.

    Attributes:
        labelled: counters of LABELLED, by name and the values of its labels.
        restarts: of the engine.
    """

    def __init__(self, model_name: str, max_model_len: int = 131072, engine: int = 0) -> None:
        registry = self.registry = CollectorRegistry()
        labels = self.labels = {"model_name": model_name, "engine": str(engine)}
        token_buckets = _one_two_five(max_model_len)
        # The engine reports its state to one API server at a time: the newest report is right, a
        # sum is not.
        gauge = partial(Gauge, registry=registry, multiprocess_mode="livemostrecent")
        self.gauges = {
            name: gauge(name, text, labels).labels(**labels) for name, text in GAUGES.items()
        }
        self.counters = {
            name: Counter(name, text, labels, registry=registry).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self.histograms = {
            name: (TalliedHistogram if name in TALLIED else Histogram)(
                name, text, labels, registry=registry, buckets=buckets or token_buckets
            ).labels(**labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._num_generated = 0  # tokens that no counter shows yet
        self.labelled = {
            (name, *values): counter.labels(*labels.values(), *values)
            for name, (text, own) in LABELLED.items()
            for counter in [Counter(name, text, [*labels, *own], registry=registry)]
            for values in product(*own.values())
        }
        self.accepted_by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their number in the step, from 0.",
            [*labels, "position"],
            registry=registry,
        )
        waiting = gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait to be scheduled: for room, or (deferred) for their grammar.",
            [*labels, "reason"],
        )
        self.waiting = {
            reason: waiting.labels(**labels, reason=reason) for reason in ("capacity", "deferred")
        }
        self._unwritten: SchedulerStats | None = None  # the last report, if no gauge shows it yet
        self.cache_config = gauge(
            "vllm:cache_config_info", "The KV cache; always 1.", [*labels, *CACHE_FACTS]
        )
        self.adapters = AdapterGauge(registry, labels)
        self.restarts = EngineRestarts(labels)
        registry.register(self.restarts)
        # Under the names of prometheus-fastapi-instrumentator, without the labels of a model.
        self.http_requests = Counter(
            "http_requests", "Answers.", ["handler", "method", "status"], registry=registry
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the head of a request to the last byte of its answer.",
            ["handler", "method"],
            registry=registry,
            buckets=HTTP_BUCKETS,
        )

    def observe_ready(self, ready: EngineReady, config: Config) -> None:
        """Record the configuration of the KV cache, and how many adapters run at once."""
        self.adapters.max_loras, cache = config.lora.num_places, config.cache
        self.cache_config.labels(
            **self.labels,
            block_size=ready.block_size,
            num_gpu_blocks=ready.worker.num_blocks,
            cache_dtype=cache.kv_cache_dtype,
            enable_prefix_caching=cache.enable_prefix_caching,
            gpu_memory_utilization=cache.gpu_memory_utilization,
        ).set(1)

    def observe_answer(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. `handler` is the template of its route."""
        self.http_requests.labels(handler, method, str(status)).inc()
        self.http_seconds.labels(handler, method).observe(seconds)

    def observe_refusal(self, handler: str, method: str, status: int) -> None:
        """A client was refused before there was a whole request."""
        self.http_requests.labels(handler, method, str(status)).inc()

    def observe_lag(self, seconds: float) -> None:
        """The event loop ran a timer this late; called ten times a second."""
        self.write()
        self.histograms["servd:event_loop_lag_seconds"].observe(seconds)

    def observe_step(self, stats: SchedulerStats) -> None:
        """Record the engine's state after a step; its counters are since the last report."""
        self._unwritten = stats
        drafts = stats.drafts
        for name, count in (
            ("vllm:prefix_cache_queries", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", stats.prefix_cache_hits),
            ("vllm:num_preemptions", stats.num_preemptions),
            ("vllm:spec_decode_num_drafts", drafts.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", drafts.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", drafts.num_accepted_tokens),
        ):
            if count:  # in most steps there is none, and the library takes its time
                self.counters[name].inc(count)
        for position, count in enumerate(drafts.num_accepted_tokens_per_pos):
            self.accepted_by_position.labels(**self.labels, position=position).inc(count)
        for block in stats.evictions:
            seconds = self.histograms["vllm:kv_block_lifetime_seconds"]
            seconds.observe(block.lifetime_ns / SECOND)
            seconds = self.histograms["vllm:kv_block_idle_before_evict_seconds"]
            seconds.observe(block.idle_ns / SECOND)
            seconds = self.histograms["vllm:kv_block_reuse_gap_seconds"]
            for gap in block.reuse_gaps_ns:
                seconds.observe(gap / SECOND)
        if stats.num_scheduled_tokens:
            self.histograms["vllm:iteration_tokens_total"].observe(stats.num_scheduled_tokens)

    def write(self) -> None:
        """Publish what changes with every token: before a scrape, as a request ends, and ten times
        a second, since another API server may answer the scrape. With every step, that would be a
        fifth of the cost of a token.
        """
        for name in TALLIED:
            histogram = self.histograms[name]
            assert isinstance(histogram, TalliedHistogram)
            histogram.flush()
        self.counters["vllm:generation_tokens"].inc(self._num_generated)
        self._num_generated = 0
        stats, self._unwritten = self._unwritten, None
        if stats is not None:
            self.gauges["vllm:num_requests_running"].set(stats.num_running)
            self.gauges["vllm:num_requests_waiting"].set(stats.num_waiting + stats.num_deferred)
            self.waiting["capacity"].set(stats.num_waiting)
            self.waiting["deferred"].set(stats.num_deferred)
            self.gauges["vllm:kv_cache_usage_perc"].set(stats.kv_cache_usage)
            self.adapters.write(stats)

    def observe_tokens(self, choice: ChoiceTimes, num_tokens: int, now_ns: int) -> None:
        """`num_tokens` new tokens of a choice came together at `now_ns`."""
        if not num_tokens:
            return
        if choice.num_tokens == 0:
            seconds = (now_ns - choice.arrival_ns) / SECOND
            self.histograms["vllm:time_to_first_token_seconds"].observe(seconds, choice.exemplar)
            self.counters["vllm:prompt_tokens"].inc(choice.num_prompt_tokens)
            num_cached = choice.num_cached_tokens
            self.counters["vllm:prompt_tokens_cached"].inc(num_cached)
            name = "vllm:prompt_tokens_by_source"
            self.labelled[name, "local_cache_hit"].inc(num_cached)
            self.labelled[name, "local_compute"].inc(choice.num_prompt_tokens - num_cached)
        else:
            seconds = (now_ns - choice.last_ns) / SECOND / num_tokens
            self.histograms["vllm:inter_token_latency_seconds"].observe(seconds)
        self._num_generated += num_tokens
        choice.num_tokens += num_tokens
        choice.last_ns = now_ns

    def observe_finished(self, choice: ChoiceTimes, reason: FinishReason, now_ns: int) -> None:
        """A choice ended."""
        self.labelled["vllm:request_success", reason].inc()
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return  # their times would say nothing of the engine
        marks = {"finished": now_ns, **choice.marks}  # a stop string ends it here
        values = {
            "vllm:e2e_request_latency_seconds": (now_ns - choice.arrival_ns) / SECOND,
            "vllm:request_prompt_tokens": choice.num_prompt_tokens,
            "vllm:request_prefill_kv_computed_tokens": (
                choice.num_prompt_tokens - choice.num_cached_tokens
            ),
            "vllm:request_generation_tokens": choice.num_tokens,
            "vllm:request_num_preemptions": choice.num_preemptions,
        }
        for name, (begin, end) in STAGES.items():
            if begin in marks and end in marks:
                values[name] = (marks[end] - marks[begin]) / SECOND
        if "first_token" in marks and choice.num_tokens > 1:
            seconds = (marks["finished"] - marks["first_token"]) / SECOND
            values["vllm:request_time_per_output_token_seconds"] = seconds / (choice.num_tokens - 1)
        for name, value in values.items():
            self.histograms[name].observe(value, choice.exemplar)

    def observe_request(self, params: SamplingParams, choices: Sequence[ChoiceTimes]) -> None:
        """A request ended with all its choices."""
        self.histograms["vllm:request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self.histograms["vllm:request_params_max_tokens"].observe(params.max_tokens)
        longest = max(choice.num_tokens for choice in choices)
        self.histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        self.write()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of GET /metrics, in the format that an Accept header asks for."""
        self.write()
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
            registry.register(self.restarts)
        encode, content_type = choose_encoder(accept)
        if content_type.startswith(OPEN_METRICS):  # what others escape, colons, is in our names
            encode, _ = choose_encoder(f"{OPEN_METRICS};version=1.0.0;escaping=allow-utf-8")
        return encode(registry), content_type


def _one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    return [
        step * 10**exponent
        for exponent in range(len(str(largest)))
        for step in (1, 2, 5)
        if step * 10**exponent <= largest
    ]
