"""The `servd` command: one file per subcommand, errors in one line, exit codes."""

import argparse
import errno
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from servd import __version__
from servd.base import compat, log, plugins
from servd.base.errors import ConfigError, ServdError
from servd.terminal.output import HELP, suggest


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 after a clean stop, 1 if a process died, 2 for a ServdError."""
    open_standard_files()
    try:
        check_encoding(sys.argv[1:] if argv is None else argv)
        arguments = make_parser().parse_args(argv)
        code = arguments.run(arguments)
        sys.stdout.flush()
        sys.exit(code)
    except ServdError as error:
        log.exit_with(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever reads it has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        print(f"servd: error: {str(error.filename)[:80]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def check_encoding(words: Sequence[str]) -> None:
    """Raise ConfigError for a word that is not UTF-8, as the processes exchange text."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{ascii(word)} is not UTF-8: rename it, or fix its encoding"
            ) from None


def open_standard_files() -> None:
    """Open what is closed of stdin, stdout and stderr, or sockets would take their descriptors."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # It takes the lowest free descriptor. Children need it as well.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(descriptor, mode, closefd=False, encoding="utf8"))


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="servd",
        usage="%(prog)s [--version] COMMAND ...",
        description="An OpenAI-compatible serving daemon.",
        epilog="`servd COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    help = "with --version: all that a bug report needs"
    parser.add_argument("--verbose", action="store_true", help=help)
    parser.set_defaults(run=show_version)
    add_commands(parser, __name__)
    for title, names in HELP["groups"].items():
        rows = [f"{name:<12}{docstring(f'{__name__}.{name}')}" for name in names]
        parser.add_argument_group(title, "\n".join(rows))
    return parser


def show_version(arguments: argparse.Namespace) -> int:
    """Print the version; without --version, the help."""
    if not arguments.version:
        make_parser().print_help(sys.stderr)
        return 2
    if not arguments.verbose:
        print(f"servd {__version__}")
        return 0
    from servd.terminal.installation import describe_installation

    print(describe_installation())
    return 0


def add_commands(parser: argparse.ArgumentParser, package: str) -> None:
    """Add each file of `package` as a command: the file's docstring is the help,
    `add_options(parser)` adds the flags, `run(arguments)` does the work and returns the exit code.
    """
    is_grouped = parser.usage is not None
    commands = parser.add_subparsers(
        metavar="COMMAND",
        required=not is_grouped,
        prog=parser.prog,
        parser_class=Command,
        help=argparse.SUPPRESS if is_grouped else None,
    )
    for name in plugins.names(package):
        purpose = docstring(f"{package}.{name}")
        style: dict[str, Any] = {} if is_grouped else {"help": purpose}
        module = f"{package}.{name}"
        commands.add_parser(name.replace("_", "-"), module=module, description=purpose, **style)


def docstring(module: str) -> str:
    """Return the first paragraph of a module's docstring, without importing the module."""
    spec = importlib.util.find_spec(module.replace("-", "_"))
    assert spec is not None and spec.origin is not None, module
    text = Path(spec.origin).read_text(encoding="utf8").split('"""')[1]
    return " ".join(text.split("\n\n")[0].split())


class CommandParser(compat.ArgumentParser):
    """A parser that suggests the intended flag for an unknown flag."""

    def __init__(self, **options: Any) -> None:
        # A flag abbreviated today could mean another flag tomorrow.
        super().__init__(**{"formatter_class": wide, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2. Of a wrong choice, name the most similar right one."""
        match = re.fullmatch(
            r"argument (.+): invalid choice: '(.*?)' \(choose from (.+)\)", message
        )
        if match:
            choices = re.findall(r"[^\s',]+", match[3])
            message = f"{match[1]}: {match[2]!r} is unknown; {suggest(match[2], choices)}"
        super().error(message)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse all arguments, so that an error comes from the command that was meant."""
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            from servd.config.flag_aliases import hint

            known_flags = self.flags
            listed = f"`{self.prog} --help` lists them"
            flags = [argument for argument in unknown if argument.startswith("-")] or unknown[:1]
            self.error(
                "\n".join(
                    f"unknown argument {flag}; {hint(flag, known_flags, listed)}" for flag in flags
                )
            )
        return parsed, unknown

    def is_whole(self, flag: str) -> bool:
        """Return whether a flag is another server's: `-ngl 99` is not `-n gl`."""
        from servd.config.flag_aliases import HINTS

        return flag in HINTS


class Command(CommandParser):
    """A parser of one command, which imports the command's module only to run the command."""

    def __init__(self, module: str, **options: Any) -> None:
        super().__init__(**options)
        self.module = module

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Add the options of the command's module, then parse."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{self.prog} needs a package: pip install {error.name}") from None
        module.add_options(self)
        if args and args[0]:  # `--max_model_len`, as vLLM takes it, too
            words = [*args[0]]
            if "--" in words and getattr(module, "TAKES_REST", False):
                border = words.index("--")
                self.set_defaults(rest=words[border + 1 :])
                words = words[:border]
            args = ([with_dashes(word) for word in words], *args[1:])
        if run := getattr(module, "run", None):  # a package of commands has none of its own
            self.set_defaults(run=run)
        return super().parse_known_args(*args, **kwargs)


def with_dashes(word: str) -> str:
    """Return a flag with dashes in its name. Other words are unchanged."""
    flag, equals, value = word.partition("=")
    is_flag = re.fullmatch(r"--\w[\w-]*(\.\w+)*", flag)
    return flag.replace("_", "-") + equals + value if is_flag else word


def wide(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=34, width=100)
