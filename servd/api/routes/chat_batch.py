"""POST /v1/chat/completions/batch: several conversations with the same settings, one choice for
each.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.call import call_of
from servd.api.protocol.chat import ChatCompletion
from servd.api.protocol.chat_batch import ChatBatchRequest
from servd.api.response_builders.chat import ChatBuilder
from servd.api.route import Parsed, Route

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions/batch", response_model=ChatCompletion)
async def create_chat_completions(request: Request, body: Parsed[ChatBatchRequest]) -> Response:
    """Answer conversations; choice i is the answer to conversation i."""
    call = call_of(request)
    response_id = f"chatcmpl-{call.unique_id}"
    chats = await call.run_in_thread(call.num_bytes, body.chats)
    prompts = [chat.prompt(f"{response_id}-{number}") for number, chat in enumerate(chats)]
    return await ChatBuilder(request, chats[0], response_id, prompts).respond()
