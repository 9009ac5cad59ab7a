"""The `servd` command: flags derived from Config, errors in one line, exit code 2."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from servd import __version__, plugins
from servd.config import Config, flag_of, read_config_file
from servd.errors import ConfigError, ServdError


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 after a clean stop, 1 when a process died, 2 for an error that
    names its
    remedy."""
    arguments = vars(make_parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        sys.exit(command(arguments))
    except ServdError as error:
        print(f"servd: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def serve(arguments: dict[str, Any]) -> int:
    """`servd serve`: run the server until it is told to stop."""
    import servd.launch  # zmq and the rest are not needed for --help

    return servd.launch.serve(Config.load(load_options(arguments)))


def chat(arguments: dict[str, Any]) -> int:
    """`servd chat`: talk until the end of input."""
    import servd.chat

    return servd.chat.chat(**client_arguments(arguments))


def complete(arguments: dict[str, Any]) -> int:
    """`servd complete`: print one continuation."""
    import servd.chat

    return servd.chat.complete(**client_arguments(arguments))


def bench(arguments: dict[str, Any]) -> int:
    """`servd bench NAME`: run servd/bench/NAME.py."""
    name = arguments["name"]
    try:
        module = importlib.import_module(f"servd.bench.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"servd bench {name} needs {error.name}: pip install 'servd[bench]'"
        ) from None
    parser = Parser(prog=f"servd bench {name}", description=module.__doc__, formatter_class=wide)
    module.add_options(parser)
    return module.run(parser.parse_args(arguments["rest"]))


def run_batch(arguments: dict[str, Any]) -> int:
    """`servd run-batch`: answer a file of requests."""
    import servd.run_batch

    names = ("source", "results", "url", "concurrency")
    own = {name: arguments.pop(name) for name in names}
    return servd.run_batch.run_batch(load_options(arguments), **own)


def client_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters that were given go into `options`, which are sent as they are."""
    sampling = {name: arguments.pop(name) for name in ("temperature", "max_tokens", "seed")}
    return {
        **arguments,
        "options": {name: value for name, value in sampling.items() if value is not None},
    }


def load_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Options of Config from parsed arguments: the command line wins over --config, which wins over
    the defaults.
    """
    config_file = arguments.pop("config", None)
    options = read_config_file(config_file) if config_file else {}
    options.update(arguments)
    if "api_key" not in options and (key := os.environ.get("SERVD_API_KEY")):
        options["api_key"] = [key]
    return options


class Parser(argparse.ArgumentParser):
    """Says what an unknown flag may have meant."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing may be left over, so that the error comes from the command whose flags they would
        have been.
        """
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            near = difflib.get_close_matches(
                unknown[0].partition("=")[0], self._option_string_actions, n=1
            )
            hint = (
                f"did you mean {near[0]}?" if near else f"`{self.prog} --help` says what there is"
            )
            self.error(f"unknown argument {unknown[0]}; {hint}")
        return parsed, unknown


def wide(prog: str) -> argparse.HelpFormatter:
    """Help in two columns, with room for long flags."""
    return argparse.HelpFormatter(prog, max_help_position=34, width=110)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="servd", description="An OpenAI-compatible serving daemon.")
    parser.add_argument("--version", action="version", version=f"servd {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve_parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="servd serve [MODEL] [OPTION ...]",
        allow_abbrev=False,  # a flag that is cut short today means another one tomorrow
        argument_default=argparse.SUPPRESS,
        formatter_class=wide,
    )
    serve_parser.set_defaults(command=serve)
    add_config_options(serve_parser)

    chat_parser = commands.add_parser("chat", help="talk to a running server in the terminal")
    chat_parser.set_defaults(command=chat)
    chat_parser.add_argument("--system", metavar="TEXT", help="system message")
    add_client_options(chat_parser)
    complete_parser = commands.add_parser("complete", help="have a running server continue a text")
    complete_parser.set_defaults(command=complete)
    complete_parser.add_argument("prompt", metavar="PROMPT")
    add_client_options(complete_parser)

    add_batch_parser(commands)
    bench_parser = commands.add_parser(
        "bench", help="measure a server or the engine", usage="servd bench NAME ..."
    )
    bench_parser.set_defaults(command=bench)
    bench_parser.add_argument(
        "name", metavar="NAME", choices=plugins.names("servd.bench"), help="%(choices)s"
    )
    bench_parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="try servd bench NAME --help"
    )
    return parser


def add_batch_parser(commands: Any) -> None:
    """The parser of `servd run-batch`."""
    parser = commands.add_parser(
        "run-batch",
        help="answer the requests of an OpenAI batch file",
        usage="servd run-batch [MODEL] -i IN.jsonl -o OUT.jsonl [OPTION ...]",
        description="Starts a server of its own with the options of `servd serve`, unless --url "
        "names one. Run again "
        "with the same files, it goes on where it stopped.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=wide,
    )
    parser.set_defaults(command=run_batch)
    parser.add_argument(
        "-i", dest="source", metavar="FILE", required=True, help="requests, one per line"
    )
    parser.add_argument(
        "-o", dest="results", metavar="FILE", required=True, help="answers, one per line"
    )
    parser.add_argument(
        "--url", default=None, help="a running OpenAI-compatible server to use instead"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=64,
        metavar="N",
        help="requests at the same time [%(default)s]",
    )
    add_config_options(parser)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that speak to a running server."""
    key = os.environ.get("SERVD_API_KEY")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="any OpenAI-compatible server [%(default)s]"
    )
    parser.add_argument("--api-key", default=key, metavar="KEY", help="default: $SERVD_API_KEY")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 for the most probable tokens; default: the model's",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer; default: the server's",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of Config, grouped by section, and the positional MODEL.

    Values stay strings here; Config.load converts and checks them. Options not given are absent
    from the result.
    """
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="options from a .toml, .yaml or .json file; flags win over it",
    )
    for section in msgspec.structs.fields(Config):
        title = (section.type.__doc__ or "").splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(section.type, include_extras=True)
        for option in msgspec.structs.fields(section.type):
            kind, description = describe(hints[option.name])
            description = description.replace("%", "%%")
            if option.name == "model":
                group.add_argument("model", nargs="?", metavar="MODEL", help=description)
                continue
            if option.default not in (msgspec.NODEFAULT, None, False):
                description += f" [{'on' if option.default is True else option.default}]"
            group.add_argument(
                flag_of(option.name), help=description, **argument_style(kind, option.name)
            )


def describe(hint: Any) -> tuple[Any, str]:
    """Plain type and description of an annotated field: `Annotated[Positive | None, Meta(...)]` ->
    (int, text).
    """
    description = ""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint, *metas = typing.get_args(hint)
            description = description or next((m.description for m in metas if m.description), "")
        elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        else:
            return hint, description


def argument_style(kind: Any, name: str) -> dict[str, Any]:
    """argparse settings for a plain type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    metavar = {int: "N", float: "X"}.get(kind, name.rpartition("_")[2].upper())
    if (
        name == "api_key"
    ):  # one at a time: "--api-key KEY MODEL" must not take MODEL for a second key
        return {"action": "append", "metavar": metavar}
    if typing.get_origin(kind) is list:
        return {"nargs": "+", "action": "extend", "metavar": metavar}
    return {"metavar": "SIZE" if name == "kv_cache_memory" else metavar}
