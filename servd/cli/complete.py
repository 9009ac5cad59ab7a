"""Continue a text with a running server."""

from __future__ import annotations

import argparse
import sys

from servd.cli import _client


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    _client.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    client, options = _client.connect(arguments)
    for chunk in client.stream("/v1/completions", {"prompt": arguments.prompt, **options}):
        for choice in chunk["choices"]:
            sys.stdout.write(choice["text"])
            sys.stdout.flush()
    print()
    return 0
