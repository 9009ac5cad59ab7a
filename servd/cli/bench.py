"""Measure a server or the engine."""

import argparse

from servd.cli import add_commands


def add_options(parser: argparse.ArgumentParser) -> None:
    add_commands(parser, "servd.bench")
