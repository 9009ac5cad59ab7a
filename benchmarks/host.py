"""What the host does for a decode step: `python -m benchmarks.host [ROWS ...]`.

The engine as it serves, two steps in flight: scheduler, messages, rows, block tables and sampler.
Only the device is missing: hidden states and logits are there, and the vocabulary has 8 tokens. CPU
time of the engine's thread, medians over steps, and the calls of torch in a step. With --graphs
what a GPU's host does, where graphs that launch nothing compute and sample; copies take no time.
With --fake the fake executor, one step after the other.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu import shapes
from benchmarks.gpu.engine import Bench
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.core.engine_core import EngineCore
from servd.core.executor.fake import FakeExecutor
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from servd.worker import worker
from servd.worker.ops import native
from servd.worker.output_heads import StepPart
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from servd.worker.runner.gpu_model_runner import GPUModelRunner

PARTS = ("schedule", "prepare", "sample", "collect", "update", "outputs", "other")
NUM_STEPS = 300
WARM_STEPS = 20
VOCAB_SIZE = 8
LONGEST_PROMPT = 64  # so that their blocks end in different steps
# Questions about a tensor's shape, type or place.
FREE = {"__get__", "__len__", "data_ptr", "dim", "is_contiguous", "numel", "size", "stride"}


class Clock:
    """CPU time of this thread, by part of a step."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.num_tokens = 0  # of the step launched last
        self.spent: defaultdict[str, float] = defaultdict(float)
        scheduler = engine.scheduler
        executor = engine.executor
        self.wrap(scheduler, "schedule", "schedule")
        self.wrap(executor, "execute_model", "prepare")
        self.wrap(executor, "sample_tokens", "sample")
        self.wrap(scheduler, "update_from_output", "update")
        self.wrap(scheduler, "take_outputs", "outputs")
        engine.on_scheduled = lambda record: setattr(self, "num_tokens", record.num_tokens)
        launch = executor.sample_tokens
        executor.sample_tokens = lambda *args: Timed(launch(*args), self)  # type: ignore[method-assign]

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a method."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same call, counted."""

        def counted(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self.spent[part] += time.thread_time() - began

        return counted

    def step(self) -> tuple[dict[str, float], float]:
        """Microseconds of a step by part, and of what its outputs take to encode: another thread
        does that.
        """
        self.spent.clear()
        began = time.thread_time()
        outputs = self.engine.step()
        whole = time.thread_time() - began
        self.spent["other"] = whole - sum(self.spent.values())
        began = time.thread_time()
        for message in outputs.values():
            msgspec.msgpack.encode(message)
        encoding = time.thread_time() - began
        return {part: 1e6 * self.spent[part] for part in PARTS}, 1e6 * encoding


class Timed:
    """The output of a step in flight."""

    def __init__(self, pending: Any, clock: Clock) -> None:
        self.result = clock.timed(pending.result, "collect")


def options(num_rows: int) -> dict[str, Any]:
    """Room for all rows, and for the tokens of all steps."""
    return {
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": max(2048, 2 * num_rows),
        "max_model_len": 1024,
    }


class StubRunner(GPUModelRunner):
    """Takes the place of a CPUModelRunner; its graphs compute nothing."""

    def to_host(self, parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Callable[[], None]]:
        """It is there."""
        return parts, lambda: None

    def load_model(self, progress: Callable[[float], None]) -> None:
        """And its backend is as good as any."""
        super().load_model(progress)
        self.backend.supports_graphs = True  # type: ignore[misc]

    def _captured(self, tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        if ends is None:  # where sampled tokens go is read
            self.states.begin_decode(self.states.inputs.buffers_of(tokens.shape[1]))
        return torch.zeros(tokens.shape[1], self.spec.hidden_size)

    def recorder(self) -> Callable[[Callable[[], object]], Callable[[], None]]:
        """Of nothing."""
        return lambda run: lambda: None


def with_graphs(num_rows: int) -> EngineCore:
    """What a GPU's host does."""
    with patch.object(worker, "CPUModelRunner", StubRunner):
        return without_device(num_rows)


def without_device(num_rows: int) -> EngineCore:
    """The worker's own steps, but for the forward pass."""
    shape = shapes.tiny(shapes.GPT2_124M) | {"vocab_size": VOCAB_SIZE}
    num_tokens = num_rows * (2 * LONGEST_PROMPT + NUM_STEPS + 2 * WARM_STEPS)
    memory = num_tokens * 2 * shape["n_embd"] * 4
    bench = Bench(shape, "cpu", async_scheduling=True, kv_cache_memory=memory, **options(num_rows))
    bench.engine.executor = bench.executor.executor
    runner = bench.worker.runner
    hidden = torch.zeros(runner.max_num_tokens, bench.spec.hidden_size)
    logits = torch.zeros(num_rows, bench.spec.vocab_size)
    if isinstance(runner, CPUModelRunner):
        runner.forward = lambda batch: hidden[: batch.tokens.shape[1]]
    runner.model.compute_logits = lambda hidden: logits[: len(hidden)]
    assert bench.engine.depth == 2
    return bench.engine


def with_fake(num_rows: int) -> EngineCore:
    """No worker at all."""
    config = Config.load(options(num_rows) | {"async_scheduling": False})
    executor = FakeExecutor(config, FAKE_SPEC, lambda phase, fraction: None)
    return EngineCore(config, FAKE_SPEC, executor, executor.start())


class Calls(TorchFunctionMode):
    """Notes what torch is called for, by operators too, and the native library."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called in place of every function of torch, and of `native.call`."""
        if func.__name__ not in FREE:
            self.names.append(args[0] if func is native.call else func.__name__)
        return func(*args, **(kwargs or {}))


def calls_of_torch(engine: EngineCore, num_steps: int) -> list[list[str]]:
    """Those of each of some steps."""
    steps = []
    for _ in range(num_steps):
        with Calls() as calls:
            engine.step()
        steps.append(calls.names)
    return steps


def let_all_decode(engine: EngineCore, num_rows: int) -> Clock:
    """Requests come, until they all decode."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 200, ignore_eos=True)
    for i in range(num_rows):
        prompt = [(3 * i + j) % VOCAB_SIZE for j in range(1 + i % LONGEST_PROMPT)]
        engine.handle(EngineCoreRequest(f"cmpl-{i:032}", prompt, params))
    clock = Clock(engine)
    num_decoding = 0
    while num_decoding < WARM_STEPS:
        clock.step()
        if clock.num_tokens == num_rows:
            num_decoding += 1
    return clock


def measure(engine: EngineCore, num_rows: int) -> dict[str, float]:
    """Medians over steps in which all rows decode, see `Clock.step`; and how long the whole takes
    where other processes disturb least: a twentieth of the steps are faster.
    """
    clock = let_all_decode(engine, num_rows)
    gc.collect()
    gc.freeze()
    steps = [clock.step() for _ in range(NUM_STEPS)]
    assert clock.num_tokens == num_rows, "requests have ended"
    parts = {part: statistics.median(step[part] for step, _ in steps) for part in PARTS}
    wholes = [sum(step.values()) for step, _ in steps]
    parts["**step**"] = statistics.median(wholes)
    parts["least"] = statistics.quantiles(wholes, n=20)[0]
    parts["encoding"] = statistics.median(encoding for _, encoding in steps)
    parts["torch"] = statistics.mean(map(len, calls_of_torch(engine, 16)))
    return parts


def main() -> None:
    """Print a row for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f}; microseconds per step")
    columns = (*PARTS, "**step**", "least", "encoding", "calls of torch")
    print("| rows | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for num_rows in arguments.rows:
        make = with_graphs if arguments.graphs else without_device
        engine = with_fake(num_rows) if arguments.fake else make(num_rows)
        figures = [f"{micros:,.0f}" for micros in measure(engine, num_rows).values()]
        print(f"| {num_rows:,} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
