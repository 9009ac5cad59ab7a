"""The figures of a measurement: times of requests, printed and as JSON."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servd.base.errors import ServdError
from servd.terminal.output import format_row, write_json

PERCENTILES = (50, 90, 99)
# Names that scripts for vLLM's results read -> the names of `summarise`.
NAMES = {
    "duration": "seconds",
    "completed": "requests",
    "failed": "failed",
    "total_input_tokens": "prompt_tokens",
    "total_output_tokens": "output_tokens",
    "request_throughput": "requests_per_s",
    "output_throughput": "output_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
}
SPREADS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "request_ms"}
COLUMNS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}


@dataclass
class Record:
    """The record of one request. Times are seconds of the client's monotonic clock."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    started: float = 0.0
    chunks: list[float] = field(default_factory=list)  # arrival of every chunk with text
    ended: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.started

    @property
    def tpot(self) -> float | None:
        """The time per output token after the first; None with a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.chunks)]


def summarise(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Return the throughput over `seconds`, and the spread of TTFT, TPOT, ITL and whole requests in
    milliseconds. Raises ServdError if no request succeeded.
    """
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    if not good:
        raise ServdError(f"all {len(records)} requests failed, the first with: {errors[0]}")
    num_prompt_tokens = sum(record.num_prompt_tokens for record in good)
    num_output_tokens = sum(record.num_output_tokens for record in good)
    return {
        "requests": len(good),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        **rates(len(good), num_prompt_tokens, num_output_tokens, seconds),
        "ttft_ms": spread([record.ttft for record in good]),
        "tpot_ms": spread([record.tpot for record in good if record.tpot is not None]),
        "itl_ms": spread([gap for record in good for gap in record.itl]),
        "request_ms": spread([record.ended - record.started for record in good]),
    }


def rates(
    num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seconds: float
) -> dict[str, float]:
    return {
        "requests_per_s": num_requests / seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / seconds,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = 1000 * np.asarray(seconds)
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean())} | percentiles


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")


def show(summary: Mapping[str, Any], json_file: str | None) -> None:
    """Print numbers, then a line per mean and percentiles. Write all to `json_file`, if given."""
    columns: list[str] = []
    for name, value in summary.items():
        if isinstance(value, int | float):
            print(format_row(name, value))
        elif isinstance(value, dict) and value:
            if columns != [*value]:
                columns = [*value]
                print("\n" + format_row("", *columns))
            print(format_row(name, *value.values()))
    if json_file is not None:
        write_json("--json", json_file, summary)


def as_vllm(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures under vLLM's names."""
    figures = {theirs: summary[ours] for theirs, ours in NAMES.items()}
    for metric, name in SPREADS.items():
        for theirs, ours in COLUMNS.items():
            figures[f"{theirs}_{metric}_ms"] = summary[name].get(ours, 0.0)
    return figures
