"""`servd chat` and `servd complete`: a terminal client with streaming, for any OpenAI-compatible
server.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from servd.errors import ServdError

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation
/help           this text
/exit           leave (also Ctrl-D); Ctrl-C stops an answer"""

DIM, PLAIN = "\033[2m", "\033[0m"


class Client:
    """Speaks to one server.

    Args:
        url: of the server, with or without /v1.
        api_key: sent as bearer token, if given.
        model: None: the first that the server lists.

    Raises:
        ServdError: the server does not answer or answers with an error.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self.model: str = model or self.request("/v1/models")["data"][0]["id"]

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Open a route; POST if there is a body."""
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode() if body else None, headers
        )
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise ServdError(f"{self.url}{path}: {message_of(error)}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            raise ServdError(
                f"no server answers at {self.url} ({reason}); start one with `servd serve`"
            ) from None

    def request(self, path: str) -> Any:
        """The JSON reply of a GET."""
        with self.open(path) as reply:
            return json.load(reply)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer.

        Raises:
            ServdError: the request is refused, or the stream reports an error.
        """
        with self.open(path, {"model": self.model, **body, "stream": True}) as reply:
            for line in reply:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServdError(chunk["error"]["message"])
                yield chunk


def message_of(error: urllib.error.HTTPError) -> str:
    """The server's own words, if it has any."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.load(error)["error"]["message"]
    return f"{error.code} {error.reason}"


class Conversation:
    """A chat in the terminal. Reasoning is shown dimmed and is not part of the history."""

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self.client = client
        self.options = options
        self.is_terminal = sys.stdout.isatty()
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Begin anew."""
        self.system = system
        self.messages: list[dict[str, str]] = (
            [{"role": "system", "content": system}] if system else []
        )

    def obey(self, command: str) -> bool:
        """Carry out a line that begins with a slash; False: leave."""
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
        """Send a message and print the answer as it comes; Ctrl-C keeps what has come."""
        self.messages.append({"role": "user", "content": text})
        started, answer = time.monotonic(), ""
        body = {
            "messages": self.messages,
            **self.options,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, Any] | None = None
        try:
            for chunk in self.client.stream("/v1/chat/completions", body):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        self.print(thought, dim=True)
                    if content := delta.get("content"):
                        answer += content
                        self.print(content)
        except KeyboardInterrupt:
            self.print(" [stopped]", dim=True)
        except ServdError as error:
            self.messages.pop()
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


def chat(
    url: str, api_key: str | None, model: str | None, system: str | None, options: dict[str, Any]
) -> int:
    """Talk until /exit or the end of input; returns the exit code."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() line editing and history

    conversation = Conversation(Client(url, api_key, model), system, options)
    prompt = ""
    if sys.stdin.isatty():
        print(f"{conversation.client.model} at {conversation.client.url}; /help lists the commands")
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


def complete(
    url: str, api_key: str | None, model: str | None, prompt: str, options: dict[str, Any]
) -> int:
    """Print the continuation of one prompt as it comes; returns the exit code."""
    for chunk in Client(url, api_key, model).stream(
        "/v1/completions", {"prompt": prompt, **options}
    ):
        for choice in chunk["choices"]:
            sys.stdout.write(choice["text"])
            sys.stdout.flush()
    print()
    return 0
