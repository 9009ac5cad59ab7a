"""The table of figures against goals, made of the facts that were found, whichever those are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]
COMMAND = "make bench-gpu"


@dataclass(frozen=True)
class Figure:
    """One line of the table. `value` raises KeyError for a fact that is missing, and may divide by
    one that is 0.
    """

    name: str
    part: str  # that measures it
    value: Callable[[Facts], float]
    unit: str
    goal: float
    is_lower_better: bool = False

    def row(self, facts: Facts, missing: dict[str, str]) -> tuple[str, str, str, str]:
        """Name, value, goal and whether it is reached."""
        bound = f"{'<=' if self.is_lower_better else '>='} {show(self.goal)}{self.unit}"
        try:
            value = self.value(facts)
        except (KeyError, ZeroDivisionError):
            return self.name, f"missing: {missing.get(self.part, 'not measured')}", bound, "-"
        reached = value <= self.goal if self.is_lower_better else value >= self.goal
        return self.name, f"{show(value)}{self.unit}", bound, "yes" if reached else "NO"


def show(value: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


FIGURES = [
    Figure(
        "8B decode step, batch 1: time / (weights / bandwidth)",
        "llama",
        lambda f: f["llama_one_step"] / (f["llama_weight_bytes"] / f["bandwidth"]),
        "x",
        1.15,
        True,
    ),
    Figure(
        "8B decode step, batch 64 at 1k: time / ((weights + KV) / bandwidth)",
        "llama",
        lambda f: (
            f["llama_some_step"]
            * f["bandwidth"]
            / (f["llama_weight_bytes"] + f["llama_some_kv_bytes"])
        ),
        "x",
        1.15,
        True,
    ),
    Figure(
        "8B decode step, batch 256 at 1k: time / ((weights + KV) / bandwidth)",
        "llama",
        lambda f: (
            f["llama_all_step"] * f["bandwidth"] / (f["llama_weight_bytes"] + f["llama_kv_bytes"])
        ),
        "x",
        1.15,
        True,
    ),
    Figure(
        "8B prompt of 8k tokens: share of the bf16 matrix rate",
        "llama",
        lambda f: 100 * f["llama_prefill_operations"] / f["llama_prefill"] / f["matrix_rate"],
        " %",
        65,
    ),
    Figure(
        "8B, random arrivals of 512 in and 128 out: time of full steps / time",
        "llama",
        lambda f: 100 * f["mixed_share"],
        " %",
        80,
    ),
    Figure(
        "GPT-2 124M step, batch 1", "gpt2", lambda f: 1000 * f["gpt2_one_step"], " ms", 0.4, True
    ),
    *(
        Figure(
            f"GPT-2 124M decode, batch {rows}",
            "gpt2",
            lambda f, name=f"gpt2_decode_{rows}": f[name],
            " tok/s",
            goal,
        )
        for rows, goal in ((64, 100_000), (256, 220_000), (1024, 300_000))
    ),
    Figure(
        "GPT-2 124M, 256 sequences of 100-1024 in and out: share of the bandwidth",
        "gpt2",
        lambda f: 100 * f["gpt2_bytes"] / f["bandwidth"] / f["gpt2_seconds"],
        " %",
        75,
    ),
    Figure(
        "Qwen3-0.6B shapes, the same",
        "qwen3",
        lambda f: 100 * f["qwen3_bytes"] / f["bandwidth"] / f["qwen3_seconds"],
        " %",
        75,
    ),
    Figure(
        "the same: rate / rate of transformers' continuous batching",
        "rival",
        lambda f: f["qwen3_rate"] / f["rival_rate"],
        "x",
        5,
    ),
    Figure(
        "8B at batch 256: time of a step's kernels / time of the step",
        "llama",
        lambda f: 100 * f["llama_kernel_step"] / f["llama_all_step"],
        " %",
        95,
    ),
    Figure(
        "the inverse: time of a step over that of its kernels",
        "llama",
        lambda f: f["llama_all_step"] / f["llama_kernel_step"],
        "x",
        1.03,
        True,
    ),
]

DETAILS: list[tuple[str, str, float, str]] = [  # fact, what it is, factor, unit
    ("bandwidth", "copy, bytes read and written", 1e-12, "TB/s"),
    ("matrix_rate", "bf16 matrix product, 8192 x 8192 x 8192", 1e-12, "TFLOP/s"),
    ("llama_one_step", "8B decode step, batch 1", 1e3, "ms"),
    ("llama_weight_bytes", "8B weights that a step reads", 1e-9, "GB"),
    ("llama_some_step", "8B decode step, batch 64", 1e3, "ms"),
    ("llama_some_kv_bytes", "keys and values that it reads", 1e-9, "GB"),
    ("llama_all_step", "8B decode step, batch 256", 1e3, "ms"),
    ("llama_kernel_step", "the sum of its kernels", 1e3, "ms"),
    ("llama_host_step", "the host's time to prepare and launch it", 1e3, "ms"),
    ("llama_kv_bytes", "keys and values that it reads", 1e-9, "GB"),
    ("llama_prefill", "8B prompt of 8k tokens", 1e3, "ms"),
    ("mixed_rate", "8B, random arrivals: tokens in and out", 1, "tok/s"),
    ("compiled_all_step", "8B decode step, batch 256, with `--compile`", 1e3, "ms"),
    ("compiled_prefill", "8B prompt of 8k tokens, with `--compile`", 1e3, "ms"),
    ("gpt2_one_step", "GPT-2 124M step, batch 1", 1e3, "ms"),
    ("gpt2_rate", "GPT-2 124M, workload", 1, "output tok/s"),
    ("gpt2_bytes", "weights, keys and values that its decoding reads", 1e-12, "TB"),
    ("gpt2_waiting", "share of the time in which the host waits for the device", 100, "%"),
    ("qwen3_rate", "Qwen3-0.6B shapes, workload", 1, "output tok/s"),
    ("qwen3_bytes", "weights, keys and values that its decoding reads", 1e-12, "TB"),
    ("qwen3_waiting", "share of the time in which the host waits for the device", 100, "%"),
    ("rival_rate", "transformers continuous batching, workload", 1, "output tok/s"),
    ("rival_done", "requests of the 256 that it finished within the time limit", 1, ""),
]


def table(facts: Facts, missing: dict[str, str]) -> str:
    """The figures, as a Markdown table."""
    rows = [("figure", "measured", "goal", "reached"), ("---",) * 4]
    rows += [figure.row(facts, missing) for figure in FIGURES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def document(facts: Facts, missing: dict[str, str]) -> str:
    """docs/benchmarks/gpu.md."""
    lines = [
        "# Benchmarks on a GPU",
        "",
        "Models have random weights. Tokens go in and come out as ids, without a tokenizer or "
        "server.",
        "",
        "```console",
        f"$ {COMMAND}",
        "```",
        "",
        "The command writes this page. [NVIDIA GPUs](../explanation/gpu.md) explains how servd "
        "runs on them.",
        "",
    ]
    if facts:
        lines += [
            f"{time.strftime('%d %B %Y').lstrip('0')}, {facts.get('device', 'an unknown device')}, "
            f"torch {facts.get('torch', '?')}, attention backend `{facts.get('attention', '?')}`.",
            "",
        ]
    else:
        lines += ["**Not measured yet**: run the command on a machine with a GPU.", ""]
    lines += [
        table(facts, missing),
        "",
        "## What the figures are made of",
        "",
        "| | | |",
        "|---|---|---|",
    ]
    lines += [
        f"| {what} | {show(facts[name] * factor) if name in facts else ''} | {unit} |"
        for name, what, factor, unit in DETAILS
    ]
    lines += _attention(facts)
    if "kernels" in facts:
        lines += [
            "",
            "## Where a decode step's time goes",
            "",
            "8B shapes, batch 256, about 1k tokens of context, kernels from 1 %:",
            "",
            "| kernel | share |",
            "|---|---|",
        ]
        shares = [(name, share) for name, share in facts["kernels"] if share >= 0.01]
        lines += [f"| `{name}` | {100 * share:.1f} % |" for name, share in shares]
    return "\n".join(lines) + "\n"


def _attention(facts: Facts) -> list[str]:
    """Time of each backend by workload, and which could not run."""
    reports = {
        key.removeprefix("attention_"): value
        for key, value in facts.items()
        if key.startswith("attention_")
    }
    times = {name: value for name, value in reports.items() if not isinstance(value, str)}
    lines = []
    if times:
        workloads = next(iter(times.values()))
        lines += [
            "",
            "## Attention backends",
            "",
            "Milliseconds on the device for one layer of 8B shapes. "
            "`--attention-backend auto` should choose by this table.",
            "",
            f"| | {' | '.join(times)} |",
            "|---" * (len(times) + 1) + "|",
        ]
        for workload in workloads:
            cells = [show(1000 * seconds[workload]) for seconds in times.values()]
            lines.append(f"| {workload} | {' | '.join(cells)} |")
    reasons = [
        f"- `{name}` was not measured: {reason}."
        for name, reason in reports.items()
        if name not in times
    ]
    return lines + ["", *reasons] if reasons else lines
