"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import Context, context_of, json_response
from servd.api.openapi import describes
from servd.api.protocol.models import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models")
@describes(ModelList)
async def list_models(request: Request) -> Response:
    """All names of the model."""
    context = context_of(request)
    return json_response(ModelList([_card(context, name) for name in context.model_names]))


@router.get("/v1/models/{name:path}")  # names contain slashes
@describes(ModelCard)
async def retrieve_model(request: Request, name: str) -> Response:
    """One name of the model."""
    context = context_of(request)
    return json_response(_card(context, context.model_name(name)))


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(context.started_at),
        root=context.config.model.model or context.model_names[0],
        max_model_len=context.max_model_len,
    )
