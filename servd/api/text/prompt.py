"""Prompt: text, token ids, a chat or a pair of texts, independent of the API that received it."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Detail = Literal["auto", "low", "high"]  # of a picture: low has fewer tokens
DETAILS = ("auto", "low", "high")
PICTURE = "image_url"  # type of a part of a message
NOTE = "[image: not available here]"  # what a text model reads in its place
OBJECT_SIZE = 64  # fixed cost of a message, in characters
MANY = 1 << 16  # characters at which counting a chat stops


class TextGrammar(msgspec.Struct, frozen=True):
    """The grammar of a custom tool's text: Lark, or a regular expression in Rust's syntax."""

    syntax: Literal["lark", "regex"]
    definition: str


class ToolOptions(msgspec.Struct, frozen=True):
    """The tools of a request, in OpenAI's format, and those that the model may or must call."""

    tools: list[dict[str, Any]]  # shown to the model
    forced: list[dict[str, Any]] = []  # one of these must be called
    parallel: bool = True  # else only the first call counts
    # The functions that stand for custom tools: their only argument is the tool's text.
    custom: Mapping[str, TextGrammar | None] = {}


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    # As in the OpenAI API; the content may be a string, null, or a list of text parts.
    messages: list[dict[str, Any]]
    tool_options: ToolOptions | None = None  # None: the model sees no tools
    add_generation_prompt: bool = True  # end with the beginning of an assistant message
    continue_final_message: bool = False  # end inside the last message, which the model continues
    chat_template_kwargs: dict[str, Any] = {}  # variables for the template: enable_thinking, ...

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return self.tool_options.tools if self.tool_options else None


class Picture(msgspec.Struct, frozen=True):
    """A picture of a chat as the client sent it."""

    url: str | None  # data:, https: or file:; None: the picture that was sent with this uuid
    detail: Detail = "auto"
    uuid: str | None = None  # the client's name for it


def picture_part(url: str, detail: str | None = None, *, is_noted: bool = False) -> dict[str, Any]:
    """Return a part of a message. `is_noted`: a text model gets a note in its place."""
    part: dict[str, Any] = {"type": PICTURE, PICTURE: {"url": url, "detail": detail or "auto"}}
    return part | {"is_noted": True} if is_noted else part


class SharedText(msgspec.Struct):
    """The first text of many pairs, tokenised only once."""

    text: str
    token_ids: list[int] | None = None  # None: not yet


class Pair(msgspec.Struct, frozen=True):
    """Two texts that the model scores together. Each text may be truncated."""

    first: SharedText
    second: str
    keep_first: int | None = None
    keep_second: int | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    content: str | list[int] | Chat | Pair
    param: str = "prompt"  # the field of the request that holds it, for errors
    add_special_tokens: bool = True  # e.g. BOS
    may_fill_context: bool = False  # a larger `max_tokens` means up to its end
    suffix: str | None = None  # text that follows the generated text
    keep_first: int | None = None  # tokens; truncates the end
    keep_last: int | None = None  # tokens; truncates the beginning
    # Name of a prefix for texts in the model's files (sentence-transformers); None: the default.
    prompt_name: str | None = None

    @property
    def num_chars(self) -> int:
        """An estimate of the characters to render and tokenise; for chats at most about MANY."""
        if isinstance(self.content, Pair):
            return len(self.content.first.text) + len(self.content.second)
        if not isinstance(self.content, Chat):
            return len(self.content)
        chat = self.content
        total = 0
        waiting = [chat.messages, chat.tools, chat.chat_template_kwargs]
        while waiting and total < MANY:
            match waiting.pop():
                case str() as text:
                    total += len(text)
                case dict() as fields:
                    total += OBJECT_SIZE
                    waiting += fields.values()
                case list() as items:
                    waiting += items
                case _:
                    total += 1
        return total
