"""POST /collective_rpc: call a method of all workers."""

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from servd.api.context import context_of, json_response
from servd.api.engine.engine_client import EngineClient
from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route, refusals
from servd.api.protocol.collective_rpc import CollectiveRpcRequest, CollectiveRpcResponse
from servd.base.errors import DeadlineExceeded, EngineError, InvalidRequest, Unavailable
from servd.core.client import make_rpc
from servd.messages.engine import CollectiveRpc

router = APIRouter(route_class=Route)

TIMEOUT = 600.0  # seconds, unless the body has others


@router.post("/collective_rpc", response_model=CollectiveRpcResponse, responses=refusals(503))
async def collective_rpc(request: Request, body: JsonBody[CollectiveRpcRequest]) -> Response:
    """Load other weights, record a profile, or sleep and wake up, on all workers."""
    calls = [make_rpc(body.method, body.args)]
    engines = context_of(request).async_llm.engines
    if not all(engine.is_ready for engine in engines):
        raise Unavailable("the engine is not ready: retry later")
    if body.method == "update_weights" and len(engines) > 1:  # nothing changes if one refuses it
        calls.insert(0, msgspec.structs.replace(calls[0], only_checks=True))
    results: list[str | None] = []
    try:
        async with asyncio.timeout(body.timeout or TIMEOUT):
            for call in calls:
                results = await _call_engines(engines, call)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{body.method} has not ended within `timeout`, and may still end: see the log"
        ) from None
    return json_response(CollectiveRpcResponse(results))


async def _call_engines(engines: Sequence[EngineClient], call: CollectiveRpc) -> list[str | None]:
    """Return the results by rank. Raises the error of a single engine, or else one that states
    which engines failed.
    """
    calls = [engine.collective_rpc(call) for engine in engines]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    results: list[str | None] = []
    errors: dict[int, BaseException] = {}
    for rank, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            errors[rank] = answer
        else:
            results += answer
    if not errors:
        return results
    if len(engines) == 1:
        raise errors[0]
    reason = "; ".join(f"engine {rank}: {error}" for rank, error in errors.items())
    if all(isinstance(error, InvalidRequest) for error in errors.values()):
        if len(errors) == len(engines) or call.only_checks:
            raise InvalidRequest(reason, param="args")
    if call.method == "update_weights":
        reason += "; the engines now have different weights: call update_weights again, or restart"
    raise EngineError(reason)
