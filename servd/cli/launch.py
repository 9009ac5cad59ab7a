"""Run a coding agent with a model of yours: it needs no settings."""

import argparse
import secrets
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from servd.base.errors import ServdError
from servd.cli.run import choose
from servd.terminal import agents, engine_flags
from servd.terminal.api_client import DEFAULT_URL, Client
from servd.terminal.server_process import find_model, key_of, own_server
from servd.terminal.waiting import spinner

TAKES_REST = True  # the words after `--`, see `servd.cli.Command`
MAX_OUTPUT = 32_000  # tokens
UNKNOWN_CONTEXT = 32_768  # tokens, of a server that does not state it


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `servd serve`, for a server of its own."""
    parser.usage = "%(prog)s AGENT [MODEL] [OPTION ...] [-- ARGUMENT ...]"
    parser.epilog = "The agent gets the arguments after `--`."
    parser.add_argument(
        "agent", metavar="AGENT", choices=agents.NAMES, help=", ".join(agents.NAMES)
    )
    parser.add_argument("--url", help=f"a server to use instead [{DEFAULT_URL}]")
    parser.set_defaults(rest=[])
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the agent with a running server that has the model, else with a server of its own.
    Raises ServdError if the agent is not installed, or the server of --url lacks the model.
    """
    agent = agents.Agent.load(arguments.agent)
    options = engine_flags.load_options(arguments)
    key = key_of(options) if arguments.url else None  # none for a server that nobody named
    client = Client(arguments.url or DEFAULT_URL, key)
    model = None
    if arguments.url or options.keys() <= {"model", "api_key"}:  # others are of a server to start
        model = find_model(client, options)
    if model is None and arguments.url:
        names = [card["id"] for card in client.get("/v1/models")["data"]]
        raise ServdError(f"{client.url} has no model {options.get('model')}, only {names}")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="servd-"))
        if model is None:
            if options.get("executor") != "fake":  # which has no weights to fit
                with spinner("looking at the model and the memory"):
                    options, choice = choose(options)
                print(choice, file=sys.stderr)
            # Other users of this machine reach the port, too.
            options.setdefault("api_key", [secrets.token_urlsafe()])
            key = key_of(options)
            client = stack.enter_context(own_server(options, on_tcp=True))()
            model = client.get("/v1/models")["data"][0]
        context = model.get("max_model_len") or UNKNOWN_CONTEXT
        if context < agent.min_context:
            text = f"{agent.title} needs about {agent.min_context} tokens of context"
            print(f"warning: {text}, and {model['id']} has {context}", file=sys.stderr)
        output = min(MAX_OUTPUT, context // 8)
        values: dict[str, Any] = {"url": client.url, "key": key or "none", "model": model["id"]}
        values |= {"context": context, "output": output, "compact": context - output}
        return agent.run(values | {"folder": folder}, arguments.rest)
