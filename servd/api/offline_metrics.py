"""OfflineMetrics: what `LLM.get_metrics` returns, the metrics of an engine in a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from servd.api.metrics import ChoiceTimes, Metrics
from servd.api.processor import Prepared
from servd.messages import EngineCoreOutput
from servd.outputs import CompletionOutput
from servd.params import SamplingParams
from servd.stats import SchedulerStats
from servd.tracing import now_ns


class Metric(msgspec.Struct, kw_only=True):
    """A value under its name in /metrics."""

    name: str
    labels: dict[str, str]


class Counter(Metric):
    """A number that only grows."""

    value: int


class Gauge(Metric):
    """A number that goes up and down."""

    value: float


class Vector(Metric):
    """A counter for each position."""

    values: list[int]


class Histogram(Metric):
    """How many values there were, their sum, and how many were at most as large as each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


class OfflineMetrics:
    """Counts what requests do. Steps of beam searches do not count as requests."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.metrics = Metrics(model_name, max_model_len)
        self.running: dict[str, tuple[SamplingParams, list[ChoiceTimes]]] = {}  # by request

    def begin(self, prepared: Prepared) -> None:
        if prepared.part_of:
            return
        now, num_tokens = now_ns(), len(prepared.prompt_token_ids)
        choices = [ChoiceTimes(now, num_tokens) for _ in range(prepared.params.n)]
        self.running[prepared.request_id] = prepared.params, choices

    def take(
        self,
        outputs: Iterable[EngineCoreOutput],
        stats: SchedulerStats | None,
        owner: Callable[[str], tuple[str, int] | None],
    ) -> None:
        """The engine reports; `owner` gives request and choice of an engine's id."""
        if stats is not None:
            self.metrics.observe_step(stats)
        for output in outputs:
            if output.marks and (found := owner(output.request_id)) and found[0] in self.running:
                self.running[found[0]][1][found[1]].add(output)

    def observe(self, request_id: str, delta: CompletionOutput) -> None:
        if request_id not in self.running:
            return
        params, choices = self.running[request_id]
        choice, now = choices[delta.index], now_ns()
        self.metrics.observe_tokens(choice, len(delta.token_ids), now)
        if delta.finish_reason is None:
            return
        choice.finish_reason = delta.finish_reason
        self.metrics.observe_finished(choice, delta.finish_reason, now)
        if all(each.finish_reason is not None for each in choices):
            self.metrics.observe_request(params, choices)
            del self.running[request_id]

    def read(self) -> list[Metric]:
        self.metrics.write()
        found: dict[tuple[str, str], Metric] = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples if family.name.startswith("vllm:") else ():
                kind, name, value = family.type, family.name, sample.value
                if sample.name.endswith("_created"):
                    continue
                labels = {k: v for k, v in sample.labels.items() if k not in ("le", "position")}
                common: dict[str, Any] = {"name": name, "labels": labels}
                key = name, str(labels)
                if kind == "histogram":
                    made = found.setdefault(key, Histogram(count=0, sum=0, buckets={}, **common))
                    assert isinstance(made, Histogram)
                    if (bound := sample.labels.get("le")) is not None:
                        made.buckets[bound] = int(value)
                    elif sample.name.endswith("_sum"):
                        made.sum = value
                    else:
                        made.count = int(value)
                elif "position" in sample.labels:
                    made = found.setdefault(key, Vector(values=[], **common))
                    assert isinstance(made, Vector)
                    made.values.append(int(value))
                elif kind == "counter":
                    found[key] = Counter(value=int(value), **common)
                else:
                    found[key] = Gauge(value=value, **common)
        return [*found.values()]
