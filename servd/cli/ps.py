"""List the models that a running server has loaded."""

import argparse

from servd.base import log
from servd.base.sizes import format_bytes
from servd.terminal import api_client


def add_options(parser: argparse.ArgumentParser) -> None:
    api_client.add_server_options(parser)


def run(arguments: argparse.Namespace) -> int:
    client = api_client.Client(arguments.url, arguments.api_key)
    for model in client.get("/api/ps")["models"]:
        size = format_bytes(model["size"])
        print(f"{log.escape(model['name']):<44}{size:>10}{model['context_length']:>9} tokens")
    return 0
