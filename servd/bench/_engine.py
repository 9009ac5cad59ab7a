"""The common parts of offline measurements: flags of the engine, and an LLM made from the flags."""

import argparse
from collections.abc import Sequence
from typing import Any

from servd.api.request.request_output import RequestOutput
from servd.bench import _data, _report
from servd.bench._data import BenchPrompt
from servd.messages.params import SamplingParams
from servd.offline.llm import LLM
from servd.terminal import engine_flags


def add_options(
    parser: argparse.ArgumentParser, batch: int, input_len: int, output_len: int
) -> None:
    """Add a workload and every option of `servd serve`."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    _report.add_options(parser)
    _data.add_options(parser, batch, input_len, output_len)
    engine_flags.add_options(parser)


def make_llm(arguments: argparse.Namespace, **overrides: Any) -> LLM:
    options = engine_flags.load_options(arguments) | overrides
    options.setdefault("enable_prefix_caching", False)
    return LLM(**options)


def generate(
    llm: LLM, prompts: Sequence[BenchPrompt], use_tqdm: bool = False
) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
        for prompt in prompts
    ]
    return llm.generate([prompt.prompt for prompt in prompts], params, use_tqdm=use_tqdm)
