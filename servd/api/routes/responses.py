"""/v1/responses: create, retrieve, stream, cancel and delete responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Query
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from servd.api.builders.events import encode
from servd.api.builders.responses import ResponsesBuilder
from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.paging import Page
from servd.api.http.route import Parsed, PathPart, Route, events
from servd.api.http.streaming import EventStream
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.errors import error_reply
from servd.api.protocol.events import ResponseEvent
from servd.api.protocol.response_items import listed
from servd.api.protocol.responses import (
    CHAT_NAMES,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponsesRequest,
    ResponsesResponse,
)
from servd.api.protocol.translation import renamed
from servd.api.responses.event_log import EventLog
from servd.api.responses.response_store import ResponseStore, Stored
from servd.base.errors import InvalidRequest, NotFound
from servd.messages.outputs import CompletionOutput

if TYPE_CHECKING:
    from servd.api.observability.otel import RequestSpan

router = APIRouter(route_class=Route)


class ResponseId(StringConvertor):
    """The id of a response in a path: anything but the name of a route, of servd's or OpenAI's."""

    regex = r"(?!(?:input_tokens|compact)(?:/|\Z))[^/]+"


register_url_convertor("response", ResponseId())


@router.post("/v1/responses", response_model=ResponsesResponse, responses=events(ResponseEvent))
async def create_response(request: Request, body: Parsed[ResponsesRequest]) -> HTTPResponse:
    """Answer a conversation, and store it for the next turn."""
    call = call_of(request)
    store = _store(request)
    response_id = f"resp_{call.unique_id}"
    is_stored = body.store is not False and store.max_responses > 0
    if body.background and not is_stored:
        raise InvalidRequest("a background response needs `store`: true", param="background")
    previous = _previous(store, body)
    items = _conversation(previous, body)
    with renamed(CHAT_NAMES):
        chat = await _chat(request, body, items)
        builder = ResponsesBuilder(request, body, response_id, chat, is_stored)
    log = EventLog() if body.background else None
    task: asyncio.Task[None] | None = None

    def keep() -> None:
        num_bytes = len(msgspec.json.encode([builder.response, body.input]))
        num_bytes += (previous.num_bytes if previous else 0) + (log.num_bytes if log else 0)
        store.put(Stored(builder.response, items, num_bytes, log, task))

    if log is None:
        if is_stored:
            builder.keep = keep
        return await builder.respond()
    async with AsyncExitStack() as admission:
        outputs = await admission.enter_async_context(builder.outputs())
        store.check_room()  # other responses may have started meanwhile
        call.requests.clear()  # its timeline is longer than the call
        span, call.span = call.span, None
        task = asyncio.create_task(_run_detached(builder, outputs, log, admission.pop_all()))
        # Store the complete response with its final size, unless it was evicted or deleted.
        task.add_done_callback(lambda _: keep() if response_id in store else None)
        task.add_done_callback(lambda _: _end_timeline(builder, span))  # though it never ran
    for event in builder.queue():
        log.append(encode([event]))
    keep()
    # Let the task begin before a client can cancel it: a task that never ran cleans nothing up.
    await asyncio.sleep(0)
    if body.stream:
        return _stream(request, log, 0)
    return json_response(builder.response)


@router.post("/v1/responses/input_tokens", response_model=InputTokens)
async def count_input_tokens(request: Request, body: Parsed[ResponsesRequest]) -> HTTPResponse:
    """Count the tokens of a response's prompt."""
    call = call_of(request)
    items = _conversation(_previous(_store(request), body), body)
    with renamed(CHAT_NAMES):
        chat = await _chat(request, body, items)
        call.check_params(chat)
        token_ids = await call.tokenize(chat.prompt(call.unique_id))
    return json_response(InputTokens(len(token_ids)))


@router.get(
    "/v1/responses/{response_id:response}",
    response_model=ResponsesResponse,
    responses=events(ResponseEvent),
)
async def get_response(
    request: Request,
    response_id: PathPart,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, le=2**31)] = None,
) -> HTTPResponse:
    """Return a stored response, or stream the events of a background response."""
    stored = _stored(request, response_id)
    if not stream:
        return json_response(stored.response)
    if stored.log is None:
        raise InvalidRequest(
            "only a response with `background`: true can be streamed again: leave out `stream`",
            param="stream",
        )
    start = 0 if starting_after is None else starting_after + 1
    return _stream(request, stored.log, start)


@router.get("/v1/responses/{response_id:response}/input_items", response_model=InputItems)
async def list_input_items(
    request: Request, response_id: PathPart, page: Annotated[Page, Query()]
) -> HTTPResponse:
    """List the input items of a stored response, including items of earlier turns."""
    stored = _stored(request, response_id)
    items = listed(response_id, stored.items)
    return json_response(InputItems(*page.of(items, lambda item: item["id"])))


@router.delete("/v1/responses/{response_id:response}", response_model=DeletedResponse)
async def delete_response(request: Request, response_id: PathPart) -> HTTPResponse:
    """Delete a stored response, and cancel it if it is running."""
    stored = _stored(request, response_id)
    await _cancel(stored)
    _store(request).pop(stored.response.id)
    return json_response(DeletedResponse(stored.response.id))


@router.post("/v1/responses/{response_id:response}/cancel", response_model=ResponsesResponse)
async def cancel_response(request: Request, response_id: PathPart) -> HTTPResponse:
    """Cancel a background response."""
    stored = _stored(request, response_id)
    if not stored.response.background:
        raise InvalidRequest(
            "only a response with `background`: true can be cancelled", param="response_id"
        )
    await _cancel(stored)
    return json_response(stored.response)


def _stream(request: Request, log: EventLog, start: int) -> EventStream:
    """Stream the events from number `start` on. A disconnect does not cancel the response."""
    return EventStream(
        log.follow(start),
        request_id=call_of(request).request_id,
        keep_alive=context_of(request).keep_alive,
        headers={},
        end=b"",  # the last event marks the end
    )


def _store(request: Request) -> ResponseStore:
    return context_of(request).responses[call_of(request).owner]


def _stored(request: Request, response_id: str) -> Stored:
    return _store(request).get(response_id, NotFound, "response_id")


def _previous(store: ResponseStore, body: ResponsesRequest) -> Stored | None:
    name = "previous_response_id"
    if body.previous_response_id is None:
        return None
    stored = store.get(
        body.previous_response_id, InvalidRequest, name, "previous_response_not_found"
    )
    if stored.response.status not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"the previous response is {stored.response.status}: it has no output", param=name
        )
    return stored


async def _chat(
    request: Request, body: ResponsesRequest, items: list[dict[str, Any]]
) -> ChatCompletionRequest:
    # Stored turns come on top of the body.
    call = call_of(request)
    size = call.num_bytes + 64 * len(items)
    return await call.run_in_thread(
        size, lambda: body.as_chat(body.chat_fields(items)), is_new=True
    )


def _conversation(previous: Stored | None, body: ResponsesRequest) -> list[dict[str, Any]]:
    return [*(previous.conversation if previous else ()), *cast(list[dict[str, Any]], body.input)]


async def _cancel(stored: Stored) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])


async def _run_detached(
    builder: ResponsesBuilder,
    outputs: AsyncIterable[CompletionOutput],
    log: EventLog,
    admission: AsyncExitStack,
) -> None:
    """Generate a response in the background until it finishes or is cancelled."""
    request_id = builder.call.request_id
    try:
        async with admission:
            async for output in outputs:
                builder.count(output)
                for event in builder.events_of(output):
                    log.append(encode([event]))
    except asyncio.CancelledError:
        for event in builder.cancel():
            log.append(encode([event]))
        raise
    except Exception as error:
        log.append(builder.error_frame(error_reply(error, request_id)))
    finally:
        log.close()


def _end_timeline(builder: ResponsesBuilder, span: RequestSpan | None) -> None:
    state = builder.prepared[0]
    timeline = builder.async_llm.tracer.finish_request(state)
    if span is not None:
        span.add_timeline(timeline, state.params)
        span.end()
