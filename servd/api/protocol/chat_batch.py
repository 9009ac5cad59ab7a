"""Chat batches: one request for several conversations."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field, GetJsonSchemaHandler, model_validator

from servd.api.protocol.chat import ChatCompletionRequest, add_chat_fields
from servd.api.protocol.completions import MAX_PROMPTS
from servd.api.protocol.validation import RequestBody, Schema, parse
from servd.errors import InvalidRequest

# What is said once, or by call, and so has no place where there are several conversations.
REFUSED = (
    "stream", "tools", "use_beam_search", "echo", "prompt_logprobs", "return_token_ids",
    "return_prompt_text",
)  # fmt: skip
NEEDLESS = ("messages", "n", "stream_options", "tool_choice")  # not said, or nothing without those


class ChatBatchRequest(RequestBody):
    """Body of POST /v1/chat/completions/batch: that of a chat, with a list of its `messages`."""

    from_chat = frozenset(ChatCompletionRequest.model_fields.keys() - {*REFUSED, *NEEDLESS})

    messages: Annotated[list[list[Any]], Field(min_length=1, max_length=MAX_PROMPTS)]
    """The conversations."""

    @classmethod
    def complete_schema(cls, properties: dict[str, Schema], handler: GetJsonSchemaHandler) -> None:
        """Add the fields of chats."""
        super().complete_schema(properties, handler)
        add_chat_fields(properties, cls.from_chat, handler)

    @model_validator(mode="after")
    def _check_support(self) -> ChatBatchRequest:
        extra = self.model_extra or {}
        for name in REFUSED:
            if extra.get(name):
                raise InvalidRequest(
                    f"`{name}` is not supported in a batch of chats: leave it out", param=name
                )
        if extra.get("n") not in (None, 1):
            raise InvalidRequest("`n` must be 1 in a batch of chats", param="n")
        return self

    def ignored(self) -> list[str]:
        return self._chat(0).ignored()

    def chats(self) -> list[ChatCompletionRequest]:
        """A chat request for each conversation.

        Raises:
            InvalidRequest: with the conversation in `param`, e.g. `messages[3][0]`.
        """
        return [self._chat(number) for number in range(len(self.messages))]

    def _chat(self, number: int) -> ChatCompletionRequest:
        known = ChatCompletionRequest.model_fields
        # What has no effect is named for the first one, and is not copied for the others.
        fields = {k: v for k, v in (self.model_extra or {}).items() if k in known or number == 0}
        fields |= {"model": self.model, "priority": self.priority}
        fields["messages"] = self.messages[number]
        try:
            return parse(ChatCompletionRequest, msgspec.json.encode(fields))
        except InvalidRequest as error:
            if error.param and error.param.startswith("messages"):
                error.param = f"messages[{number}]{error.param.removeprefix('messages')}"
                error.message = f"conversation {number}: {error.message}"
            raise
