"""Download a model of the hub, or resume a download."""

import argparse

from servd.base import log
from servd.checkpoint import hub
from servd.checkpoint.short_names import full_name


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="id or short name, such as qwen3:0.6b")
    parser.add_argument("--cache", metavar="DIR", help="folder to use as a Hugging Face cache")


def run(arguments: argparse.Namespace) -> int:
    folder = hub.download_weights(full_name(arguments.model), download_dir=arguments.cache)
    print(log.escape(str(folder)))
    return 0
