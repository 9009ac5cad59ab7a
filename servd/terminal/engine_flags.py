"""Flags of commands that start an engine, derived from Config; also files and environment."""

import argparse
import json
import math
import os
import tomllib
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from servd.base.errors import ConfigError
from servd.config import SIZES, Config, choices, descriptions, flag_of, options_by_name, title_of
from servd.config._section import plain
from servd.config.flag_aliases import ALIASES, IGNORED, OTHER_FLAGS, VALUE_ALIASES
from servd.terminal.output import HELP

COMMON = set(HELP["common"])  # options of `servd serve --help`; `--help-all` shows every option


class HelpAll(argparse.Action):
    """A flag that prints the help with hidden options. `hidden`: their actions and help texts."""

    def __init__(self, *, hidden: list[tuple[argparse.Action, str | None]], **options: Any) -> None:
        super().__init__(nargs=0, **options)
        self.hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action, text in self.hidden:
            action.help = text
        parser.print_help()
        parser.exit()


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return the `type` of an argument that must be above 0."""

    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return value

    read.__name__ = kind.__name__  # in errors
    return read


def add_options(parser: argparse.ArgumentParser, devices: Sequence[str] = ()) -> None:
    """Add a flag for every field of Config, grouped by section, and the positional MODEL.

    Values stay strings here; Config.load converts and checks them. Options not given are absent
    from the result: an argument that you add to the parser later needs an explicit default.
    `devices`: values of --device that the command knows besides.
    """
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="options from a .toml, .yaml or .json file; flags win over it",
    )
    hidden: list[tuple[argparse.Action, str | None]] = []
    for section in msgspec.structs.fields(Config):
        group = parser.add_argument_group(title_of(section.type))
        for option in msgspec.structs.fields(section.type):
            action = add_option(group, option.name)
            if option.name == "device" and devices:
                action.choices = [*(action.choices or ()), *devices]
                action.metavar = f"{{{','.join(action.choices)}}}"
            if option.name not in COMMON:
                hidden.append((action, action.help))
                action.help = argparse.SUPPRESS
    parser.add_argument("--help-all", action=HelpAll, hidden=hidden, help="show every option")
    add_needless(parser)


def add_needless(parser: argparse.ArgumentParser) -> None:
    """Add other servers' flags without effect, hidden in --help; see `Config.load`."""
    for name in IGNORED:
        style: dict[str, Any] = {} if name.endswith("=") else {"const": "", "action": "store_const"}
        name = name.removesuffix("=")
        parser.add_argument(flag_of(name), dest=name, help=argparse.SUPPRESS, **style)


def add_option(group: Any, name: str) -> argparse.Action:
    """Add the flag of an option of Config, with its aliases."""
    _, option = options_by_name()[name]
    kind, _ = plain(option.type)
    description = descriptions()[name].replace("%", "%%")
    if name == "model":
        group.add_argument("--model", "--model-path", dest=name, help=argparse.SUPPRESS)
        return group.add_argument("model", nargs="?", metavar="MODEL", help=description)
    if option.default not in (msgspec.NODEFAULT, None, False):
        description += f" [{'on' if option.default is True else option.default}]"
    flags = OTHER_FLAGS.get(name, []) + [flag_of(name)]
    style = argument_style(kind, name)
    action = group.add_argument(*flags, dest=name, help=description, **style)
    aliases = [flag_of(other) for other, same in ALIASES.items() if same == name]
    if hidden := [flag for flag in aliases if flag not in flags]:
        group.add_argument(*hidden, dest=name, help=argparse.SUPPRESS, **style)
    return action


def load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return options of Config from parsed arguments. The command line overrides --config, which
    overrides the environment. Raises ConfigError like `read_config_file`.
    """
    flags = vars(arguments)
    options = read_config_file(flags["config"]) if "config" in flags else {}
    names = [*options_by_name(), *(name.removesuffix("=") for name in IGNORED)]
    options |= {name: flags[name] for name in names if name in flags}
    key = os.environ.get("SERVD_API_KEY") or os.environ.get("VLLM_API_KEY")
    if key and "api_key" not in options:
        options["api_key"] = [key]
    return options


def read_config_file(path: str) -> dict[str, Any]:
    """Return options from a .toml, .yaml or .json file. Keys are flag names with dashes or
    underscores. Raises ConfigError if the file is missing, unreadable, or not a flat table.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf8")
        match file.suffix:
            case ".toml":
                options = tomllib.loads(text)
            case ".json":
                options = json.loads(text)
            case ".yaml" | ".yml":
                options = msgspec.yaml.decode(text.encode())
                json.dumps(options, skipkeys=True, default=str)  # an anchor may contain itself
            case _:
                raise ConfigError(f"--config {path}: the name must end in .toml, .yaml or .json")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: nested too deeply") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: must be a table of options")
    return {str(name).replace("-", "_"): value for name, value in options.items()}


def argument_style(kind: Any, name: str) -> dict[str, Any]:
    """Return argparse settings for a plain type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        same = VALUE_ALIASES.get(name, {})
        form = f"{{{','.join(typing.get_args(kind))}}}"
        return {"choices": [*typing.get_args(kind), *same], "metavar": form}
    if values := choices(options_by_name()[name][1].type):
        return {"metavar": f"{{{','.join(values)}}}"}  # or "module:attribute", checked later
    metavar = {int: "N", float: "X"}.get(kind, name.rpartition("_")[2].upper())
    if name == "api_key":  # "--api-key KEY MODEL" must not take MODEL for a second key
        return {"action": "append", "metavar": metavar}
    if typing.get_origin(kind) is list:
        return {"nargs": "+", "action": "extend", "metavar": metavar}
    return {"metavar": "SIZE" if name in SIZES else metavar}
