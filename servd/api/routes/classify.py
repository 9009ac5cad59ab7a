"""POST /classify: refused, since no model that servd runs has a classification head."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import read_body
from servd.api.openapi import describes
from servd.api.protocol.embeddings import VectorRequest
from servd.api.protocol.pooling import CLASSIFY
from servd.errors import InvalidRequest

router = APIRouter()


@router.post("/classify")
@describes(body=VectorRequest)
async def classify(request: Request) -> Response:
    """Say what to use instead.

    Raises:
        InvalidRequest: always.
    """
    await read_body(request, VectorRequest)
    model = request.state.model[:200]
    raise InvalidRequest(
        f"{CLASSIFY}, {model!r} writes text: ask it for a class by /v1/chat/completions with "
        '`structured_outputs`: {"choice": [...]}, or compare embeddings by /score',
        param="model",
    )
