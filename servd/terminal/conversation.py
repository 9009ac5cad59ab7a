"""Conversation: a chat with a server, its slash commands, its settings and its files."""

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from servd.base import log
from servd.base.errors import ContextTooLong, ServdError
from servd.terminal.api_client import Client
from servd.terminal.output import HELP, suggest, write_file, write_json

CHATS = "/v1/chat/completions"
COMMANDS: dict[str, str] = HELP["chat"]  # with their arguments, and what they do
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
NUMBERS += ("repetition_penalty",)
COUNTS = ("max_tokens", "seed", "top_k")
NAMES = [*dict.fromkeys(usage.split()[0] for usage in COMMANDS)]
SWITCHES = {"on": True, "off": False}
SETTINGS = [*NUMBERS, *COUNTS, "system", "think"]
MAX_PICTURE = 20 << 20  # bytes, as servers read
MAX_TOKENS = 4096  # of an answer, or half of the context: a small model may not find an end

Show = Callable[[str, bool | None], None]
"""Shows a piece of an answer, and whether it is reasoning. None: a note until the next piece."""


class ChatTurn(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]  # a list: with pictures


class Saved(msgspec.Struct):
    messages: list[ChatTurn]


def write(text: str, is_reasoning: bool | None) -> None:
    if is_reasoning is not None:
        print(log.escape(text.replace("\r", ""), "\n\t"), end="", flush=True)


def expand(path: str) -> Path:
    if not path:
        raise ServdError("name a file after the command")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # of a user who does not exist
        raise ServdError(f"{path}: {error}") from None


def picture_part(path: str) -> dict[str, Any]:
    """Return the part of a picture: of a file, or at an address that the server may fetch. Raises
    ServdError.
    """
    if path.startswith(("https:", "data:")):
        return {"type": "image_url", "image_url": {"url": path}}
    file = expand(path)
    try:
        size = file.stat().st_size
        if size > MAX_PICTURE:
            raise ServdError(f"{path} has {size} bytes, a picture at most {MAX_PICTURE}")
        data = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise ServdError(f"{path}: {error.strerror}") from None
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return a message's content with a word in place of each picture."""
    if isinstance(content, str):
        return content
    return "\n\n".join(part.get("text", "[picture]") for part in content)


class Conversation:
    """A chat in the terminal. Reasoning is shown, and is not part of the history. `options`: the
    model and parameters of requests. Methods raise ServdError.
    """

    # Shows an answer; None: as it is.
    open_answer: Callable[[], AbstractContextManager[Show]] | None = None

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self.client = client
        self.options = options
        self.pictures: list[dict[str, Any]] = []  # parts of the next message
        self.reset(system)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The longest answer, and the model's sampling parameters if the server lists them."""
        model = self.options["model"]
        try:
            card = next(c for c in self.client.get("/v1/models")["data"] if c["id"] == model)
            max_tokens = min(MAX_TOKENS, card["max_model_len"] // 2)
            return {"max_tokens": max_tokens} | card.get("default_parameters", {})
        except (ServdError, LookupError, ValueError, TypeError, StopIteration):
            return {"max_tokens": MAX_TOKENS}  # another kind of server

    def reset(self, system: str | None) -> None:
        self.system = system
        self.pictures = []
        self.messages: list[dict[str, Any]] = (
            [{"role": "system", "content": system}] if system else []
        )

    def obey(self, line: str) -> bool:
        """Execute a line that begins with a slash. Return False to leave the chat."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                print("\n".join(f"{usage:<16}{text}" for usage, text in COMMANDS.items()))
            case "/reset":
                self.reset(self.system)
            case "/system":
                self.reset(argument or None)
            case "/image":
                self.pictures.append(picture_part(argument))
                print(f"{len(self.pictures)} in the next message")
            case "/set":
                self.set(argument)
            case "/save":
                self.save(expand(argument))
            case "/load":
                self.load(expand(argument))
            case "/regenerate":
                if self.messages and self.messages[-1]["role"] == "assistant":
                    self.answer(self.messages[:-1])
            case _:
                print(f"{name} is unknown; {suggest(name, NAMES)}")
        return True

    def ask(self, text: str) -> None:
        content = [*self.pictures, {"type": "text", "text": text}] if self.pictures else text
        self.answer([*self.messages, {"role": "user", "content": content}])
        self.pictures = []

    def answer(self, messages: list[dict[str, Any]]) -> None:
        """Get and show the next message of a conversation. Ctrl-C keeps the text so far."""
        started = time.monotonic()
        content = ""
        usage: dict[str, Any] = {}
        ending = ""
        with self.open_answer() if self.open_answer else nullcontext(write) as show:
            try:
                for chunk in self.stream(messages):
                    usage = chunk.get("usage") or usage
                    if progress := chunk.get("prompt_progress"):
                        share = progress["processed"] / max(progress["total"], 1)
                        show(f"reading the prompt: {share:.0%}", None)
                    for choice in chunk["choices"]:
                        delta = choice["delta"]
                        if choice.get("finish_reason") == "length":
                            ending = ", cut off: see /set max_tokens"
                        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                            show(reasoning, True)
                        if text := delta.get("content"):
                            content += text
                            show(text, False)
            except KeyboardInterrupt:
                show("[stopped]", True)
            if self.open_answer is None:
                print()
            elif usage:
                rate = usage["completion_tokens"] / (time.monotonic() - started)
                show(f"({usage['completion_tokens']} tokens, {rate:.1f} tok/s{ending})", True)
        self.messages = [*messages, {"role": "assistant", "content": content}]

    def stream(self, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer."""
        body = {"messages": messages, "stream_options": {"include_usage": True}} | self.options
        body["return_progress"] = True
        limit = {"max_tokens": self.defaults["max_tokens"]}
        try:
            yield from self.client.stream(CHATS, limit | body)
        except ContextTooLong:
            if "max_tokens" in body:
                raise
            yield from self.client.stream(CHATS, body)  # to the end of the context: it is near

    def set(self, argument: str) -> None:
        """Change a setting, or print all."""
        name, _, value = argument.partition(" ")
        if not name:
            chosen = self.options | ({"system": self.system} if self.system else {})
            settings = dict.fromkeys(SETTINGS, "as the server has it") | self.defaults
            for key, value in (settings | {"seed": "random", "system": "none"} | chosen).items():
                print(f"{key} = {value}{'' if key in chosen else ' (default)'}")
        elif name not in SETTINGS:
            raise ServdError(f"/set {name}: unknown; {suggest(name, SETTINGS)}")
        elif name == "system":  # as `reset`, with the conversation
            later = [message for message in self.messages if message["role"] != "system"]
            self.reset(value or None)
            self.messages += later
        elif not value:
            self.options.pop("chat_template_kwargs" if name == "think" else name, None)
        elif name == "think":
            if value not in SWITCHES:
                raise ServdError(f"/set think {value}: must be on or off")
            kwargs = dict.fromkeys(("enable_thinking", "thinking"), SWITCHES[value])
            self.options["chat_template_kwargs"] = kwargs
        else:
            try:
                self.options[name] = float(value) if name in NUMBERS else int(value)
            except ValueError:
                raise ServdError(f"/set {name} {value}: must be a number") from None

    def save(self, file: Path) -> None:
        if file.suffix == ".md":
            parts = [
                f"## {message['role'].capitalize()}\n\n{text_of(message['content'])}\n"
                for message in self.messages
            ]
            write_file("/save", file, "\n".join(parts).encode())
        else:  # a body for /v1/chat/completions
            write_json("/save", file, self.options | {"messages": self.messages})
        print(f"{file} has {len(self.messages)} messages")

    def load(self, file: Path) -> None:
        try:
            saved = msgspec.json.decode(file.read_bytes(), type=Saved)
        except OSError as error:
            raise ServdError(f"/load {file}: {error.strerror}") from None
        except ValueError as error:  # not JSON, not UTF-8, or of another shape
            raise ServdError(f"/load {file}: {error}") from None
        self.messages = msgspec.to_builtins(saved.messages)
        self.system = next((m["content"] for m in self.messages if m["role"] == "system"), None)
