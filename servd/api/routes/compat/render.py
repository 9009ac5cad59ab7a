"""POST /v1/chat/completions/render: show what a chat request would send to the engine."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.route import Parsed, Route
from servd.api.protocol.chat import ChatCompletionRequest, RenderedChat

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions/render", response_model=RenderedChat)
async def render_chat_completion(request: Request, body: Parsed[ChatCompletionRequest]) -> Response:
    """Render, tokenize and check a chat request without running it."""
    call = call_of(request)
    context = context_of(request)
    params = body.sampling_params(context.async_llm.processor.default_params)
    prompt = body.prompt(f"render-{call.unique_id}")
    with call.admit(body.request_options) as (_, options):
        (prepared,) = await context.async_llm.prepare([prompt], params, options)
    params = msgspec.structs.asdict(prepared.params)
    answer = RenderedChat(call.model, prepared.prompt, prepared.prompt_token_ids, params)
    return json_response(answer)
