"""What the routes of vectors share: prompts in, vectors of the engine out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import Request

from servd.api.async_llm import AsyncLLM
from servd.api.processor import Prepared
from servd.api.routes._answer import generate
from servd.api.routes._context import context_of, start_timeline
from servd.api.streaming import until_disconnect
from servd.params import PoolingParams


class Input(msgspec.Struct):
    """A prompt that becomes a vector, or one for each of its tokens."""

    prompt: str | list[int]
    param: str = "input"  # the field of the request that holds it, for errors
    add_special_tokens: bool = True
    keep_first: int | None = None  # tokens; cuts the end off
    keep_last: int | None = None  # tokens; cuts the beginning off; -1 for as many as fit


class Vectors(msgspec.Struct):
    """What became of the inputs, in their order."""

    data: list[bytes]  # float32, little-endian
    num_prompt_tokens: int  # of all inputs


async def embed(
    request: Request,
    prefix: str,
    inputs: Sequence[Input],
    params: PoolingParams,
    priority: int | None = None,
    check: Callable[[int], None] = lambda num_tokens: None,
) -> Vectors:
    """Validate all inputs, then compute all vectors; the engine stops when the client leaves.

    Args:
        request: whose body has been read.
        prefix: of the ids of the engine's requests.
        inputs: at least one.
        params: of all of them.
        priority: as of `Processor.process`.
        check: gets the number of tokens of all inputs before anything is computed, and may refuse
            them.

    Raises:
        InvalidRequest: see `Processor.process_pooling`.
        ClientDisconnect: the client left.
    """
    async_llm = context_of(request).async_llm
    prepared: list[Prepared] = []
    for number, item in enumerate(inputs):
        request_id = f"{prefix}-{request.state.unique_id}-{number}"
        start_timeline(request, request_id)
        prompt = (
            item.prompt
            if item.keep_first is None
            else await _first_tokens(async_llm, item, item.keep_first)
        )
        prepared.append(
            await async_llm.prepare_pooling(
                request_id,
                prompt,
                params,
                add_special_tokens=item.add_special_tokens,
                priority=priority or 0,
                truncate_prompt_tokens=item.keep_last,
                param=item.param,
            )
        )
    num_tokens = sum(len(p.prompt_token_ids) for p in prepared)
    check(num_tokens)
    return Vectors(await until_disconnect(_run(async_llm, prepared), request.receive), num_tokens)


async def _first_tokens(async_llm: AsyncLLM, item: Input, limit: int) -> list[int]:
    """The beginning of a prompt, with the special tokens that the tokenizer puts at its end."""
    token_ids = item.prompt
    if isinstance(token_ids, str):
        token_ids = await async_llm.encode(token_ids, item.add_special_tokens)
    if len(token_ids) <= limit:
        return token_ids
    num_last = 0
    while (
        num_last < limit and token_ids[-1 - num_last] in async_llm.processor.tokenizer.special_ids
    ):
        num_last += 1
    return token_ids[: limit - num_last] + token_ids[len(token_ids) - num_last :]


async def _run(async_llm: AsyncLLM, prepared: list[Prepared]) -> list[bytes]:
    vectors = [b""] * len(prepared)
    async with aclosing(generate(async_llm.generate, prepared, n=1)) as outputs:
        async for output in outputs:
            assert output.pooled is not None
            vectors[output.index] = output.pooled
    return vectors
