"""`python -m benchmarks.gpu`: run all parts within the time, write docs/benchmarks/gpu.md, print
the table last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from servd.config.machine import look_at_machine

ROOT = Path(__file__).resolve().parents[2]
# Seconds of each part; the last ones get what the others leave.
LIMITS = {
    "ceilings": 60,
    "attention": 60,
    "gpt2": 90,
    "qwen3": 90,
    "llama": 180,
    "rival": 150,
    "compiled": 120,
}


def command_of(name: str, arguments: list[str]) -> list[str]:
    """Runs one part in a new process."""
    return [sys.executable, "-m", "benchmarks.gpu", "--part", name, *arguments]


def run_part(name: str, arguments: list[str], limit_s: float, facts: dict[str, Any]) -> str | None:
    """Run a part in a process of its own and take in its facts as they come; returns why it did not
    end well.
    """
    pipe = subprocess.PIPE
    command = command_of(name, arguments)
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, text=True, process_group=0) as process:
        assert process.stdout is not None
        kill = partial(
            os.killpg, process.pid, signal.SIGKILL
        )  # those of a compiler too, which hold the pipe open
        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("FACTS "):
                    facts |= json.loads(line.removeprefix("FACTS "))
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            kill()
            raise
        code = process.wait()
        timed_out = not timer.is_alive()
        timer.cancel()
    if timed_out:
        return f"took more than {limit_s:.0f} s"
    return f"exit code {code}" if code else None


def main() -> int:
    """Returns 0 also where there is no GPU, after saying so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--part", choices=LIMITS, help="run one part in this process")
    parser.add_argument(
        "--parts", nargs="+", choices=LIMITS, default=list(LIMITS), help="default: all"
    )
    parser.add_argument("--limit", type=float, default=460.0, help="seconds for all parts")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks-gpu.md")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models on a CPU, to test the measurement"
    )
    parser.add_argument(
        "--facts",
        nargs="*",
        choices=["environment", "family", "sampling"],
        help="print one line of JSON per fact instead: what starts, and with which tokens",
    )
    parser.add_argument("--fact", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="of --facts")
    arguments = parser.parse_args()
    if arguments.facts is not None or arguments.fact is not None:
        from benchmarks.gpu import first

        if arguments.fact is not None:
            first.run_item(arguments.device, arguments.fact)
        else:
            first.run_all(arguments.device, arguments.facts or [])
        return 0
    device = "cpu" if arguments.tiny else "cuda"
    if arguments.part:
        from benchmarks.gpu import parts

        parts.run(arguments.part, device, arguments.tiny)
        return 0
    machine = look_at_machine()
    if not arguments.tiny and not (machine.num_gpus and machine.torch_has_cuda):
        print("no NVIDIA GPU that torch can use here: nothing to measure")
        return 0

    facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    deadline = time.monotonic() + arguments.limit
    for name in arguments.parts:
        limit_s = min(LIMITS[name], deadline - time.monotonic())
        print(f"== {name}, at most {limit_s:.0f} s", flush=True)
        reason = (
            run_part(name, ["--tiny"] * arguments.tiny, limit_s, facts)
            if limit_s > 0
            else "no time was left"
        )
        if reason is not None:
            missing[name] = reason
        arguments.output.write_text(
            report.document(facts, missing)
        )  # what is measured stays, whatever comes
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    print(report.table(facts, missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
