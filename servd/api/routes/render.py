"""POST /v1/chat/completions/render: what a chat request would send to the engine."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import admit, context_of, json_response, read_body
from servd.api.openapi import describes
from servd.api.protocol.chat import ChatCompletionRequest, RenderedChat

router = APIRouter()


@router.post("/v1/chat/completions/render")
@describes(RenderedChat, body=ChatCompletionRequest)
async def render_chat_completion(request: Request) -> Response:
    """Template, tokenise and check a chat request, and run nothing."""
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest)
    params = body.sampling_params(context.async_llm.processor.default_params)
    prompt = body.prompt(f"render-{request.state.unique_id}")
    with admit(request, body.request_options) as (_, options):
        (prepared,) = await context.async_llm.prepare([prompt], params, options)
    params = msgspec.structs.asdict(prepared.params)
    answer = RenderedChat(request.state.model, prepared.prompt, prepared.prompt_token_ids, params)
    return json_response(answer, headers=request.state.ignored)
