"""Chat with a model: serve it until you leave, quantized to fit."""

import argparse
import sys
from typing import Any

from servd.base.errors import NotEnoughMemory
from servd.base.sizes import format_bytes
from servd.cli import chat, plan
from servd.config import Config
from servd.terminal import engine_flags
from servd.terminal.api_client import DEFAULT_URL, Client
from servd.terminal.server_process import find_model, key_of, own_server
from servd.terminal.waiting import keep_keys, spinner


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `servd serve`, for a server of its own."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    parser.add_argument("--url", help=f"a server to use instead [{DEFAULT_URL}]")
    parser.add_argument("--system", metavar="TEXT", default=None, help="system message")
    engine_flags.add_options(parser)


@keep_keys()
def run(arguments: argparse.Namespace) -> int:
    """Chat with a running server that has the model, else with a server of its own."""
    options = engine_flags.load_options(arguments)
    key = key_of(options) if arguments.url else None  # none for a server that nobody named
    client = Client(arguments.url or DEFAULT_URL, key)
    model = find_model(client, options) if "model" in options else None
    if model is not None:
        return chat.talk(client, {"model": model["id"]}, arguments.system)
    with spinner("looking at the model and the memory"):
        options, choice = choose(options)
    print(choice, file=sys.stderr)
    with own_server(options) as connect:
        client = connect()
        return chat.talk(client, {"model": client.first_model()}, arguments.system)


def choose(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return options with a quantization that fits, and a line about it. Raises NotEnoughMemory."""
    report = plan.make_report(Config.load(options))
    kinds = [] if report.quantization else ["int8", "int4"]
    while not report.plan.num_blocks and kinds:
        options = options | {"quantization": kinds.pop(0)}
        report = plan.make_report(Config.load(options))
    kind = report.quantization or report.plan.dtype
    name = report.config.model.model
    size, free = (format_bytes(n) for n in (report.plan.sizes.weights, report.plan.free))
    if not report.plan.num_blocks:
        raise NotEnoughMemory(
            f"{name} takes {size} as {kind}, and {free} of memory are free; try: "
            + "; ".join(report.advice())
        )
    length = report.max_model_len
    return options, f"{name}: {kind}, {length} tokens of context, {size} of {free} free"
