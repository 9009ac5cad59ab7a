"""Talk to a running server in the terminal."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from servd.base import log
from servd.base.errors import ServdError
from servd.terminal import api_client
from servd.terminal.conversation import NAMES, SETTINGS, Conversation, picture_part
from servd.terminal.waiting import keep_keys


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="picture in the first message; repeat for more",
    )
    api_client.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    client, options = api_client.connect(arguments)
    return talk(client, options, arguments.system, arguments.image)


@keep_keys()
def talk(
    client: api_client.Client,
    options: dict[str, Any],
    system: str | None,
    images: Sequence[str] = (),
) -> int:
    """Chat until the input ends. `options`: the model, and parameters of requests. Raises
    ServdError if input or output is no terminal: a script looks at the exit code.
    """
    conversation = Conversation(client, system, options)
    conversation.pictures = [picture_part(image) for image in images]
    read = read_line
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        # A parent may ignore it, as a script does for what it starts in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from servd.terminal.markdown import show_markdown
        from servd.terminal.prompt import TerminalPrompt

        conversation.open_answer = show_markdown
        read = TerminalPrompt([*NAMES, *(f"/set {name}" for name in SETTINGS)]).read
        name = str(options["model"]) + (f" at {client.url}" if client.url else "")
        print(f"{log.escape(name)}; /help lists the commands, Ctrl-D leaves")
    while (text := read()) is not None:
        try:
            if text.startswith("/"):
                if not conversation.obey(text):
                    break
            elif text:
                conversation.ask(text)
        except ServdError as error:
            if not is_terminal:
                raise
            print(f"error: {log.escape(str(error))}")
    return 0


def read_line() -> str | None:
    """Return a line of the input; None at its end."""
    try:
        return input().strip()
    except (EOFError, KeyboardInterrupt):
        return None
