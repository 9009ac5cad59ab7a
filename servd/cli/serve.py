"""Serve a model over HTTP."""

import argparse
import logging

from servd.config import Config
from servd.terminal import engine_flags

log = logging.getLogger("servd.launch")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option of Config."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    import servd.launch  # --help needs none of it

    if "api_key" in arguments:
        log.warning(
            "--api-key: every user of this machine can read a command line; give the key in "
            "$SERVD_API_KEY or --config, or its hash in --api-key-file"
        )
    return servd.launch.run_server(lambda: Config.load(engine_flags.load_options(arguments)))
