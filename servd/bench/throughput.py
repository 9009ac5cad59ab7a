"""Measure tokens per second with all requests at once. The engine runs in this process."""

import argparse
import time

from servd.bench import _data, _engine, _report


def add_options(parser: argparse.ArgumentParser) -> None:
    _engine.add_options(parser, batch=64, input_len=128, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    llm = _engine.make_llm(arguments)
    prompts = _data.make_prompts(arguments, more=1)
    _engine.generate(llm, prompts[:1])
    started = time.perf_counter()
    outputs = _engine.generate(llm, prompts[1:], use_tqdm=True)
    seconds = time.perf_counter() - started
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    rates = _report.rates(len(outputs), num_prompt_tokens, num_output_tokens, seconds)
    _report.show({"requests": len(outputs), "seconds": seconds, **rates}, arguments.json)
    llm.close()
    return 0
