"""/v1/batches: answer the requests of a file in the background."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from servd.api.context import json_response, shelf_of
from servd.api.http.json_body import JsonBody
from servd.api.http.paging import Page
from servd.api.http.route import PathPart, Route, refusals
from servd.api.protocol.batches import Batch, Batches, BatchRequest

router = APIRouter(route_class=Route)


@router.post("/v1/batches", response_model=Batch)
async def create_batch(request: Request, body: JsonBody[BatchRequest]) -> Response:
    """Start a batch: answer the lines of a file in the background."""
    return json_response(await asyncio.to_thread(shelf_of(request).add_batch, body))


@router.get("/v1/batches", response_model=Batches, responses=refusals(404))
async def list_batches(request: Request, page: Annotated[Page, Query()]) -> Response:
    """List the batches of this API key."""
    batches = await asyncio.to_thread(shelf_of(request).all, "batch_", Batch)
    return json_response(Batches(*page.of(batches, lambda batch: batch.id)))


@router.get("/v1/batches/{batch_id}", response_model=Batch)
async def retrieve_batch(request: Request, batch_id: PathPart) -> Response:
    """Return a batch's status and progress."""
    return json_response(await asyncio.to_thread(shelf_of(request).load, batch_id, Batch))


@router.post("/v1/batches/{batch_id}/cancel", response_model=Batch, responses=refusals(400))
async def cancel_batch(request: Request, batch_id: PathPart) -> Response:
    """Cancel a batch."""
    shelf = shelf_of(request)
    return json_response(await asyncio.to_thread(lambda: shelf.cancel(shelf.load(batch_id, Batch))))
