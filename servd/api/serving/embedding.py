"""OpenAIServingEmbedding: serves the vectors of texts."""

import base64
import math
import struct
from collections.abc import Callable, Sequence

import msgspec
from fastapi import Request, Response

from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.protocol.embeddings import (
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingResponseData,
    EmbeddingUsage,
    VectorRequest,
)
from servd.api.serving.serving import OpenAIServing, respond_with
from servd.api.text.prompt import Prompt
from servd.messages.engine import RequestOptions
from servd.messages.outputs import unpack_vector
from servd.messages.params import PoolingParams

CODES = {"float32": "f", "float16": "e", "bfloat16": "H"}  # of struct


class Vectors(msgspec.Struct):
    data: list[bytes]  # float32, little-endian
    num_prompt_tokens: int  # sum over all prompts

    @property
    def usage(self) -> EmbeddingUsage:
        return EmbeddingUsage(self.num_prompt_tokens, self.num_prompt_tokens)

    @property
    def num_numbers(self) -> int:
        return sum(map(len, self.data)) // 4


class OpenAIServingEmbedding(OpenAIServing):
    """Serves embeddings; see OpenAIServing."""

    async def create_embedding(self, body: EmbeddingRequest, request: Request) -> Response:
        """Return an embedding for each input."""
        params = body.params(body.pooling)
        vectors = await self.embed(request, "embd", body.prompts, params, body.request_options)
        as_text = body.encoding_format == "base64"

        def build() -> EmbeddingResponse:
            embeddings = [
                EmbeddingResponseData(
                    index, as_base64(data, body) if as_text else unpack_vector(data)
                )
                for index, data in enumerate(vectors.data)
            ]
            return EmbeddingResponse(embeddings, call_of(request).model, vectors.usage)

        return await respond_with(request, vectors.num_numbers, build)

    async def embed(
        self,
        request: Request,
        prefix: str,
        prompts: Sequence[Prompt],
        params: PoolingParams,
        options: RequestOptions,
        check: Callable[[Sequence[int]], None] = lambda lengths: None,
    ) -> Vectors:
        """Return the vectors of prompts, whose ids begin with `prefix`. See `AsyncLLM.encode`. If
        the client disconnects, raise ClientDisconnect and stop the engine.
        """
        call = call_of(request)
        options = self.request_options(request, options, len(prompts))
        request_id = f"{prefix}-{call.unique_id}"
        async with while_connected(request.receive):
            outputs = await self.async_llm.encode(
                prompts, params, request_id, options, call=call, check=check
            )
        vectors = [output.outputs[0].pooled or b"" for output in outputs]
        return Vectors(vectors, sum(len(output.prompt_token_ids) for output in outputs))


def as_base64(data: bytes, body: VectorRequest) -> str:
    """Return float32 numbers as base64, in the type and the order of bytes that the body states."""
    numbers = unpack_vector(data)
    if body.embed_dtype == "float16":  # has no finite number above
        numbers = [x if abs(x) < 65520 else x * math.inf for x in numbers]
    if body.embed_dtype == "bfloat16":  # the upper half of a float32, rounded to even
        whole = struct.unpack(f"<{len(numbers)}I", data)
        numbers = [(x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in whole]
    form = (">" if body.endianness == "big" else "<") + CODES[body.embed_dtype] * len(numbers)
    return base64.b64encode(struct.pack(form, *numbers)).decode()
