"""ServingPooling: serves the vectors of texts or of their tokens, and the classes of texts."""

from collections.abc import Sequence

from fastapi import Request, Response

from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.protocol.pooling import (
    Classification,
    Classifications,
    ClassifyRequest,
    PooledInput,
    PoolingRequest,
    Poolings,
)
from servd.api.serving.embedding import OpenAIServingEmbedding, as_base64
from servd.api.serving.serving import respond_with
from servd.base.errors import InvalidRequest
from servd.messages.outputs import pack_vector, unpack_vector
from servd.messages.params import CLASSIFY

MAX_NUMBERS = 2**22  # in one answer: 16 MiB of float32, and about 80 MB of JSON


class ServingPooling(OpenAIServingEmbedding):
    """Serves vLLM's routes for pooling models; see OpenAIServing."""

    async def create_pooling(self, body: PoolingRequest, request: Request) -> Response:
        """Return a vector for each input, or for each token of the inputs."""
        call = call_of(request)
        size = body.dimensions or self.async_llm.spec.hidden_size
        params = body.params("all" if body.by_token else body.pooling)
        if body.task == "classify":
            params = CLASSIFY

        def check(lengths: Sequence[int]) -> None:
            num_tokens = sum(lengths)
            if body.by_token and num_tokens * size > MAX_NUMBERS:
                raise InvalidRequest(
                    f"{num_tokens} tokens with {size} numbers each are more than {MAX_NUMBERS}, "
                    "the most per answer: send fewer inputs at once, or set "
                    "`truncate_prompt_tokens` or `dimensions`",
                    param="input",
                )

        vectors = await self.embed(
            request, "pool", body.prompts, params, body.request_options, check
        )
        if params is CLASSIFY and body.use_activation is not False:
            pooling = self.processor.pooling
            vectors.data = [
                pack_vector(pooling.probabilities(unpack_vector(data))) for data in vectors.data
            ]

        def format_vector(data: bytes) -> list[float] | list[list[float]] | str:
            if body.encoding_format == "base64":
                return as_base64(data, body)
            if not body.by_token:
                return unpack_vector(data)
            starts = range(0, len(data), 4 * size)
            return [unpack_vector(data[start : start + 4 * size]) for start in starts]

        def build() -> Poolings:
            inputs = [PooledInput(i, format_vector(data)) for i, data in enumerate(vectors.data)]
            return Poolings(f"pool-{call.unique_id}", call.model, inputs, vectors.usage)

        return await respond_with(request, vectors.num_numbers, build)

    async def create_classify(self, body: ClassifyRequest, request: Request) -> Response:
        """Classify each input."""
        call = call_of(request)
        pooling = self.processor.pooling
        vectors = await self.embed(
            request, "classify", body.prompts, CLASSIFY, body.request_options
        )
        is_active = body.use_activation is not False
        labels = pooling.labels
        classifications: list[Classification] = []
        for index, data in enumerate(vectors.data):
            probs = pooling.probabilities(unpack_vector(data), is_active)
            label = labels[probs.index(max(probs))]
            classifications.append(Classification(index, label, probs, len(probs)))
        answer = Classifications(
            f"classify-{call.unique_id}", call.model, classifications, vectors.usage
        )
        return json_response(answer)
