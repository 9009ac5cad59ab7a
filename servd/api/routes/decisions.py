"""POST /v1/decisions: answer questions with the probabilities of given options."""

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route
from servd.api.protocol.decisions import DecisionResponse, DecisionsRequest
from servd.api.serving.decisions import ServingDecisions

router = APIRouter(route_class=Route)


@router.post("/v1/decisions", response_model=DecisionResponse)
async def create_decision(request: Request, body: JsonBody[DecisionsRequest]) -> Response:
    """Answer questions with the probabilities of the given options.

    The model answers each question twice, with the options in both orders. The response has the
    mean probabilities, because models favour the first or the last option.
    """
    serving: ServingDecisions = request.app.state.serving_decisions
    return await serving.create_decision(body, request)
