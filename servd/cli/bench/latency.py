"""Latency of one batch, repeated; the engine runs in this process."""

from __future__ import annotations

import argparse
import time

from tqdm import tqdm

from servd.cli.bench import _data, _engine, _report
from servd.params import SamplingParams


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="measured runs [%(default)s]"
    )
    _report.add_options(parser)
    _engine.add_options(parser, batch=8, input_len=32, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    llm = _engine.make_llm(arguments)
    prompts = _data.make_prompts(arguments)
    params = [
        SamplingParams(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
        for prompt in prompts
    ]
    contents = [prompt.content for prompt in prompts]
    num_steps = max(prompt.output_len for prompt in prompts)
    seconds: list[float] = []
    for repeat in tqdm(range(arguments.repeats + 1), desc="runs"):
        started = time.perf_counter()
        llm.generate(contents, params, use_tqdm=False)
        if repeat:  # the first run warms up
            seconds.append(time.perf_counter() - started)
    summary = {
        "batch": len(prompts),
        "batch_ms": _report.spread(seconds),
        "ms_per_output_step": _report.spread([s / num_steps for s in seconds]),
    }
    _report.show(summary, arguments.json)
    llm.close()
    return 0
