"""POST /pooling and /classify: vectors of texts or of their tokens, and classes of texts."""

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route
from servd.api.protocol.pooling import Classifications, ClassifyRequest, PoolingRequest, Poolings
from servd.api.serving.pooling import ServingPooling

router = APIRouter(route_class=Route)


@router.post("/pooling", response_model=Poolings)
async def pool(request: Request, body: JsonBody[PoolingRequest]) -> Response:
    """Return a vector for each input, or for each token of the inputs."""
    serving: ServingPooling = request.app.state.serving_pooling
    return await serving.create_pooling(body, request)


@router.post("/classify", response_model=Classifications)
async def classify(request: Request, body: JsonBody[ClassifyRequest]) -> Response:
    """Classify each input."""
    serving: ServingPooling = request.app.state.serving_pooling
    return await serving.create_classify(body, request)
