"""The engine over random weights, and the times of its steps. Without tokenizer and server: token
ids in and out.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.config.machine import look_at_machine
from servd.config.resolve import resolve
from servd.core.engine_core import EngineCore
from servd.core.executor import PendingOutput
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import (
    EngineCoreRequest,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from servd.messages.params import SamplingParams


@dataclass
class StepTime:
    """One step as its executor sees it."""

    num_rows: int
    num_tokens: int
    num_prompt_tokens: int  # of rows that compute several
    launched: float  # when the host began to prepare it
    host_seconds: float = 0.0  # to prepare and launch it


@dataclass
class TimedOutput:
    """Counts the time for which the host waits."""

    clock: TimedExecutor
    pending: PendingOutput

    def result(self) -> ModelRunnerOutput:
        """See PendingOutput."""
        began = time.perf_counter()
        output = self.pending.result()
        self.clock.waited += time.perf_counter() - began
        return output


@dataclass
class TimedExecutor:
    """Stands before an executor and takes the host's time of every step."""

    executor: Any
    steps: list[StepTime] = field(default_factory=list)
    waited: float = 0.0

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """See Executor."""
        prompts = sum(
            row.num_scheduled_tokens for row in scheduled.scheduled if row.num_scheduled_tokens > 1
        )
        now = time.perf_counter()
        self.steps.append(
            StepTime(scheduled.num_rows, scheduled.total_num_scheduled_tokens, prompts, now)
        )
        self.executor.execute_model(scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> TimedOutput:
        """See Executor."""
        pending = self.executor.sample_tokens(grammar_output)
        self.steps[-1].host_seconds = time.perf_counter() - self.steps[-1].launched
        return TimedOutput(self, pending)


class Bench:
    """An engine of a model with random weights, built on the device.

    Args:
        shape: config.json.
        device: "cuda" or "cpu".
        options: as of `servd serve`.
    """

    def __init__(self, shape: dict[str, Any], device: str, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:  # nothing but config.json is ever read
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            self.spec = read_spec(folder)
            options = {"model": folder, "load_format": "dummy", "device": device} | options
            self.config = resolve(Config.load(options), self.spec, look_at_machine())
        self.device = torch.device(device)
        executor = UniProcExecutor(self.config, self.spec, lambda phase, fraction: None)
        self.ready = executor.start()
        self.worker: Any = executor.worker
        self.executor = TimedExecutor(executor)
        self.engine = EngineCore(self.config, self.spec, executor, self.ready)
        self.engine.executor = self.executor  # type: ignore[assignment]
        self.random = random.Random(0)
        self.num_requests = 0

    def add(self, input_len: int, output_len: int) -> None:
        """Queue a request of random tokens, greedy, that ends by its length only."""
        prompt = [self.random.randrange(self.spec.vocab_size) for _ in range(input_len)]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self.num_requests += 1
        self.engine.handle(EngineCoreRequest(str(self.num_requests), prompt, params))

    def run(self, num_steps: int | None = None) -> int:
        """Step until there is no work, or N steps; returns the number of output tokens."""
        num_tokens = 0
        while self.engine.has_work and num_steps != 0:
            for outputs in self.engine.step().values():
                num_tokens += sum(len(output.new_token_ids) for output in outputs.all_outputs)
            num_steps = None if num_steps is None else num_steps - 1
        return num_tokens

    def forget(self) -> None:
        """Begin to take times anew."""
        self.synchronize()
        self.executor.steps.clear()
        self.executor.waited = 0.0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def head_bytes(self) -> int:
        """Size of the output head."""
        return self.spec.vocab_size * self.spec.hidden_size * self.worker.runner.dtype.itemsize

    @property
    def weight_bytes_per_step(self) -> int:
        """Weights that a decode step reads: all, less an embedding table that is not the output
        head as well.
        """
        is_tied = self.spec.config.get("tie_word_embeddings", True)
        return self.ready.weights_bytes - (0 if is_tied else self.head_bytes)


@dataclass(frozen=True)
class Decoding:
    """Medians over steps in which all requests decode, in seconds."""

    step: float  # from launch to launch
    host: float  # the host's part: preparing and launching
    context: float  # mean number of tokens that a request has
    kernels: list[
        tuple[str, float]
    ]  # name and seconds a step on the device; empty if it was not asked for


def decode(
    bench: Bench, batch: int, context: int, num_steps: int, num_profiled: int = 0, warm: int = 8
) -> Decoding:
    """Let `batch` requests decode `num_steps` after prompts of `context` tokens, then some more
    under a profiler.
    """
    budget = bench.config.scheduler.max_num_batched_tokens
    assert budget is not None
    # The first requests decode already while the last ones' prompts are computed.
    before = -(-batch * context // (budget - batch)) + warm + 2
    for _ in range(batch):
        bench.add(context, before + num_steps + num_profiled + 4)
    bench.forget()
    bench.run(1)
    while not bench.executor.steps[-1].num_tokens == bench.executor.steps[-1].num_rows == batch:
        bench.run(1)
    bench.run(warm)
    bench.forget()
    mean_context = (
        statistics.mean(request.num_tokens for request in bench.engine.scheduler.running)
        + num_steps / 2
    )
    bench.run(num_steps)
    steps = list(bench.executor.steps)
    gaps = [later.launched - step.launched for step, later in itertools.pairwise(steps)]
    kernels: list[tuple[str, float]] = []
    if num_profiled and bench.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            bench.run(num_profiled)
            bench.synchronize()
        kernels = [
            (e.key, e.self_device_time_total / 1e6 / num_profiled) for e in profiler.key_averages()
        ]
    bench.run()
    host = statistics.median(step.host_seconds for step in steps)
    return Decoding(statistics.median(gaps), host, mean_context, kernels)


def arrive(
    bench: Bench, rate: float, num_requests: int, input_len: int, output_len: int
) -> tuple[int, int, float]:
    """Requests arrive at random, N a second (a Poisson process).

    Returns:
        prompt tokens and output tokens that were computed between the arrivals of the first quarter
        and of the last one, and the seconds between.
    """
    draw = random.Random(0)
    began = time.perf_counter()
    due = list(itertools.accumulate(draw.expovariate(rate) for _ in range(num_requests)))
    first = began + due[num_requests // 4]
    num_arrived = 0
    bench.forget()
    while num_arrived < num_requests:
        while num_arrived < num_requests and began + due[num_arrived] <= time.perf_counter():
            bench.add(input_len, output_len)
            num_arrived += 1
        if bench.engine.has_work:
            bench.run(1)
        elif num_arrived < num_requests:
            time.sleep(max(began + due[num_arrived] - time.perf_counter(), 0))
    bench.synchronize()
    seconds = time.perf_counter() - first
    steps = [step for step in bench.executor.steps if step.launched >= first]
    prompts = sum(step.num_prompt_tokens for step in steps)
    outputs = sum(step.num_tokens for step in steps) - prompts
    bench.run()
    return prompts, outputs, seconds


def prompt_seconds(bench: Bench, num_tokens: int, repeats: int = 4) -> float:
    """Median time of a prompt that is computed in one step, with its one output token; the first
    does not count.
    """
    times = []
    for _ in range(repeats):
        bench.add(num_tokens, 1)
        bench.synchronize()
        began = time.perf_counter()
        bench.run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
