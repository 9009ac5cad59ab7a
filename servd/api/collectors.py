"""Metrics of engines that each of several API servers answers for, rather than their sum."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from servd.messages import SchedulerStats


class SharedMetrics(Collector):
    """Those that all API servers keep in a folder; with the exemplars of this one, as the library
    keeps none there.
    """

    def __init__(self) -> None:
        self.exemplars: dict[tuple[str, str, str], Exemplar] = {}  # by sample, engine and bucket

    def note(self, name: str, engine: str, bounds: Sequence[float], exemplar: Exemplar) -> None:
        """This leads to a value that a histogram with these buckets has just got."""
        bucket = bisect_left(bounds, exemplar.value)
        bound = floatToGoString(bounds[bucket] if bucket < len(bounds) else float("inf"))
        self.exemplars[f"{name}_bucket", engine, bound] = exemplar

    def collect(self) -> Iterator[Metric]:
        """Called by the library."""
        for family in MultiProcessCollector(None).collect():
            if family.type == "histogram":
                family.samples = [self._with_exemplar(sample) for sample in family.samples]
            yield family

    def _with_exemplar(self, sample: Sample) -> Sample:
        key = sample.name, sample.labels.get("engine", ""), sample.labels.get("le", "")
        return sample._replace(exemplar=self.exemplars.get(key))


class EngineRestarts(Collector):
    """How often each engine was started again. Every API server knows the whole number: a sum over
    them would count each restart several times.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.counts: dict[int, int] = {}  # by engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by the library."""
        family = CounterMetricFamily(
            "servd:engine_restarts",
            "Times the engine died and was started again.",
            labels=["model_name", "engine"],
        )
        for engine, count in self.counts.items():
            family.add_metric([self.model_name, str(engine)], count)
        yield family


class AdapterState(msgspec.Struct, array_like=True):
    """Names of the adapters of an engine, and when it was so: Unix time, and its own clock's."""

    running: str
    waiting: str
    seconds: float
    at_ns: int


class AdapterGauge(Collector):
    """Which adapters run and wait; its value is the Unix time at which it was so.

    With several API servers the library would keep a series for each set of names that there ever
    was. So the newest state of any of them is in a file that they share, one of each engine.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.max_loras = 0  # 0: there are none
        self._states: dict[str, AdapterState] = {}  # by engine
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._shared = Path(folder) if folder else None

    def write(self, engine: int, stats: SchedulerStats) -> None:
        """Publish an engine's last report."""
        if not self.max_loras:
            return
        running, waiting = sorted(stats.running_adapters), sorted(stats.waiting_adapters)
        state = AdapterState(",".join(running), ",".join(waiting), time.time(), stats.at_ns)
        self._states[str(engine)] = state
        if self._shared is not None:
            path = self._shared / f"adapters-{engine}.json"
            if path.exists() and self._read(path).at_ns > state.at_ns:
                return  # another API server has heard of a later one
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(msgspec.json.encode(state))
            new.replace(path)

    def _read(self, path: Path) -> AdapterState:
        return msgspec.json.decode(path.read_bytes(), type=AdapterState)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by the library."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of requests that run, and of those that wait for a place; the time of it.",
            labels=[
                "model_name",
                "engine",
                "max_lora",
                "running_lora_adapters",
                "waiting_lora_adapters",
            ],
        )
        states = self._states
        if self._shared is not None:
            states = {
                path.stem.partition("-")[2]: self._read(path)
                for path in sorted(self._shared.glob("adapters-*.json"))
            }
        for engine, state in states.items():
            labels = [self.model_name, engine, str(self.max_loras), state.running, state.waiting]
            family.add_metric(labels, state.seconds)
        yield family
