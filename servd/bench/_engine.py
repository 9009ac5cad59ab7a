"""What the offline measurements share: flags of the engine, and an LLM made of them."""

from __future__ import annotations

import argparse

from servd.bench import _data
from servd.cli import add_config_options, load_options
from servd.config import options_by_name
from servd.llm import LLM


def add_options(
    parser: argparse.ArgumentParser, batch: int, input_len: int, output_len: int
) -> None:
    """A workload and every option of `servd serve`."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    _data.add_options(parser, batch, input_len, output_len)
    parser.argument_default = argparse.SUPPRESS
    add_config_options(parser)


def make_llm(arguments: argparse.Namespace) -> LLM:
    """The engine in this process. Prefix caching is off unless asked for: repeated prompts must be
    computed.
    """
    names = {*options_by_name(), "config"}
    options = load_options(
        {name: value for name, value in vars(arguments).items() if name in names}
    )
    options.setdefault("enable_prefix_caching", False)
    return LLM(**options)
