"""Talk to a running server in the terminal."""

import argparse
import contextlib
import importlib
import sys
import time
from typing import Any

from servd.base.errors import ServdError
from servd.terminal import api_client

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation
/help           this text
/exit           leave (also Ctrl-D); Ctrl-C stops an answer"""

DIM = "\033[2m"
PLAIN = "\033[0m"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    api_client.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    client, options = api_client.connect(arguments)
    return talk(client, options, arguments.system)


def talk(client: api_client.Client, options: dict[str, Any], system: str | None) -> int:
    """Chat until the input ends. `options`: the model, and parameters of requests."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() line editing and history
    conversation = Conversation(client, system, options)
    prompt = ""
    if sys.stdin.isatty():
        print(f"{options['model']} at {client.url}; /help lists the commands")
        prompt = "> "
    while True:
        try:
            text = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if text.startswith("/"):
            if not conversation.obey(text):
                return 0
        elif text:
            conversation.ask(text)


class Conversation:
    """A chat in the terminal. Reasoning is shown dimmed and is not part of the history."""

    def __init__(
        self, client: api_client.Client, system: str | None, options: dict[str, Any]
    ) -> None:
        self.client = client
        self.options = options
        self.is_terminal = sys.stdout.isatty()
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def obey(self, command: str) -> bool:
        """Execute a line that begins with a slash. Return False to leave the chat."""
        name, _, argument = command.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.reset(self.system)
            case "/system":
                self.reset(argument or None)
            case _:
                print(HELP)
        return True

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it arrives. Ctrl-C keeps the text so far."""
        self.messages.append({"role": "user", "content": text})
        started = time.monotonic()
        answer = ""
        body = {"messages": self.messages, "stream_options": {"include_usage": True}}
        usage: dict[str, Any] | None = None
        try:
            for chunk in self.client.stream("/v1/chat/completions", body | self.options):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                        self.print(reasoning, dim=True)
                    if content := delta.get("content"):
                        answer += content
                        self.print(content)
        except KeyboardInterrupt:
            self.print(" [stopped]", dim=True)
        except ServdError as error:
            self.messages.pop()
            if not sys.stdin.isatty():  # a script looks at the exit code
                raise
            print(f"error: {error}")
            return
        self.messages.append({"role": "assistant", "content": answer})
        if usage and self.is_terminal:
            seconds = time.monotonic() - started
            rate = usage["completion_tokens"] / seconds
            self.print(f"\n({usage['completion_tokens']} tokens, {rate:.1f} tok/s)", dim=True)
        print()

    def print(self, text: str, dim: bool = False) -> None:
        """Write without a line end, dimmed if the output is a terminal."""
        sys.stdout.write(f"{DIM}{text}{PLAIN}" if dim and self.is_terminal else text)
        sys.stdout.flush()
