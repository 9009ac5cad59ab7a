"""Measure the latency of one batch, repeatedly. The engine runs in this process."""

import argparse
import time

from tqdm import tqdm

from servd.bench import _data, _engine, _report


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "measured runs [%(default)s]"
    parser.add_argument("--repeats", "--num-iters", type=int, default=5, metavar="N", help=help)
    _engine.add_options(parser, batch=8, input_len=32, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    llm = _engine.make_llm(arguments)
    prompts = _data.make_prompts(arguments)
    num_steps = max(prompt.output_len for prompt in prompts)
    seconds: list[float] = []
    for _ in tqdm(range(arguments.repeats + 1), desc="runs"):
        started = time.perf_counter()
        _engine.generate(llm, prompts)
        seconds.append(time.perf_counter() - started)
    del seconds[0]  # the first run warms up
    summary = {
        "batch": len(prompts),
        "batch_ms": _report.spread(seconds),
        "ms_per_output_step": _report.spread([total / num_steps for total in seconds]),
    }
    _report.show(summary, arguments.json)
    llm.close()
    return 0
