"""POST /v1/completions: complete prompts."""

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route, events
from servd.api.protocol.completions import CompletionRequest, CompletionResponse
from servd.api.serving.completion import OpenAIServingCompletion

router = APIRouter(route_class=Route)


@router.post(
    "/v1/completions", response_model=CompletionResponse, responses=events(CompletionResponse)
)
async def create_completion(request: Request, body: JsonBody[CompletionRequest]) -> Response:
    """Complete one or more prompts."""
    serving: OpenAIServingCompletion = request.app.state.serving_completion
    return await serving.create_completion(body, request)
