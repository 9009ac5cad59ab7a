"""/v1/batches: the requests of a file, answered in the background."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import json_response, read_body, shelf_of
from servd.api.openapi import describes
from servd.api.paging import page, query
from servd.api.protocol.batches import Batch, Batches, BatchRequest

router = APIRouter()


@router.post("/v1/batches")
@describes(Batch, body=BatchRequest)
async def create_batch(request: Request) -> Response:
    """Begin to answer the lines of a file, with what other requests leave of the engine."""
    shelf = shelf_of(request)
    body = await read_body(request, BatchRequest)
    return json_response(
        await asyncio.to_thread(shelf.add_batch, body), headers=request.state.ignored
    )


@router.get("/v1/batches")
@describes(Batches, query=query(), errors=(404,))
async def list_batches(request: Request) -> Response:
    """The batches of this API key."""
    shelf = shelf_of(request)
    batches = await asyncio.to_thread(shelf.all, "batch_", Batch)
    return json_response(Batches(*page(request, batches, lambda batch: batch.id)))


@router.get("/v1/batches/{batch_id}")
@describes(Batch)
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """How far a batch is."""
    return json_response(await asyncio.to_thread(shelf_of(request).load, batch_id, Batch))


@router.post("/v1/batches/{batch_id}/cancel")
@describes(Batch, errors=(400,))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Stop a batch; what was answered until then is in its output file."""
    shelf = shelf_of(request)
    return json_response(await asyncio.to_thread(lambda: shelf.cancel(shelf.load(batch_id, Batch))))
