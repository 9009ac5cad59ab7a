"""What the offline measurements share: flags of the engine, and an LLM made of them."""

from __future__ import annotations

import argparse
from typing import Any

from servd.cli import _options
from servd.cli.bench import _data
from servd.llm import LLM


def add_options(
    parser: argparse.ArgumentParser, batch: int, input_len: int, output_len: int
) -> None:
    """A workload and every option of `servd serve`."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    _data.add_options(parser, batch, input_len, output_len)
    _options.add_options(parser)


def make_llm(arguments: argparse.Namespace, **overrides: Any) -> LLM:
    options = _options.load_options(arguments) | overrides
    options.setdefault("enable_prefix_caching", False)
    return LLM(**options)
