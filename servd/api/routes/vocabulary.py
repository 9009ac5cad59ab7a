"""GET /v1/vocabulary."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response
from servd.api.openapi import describes

router = APIRouter()


@router.get("/v1/vocabulary")
@describes(dict)
async def vocabulary(request: Request) -> Response:
    """How many tokens the model knows."""
    return json_response({"size": context_of(request).async_llm.processor.spec.vocab_size})
