"""POST /pooling: return a vector for each input, or for each token of the inputs."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.embedding import as_base64, embed
from servd.api.call import call_of
from servd.api.context import context_of
from servd.api.http.route import Parsed, Route
from servd.api.protocol.pooling import PooledInput, PoolingRequest, Poolings
from servd.base.errors import InvalidRequest
from servd.messages.outputs import pack_vector, unpack_vector
from servd.messages.params import CLASSIFY

router = APIRouter(route_class=Route)

MAX_NUMBERS = 2**22  # in one answer: 16 MiB of float32, and about 80 MB of JSON


@router.post("/pooling", response_model=Poolings)
async def pool(request: Request, body: Parsed[PoolingRequest]) -> Response:
    """Return a vector for each input, or for each token of the inputs."""
    call = call_of(request)
    context = context_of(request)
    size = body.dimensions or context.async_llm.spec.hidden_size
    params = body.params("all" if body.by_token else body.pooling)
    if body.task == "classify":
        params = CLASSIFY

    def check(lengths: Sequence[int]) -> None:
        num_tokens = sum(lengths)
        if body.by_token and num_tokens * size > MAX_NUMBERS:
            raise InvalidRequest(
                f"{num_tokens} tokens with {size} numbers each are more than {MAX_NUMBERS}, the "
                "most per answer: send fewer inputs at once, or set `truncate_prompt_tokens` or "
                "`dimensions`",
                param="input",
            )

    vectors = await embed(request, "pool", body.prompts(), params, body.request_options, check)
    if params is CLASSIFY and body.use_activation is not False:
        pooling = context.async_llm.processor.pooling
        vectors.data = [
            pack_vector(pooling.probabilities(unpack_vector(data))) for data in vectors.data
        ]

    def shown(data: bytes) -> list[float] | list[list[float]] | str:
        if body.encoding_format == "base64":
            return as_base64(data, body)
        if not body.by_token:
            return unpack_vector(data)
        starts = range(0, len(data), 4 * size)
        return [unpack_vector(data[start : start + 4 * size]) for start in starts]

    def build() -> Poolings:
        return Poolings(
            f"pool-{call.unique_id}",
            call.model,
            [PooledInput(i, shown(data)) for i, data in enumerate(vectors.data)],
            vectors.usage,
        )

    return await call.respond(vectors.num_numbers, build)
