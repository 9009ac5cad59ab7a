"""Tokens a second with all requests at once; the engine runs in this process."""

from __future__ import annotations

import argparse
import time

from servd.cli.bench import _data, _engine, _report
from servd.params import SamplingParams


def add_options(parser: argparse.ArgumentParser) -> None:
    _report.add_options(parser)
    _engine.add_options(parser, batch=64, input_len=128, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    llm = _engine.make_llm(arguments)
    prompts = _data.make_prompts(arguments, more=1)
    params = [
        SamplingParams(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
        for prompt in prompts
    ]
    contents = [prompt.content for prompt in prompts]
    llm.generate(contents[:1], params[:1], use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(contents[1:], params[1:])
    seconds = time.perf_counter() - started
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    summary = {
        "requests": len(outputs),
        "seconds": seconds,
        "requests_per_s": len(outputs) / seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / seconds,
    }
    _report.show(summary, arguments.json)
    llm.close()
    return 0
