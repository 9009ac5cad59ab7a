"""What the Responses and Messages requests share: each becomes a chat request, and hears of errors
in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.validation import RequestBody, parse
from servd.errors import InvalidRequest, RequestError

# Fields of the chat route that keep their name and meaning in both other APIs, which do not have
# them of themselves.
EXTENSIONS = frozenset({
    "allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "frequency_penalty",
    "guided_choice",
    "guided_grammar", "guided_json", "guided_regex", "ignore_eos", "logit_bias", "min_p",
    "min_tokens",
    "presence_penalty", "priority", "repetition_detection", "repetition_penalty", "seed",
    "skip_special_tokens", "stop",
    "stop_token_ids", "structured_outputs", "top_k",
})  # fmt: skip


class TranslatedRequest(RequestBody):
    """Base of the bodies that become a chat request."""

    stream: bool | None = None

    def ignored(self) -> list[str]:
        """Fields of the body that have no effect here."""
        return sorted(set(super().ignored()) - EXTENSIONS)

    def as_chat(self, fields: dict[str, Any]) -> ChatCompletionRequest:
        """The chat request with these fields, and those that the body took over from the chat
        route.

        Raises:
            InvalidRequest: what the chat route would say, or a field is there under two names.
        """
        extra = self.model_extra or {}
        for name in EXTENSIONS & extra.keys():
            made = fields.get(name)  # of fields of this API
            if isinstance(made, dict) and isinstance(extra[name], dict):
                fields[name] = made | extra[name]
            elif made is not None:
                raise InvalidRequest(
                    f"`{name}` says the same as a field of this API: leave it out", param=name
                )
            else:
                fields[name] = extra[name]
        return parse(ChatCompletionRequest, msgspec.json.encode(fields))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields as the client wrote them: chat field -> field of the body."""
    try:
        yield
    except RequestError as error:
        if error.param and (root := re.match(r"\w+", error.param)):
            error.param = names.get(root[0], error.param)
        raise
