"""/v1/responses: create, retrieve, stream, cancel and delete responses."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi import Response as HTTPResponse
from starlette.convertors import StringConvertor, register_url_convertor

from servd.api.http.json_body import JsonBody
from servd.api.http.paging import Page
from servd.api.http.route import PathPart, Route, events, without_weights
from servd.api.protocol.events import ResponseEvent
from servd.api.protocol.responses import (
    CompactedResponse,
    CompactRequest,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponsesRequest,
    ResponsesResponse,
)
from servd.api.serving.responses import OpenAIServingResponses

router = APIRouter(route_class=Route)


class ResponseId(StringConvertor):
    """The id of a response in a path: anything but the name of a route, of servd's or OpenAI's."""

    regex = r"(?!(?:input_tokens|compact)(?:/|\Z))[^/]+"


register_url_convertor("response", ResponseId())


def serving_of(request: Request) -> OpenAIServingResponses:
    return request.app.state.serving_responses


@router.post("/v1/responses", response_model=ResponsesResponse, responses=events(ResponseEvent))
async def create_response(request: Request, body: JsonBody[ResponsesRequest]) -> HTTPResponse:
    """Answer a conversation, and store it for the next turn."""
    return await serving_of(request).create_responses(body, request)


@router.post("/v1/responses/compact", response_model=CompactedResponse)
@without_weights
async def compact_conversation(request: Request, body: JsonBody[CompactRequest]) -> HTTPResponse:
    """Drop the oldest items of a conversation, down to half of the context."""
    return await serving_of(request).compact_conversation(body, request)


@router.post("/v1/responses/input_tokens", response_model=InputTokens)
@without_weights
async def count_input_tokens(request: Request, body: JsonBody[ResponsesRequest]) -> HTTPResponse:
    """Count the tokens of a response's prompt."""
    return await serving_of(request).count_input_tokens(body, request)


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
    serving = serving_of(request)
    return await serving.retrieve_responses(response_id, stream, starting_after, request)


@router.get("/v1/responses/{response_id:response}/input_items", response_model=InputItems)
async def list_input_items(
    request: Request, response_id: PathPart, page: Annotated[Page, Query()]
) -> HTTPResponse:
    """List the input items of a stored response, including items of earlier turns."""
    return await serving_of(request).list_input_items(response_id, page, request)


@router.delete("/v1/responses/{response_id:response}", response_model=DeletedResponse)
async def delete_response(request: Request, response_id: PathPart) -> HTTPResponse:
    """Delete a stored response, and cancel it if it is running."""
    return await serving_of(request).delete_responses(response_id, request)


@router.post("/v1/responses/{response_id:response}/cancel", response_model=ResponsesResponse)
@without_weights
async def cancel_response(request: Request, response_id: PathPart) -> HTTPResponse:
    """Cancel a background response."""
    return await serving_of(request).cancel_responses(response_id, request)
