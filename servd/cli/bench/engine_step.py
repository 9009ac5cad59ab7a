"""Where each microsecond of a decode step goes: one process, uniproc or fake executor."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from servd.cli.bench import _data, _engine, _report
from servd.llm_engine import InProcess
from servd.messages import EngineCoreOutputs
from servd.params import SamplingParams

PHASES = ("schedule", "prepare", "forward", "sample", "update", "ipc")


def add_options(parser: argparse.ArgumentParser) -> None:
    _report.add_options(parser)
    _engine.add_options(parser, batch=32, input_len=32, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    llm = _engine.make_llm(arguments)
    port = llm.engine.port
    assert isinstance(port, InProcess)
    prompts = _data.make_prompts(arguments, more=1)
    warm_up = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate(prompts.pop(0).content, warm_up, use_tqdm=False)
    clock = StepClock()
    clock.watch(port)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
        llm.engine.add_request(str(i), prompt.content, params)
    while port.engine.has_work:
        clock.step(port)
    summary = clock.summary()
    _report.show(summary, arguments.json)
    llm.close()
    return 0


class StepClock:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: list[float] = []
        self.num_tokens = 0

    def watch(self, port: InProcess) -> None:
        engine = port.engine
        self.wrap(engine.scheduler, "schedule", "schedule")
        self.wrap(engine.scheduler, "update_from_output", "update")
        self.wrap(engine.scheduler, "take_outputs", "update")
        self.wrap(engine.executor, "execute_model", "prepare")  # less the forward pass inside it
        self.wrap(engine.executor, "sample_tokens", "sample")
        if (worker := getattr(engine.executor, "worker", None)) is not None:
            self.wrap(worker.runner.model, "forward", "forward")

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[phase] += time.perf_counter() - started

        setattr(owner, name, timed)

    def step(self, port: InProcess) -> None:
        started = time.perf_counter()
        outputs = port.engine.step()
        self.steps.append(time.perf_counter() - started)
        started = time.perf_counter()
        for message in outputs.values():
            encoded = msgspec.msgpack.encode(message)
            received = msgspec.msgpack.decode(encoded, type=EngineCoreOutputs)
            self.num_tokens += sum(len(output.new_token_ids) for output in received.all_outputs)
        self.seconds["ipc"] += time.perf_counter() - started

    def summary(self) -> dict[str, Any]:
        """Microseconds a step; `other` is what no phase accounts for."""
        num_steps = len(self.steps)
        micros = {phase: 1e6 * self.seconds[phase] / num_steps for phase in PHASES}
        micros["prepare"] -= micros["forward"]
        total = 1e6 * sum(self.steps) / num_steps
        micros["other"] = total + micros["ipc"] - sum(micros.values())
        micros["all"] = total
        return {"steps": num_steps, "output_tokens": self.num_tokens, "us_per_step": micros}
