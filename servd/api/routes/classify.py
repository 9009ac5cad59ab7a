"""POST /classify: classify texts with the model's classification head."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.embedding import embed
from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.route import Parsed, Route
from servd.api.protocol.classify import Classification, Classifications, ClassifyRequest
from servd.messages.outputs import unpack_vector
from servd.messages.params import CLASSIFY

router = APIRouter(route_class=Route)


@router.post("/classify", response_model=Classifications)
async def classify(request: Request, body: Parsed[ClassifyRequest]) -> Response:
    """Classify each input."""
    call = call_of(request)
    pooling = context_of(request).async_llm.processor.pooling
    vectors = await embed(request, "classify", body.prompts(), CLASSIFY, body.request_options)
    is_active = body.use_activation is not False
    found = [pooling.probabilities(unpack_vector(data), is_active) for data in vectors.data]
    labels = pooling.labels
    answer = Classifications(
        f"classify-{call.unique_id}",
        call.model,
        [
            Classification(i, labels[probs.index(max(probs))], probs, len(probs))
            for i, probs in enumerate(found)
        ],
        vectors.usage,
    )
    return json_response(answer)
