"""POST /v1/chat/completions/batch: several conversations with the same settings, one choice for
each.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.openapi import describes
from servd.api.processor import Prepared
from servd.api.protocol.chat import ChatCompletion
from servd.api.protocol.chat_batch import ChatBatchRequest
from servd.api.routes._context import context_of, read_body, start_timeline
from servd.api.routes.chat import ChatAnswer, prepare_chat

router = APIRouter()


@router.post("/v1/chat/completions/batch")
@describes(ChatCompletion, body=ChatBatchRequest)
async def create_chat_completions(request: Request) -> Response:
    """Answer conversations; choice i is the answer to conversation i."""
    context = context_of(request)
    body = await read_body(request, ChatBatchRequest)
    model = context.model_name(body.model)
    answer_id = f"chatcmpl-{request.state.unique_id}"
    chats = body.chats()
    prepared: list[Prepared] = []
    for number, chat in enumerate(chats):
        request_id = f"{answer_id}-{number}"
        start_timeline(request, request_id)
        prepared.append(await prepare_chat(context.async_llm, request_id, chat))
    return await ChatAnswer(request, answer_id, model, chats[0], prepared).respond()
