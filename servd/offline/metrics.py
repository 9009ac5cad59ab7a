"""OfflineMetrics: collects the metrics of an engine in a script, for `LLM.get_metrics`."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from servd.api.observability.metrics import Metrics
from servd.api.request.request_state import RequestState, find_choice
from servd.base.tracing import now_ns
from servd.messages.engine import EngineCoreOutput
from servd.messages.outputs import CompletionOutput
from servd.messages.stats import SchedulerStats


class Metric(msgspec.Struct, kw_only=True):
    """A metric, with its name and labels in /metrics."""

    name: str
    labels: dict[str, str]


class Counter(Metric):
    """A metric that only grows."""

    value: int


class Gauge(Metric):
    """A metric that can rise and fall."""

    value: float


class Vector(Metric):
    """A counter for each draft position."""

    values: list[int]


class Histogram(Metric):
    """A metric's number of values, their sum, and for each bound the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


class OfflineMetrics:
    """The metrics of requests and steps. The steps of a beam search do not count as requests."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.metrics = Metrics(model_name, max_model_len)

    def take(
        self,
        outputs: Iterable[EngineCoreOutput],
        stats: SchedulerStats | None,
        requests: Mapping[str, RequestState],
    ) -> None:
        """Record the engine's reports about these requests and about its step."""
        if stats is not None:
            self.metrics.observe_step(stats)
        for output in outputs:
            if output.marks and (running := find_choice(requests, output.request_id)):
                _, choice = running
                choice.add_report(output)

    def observe(self, state: RequestState, delta: CompletionOutput) -> None:
        self.metrics.received(state, delta, now_ns())
        if not (state.is_part or state.is_open):
            self.metrics.observe_request(state.params, state.choices)

    def read(self) -> list[Metric]:
        self.metrics.write()
        metrics: dict[tuple[str, str], Metric] = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples if family.name.startswith("vllm:") else ():
                kind = family.type
                name = family.name
                value = sample.value
                if sample.name.endswith("_created"):
                    continue
                labels = {k: v for k, v in sample.labels.items() if k not in ("le", "position")}
                common: dict[str, Any] = {"name": name, "labels": labels}
                key = name, str(labels)
                if kind == "histogram":
                    made = metrics.setdefault(key, Histogram(count=0, sum=0, buckets={}, **common))
                    assert isinstance(made, Histogram)
                    if (bound := sample.labels.get("le")) is not None:
                        made.buckets[bound] = int(value)
                    elif sample.name.endswith("_sum"):
                        made.sum = value
                    else:
                        made.count = int(value)
                elif "position" in sample.labels:
                    made = metrics.setdefault(key, Vector(values=[], **common))
                    assert isinstance(made, Vector)
                    made.values.append(int(value))
                elif kind == "counter":
                    metrics[key] = Counter(value=int(value), **common)
                else:
                    metrics[key] = Gauge(value=value, **common)
        return [*metrics.values()]
