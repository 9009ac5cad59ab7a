"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import read_body
from servd.api.openapi import describes
from servd.api.protocol.completions import Completion, CompletionRequest
from servd.api.response_builders.completions import CompletionBuilder

router = APIRouter()


@router.post("/v1/completions")
@describes(Completion, body=CompletionRequest, events=(Completion,))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    body = await read_body(request, CompletionRequest)
    response_id = f"cmpl-{request.state.unique_id}"
    prompts = body.prompts(response_id)
    return await CompletionBuilder(request, body, response_id, prompts).respond()
