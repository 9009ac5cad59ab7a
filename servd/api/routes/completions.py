"""POST /v1/completions: complete prompts."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.completions import CompletionBuilder
from servd.api.call import call_of
from servd.api.http.route import Parsed, Route, events
from servd.api.protocol.completions import CompletionRequest, CompletionResponse

router = APIRouter(route_class=Route)


@router.post(
    "/v1/completions", response_model=CompletionResponse, responses=events(CompletionResponse)
)
async def create_completion(request: Request, body: Parsed[CompletionRequest]) -> Response:
    """Complete one or more prompts."""
    response_id = f"cmpl-{call_of(request).unique_id}"
    prompts = body.prompts(response_id)
    return await CompletionBuilder(request, body, response_id, prompts).respond()
