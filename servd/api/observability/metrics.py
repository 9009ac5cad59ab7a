"""The Prometheus metrics of an API server, with vLLM's names where they mean the same.

With several API servers, the parent sets PROMETHEUS_MULTIPROC_DIR before it starts them.
prometheus-client then keeps all values in files there, and /metrics of each server covers all.
"""

import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from operator import attrgetter
from typing import Any, Self, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString

from servd.api.observability import metric_names as names
from servd.api.observability.collectors import (
    EngineCollector,
    EngineState,
    ProcessesCollector,
    WithExemplars,
)
from servd.api.request.choice import Choice
from servd.api.request.observer import Observer
from servd.api.request.request_state import RequestState
from servd.base import compat
from servd.base.tracing import StepRecord, now_ns
from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.messages.engine import EngineGone, EngineReady, EngineStatus, FinishReason
from servd.messages.outputs import CompletionOutput
from servd.messages.params import SamplingParams
from servd.messages.stats import SchedulerStats

SECOND = 1e9  # nanoseconds
OPEN_METRICS = "application/openmetrics-text"
LAGS_PER_WRITE = 10  # one second's worth

M = TypeVar("M", Counter, Gauge, Histogram)


class Report(msgspec.Struct):
    """A message from an API server to its peers: its pid, and the engines' states by rank."""

    pid: int
    states: list[SchedulerStats]


class TalliedHistogram:
    """A histogram that buffers its values until `flush`."""

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self.histogram = histogram
        self.bounds = [float(bound) for bound in bounds]
        self.values: list[float] = []  # observed since the last `flush`

    def flush(self) -> None:
        if self.values:
            compat.observe_values(self.histogram, self.values)
            self.values.clear()

    def bucket_of(self, value: float) -> str:
        bucket = bisect_left(self.bounds, value)
        return floatToGoString(self.bounds[bucket] if bucket < len(self.bounds) else math.inf)


class Families:
    """The metric families of all engines. Most have the labels `model_name` and `engine`."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = registry = CollectorRegistry()
        self.engines = EngineCollector(model_name)
        registry.register(self.engines)
        is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ  # with other API servers
        self.processes = ProcessesCollector(is_shared)
        counted = [MultiProcessCollector(None), self.engines] if is_shared else [registry]
        self.all = WithExemplars([*counted, self.processes])
        labels = ["model_name", "engine"]
        lengths = _one_two_five(max_model_len)
        self.counters = {
            name: Counter(name, text, labels, registry=registry)
            for name, text in names.COUNTERS.items()
        }
        self.labelled = {
            name: Counter(name, family.text, [*labels, *family.labels], registry=registry)
            for name, family in names.LABELLED.items()
        }
        self.bounds = {name: buckets or lengths for name, (_, buckets) in names.HISTOGRAMS.items()}
        self.histograms = {
            name: Histogram(name, text, labels, buckets=self.bounds[name], registry=registry)
            for name, (text, _) in names.HISTOGRAMS.items()
        }
        self.ignored_fields = self._of_server(Counter, "servd_ignored_fields")
        self.http_requests = self._of_server(Counter, "http_requests")
        self.http_seconds = self._of_server(
            Histogram, "http_request_duration_seconds", buckets=names.BUCKETS["http"]
        )
        # Seconds of responses not yet in these two, by the labels of the first.
        self.answers = defaultdict[tuple[str, str, int], list[float]](list)
        self.sleep_seconds = self._of_server(
            Histogram, "vllm:sleep_mode_operation_duration_seconds", buckets=names.BUCKETS["sleep"]
        )
        self.sleeping = self._of_server(
            Gauge, "vllm:sleep_mode_operations_in_flight", multiprocess_mode="livesum"
        )

    def _of_server(self, kind: type[M], name: str, **options: Any) -> M:
        family = names.OF_SERVERS[name]
        metric = kind(name, family.text, [*family.labels], registry=self.registry, **options)
        for values in product(*family.labels.values()) if family.labels else ():
            metric.labels(*values)
        return metric

    def write(self) -> None:
        answers, self.answers = self.answers, defaultdict(list)
        for (handler, method, status), seconds in answers.items():
            self.http_requests.labels(handler, method, str(status)).inc(len(seconds))
            compat.observe_values(self.http_seconds.labels(handler, method), seconds)


class Metrics(Observer):
    """The metrics of one engine, with the labels `model_name` and `engine` filled in.

    `engines` has the metrics of all engines by rank, which /metrics renders together. `beside` is
    the Metrics of the previous engine. Without `beside`, the engine has the rank `first_rank`.
    `max_model_len` is the largest bucket of the token-count histograms.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int = 131072,
        beside: Self | None = None,
        first_rank: int = 0,
    ) -> None:
        self.engines: list[Metrics] = beside.engines if beside else []
        self.rank = beside.engines[-1].rank + 1 if beside else first_rank
        self.engines.append(self)
        families = beside.families if beside else Families(model_name, max_model_len)
        self.families = families
        self.registry = families.registry
        self.state = families.engines.states[self.rank] = EngineState()
        labels = self.labels = {"model_name": model_name, "engine": str(self.rank)}
        self.counters = {
            name: family.labels(**labels) for name, family in families.counters.items()
        }
        self.histograms: dict[str, TalliedHistogram] = {
            name: TalliedHistogram(family.labels(**labels), families.bounds[name])
            for name, family in families.histograms.items()
        }
        self.labelled = {
            (name, *values): family.labels(*labels.values(), *values)
            for name, family in families.labelled.items()
            for values in product(*names.LABELLED[name].labels.values())
        }
        self._gaps = self.histograms["vllm:inter_token_latency_seconds"]
        self._note_gap = self._gaps.values.append
        self._note_steps = self.histograms["vllm:iteration_tokens_total"].values.extend
        # Tokens not yet in a counter; prompt tokens as (all, cached, loaded from offload storage).
        self._num_generated = self._num_prompt = self._num_cached = self._num_external = 0

    def received(self, state: RequestState, delta: CompletionOutput, at_ns: int) -> None:
        if state.is_part:
            return
        engine = self.engines[state.rank]
        choice = state.choices[delta.index]
        engine.observe_tokens(choice, len(delta.token_ids), at_ns)
        if delta.finish_reason is not None:
            engine.observe_finished(choice, delta.finish_reason, at_ns)

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        if stats is not None:
            self.engines[rank].observe_step(stats)

    def ended(self, state: RequestState, status: EngineStatus | EngineReady | EngineGone) -> None:
        if state.is_part:
            return
        engine = self.engines[state.rank]
        num_aborted = len(state.open_engine_ids())
        if num_aborted and not isinstance(status, EngineGone):
            engine.labelled["vllm:request_success", FinishReason.ABORT].inc(num_aborted)
            ended_ns = now_ns()
            for choice in state.choices:
                if choice.is_open:
                    engine.observe_aborted(choice, ended_ns)
        engine.observe_request(state.params, state.choices)

    def observe_ready(self, ready: EngineReady, config: Config) -> None:
        """Record the KV cache's configuration, the limit of adapters, and the loaded model."""
        cache = config.cache
        max_tokens = config.scheduler.max_num_batched_tokens or 1
        layout = KVLayout(ready.block_size, max_tokens, ready.worker.kv_windows)
        num_tokens = layout.num_tokens(ready.worker.num_blocks, ready.max_model_len)
        facts = {
            "block_size": ready.block_size,
            "num_gpu_blocks": ready.worker.num_blocks,
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": round(num_tokens / ready.max_model_len, 2),
        }
        self.state.cache = {name: str(fact) for name, fact in facts.items()}
        self.state.is_asleep = ready.is_asleep
        self.state.max_loras = config.lora.num_adapter_slots

    def observe_restarts(self, count: int) -> None:
        self.state.num_restarts = count

    def observe_answer(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Record an HTTP response. `handler` is the template of its route."""
        self.families.answers[handler, method, status].append(seconds)

    def observe_lag(self, seconds: float) -> None:
        """Record how late the event loop ran a timer. Called ten times a second."""
        lags = self.histograms["servd:event_loop_lag_seconds"].values
        lags.append(seconds)
        for engine in self.engines:
            engine._gaps.flush()  # a whole second's values would block the loop
        if len(lags) >= LAGS_PER_WRITE:
            self.write()

    def observe_step(self, stats: SchedulerStats) -> None:
        """Record the engine's state after a step. Counters in `stats` are increments."""
        self.state.stats = stats
        self._note_steps(filter(None, stats.step_tokens))
        # Most steps have nothing else to count, and calls of the library are slow.
        counts = (stats.prefix_cache_queries, stats.num_prompt_tokens, stats.num_failed)
        counts += (stats.num_preemptions, stats.num_state_evictions)
        if any(counts) or stats.drafts.num_drafts or stats.kv_stores:
            for name, count_of in names.OF_STEPS.items():
                if count := count_of(stats):
                    self.counters[name].inc(count)
            accepted = self.families.labelled["vllm:spec_decode_num_accepted_tokens_per_pos"]
            for position, count in enumerate(stats.drafts.num_accepted_tokens_per_pos):
                accepted.labels(**self.labels, position=position).inc(count)
        for block in stats.evictions:
            for name, times in (
                ("lifetime", [block.lifetime_ns]),
                ("idle_before_evict", [block.idle_ns]),
                ("reuse_gap", block.reuse_gaps_ns),
            ):
                histogram = self.histograms[f"vllm:kv_block_{name}_seconds"]
                histogram.values += [ns / SECOND for ns in times]

    def write(self) -> None:
        """Publish the buffered values, before a scrape and once a second. Publishing each value at
        once would take a third of an API server's time per request.
        """
        self.families.write()
        for engine in self.engines:
            engine._write_tokens()
            for histogram in engine.histograms.values():
                histogram.flush()

    def _write_tokens(self) -> None:
        prompt = self._num_prompt
        cached = self._num_cached
        external = self._num_external
        self.counters["vllm:generation_tokens"].inc(self._num_generated)
        self.counters["vllm:prompt_tokens"].inc(prompt)
        self.counters["vllm:prompt_tokens_cached"].inc(cached)
        sources = {"local_cache_hit": cached - external, "external_kv_transfer": external}
        for source, count in sources.items():
            self.labelled["vllm:prompt_tokens_cached_by_source", source].inc(count)
        for source, count in {**sources, "local_compute": prompt - cached}.items():
            self.labelled["vllm:prompt_tokens_by_source", source].inc(count)
        self._num_generated = self._num_prompt = self._num_cached = self._num_external = 0

    def observe_tokens(self, choice: Choice, num_tokens: int, now_ns: int) -> None:
        """Record that `num_tokens` tokens of a choice arrived together at `now_ns`."""
        if choice.num_tokens and num_tokens:
            self._note_gap((now_ns - choice.last_ns) / SECOND / num_tokens)
        elif num_tokens:
            self._observe_first(choice, now_ns)
        else:
            return
        self._num_generated += num_tokens
        choice.num_tokens += num_tokens
        choice.last_ns = now_ns

    def _observe_first(self, choice: Choice, now_ns: int) -> None:
        seconds = (now_ns - choice.arrival_ns) / SECOND
        self._observe({"vllm:time_to_first_token_seconds": seconds}, choice.exemplar)
        self._num_prompt += choice.num_prompt_tokens
        self._num_cached += choice.num_cached_tokens
        self._num_external += choice.num_external_tokens

    def observe_finished(self, choice: Choice, reason: FinishReason, now_ns: int) -> None:
        """Record that a choice has finished for `reason` at `now_ns`."""
        self.labelled["vllm:request_success", reason].inc()
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return  # their times do not measure the engine
        marks = {"finished": now_ns, **choice.marks}  # a stop string ends it here
        num_computed = choice.num_prompt_tokens - choice.num_cached_tokens
        values = {
            "vllm:e2e_request_latency_seconds": (now_ns - choice.arrival_ns) / SECOND,
            "vllm:request_prompt_tokens": choice.num_prompt_tokens,
            "vllm:request_prefill_kv_computed_tokens": num_computed,
            "vllm:request_generation_tokens": choice.num_tokens,
            "vllm:request_num_preemptions": choice.num_preemptions,
        }
        for name, (begin, end) in names.STAGES.items():
            if begin in marks and end in marks:
                values[name] = (marks[end] - marks[begin]) / SECOND
        if "first_token" in marks and choice.num_tokens > 1:
            seconds = (marks["finished"] - marks["first_token"]) / SECOND
            values["vllm:request_time_per_output_token_seconds"] = seconds / (choice.num_tokens - 1)
        self._observe(values, choice.exemplar)

    def observe_aborted(self, choice: Choice, ended_ns: int) -> None:
        """Record that a choice was aborted at `ended_ns`."""
        seconds = (ended_ns - choice.arrival_ns) / SECOND
        self._observe({"servd:aborted_request_latency_seconds": seconds}, choice.exemplar)

    def _observe(self, values: dict[str, float], leads_to: dict[str, str] | None) -> None:
        for name, value in values.items():
            histogram = self.histograms[name]
            histogram.values.append(value)
            if leads_to is not None:
                bucket = histogram.bucket_of(value)
                self.families.all.note(name, str(self.rank), bucket, value, leads_to)

    def observe_request(self, params: SamplingParams, choices: Sequence[Choice]) -> None:
        """Record that all choices of a request have finished."""
        values: dict[str, float] = {
            "vllm:request_params_n": params.n,
            "vllm:request_max_num_generation_tokens": max(choice.num_tokens for choice in choices),
        }
        if params.max_tokens is not None:
            values["vllm:request_params_max_tokens"] = params.max_tokens
        self._observe(values, None)

    def report(self) -> Report:
        """Return the latest known state of the engines."""
        return Report(os.getpid(), [engine.state.stats for engine in self.engines])

    def render(self, accept: str = "", reports: Sequence[Report] = ()) -> tuple[bytes, str]:
        """Return the body and content type of GET /metrics, in the format of the Accept header.
        `reports` come from the other API servers. Each engine reports to one server at a time, so
        the newest report is used.
        """
        self.write()
        self.families.processes.other_pids = [report.pid for report in reports]
        encode, content_type = choose_encoder(accept)
        if content_type.startswith(OPEN_METRICS):  # allow colons in names
            encode, _ = choose_encoder(f"{OPEN_METRICS};version=1.0.0;escaping=allow-utf-8")
        latest = self.report().states
        try:
            lists = [latest, *(report.states for report in reports)]
            for engine, *states in zip(self.engines, *lists, strict=True):
                engine.state.stats = max(states, key=attrgetter("at_ns"))
            return encode(self.families.all), content_type
        finally:  # a server that ends reports nothing newer; no step comes between on the loop
            for engine, stats in zip(self.engines, latest, strict=True):
                engine.state.stats = stats


def _one_two_five(largest: int) -> list[int]:
    steps = [step * 10**exponent for exponent in range(len(str(largest))) for step in (1, 2, 5)]
    return [step for step in steps if step <= largest]
