"""Measure the phases of a decode step in one process, with the uniproc or the fake executor:
`python -m benchmarks.engine_step`.
"""

import argparse
import sys
from collections import Counter

import msgspec

from servd.base.tracing import now_ns
from servd.bench import _data, _engine, _report
from servd.core.client import InprocClient
from servd.core.engine_core import EngineCore
from servd.messages.engine import EngineCoreOutputs
from servd.messages.params import SamplingParams

PHASES = ("schedule", "prepare", "forward", "sample", "update", "ipc")


def add_options(parser: argparse.ArgumentParser) -> None:
    _engine.add_options(parser, batch=32, input_len=32, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    llm = _engine.make_llm(arguments)
    assert isinstance(llm.engine.engine_core, InprocClient)
    engine = llm.engine.engine_core.engine
    prompts = _data.make_prompts(arguments, more=1)
    _engine.generate(llm, prompts[:1])
    for i, prompt in enumerate(prompts[1:]):
        params = SamplingParams(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
        llm.engine.add_request(str(i), prompt.prompt, params)
    spent: Counter[str] = Counter()  # nanoseconds by phase
    num_steps = 0
    num_tokens = 0
    while engine.has_work:
        num_tokens += time_step(engine, spent)
        num_steps += 1
    micros = {phase: spent[phase] / num_steps / 1000 for phase in PHASES}
    total = spent["all"] / num_steps / 1000
    micros["other"] = total + micros["ipc"] - sum(micros.values())
    micros["all"] = total
    summary = {"steps": num_steps, "output_tokens": num_tokens, "us_per_step": micros}
    _report.show(summary, arguments.json)
    llm.close()
    return 0


def time_step(engine: EngineCore, spent: Counter[str]) -> int:
    """Run a step, add the times of its phases to `spent`, return its number of output tokens."""
    began_ns = now_ns()
    outputs = engine.step()
    ended_ns = now_ns()
    spent["all"] += ended_ns - began_ns
    num_tokens = 0
    for message in outputs.values():
        encoded = msgspec.msgpack.encode(message)
        received = msgspec.msgpack.decode(encoded, type=EngineCoreOutputs)
        num_tokens += sum(len(output.new_token_ids) for output in received.all_outputs)
    spent["ipc"] += now_ns() - ended_ns
    for record in [record for message in outputs.values() for record in message.steps]:
        begin, gathered, computed, sampled = record.worker_ns[:4] or (0, 0, 0, 0)
        spent["schedule"] += record.scheduled_ns - record.started_ns
        spent["prepare"] += gathered - begin
        spent["forward"] += computed - gathered
        spent["sample"] += sampled - computed
        if record.collected_ns > began_ns:
            spent["update"] += ended_ns - record.collected_ns
    return num_tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    sys.exit(run(parser.parse_args()))
