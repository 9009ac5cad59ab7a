"""POST /sleep, POST /wake_up and GET /is_sleeping, with vLLM's names."""

import asyncio
import time
from contextlib import suppress
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from servd.api.context import context_of, json_response
from servd.api.engine.async_llm import AsyncLLM
from servd.api.http.route import Route, refusals
from servd.base.errors import InvalidRequest, Unavailable
from servd.messages.engine import CollectiveRpc, EngineReady

router = APIRouter(route_class=Route)

Level = Annotated[str, Query(json_schema_extra={"enum": ["1", "2"]})]
TIMEOUT = 60.0  # seconds that an answer waits for the engine, which finishes its requests first


class SleepState(msgspec.Struct):
    """Whether all engines sleep: their weights and KV caches are freed."""

    is_sleeping: bool


@router.post("/sleep", response_model=SleepState, responses=refusals(503))
async def sleep(request: Request, level: Level = "1") -> Response:
    """Free the weights and the KV cache once no request runs. The next request loads them again."""
    check_level(level)
    await context_of(request).find_model(request.query_params.get("model"))
    return await _ask(context_of(request).async_llm, CollectiveRpc("sleep"))


def check_level(level: str) -> None:
    """Check a sleep level. Raises InvalidRequest: the level is not 1 or 2."""
    if level not in ("1", "2"):
        raise InvalidRequest("level must be 1 or 2: both free the weights", param="level")


@router.post("/wake_up", response_model=SleepState, responses=refusals(503))
async def wake_up(request: Request) -> Response:
    """Load the model again, before a request needs it."""
    return await _ask(context_of(request).async_llm, CollectiveRpc("wake_up"))


@router.get("/is_sleeping", response_model=SleepState, responses=refusals(503))
async def is_sleeping(request: Request) -> Response:
    """Report whether all engines sleep."""
    return json_response(SleepState(all(_sleep(context_of(request).async_llm))))


async def _ask(async_llm: AsyncLLM, message: CollectiveRpc) -> Response:
    target = [message.method == "sleep"] * len(_sleep(async_llm))
    for engine in async_llm.engines:
        engine.client.send(message)
    end = time.monotonic() + TIMEOUT
    families = async_llm.metrics.families
    operation = "sleep" if all(target) else "wake"
    with (
        families.sleep_seconds.labels(operation).time(),
        families.sleeping.labels(operation).track_inprogress(),
    ):
        while (current := _sleep(async_llm)) != target and (seconds := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(async_llm.has_changed.wait(), seconds)
    return json_response(SleepState(all(current)))


def _sleep(async_llm: AsyncLLM) -> list[bool]:
    statuses = [engine.status for engine in async_llm.engines]
    ready = [status for status in statuses if isinstance(status, EngineReady)]
    if len(ready) < len(statuses):
        raise Unavailable("the engine is not ready: retry later")
    return [status.is_asleep for status in ready]
