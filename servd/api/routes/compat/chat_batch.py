"""POST /v1/chat/completions/batch: answer several conversations with the same settings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field, GetJsonSchemaHandler, model_validator
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.chat import ChatBuilder
from servd.api.call import call_of
from servd.api.http.route import Parsed, Route
from servd.api.protocol.chat import ChatCompletion, ChatCompletionRequest, add_chat_fields
from servd.api.protocol.completions import MAX_PROMPTS
from servd.api.protocol.validation import RequestBody, Schema, parse
from servd.base.errors import InvalidRequest

# Fields that do not work with several conversations.
REFUSED = (
    "stream",
    "tools",
    "use_beam_search",
    "echo",
    "prompt_logprobs",
    "return_token_ids",
    "return_prompt_text",
)
NEEDLESS = ("messages", "n", "stream_options", "tool_choice")  # declared or useless here

router = APIRouter(route_class=Route)


class ChatBatchRequest(RequestBody):
    """Body of POST /v1/chat/completions/batch: a chat's body, with a list of conversations."""

    from_chat = frozenset(ChatCompletionRequest.model_fields.keys() - {*REFUSED, *NEEDLESS})

    messages: Annotated[list[list[Any]], Field(min_length=1, max_length=MAX_PROMPTS)]
    """The messages of each conversation."""

    @classmethod
    def complete_schema(cls, properties: dict[str, Schema], handler: GetJsonSchemaHandler) -> None:
        super().complete_schema(properties, handler)
        add_chat_fields(properties, cls.from_chat, handler)

    @model_validator(mode="after")
    def _check_support(self) -> ChatBatchRequest:
        extra = self.model_extra or {}
        for name in REFUSED:
            if extra.get(name):
                error = f"`{name}` is not supported in a batch of chats: leave it out"
                raise InvalidRequest(error, param=name)
        if extra.get("n") not in (None, 1):
            raise InvalidRequest("`n` must be 1 in a batch of chats", param="n")
        return self

    def ignored(self) -> list[str]:
        return self.chat(0).ignored()

    def chat(self, number: int) -> ChatCompletionRequest:
        """Return conversation `number` as a chat request. Errors name the number in `param`."""
        known = ChatCompletionRequest.model_fields
        # Fields without effect are reported for the first conversation, and not copied for others.
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


@router.post("/v1/chat/completions/batch", response_model=ChatCompletion)
async def create_chat_completions(request: Request, body: Parsed[ChatBatchRequest]) -> Response:
    """Answer several conversations; choice i answers conversation i."""
    call = call_of(request)
    response_id = f"chatcmpl-{call.unique_id}"
    numbers = range(len(body.messages))
    chats = await call.run_in_thread(call.num_bytes, lambda: [body.chat(i) for i in numbers])
    prompts = [chat.prompt(f"{response_id}-{number}") for number, chat in enumerate(chats)]
    return await ChatBuilder(request, chats[0], response_id, prompts).respond()
