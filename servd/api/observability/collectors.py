"""Collectors for /metrics that read values on demand: engine state, process state, exemplars."""

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from servd.api.observability.metric_names import GAUGES
from servd.base.tracing import unix_time
from servd.messages.stats import SchedulerStats


class EngineState(msgspec.Struct):
    """The state of an engine that an API server knows."""

    stats: SchedulerStats = msgspec.field(default_factory=SchedulerStats)  # its latest report
    num_restarts: int = 0
    is_asleep: bool | None = None  # None while it loads
    cache: dict[str, str] = {}  # labels of vllm:cache_config_info
    max_loras: int = 0  # 0: there are no adapters

    def samples(self) -> Iterator[tuple[str, float, dict[str, str]]]:
        """Yield the name, value and additional labels of each metric."""
        stats = self.stats
        yield "vllm:num_requests_running", stats.num_running, {}
        yield "vllm:num_requests_waiting", stats.num_waiting + stats.num_deferred, {}
        for reason, count in (("capacity", stats.num_waiting), ("deferred", stats.num_deferred)):
            yield "vllm:num_requests_waiting_by_reason", count, {"reason": reason}
        yield "vllm:num_requests_swapped", stats.num_swapped, {}
        for stage, count in (
            ("waiting_to_start", 0),  # always 0: they start at once
            ("in_progress", stats.num_reading),
            ("completed_waiting", stats.num_read),
        ):
            yield "vllm:num_requests_kv_fetch_by_stage", count, {"stage": stage}
        yield "vllm:kv_cache_usage_perc", stats.kv_cache_usage, {}
        if stats.max_state_cache_bytes:
            yield "servd:state_cache_checkpoints", stats.num_checkpoints, {}
            yield "servd:state_cache_bytes", stats.state_cache_bytes, {}
            yield "servd:state_cache_max_bytes", stats.max_state_cache_bytes, {}
        in_host_memory = [tier.num_blocks / tier.max_blocks for tier in stats.kv_stores[:1]]
        yield "vllm:kv_offload_cpu_cache_usage_perc", sum(in_host_memory), {}
        if self.is_asleep is not None:
            for state, is_so in (("awake", not self.is_asleep), ("discard_all", self.is_asleep)):
                yield "vllm:engine_sleep_state", is_so, {"sleep_state": state}
            yield "vllm:cache_config_info", 1, self.cache
        if self.max_loras and stats.at_ns:
            names = {
                "max_lora": str(self.max_loras),
                "running_lora_adapters": ",".join(sorted(stats.running_adapters)),
                "waiting_lora_adapters": ",".join(sorted(stats.waiting_adapters)),
            }
            yield "vllm:lora_requests_info", unix_time(stats.at_ns), names


class EngineCollector(Collector):
    """A collector of the state of all engines. Do not sum its values over API servers: every server
    knows all engines.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.states: dict[int, EngineState] = {}  # by rank

    def collect(self) -> Iterator[Metric]:
        families = {name: GaugeMetricFamily(name, text) for name, text in GAUGES.items()}
        text = "Restarts of an engine that died or hung."
        restarts = CounterMetricFamily("servd:engine_restarts", text)
        for rank, state in self.states.items():
            labels = {"model_name": self.model_name, "engine": str(rank)}
            for name, value, sample_labels in state.samples():
                families[name].add_sample(name, labels | sample_labels, value)
            restarts.add_sample("servd:engine_restarts_total", labels, state.num_restarts)
        yield from families.values()
        yield restarts


class ProcessesCollector(Collector):
    """A collector of the standard `process_*` metrics of this API server. If several servers share
    a port, they have a `pid` label, because each scrape may reach another server.
    """

    def __init__(self, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.other_pids: list[int] = []  # pids of the other servers

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for pid in sorted({os.getpid(), *self.other_pids}):
            for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                if self.is_shared:
                    family.samples = [s._replace(labels={"pid": str(pid)}) for s in family.samples]
                if (first := families.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        yield from families.values()


class WithExemplars(Collector):
    """A collector that adds exemplars to the histograms of other collectors, because
    prometheus-client keeps no exemplars in multiprocess mode.
    """

    def __init__(self, sources: Sequence[Collector]) -> None:
        self.sources = sources
        self._exemplars: dict[tuple[str, str, str], Exemplar] = {}  # by sample, engine and bucket

    def note(
        self, name: str, engine: str, bucket: str, value: float, leads_to: dict[str, str]
    ) -> None:
        """Keep the exemplar of a histogram's new value. `leads_to` is the label of the trace."""
        self._exemplars[f"{name}_bucket", engine, bucket] = Exemplar(leads_to, value, time.time())

    def collect(self) -> Iterator[Metric]:
        for family in chain.from_iterable(source.collect() for source in self.sources):
            for i, sample in enumerate(family.samples if family.type == "histogram" else ()):
                key = sample.name, sample.labels.get("engine", ""), sample.labels.get("le", "")
                family.samples[i] = sample._replace(exemplar=self._exemplars.get(key))
            yield family
