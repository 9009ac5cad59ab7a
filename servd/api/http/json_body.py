"""Reads the JSON body of a request: validated, in turn, and off the event loop if it is long."""

import asyncio
from collections.abc import Callable
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Request

from servd.api.call import MAX_IGNORED, Call, call_of
from servd.api.connection import while_connected
from servd.api.context import Context, context_of
from servd.api.engine.async_llm import MAX_INLINE
from servd.api.protocol.generation import GenerationRequest
from servd.api.protocol.validation import MAX_VALUES, Body, RequestBody, parse
from servd.base.errors import DeadlineExceeded, InvalidRequest
from servd.base.tracing import now_ns

T = TypeVar("T")

if TYPE_CHECKING:
    JsonBody = Annotated[Body, "read by `read_json_body`"]
else:

    class JsonBody:
        """`JsonBody[ScoreRequest]` is the type of an endpoint's body, which `read_json_body` reads.
        FastAPI would parse even long bodies on the event loop, and phrase errors differently.
        """

        def __class_getitem__(cls, body_type: type[RequestBody]) -> Any:
            return Annotated[body_type, Depends(partial(read_json_body, body_type))]


async def read_json_body(body_type: type[Body], request: Request) -> Body:
    """Return the validated body. The body may set the request id if no header does.

    Raises UnknownModel, Overloaded or InvalidRequest. InvalidRequest also covers other content
    types, which HTML forms of other sites could send, and ignored fields with --strict-fields.
    """
    call = call_of(request)
    context = context_of(request)
    data = await request.body()
    call.received_ns = now_ns()
    call.num_bytes = len(data)
    check_content_type(request)
    if call.timeout is not None:
        call.deadline = asyncio.get_running_loop().time() + call.timeout
    async_llm = context.async_llm
    await async_llm.loop.turn(call.client)
    max_values = max(MAX_VALUES, 2 * async_llm.processor.max_model_len)
    policy = context.config.scheduler.scheduling_policy

    def parse_body() -> tuple[Body, int, list[str]]:
        body = parse(body_type, data, max_values)
        ignored = body.ignored()  # perhaps 250,000: sorting all takes long
        if body.priority and policy != "priority":
            ignored.add("priority")
        return body, len(ignored), nsmallest(MAX_IGNORED, ignored)

    body, num_ignored, ignored = await run_for(request, len(data), parse_body, is_new=True)
    if ignored:
        report_ignored(call, context, body, num_ignored, ignored)
    request_id = body.request_id if isinstance(body, GenerationRequest) else None
    if request_id is not None and "x-request-id" not in request.headers:
        call.request_id = request_id
        call.unique_id = f"{request_id}-{call.unique_id[:12]}"
    call.parsed_ns = now_ns()
    call.model, call.adapter = await context.find_model(body.model)
    if call.adapter is not None:
        call.adapted_ns = now_ns()
    if body.timeout is not None:
        call.deadline = asyncio.get_running_loop().time() + body.timeout
    return body


async def run_for(request: Request, size: int, work: Callable[[], T], *, is_new: bool = False) -> T:
    """Run `work` with `AsyncLLM.run_in_thread`, on behalf of the request's client. Work that waits
    for a thread is dropped with the client's connection, and at the deadline. The body must have
    been read.

    Raises DeadlineExceeded, ClientDisconnect or Overloaded.
    """
    call = call_of(request)
    async_llm = context_of(request).async_llm
    if size <= MAX_INLINE:
        return work()
    try:
        async with asyncio.timeout_at(call.deadline), while_connected(request.receive):
            return await async_llm.run_in_thread(call.client, size, work, is_new=is_new)
    except TimeoutError:
        raise DeadlineExceeded from None


def check_content_type(request: Request) -> None:
    """Raise InvalidRequest if the body is stated not to be JSON. Some clients state nothing."""
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest(
            f"Content-Type must be application/json, got {content_type[:100]!r}: send the header "
            "(with curl, -H 'Content-Type: application/json')"
        )


def report_ignored(
    call: Call, context: Context, body: RequestBody, num_ignored: int, ignored: list[str]
) -> None:
    """Report ignored fields (`ignored`: the first). Raise InvalidRequest with --strict-fields."""
    context.ignored_fields.report(body, num_ignored, ignored, call.route)
    names = [name[:64] for name in ignored]
    call.ignored = [*call.ignored, *names]
    if context.config.server.strict_fields:
        listed = ", ".join(f"`{name}`" for name in names)
        raise InvalidRequest(f"the server ignores these fields: {listed}", param=names[0])
