"""`servd simulate` against what it simulates: `python -m benchmarks.simulate [MODEL] [OPTION ...]`.

A server of this machine is recorded under a load that its costs are fitted to, and under three
others. Each of those is replayed with the costs of the first, and with its own: the difference
between the two is what costs depend on beside the steps. Wants a machine with nothing else on it,
for four minutes with the demo model; options but --json are those of `servd serve`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from servd.terminal.api_client import Client
from servd.terminal.server_process import running

PORT = 18437
SERVD = [sys.executable, "-m", "servd"]
SIZES = "--input-len 200 --output-len 60 --range-ratio 0.9"
# Steps of few requests and of many, after others and after idleness.
CALIBRATION = [
    f"--num-prompts 100 {SIZES} --request-rate 5",
    f"--num-prompts 100 {SIZES} --concurrency 8",
    f"--num-prompts 160 {SIZES} --concurrency 40",
]
CLIENTS = 32  # that wait for an answer before they ask again: in a replay, too
LOADS = {
    "few at a time": "--num-prompts 150 --input-len 120 --output-len 40 --range-ratio 0.5 "
    "--request-rate 4",
    "all slots taken": "--num-prompts 200 --input-len 150 --output-len 80 --range-ratio 0.5 "
    f"--concurrency {CLIENTS}",
    "a common beginning": "--num-prompts 200 --prefix-len 400 --input-len 60 --output-len 20 "
    "--range-ratio 0.5 --request-rate 8",
}
COMPARED = ("ttft_ms_mean", "request_ms_mean", "output_tokens_per_s", "prefix_hits_%")


def record(file: Path, model: list[str], loads: list[str], seed: int) -> None:
    """Serve, send one load after another, and keep what the server recorded."""
    command = [*SERVD, "serve", *model, "--device", "cpu", "--port", str(PORT)]
    client = Client(f"http://127.0.0.1:{PORT}", None)
    with running([*command, "--record-trace", str(file)], client, 300):
        bench = [*SERVD, "bench", "serve", "--url", client.url, "--warmup", "20"]
        for i, load in enumerate(loads):
            more = ["--data-seed", str(10 * seed + i), *load.split()]
            subprocess.run([*bench, *more], check=True, stdout=subprocess.DEVNULL)


def compare(trace: Path, costs: Path, out: Path, is_closed: bool) -> dict[str, Any]:
    """Measured and simulated figures of a recording, with the costs of one. If its clients waited
    for their answers, so do those of the simulation, who have everything to ask from the start.
    """
    command = [*SERVD, "what-if", str(trace), "--costs", str(costs), "--json", str(out)]
    if is_closed:
        command += ["--speed", "1e6", "--concurrency", str(CLIENTS)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    return found | {"simulated": found.get("changed", found["simulated"])}


def main() -> None:
    """Print a line for each figure of each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments, model = parser.parse_known_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder, "calibration.jsonl")
        record(calibration, model, CALIBRATION, 0)
        print(f"{'':42}  measured  simulated      own costs")
        for seed, (name, load) in enumerate(LOADS.items(), 1):
            trace = Path(folder, f"{seed}.jsonl")
            record(trace, model, [load], seed)
            out = Path(folder, "found.json")
            is_closed = "--concurrency" in load
            found = [compare(trace, costs, out, is_closed) for costs in (calibration, trace)]
            results[name] = found
            for figure in COMPARED:
                was = found[0]["measured"][figure]
                line = ""
                for each in found:
                    is_now = each["simulated"][figure]
                    by = f"{100 * (is_now / was - 1):+6.1f} %" if was else ""
                    line += f" {is_now:10.2f} {by:8}"
                print(f"{name:20} {figure:22} {was:8.2f}{line}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
