"""POST /collective_rpc: call a method of all workers."""

import asyncio
from itertools import chain
from typing import Annotated

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response
from servd.api.http.json_body import json_body
from servd.api.http.route import Route, refusals
from servd.api.protocol.collective_rpc import CollectiveRpcRequest, CollectiveRpcResponse
from servd.base.errors import DeadlineExceeded, Unavailable
from servd.core.client import make_rpc

router = APIRouter(route_class=Route)

TIMEOUT = 600.0  # seconds, unless the body has others


@router.post("/collective_rpc", response_model=CollectiveRpcResponse, responses=refusals(503))
async def collective_rpc(
    request: Request, body: Annotated[CollectiveRpcRequest, json_body(CollectiveRpcRequest)]
) -> Response:
    """Load other weights, record a profile, or sleep and wake up, on all workers."""
    call = make_rpc(body.method, body.args)
    engines = context_of(request).async_llm.engines
    if not all(engine.is_ready for engine in engines):
        raise Unavailable("the engine is not ready: retry later")
    try:
        async with asyncio.timeout(body.timeout or TIMEOUT):
            results = await asyncio.gather(*[engine.collective_rpc(call) for engine in engines])
    except TimeoutError:
        raise DeadlineExceeded from None
    return json_response(CollectiveRpcResponse([*chain(*results)]))
