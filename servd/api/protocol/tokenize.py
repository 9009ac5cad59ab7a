"""Tokenize and detokenize: the requests and responses."""

from typing import Self

import msgspec
from pydantic import model_validator

from servd.api.protocol.chat import ChatPrompt, Messages
from servd.api.protocol.generation import TokenIds
from servd.api.protocol.validation import RequestBody


class TokenizeRequest(ChatPrompt):
    """Body of POST /tokenize: a text as for completions, or messages as for chats."""

    either = ("prompt", "messages", "content")
    lacking = {
        "chat_template": "leave it out",
        "with_pieces": "`return_token_strs` returns the texts",
    }

    prompt: str | None = None
    content: str | None = None  # llama-server's name of `prompt`
    add_special: bool | None = None  # its name of `add_special_tokens`; false beside `content`
    messages: Messages | None = None
    add_special_tokens: bool = True  # to `prompt`; a chat template writes its own
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_tokenize(self) -> Self:
        is_named = "add_special_tokens" in self.model_fields_set
        if not is_named and (self.content is not None or self.add_special is not None):
            self.add_special_tokens = bool(self.add_special)
        if self.content is not None:
            self.prompt = self.content
        return self


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    tokens: TokenIds


class Tokenized(msgspec.Struct, omit_defaults=True):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The response of /detokenize."""

    prompt: str
    content: str  # the same, as llama-server names it
