"""Continue a text with a running server."""

import argparse
import sys

from servd.terminal import api_client


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    api_client.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    client, options = api_client.connect(arguments)
    for chunk in client.stream("/v1/completions", {"prompt": arguments.prompt, **options}):
        for choice in chunk["choices"]:
            sys.stdout.write(choice["text"])
            sys.stdout.flush()
    print()
    return 0
