"""The names, help texts, labels and buckets of the metrics, which metrics.toml lists."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import msgspec

from servd.messages.stats import SchedulerStats

Buckets = tuple[float, ...]


class Labelled(msgspec.Struct):
    text: str
    labels: dict[str, list[str]]  # values of each label; none if they come as they are seen


class HistogramEntry(msgspec.Struct):
    text: str
    buckets: str | None = None  # a name in `MetricTable.buckets`


class MetricTable(msgspec.Struct, forbid_unknown_fields=True):
    """The content of metrics.toml."""

    buckets: dict[str, Buckets]
    gauges: dict[str, str]
    counters: dict[str, str]
    of_steps: dict[str, str]
    labelled: dict[str, Labelled]
    of_servers: dict[str, Labelled]
    histograms: dict[str, HistogramEntry]
    stages: dict[str, tuple[str, str]]


_TABLE = msgspec.toml.decode(
    Path(__file__).with_name("metrics.toml").read_bytes(), type=MetricTable, strict=False
)
BUCKETS = _TABLE.buckets
GAUGES = _TABLE.gauges
COUNTERS = _TABLE.counters
LABELLED = _TABLE.labelled
OF_SERVERS = _TABLE.of_servers
STAGES = _TABLE.stages
# Counter of a value that engines report -> the function that gets it from a report.
OF_STEPS: dict[str, Callable[[SchedulerStats], int]] = {
    name: attrgetter(field) for name, field in _TABLE.of_steps.items()
}
# Name -> text and buckets; None: up to the context's length.
HISTOGRAMS: dict[str, tuple[str, Buckets | None]] = {
    name: (entry.text, BUCKETS[entry.buckets] if entry.buckets else None)
    for name, entry in _TABLE.histograms.items()
}
