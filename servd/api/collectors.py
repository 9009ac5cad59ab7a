"""Metrics of engines that each of several API servers answers for, rather than their sum."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from servd.messages import SchedulerStats


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


class AdapterGauge(Collector):
    """Which adapters run and wait; its value is the Unix time at which it was so.

    With several API servers the library would keep a series for each set of names that there ever
    was. So the last state of any of them is in a file that they share, one of each engine.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.max_loras = 0  # 0: there are none
        self._states: dict[str, tuple[str, str, float]] = {}  # by engine
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._shared = Path(folder) if folder else None

    def write(self, engine: int, stats: SchedulerStats) -> None:
        """Publish an engine's last report."""
        if not self.max_loras:
            return
        running, waiting = sorted(stats.running_adapters), sorted(stats.waiting_adapters)
        state = self._states[str(engine)] = ",".join(running), ",".join(waiting), time.time()
        if self._shared is not None:
            path = self._shared / f"adapters-{engine}.json"
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(msgspec.json.encode(state))
            new.replace(path)

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
            kind = tuple[str, str, float]
            states = {
                path.stem.partition("-")[2]: msgspec.json.decode(path.read_bytes(), type=kind)
                for path in sorted(self._shared.glob("adapters-*.json"))
            }
        for engine, (*names, value) in states.items():
            labels = [self.model_name, engine, str(self.max_loras), *names]
            family.add_metric(labels, value)
        yield family
