"""The first ten minutes on a GPU: one line of JSON per fact, the cheapest and most telling first.

Each item runs in a process of its own with a time limit, so whatever fails is a fact as well.
"""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import shapes
from benchmarks.gpu.engine import Bench
from servd.checkpoint.model_spec import read_spec
from servd.config.machine import look_at_machine
from servd.config.resolve import resolve
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
NUM_AT_ONCE = 6  # families: compiling their kernels takes most of the time
PACKAGES = ("torch", "triton", "transformers", "msgspec", "llguidance", "zmq", "pytest", "xdist")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        (family, {"quantization": quantization})
        for family in ("llama", "mixtral")
        for quantization in ("int8", "int4", "fp8")
    ),
    ("llama", {"kv_cache_dtype": "fp8"}),
    ("llama", {"enable_lora": True, "max_loras": 2}),
    ("llama", {"async_scheduling": True}),
]


def emit(**facts: Any) -> None:
    """Print a fact."""
    print("FACT " + json.dumps(facts), flush=True)


def describe_environment(device: str) -> None:
    """Which packages and compilers there are."""
    results = {}
    for name in PACKAGES:
        try:
            results[name] = str(getattr(importlib.import_module(name), "__version__", "there"))
        except ImportError as error:
            results[name] = f"missing: {error}"
    gpu = None
    if device == "cuda":
        gpu = [torch.cuda.get_device_name(), *torch.cuda.mem_get_info()]
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    emit(item="environment", **results, gcc=shutil.which("gcc"), headers=headers, gpu=gpu)


def compare_family(device: str, name: str, options: dict[str, Any]) -> None:
    """Serve a tiny model of a family with and without graphs, and compare the tokens."""
    from tests.parity.families import CASES, make_checkpoint
    from tests.worker.driver import Driver, config_for

    shape = next(iter(CASES[name].values()))
    if name == "llama":
        shape = shape | {"head_dim": 16}  # the least that servd's attention kernels take
    if "quantization" in options:
        shape = shape | {"hidden_size": 96, "intermediate_size": 64}
    facts: dict[str, Any] = {}
    outputs: list[list[list[int]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_checkpoint(Path(temporary), name, shape)
        for enforce_eager in (False, True):
            began = time.monotonic()
            config = config_for(
                folder,
                device=device,
                dtype="bfloat16" if device == "cuda" else "float32",
                block_size=16,
                enable_prefix_caching=False,
                kv_cache_memory=1 << 26,
                enforce_eager=enforce_eager,
                **options,
            )
            driver = Driver(resolve(config, read_spec(folder), look_at_machine()))
            runner: Any = driver.worker.runner
            graphs = getattr(runner, "graphs", None)
            if not enforce_eager:
                facts["backend"] = runner.backend_name
                facts["graphs"] = 0 if graphs is None else len(graphs.graphs)
            facts["eager_s" if enforce_eager else "graphs_s"] = round(time.monotonic() - began, 1)
            slots = [driver.add([1, 2, 3]), driver.add([4] * 20), driver.add([7])]
            driver.generate(slots, 8, chunk=9)
            outputs.append([driver.free(slot) for slot in slots])
            driver.worker.shutdown()
    pairs = list(zip(itertools.chain(*outputs[0]), itertools.chain(*outputs[1]), strict=True))
    equal = sum(token == other for token, other in pairs) / len(pairs)
    emit(item="family", model=name, options=options, equal=round(equal, 3), **facts)


def time_sampling(device: str) -> None:
    """Time a step by the way to sample, with a large vocabulary and a model that costs little."""
    is_tiny = device == "cpu"
    num_rows = 4 if is_tiny else 256
    shape = shapes.LLAMA_8B | {
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    bench = Bench(
        shapes.tiny(shapes.LLAMA_8B) if is_tiny else shape,
        device,
        max_num_seqs=num_rows,
        max_model_len=128,
        kv_cache_memory=1 << 24 if is_tiny else 1 << 30,
        async_scheduling=True,
    )
    for name, fields in SAMPLING.items():
        for row in range(num_rows):
            params = SamplingParams(seed=row, max_tokens=60, ignore_eos=True, **fields)
            prompt = [row % 100 + 1, 2, 3]
            bench.engine.handle(EngineCoreRequest(f"{name}{row}", prompt, params))
        bench.run(12)
        bench.forget()
        bench.run(40)
        steps = bench.executor.steps
        gaps = [after.launched - before.launched for before, after in itertools.pairwise(steps)]
        host = statistics.median(step.host_seconds for step in steps)
        milliseconds = 1e3 * statistics.median(gaps)
        emit(item="sampling", way=name, rows=num_rows, ms=milliseconds, host_ms=1e3 * host)
        bench.run()


def items() -> list[list[Any]]:
    """All items: a name, and a family with its options where it is one."""
    from tests.parity.families import CASES

    families = [["family", name, {}] for name in CASES]
    variants = [["family", name, options] for name, options in OPTIONS]
    return [["environment"], *families, *variants, ["sampling"]]


def run_item(device: str, item: list[Any]) -> None:
    """Measure one item in this process."""
    try:
        if item[0] == "family":
            compare_family(device, item[1], item[2])
        elif item[0] == "sampling":
            time_sampling(device)
        else:
            describe_environment(device)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        at = [f"{frame.filename}:{frame.lineno}" for frame in frames]
        emit(item=item, failed=f"{type(error).__name__}: {error}"[:400], at=at)


def run_all(device: str, chosen: list[str], limit_s: float = 100.0) -> None:
    """Measure the items of the chosen kinds, each in a process of its own."""

    def run(item: list[Any]) -> None:
        options = ["--device", device, "--fact", json.dumps(item)]
        command = [sys.executable, "-m", "benchmarks.gpu", *options]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            emit(item=item, failed=f"took more than {limit_s:.0f} s")
            return
        lines = [line for line in done.stdout.splitlines() if line.startswith("FACT ")]
        if lines:
            print("\n".join(lines), flush=True)
        else:
            emit(item=item, failed=done.stderr[-600:])

    selected = [item for item in items() if not chosen or item[0] in chosen]
    with ThreadPoolExecutor(NUM_AT_ONCE if device == "cuda" else 1) as pool:
        list(pool.map(run, [item for item in selected if item[0] != "sampling"]))
    for item in selected:  # alone, as it is timed
        if item[0] == "sampling":
            run(item)
