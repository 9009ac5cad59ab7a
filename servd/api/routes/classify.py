"""POST /classify: classify texts with the model's classification head."""

from typing import Annotated

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.http.json_body import json_body
from servd.api.http.route import Route
from servd.api.protocol.classify import Classifications, ClassifyRequest
from servd.api.serving.pooling import ServingPooling

router = APIRouter(route_class=Route)


@router.post("/classify", response_model=Classifications)
async def classify(
    request: Request, body: Annotated[ClassifyRequest, json_body(ClassifyRequest)]
) -> Response:
    """Classify each input."""
    serving: ServingPooling = request.app.state.serving_pooling
    return await serving.create_classify(body, request)
