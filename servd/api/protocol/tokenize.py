"""Tokenize and detokenize: the requests and responses."""

from __future__ import annotations

import msgspec
from pydantic import model_validator

from servd.api.protocol.chat import ChatPrompt, Messages
from servd.api.protocol.generation import TokenIds
from servd.api.protocol.validation import RequestBody
from servd.base.errors import InvalidRequest


class TokenizeRequest(ChatPrompt):
    """Body of POST /tokenize: a text as for completions, or messages as for chats."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True  # to `prompt`; a chat template writes its own
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_tokenize(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
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
