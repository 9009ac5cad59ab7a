"""Numbers of a measurement as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servd.cli.bench._load import Record
from servd.errors import ServdError

PERCENTILES = (50, 90, 99)


def summarise(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Throughput over `seconds`, and the spread of TTFT, TPOT, ITL and whole requests in
    milliseconds.

    Raises:
        ServdError: no request succeeded.
    """
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    if not good:
        raise ServdError(f"all {len(records)} requests failed, the first with: {errors[0]}")
    num_output_tokens = sum(record.num_output_tokens for record in good)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in good)
    return {
        "requests": len(good),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / seconds,
        "ttft_ms": spread([record.ttft for record in good]),
        "tpot_ms": spread([record.tpot for record in good if record.tpot is not None]),
        "itl_ms": spread([gap for record in good for gap in record.itl]),
        "request_ms": spread([record.ended - record.started for record in good]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = 1000 * np.asarray(seconds)
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean())} | percentiles


def table(summary: Mapping[str, Any]) -> str:
    """A summary for the terminal: plain figures first, then one line per spread."""
    lines = [
        f"{name:22} {_number(value):>12}"
        for name, value in summary.items()
        if isinstance(value, int | float)
    ]
    spreads = {name: value for name, value in summary.items() if isinstance(value, dict) and value}
    if spreads:
        columns = next(iter(spreads.values()))
        lines += ["", " " * 22 + "".join(f"{column:>12}" for column in columns)]
        lines += [
            f"{name:22}" + "".join(f"{_number(v):>12}" for v in row.values())
            for name, row in spreads.items()
        ]
    return "\n".join(lines)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")


def show(summary: Mapping[str, Any], json_file: str | None) -> None:
    print(table(summary))
    if json_file is not None:
        write_json(json_file, summary)


def as_vllm(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The same under the names that scripts for vLLM's results read."""
    names = {
        "duration": "seconds", "completed": "requests", "failed": "failed",
        "total_input_tokens": "prompt_tokens", "total_output_tokens": "output_tokens",
        "request_throughput": "requests_per_s", "output_throughput": "output_tokens_per_s",
        "total_token_throughput": "total_tokens_per_s",
    }  # fmt: skip
    found = {theirs: summary[ours] for theirs, ours in names.items()}
    spreads = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "request_ms"}
    columns = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}
    for metric, name in spreads.items():
        for theirs, ours in columns.items():
            found[f"{theirs}_{metric}_ms"] = summary[name].get(ours, 0.0)
    return found


def write_json(file: str | Path, summary: Mapping[str, Any]) -> None:
    Path(file).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf8")


def make_folder(folder: str) -> None:
    """Make the folder of results, unless it is there.

    Raises:
        ServdError: that is not possible.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServdError(f"--result-dir {folder}: {error.strerror}") from None


def new_figure() -> Any:
    """A figure for `plot`; made before the measurement, so that a missing package wastes none.

    Raises:
        ServdError: matplotlib is not installed.
    """
    try:
        figure = importlib.import_module("matplotlib.figure")
        return figure.Figure(figsize=(9, 3.5), layout="constrained")
    except ModuleNotFoundError:
        raise ServdError("--plot needs matplotlib: pip install 'servd[bench]'") from None


def plot(figure: Any, file: str, records: Sequence[Record]) -> None:
    """Cumulative distributions of TTFT and ITL; `file` ends in a format (.svg, .png)."""
    good = [record for record in records if record.error is None]
    series = {
        "time to first token": [record.ttft for record in good],
        "time between chunks": [gap for record in good for gap in record.itl],
    }
    for axes, (title, seconds) in zip(figure.subplots(1, 2), series.items(), strict=True):
        values = np.sort(1000 * np.asarray(seconds))
        axes.step(values, np.arange(1, len(values) + 1) / max(len(values), 1))
        axes.set(title=title, xlabel="ms", ylabel="share of requests or chunks", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.savefig(file)
