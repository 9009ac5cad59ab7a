"""What a client gives the model to go on with, in no API's shape: text, token ids or a chat."""

from __future__ import annotations

from typing import Any

import msgspec

OBJECT_SIZE = 64  # what a message takes besides its text, in characters
MANY = 1 << 16  # characters; no more of a chat are counted


class ToolOptions(msgspec.Struct, frozen=True):
    """The tools of a request, in OpenAI's form, and which of them the model may or must call."""

    tools: list[dict[str, Any]]  # shown to the model
    forced: list[dict[str, Any]] = []  # one of these must be called
    parallel: bool = True  # else only the first call counts


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, which the chat template turns into text."""

    # As in the OpenAI API; the content may be a string, null, or a list of text parts.
    messages: list[dict[str, Any]]
    tool_options: ToolOptions | None = None  # None: the model sees no tools
    add_generation_prompt: bool = True  # end with the beginning of an assistant message
    continue_final_message: bool = False  # end inside the last message: the model goes on with it
    chat_template_kwargs: dict[str, Any] = {}  # variables for the template: enable_thinking, ...

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model sees."""
        return self.tool_options.tools if self.tool_options else None

    @property
    def continued(self) -> str:
        """The beginning of the answer, which the client has written."""
        return str(self.messages[-1].get("content") or "") if self.continue_final_message else ""


class SharedText(msgspec.Struct):
    """The first text of many pairs, which is tokenised once."""

    text: str
    token_ids: list[int] | None = None  # once it is


class Pair(msgspec.Struct, frozen=True):
    """Two texts that the model scores together; each may be cut off after so many tokens."""

    first: SharedText
    second: str
    keep_first: int | None = None
    keep_second: int | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request."""

    content: str | list[int] | Chat | Pair
    request_id: str = ""  # unique among those running; not needed to count tokens
    param: str = "prompt"  # the field of the request that holds it, for errors
    add_special_tokens: bool = True  # let the tokenizer add e.g. BOS to a text
    suffix: str | None = None  # what comes after the text that the model is to write
    keep_first: int | None = None  # tokens; cuts the end off
    keep_last: int | None = None  # tokens; cuts the beginning off
    # What the model's files let a text begin with, by its name there; None: their default.
    prompt_name: str | None = None

    @property
    def num_chars(self) -> int:
        """About how much there is to render and to tokenise; of a large chat, that it is much."""
        if isinstance(self.content, Pair):
            return len(self.content.first.text) + len(self.content.second)
        if not isinstance(self.content, Chat):
            return len(self.content)
        chat = self.content
        total, waiting = 0, [chat.messages, chat.tools, chat.chat_template_kwargs]
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
