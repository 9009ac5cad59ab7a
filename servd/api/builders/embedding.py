"""Computes the vectors of prompts, and the similarity of texts."""

import base64
import math
import operator
import struct
from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import Request

from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.protocol.embeddings import EmbeddingUsage, VectorRequest
from servd.api.protocol.score import SimilarityRequest
from servd.api.text.prompt import Pair, Prompt, SharedText
from servd.messages.engine import RequestOptions
from servd.messages.outputs import unpack_vector
from servd.messages.params import CLASSIFY, PoolingParams

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


async def embed(
    request: Request,
    prefix: str,
    prompts: Sequence[Prompt],
    params: PoolingParams,
    options: RequestOptions,
    check: Callable[[Sequence[int]], None] = lambda lengths: None,
) -> Vectors:
    """Validate all prompts, then return their vectors. The ids of the prompts begin with `prefix`.
    If the client disconnects, raise ClientDisconnect and stop the engine.

    `check` gets the prompts' numbers of tokens before the engine starts, and may raise an error.
    """
    call = call_of(request)
    async_llm = call.context.async_llm
    deadline = call.deadline
    prefix = f"{prefix}-{call.unique_id}"
    named = list[Prompt]()

    def name(prompt: Prompt) -> None:
        request_id = f"{prefix}-{len(named)}"
        named.append(msgspec.structs.replace(prompt, request_id=request_id))

    await async_llm.loop.each(call.client, prompts, name)
    vectors = [b""] * len(named)
    await call.open_requests([prompt.request_id for prompt in named])
    with call.admit(options, len(named)) as (admitted, own):
        async with while_connected(request.receive):
            prepared = await async_llm.prepare(named, params, own, deadline, admitted)
            lengths = [len(one.prompt_token_ids) for one in prepared]
            check(lengths)
            async with aclosing(async_llm.generate(prepared, deadline)) as outputs:
                async for output in outputs:
                    assert output.pooled is not None
                    vectors[output.index] = output.pooled
    return Vectors(vectors, sum(lengths))


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


async def compare(
    request: Request,
    prefix: str,
    firsts: Sequence[Prompt],
    seconds: Sequence[Prompt],
    body: SimilarityRequest,
) -> tuple[list[float], EmbeddingUsage]:
    """Return the scores of one text with all others, or of texts pair by pair: scores of the
    model's head or, without a head, cosine similarities of embeddings.

    Raises InvalidRequest: the model's head classifies, or its files do not specify how to compute
    scores.
    """
    pooling = call_of(request).context.async_llm.processor.pooling
    pooling.check_scores()
    if pooling.task != "classify":
        params = PoolingParams(pooling=body.pooling, normalize=True)
        vectors = await embed(request, prefix, [*firsts, *seconds], params, body.request_options)
        split = len(firsts)
        return await _cosines(request, vectors.data[:split], vectors.data[split:]), vectors.usage
    texts = [(SharedText(str(one.content)), one.keep_first) for one in firsts]
    pairs = [
        Prompt(content=Pair(one, str(two.content), keep, two.keep_first), param=two.param)
        for (one, keep), two in zip(texts * (len(seconds) // len(texts)), seconds, strict=True)
    ]
    vectors = await embed(request, prefix, pairs, CLASSIFY, body.request_options)
    outputs = [unpack_vector(data) for data in vectors.data]
    if body.use_activation is False:
        return [numbers[0] for numbers in outputs], vectors.usage
    return [pooling.score(numbers) for numbers in outputs], vectors.usage


async def _cosines(
    request: Request, firsts: Sequence[bytes], seconds: Sequence[bytes]
) -> list[float]:
    """Return cosines of float32 vectors of length 1: of one with all others, or of pairs."""

    def compute() -> list[float]:
        left = [unpack_vector(vector) for vector in firsts]
        left *= len(seconds) // len(left)
        return [
            sum(map(operator.mul, one, unpack_vector(other)))
            for one, other in zip(left, seconds, strict=True)
        ]

    return await call_of(request).run_in_thread(sum(map(len, seconds)) // 4, compute)
