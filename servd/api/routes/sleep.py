"""POST /sleep, POST /wake_up and GET /is_sleeping, with vLLM's names."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.async_llm import AsyncLLM
from servd.api.context import context_of, json_response
from servd.api.openapi import describes
from servd.errors import InvalidRequest, Unavailable
from servd.messages import EngineReady, Sleep, WakeUp

router = APIRouter()

PATIENCE = 60.0  # seconds that an answer waits for the engine, which finishes its requests first


class SleepState(msgspec.Struct):
    """Whether weights and KV cache are freed, those of all engines."""

    is_sleeping: bool


@router.post("/sleep")
@describes(SleepState, query={"level": {"enum": ["1", "2"], "default": "1"}}, errors=(503,))
async def sleep(request: Request) -> Response:
    """Free weights and KV cache once nothing runs or waits, and answer then, or after a minute. The
    next request loads the model again. Levels 1 and 2 do the same.
    """
    check_level(request)
    return await _ask(context_of(request).async_llm, Sleep())


def check_level(request: Request) -> None:
    """Raises InvalidRequest for a level that frees less than all."""
    if request.query_params.get("level", "1") not in ("1", "2"):
        raise InvalidRequest("level must be 1 or 2: both free the weights", param="level")


@router.post("/wake_up")
@describes(SleepState, errors=(503,))
async def wake_up(request: Request) -> Response:
    """Load the model again before a request needs it; the answer comes when it is loaded, or after
    a minute.
    """
    return await _ask(context_of(request).async_llm, WakeUp())


@router.get("/is_sleeping")
@describes(SleepState, errors=(503,))
async def is_sleeping(request: Request) -> Response:
    """Whether weights and KV cache of all engines are freed."""
    return json_response(SleepState(all(_sleep(context_of(request).async_llm))))


async def _ask(async_llm: AsyncLLM, message: Sleep | WakeUp) -> Response:
    wanted = [isinstance(message, Sleep) for _ in _sleep(async_llm)]
    for engine in async_llm.engines:
        engine.client.send(message)
    end = time.monotonic() + PATIENCE
    families, operation = async_llm.metrics.families, "sleep" if all(wanted) else "wake"
    with (
        families.sleep_seconds.labels(operation).time(),
        families.sleeping.labels(operation).track_inprogress(),
    ):
        while (found := _sleep(async_llm)) != wanted and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(async_llm.has_changed.wait(), left)
    return json_response(SleepState(all(found)))


def _sleep(async_llm: AsyncLLM) -> list[bool]:
    found = [engine.status for engine in async_llm.engines]
    ready = [status for status in found if isinstance(status, EngineReady)]
    if len(ready) < len(found):
        raise Unavailable("the engine is not ready: retry later")
    return [status.is_asleep for status in ready]
