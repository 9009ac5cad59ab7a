"""GET /v1/models, /v1/models/{id}: list the model's names and its adapters."""

import asyncio

from fastapi import APIRouter, Request, Response

from servd.api.context import Context, context_of, json_response
from servd.api.http.route import PathPart, Route
from servd.api.protocol.models import ModelCard, ModelList
from servd.messages.adapter import Adapter

router = APIRouter(route_class=Route)


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    """List the model's names and its adapters."""
    context = context_of(request)
    cards = [_card(context, name) for name in context.shown_names]
    if context.adapters is not None:
        adapters = await asyncio.to_thread(context.adapters.listed)
        cards += [_card(context, adapter.name, adapter) for adapter in adapters]
    return json_response(ModelList(cards))


@router.get("/v1/models/{name:path}", response_model=ModelCard)  # names contain slashes
async def retrieve_model(request: Request, name: PathPart) -> Response:
    """Return a model or an adapter by its name."""
    context = context_of(request)
    return json_response(_card(context, *await context.find_model(name)))


def _card(context: Context, name: str, adapter: Adapter | None = None) -> ModelCard:
    processor = context.async_llm.processor
    return ModelCard(
        id=name,
        created=adapter.created if adapter else int(context.started_at),
        root=adapter.name if adapter else context.root,
        max_model_len=processor.max_model_len,
        parent=context.config.model.served_model_name[0] if adapter else None,
        input_modalities=processor.spec.input_modalities,
        default_parameters=processor.listed_params,
    )
