"""What a CPU allows and what servd reaches, as a page: `python -m benchmarks.cpu MODEL --out
docs/benchmarks/cpu.md`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

import servd
from servd.base.errors import ServdError
from servd.checkpoint.hub import local_folder
from servd.checkpoint.weight_files import find_weight_files
from servd.terminal import api_client, server_process

FORMS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "int8": ["--dtype", "float32", "--quantization", "int8"],
}
BITS = {"float32": 32, "bfloat16": 16, "int8": 8}
BATCHES = (1, 8, 32)
IDLE_SECONDS = 10
PARTS = ["ceilings", "weights", *FORMS, "server", "peer"]
Facts = dict[str, Any]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder with safetensors")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these only [all]"
    )
    parser.add_argument(
        "--port", type=int, default=8766, metavar="N", help="for servers [%(default)s]"
    )
    parser.add_argument(
        "--peer", default=None, metavar="COMMAND", help="starts another server to compare with"
    )
    parser.add_argument(
        "--peer-name", default="another server", metavar="NAME", help="what the page calls it"
    )
    parser.add_argument("--peer-url", default=None, metavar="URL", help="where it listens")
    arguments = parser.parse_args()
    if (arguments.peer is None) != (arguments.peer_url is None):
        parser.error("--peer and --peer-url go together")
    return arguments


def main() -> int:
    """Measure part after part, and write the page after each, so that nothing is lost if one
    fails.
    """
    arguments = parse()
    facts: Facts = {"model": Path(arguments.model).name}
    parts: dict[str, Callable[[], Facts]] = {
        "ceilings": ceilings,
        "weights": lambda: weights(arguments.model),
    }
    for form, options in FORMS.items():
        parts[form] = lambda form=form, options=options: decoding(arguments.model, form, options)
    parts["server"] = lambda: server(arguments.model, arguments.port)
    if arguments.peer:
        parts["peer"] = lambda: peer(arguments)
    for name, measure in parts.items():
        if name not in arguments.parts:
            continue
        print(f"measuring: {name}", flush=True)
        try:
            facts |= measure()
        except ServdError as error:
            print(f"  {name} failed: {error}", file=sys.stderr)
            facts.setdefault("failed", []).append(f"{name}: {error}")
        arguments.out.write_text(page(facts), encoding="utf8")
    print(f"written: {arguments.out}")
    return 1 if "failed" in facts else 0


# ---- measuring ----


def ceilings() -> Facts:
    """Bytes a second that the CPUs read, and operations a second of a large product in float32 by
    torch.
    """
    numbers = torch.ones(1 << 26)
    (a, b) = torch.randn(2, 2048, 2048)

    def best(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(7):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    return {
        "threads": torch.get_num_threads(),
        "bandwidth": numbers.nbytes / best(numbers.sum),
        "matrix_rate": 2 * 2048**3 / best(lambda: a @ b),
    }


def weights(model: str) -> Facts:
    """Elements of the matrices that a step multiplies with, in the layers and in all."""
    folder = local_folder(model)
    layers = 0
    num_others = 0
    if folder is None:
        raise ServdError(f"{model} is not a folder: download the model first")
    for file in find_weight_files(folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                shape = tensors.get_slice(name).get_shape()
                if len(shape) == 2 and "wpe" not in name:
                    size = shape[0] * shape[1]
                    is_layer = ".h." in f".{name}" or ".layers." in f".{name}"
                    layers, num_others = (
                        (layers + size, num_others) if is_layer else (layers, max(num_others, size))
                    )
    return {"layer_elements": layers, "elements": layers + num_others}


def decoding(model: str, form: str, options: list[str]) -> Facts:
    """Milliseconds per step: decoding of some batches, and 8 prompts of 512 tokens with 16 outputs,
    or with one.
    """
    facts: Facts = {}
    for batch in BATCHES:
        facts[f"{form}_{batch}"] = _latency(model, options, batch, 32, 64)
    facts[f"{form}_long"] = _latency(model, options, 8, 512, 16)
    facts[f"{form}_prompts"] = _latency(model, options, 8, 512, 1)
    return facts


def server(model: str, port: int) -> Facts:
    """Start, memory and rest of a server."""
    serve = f"{model} --served-model-name model --dtype float32 --kv-cache-memory 512MiB"
    started = _bench("startup", "--repeats", "3", "--port", str(port), "--serve", serve)
    command = [sys.executable, "-m", "servd", "serve", *serve.split(), "--port", str(port)]
    with server_process.running(command, api_client.Client(f"http://127.0.0.1:{port}"), 300):
        [root] = [
            process for process in psutil.Process().children() if "servd" in process.cmdline()
        ]
        processes = [root, *root.children(recursive=True)]
        memory = sum(process.memory_full_info().uss for process in processes)

        def used() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        time.sleep(2)
        before = used()
        time.sleep(IDLE_SECONDS)
        idle = (used() - before) / IDLE_SECONDS
    return {
        "ready_ms": started["ready_ms"]["p50"],
        "first_token_ms": started["first_token_ms"]["p50"],
        "memory": memory,
        "idle": idle,
    }


def peer(arguments: argparse.Namespace) -> Facts:
    """The figures of `servd bench compare`, 64 tokens in and out."""
    serve = f"{arguments.model} --served-model-name model --dtype float32 --port {arguments.port}"
    result = _bench(
        "compare",
        "--a",
        f"{sys.executable} -m servd serve {serve}",
        "--a-url",
        f"http://127.0.0.1:{arguments.port}",
        "--b",
        arguments.peer,
        "--b-url",
        arguments.peer_url,
        "--num-prompts",
        "96",
        "--timeout",
        "900",
    )
    return {"peer_name": arguments.peer_name, "compared": result}


def _latency(model: str, options: list[str], batch: int, num_in: int, num_out: int) -> float:
    sizes = ["--num-prompts", str(batch), "--input-len", str(num_in), "--output-len", str(num_out)]
    result = _bench("latency", model, *sizes, "--repeats", "3", "--device", "cpu", *options)
    return result["ms_per_output_step"]["p50"]


def _bench(name: str, *arguments: str) -> Any:
    """The JSON of another measurement, which has a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, "-m", "servd", "bench", name, *arguments, "--json", file.name]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise ServdError(
                f"servd bench {name} ended with code {done.returncode}: "
                f"{done.stderr.strip()[-300:]}"
            )
        return json.loads(Path(file.name).read_text("utf8"))


# ---- the page ----


def page(facts: Facts) -> str:
    """Markdown of whatever was measured."""
    lines = [
        "# Benchmarks on a CPU",
        "",
        "On a shared machine, other programs change the times: trust the percentages more.",
        "",
        "```console",
        f"$ make bench-cpu MODEL=./{facts['model']}",
        "```",
        "",
        f"{time.strftime('%d %B %Y').lstrip('0')}, {_cpu()}, {platform.machine()}, "
        f"servd {servd.__version__}, torch {torch.__version__}.",
        "The command writes this page.",
    ]
    if "bandwidth" in facts:
        lines += [
            "",
            "## What the machine allows",
            "",
            "| | |",
            "|---|---|",
            f"| threads | {facts['threads']} |",
            f"| memory read | {facts['bandwidth'] / 1e9:.1f} GB/s |",
            f"| float32 product of 2048 x 2048, torch | {facts['matrix_rate'] / 1e9:.0f} GFLOP/s |",
        ]
    forms = [form for form in FORMS if f"{form}_1" in facts and "elements" in facts]
    if forms:
        lines += [
            "",
            "## Steps of the engine",
            "",
            "Milliseconds per output step, with 32 tokens in and 64 out. *8 x 512* is 8 requests "
            "with 512 in and",
            "16 out. *Of the bound* is the time to read the weights once at this bandwidth, over "
            "the time of a step",
            "of batch 1.",
            "",
            "| weights | batch 1 | of the bound | 8 | 32 | 8 x 512 | prompts, GFLOP/s (of torch) |",
            "|---" * 7 + "|",
        ]
    for form in forms:
        bound = facts["elements"] * BITS[form] / 8 / facts["bandwidth"] * 1000
        rate = 2 * facts["layer_elements"] * 8 * 512 / facts[f"{form}_prompts"] / 1e6
        single, eight, many = (facts[f"{form}_{batch}"] for batch in BATCHES)
        lines.append(
            f"| {form} | {single:.1f} | {100 * bound / single:.0f} % | {eight:.1f} | {many:.1f} "
            f"| {facts[f'{form}_long']:.0f} | {rate:.0f} "
            f"({100 * rate * 1e9 / facts['matrix_rate']:.0f} %) |"
        )
    if "memory" in facts:
        lines += [
            "",
            "## The server",
            "",
            "| | |",
            "|---|---|",
            f"| from the command to readiness | {facts['ready_ms'] / 1000:.1f} s |",
            f"| from the command to the first token | {facts['first_token_ms'] / 1000:.1f} s |",
            f"| memory of all processes, KV cache of 512 MiB | {facts['memory'] / 1e6:.0f} MB |",
            f"| idle CPU time of all processes | {100 * facts['idle']:.2f} % of a core |",
        ]
    if "compared" in facts:
        lines += _comparison(facts["peer_name"], facts["compared"])
    lines += [f"\nNot measured: {failure}" for failure in facts.get("failed", [])]
    return "\n".join(lines) + "\n"


def _comparison(name: str, result: Any) -> list[str]:
    lines = [
        "",
        f"## Beside {name}",
        "",
        "64 tokens in and out, float32. Both servers get the same load in turn.",
        "",
        "| requests at once | output tok/s: servd | other | ratio | mean TTFT, ms: servd | "
        "other | ratio |",
        "|---" * 7 + "|",
    ]
    for concurrency, ours in result["a"].items():
        other = result["b"][concurrency]
        rates = ours["output_tokens_per_s"], other["output_tokens_per_s"]
        waits = ours["ttft_ms"]["mean"], other["ttft_ms"]["mean"]
        lines.append(
            f"| {concurrency} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[0] / rates[1]:.2f} "
            f"| {waits[0]:.0f} | {waits[1]:.0f} | {waits[0] / waits[1]:.2f} |"
        )
    return lines


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unknown CPU"


if __name__ == "__main__":
    sys.exit(main())
