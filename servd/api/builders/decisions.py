"""OptionScorer: computes the probability that a model answers with each of the given options.

The options are token sequences in a trie. At each branch of the trie, one-token requests ask the
engine for the probability of each next token. An option's probability is the product along its
path, as if every answer had to be one of the options. All requests continue the same prompt, whose
blocks stay in the prefix cache.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from servd.api.engine.async_llm import AsyncLLM
from servd.api.text.prompt import Prompt
from servd.messages.engine import RequestOptions
from servd.messages.outputs import CompletionOutput
from servd.messages.params import MAX_LOGPROB_TOKEN_IDS, SamplingParams

MAX_CONCURRENT = 64  # requests to the engine

T = TypeVar("T")


class Branch(msgspec.Struct):
    path: list[int]  # tokens that lead to the branch
    members: dict[int, list[int]]  # next token -> the options that continue with it
    logprobs: dict[int, float] = {}  # by next token, from the model

    def shares(self) -> Iterator[tuple[list[int], float]]:
        """For each next token, yield the options that continue with it, and its probability."""
        most = max(self.logprobs[token_id] for token_id in self.members)
        weights = [math.exp(self.logprobs[token_id] - most) for token_id in self.members]
        for members, weight in zip(self.members.values(), weights, strict=True):
            yield members, weight / sum(weights)


def branches(options: list[list[int]]) -> list[Branch]:
    """Return the branches where the options differ, shortest prefix first, in linear time."""
    found: list[Branch] = []
    groups = [(0, list(range(len(options))))]
    while groups:
        depth, members = groups.pop()
        end = min(len(options[member]) for member in members)
        while depth < end:
            by_token: dict[int, list[int]] = {}
            for member in members:
                by_token.setdefault(options[member][depth], []).append(member)
            depth += 1
            if len(by_token) > 1:
                found.append(Branch(options[members[0]][: depth - 1], by_token))
                groups += [(depth, group) for group in by_token.values() if len(group) > 1]
                break
    return found


@dataclass(eq=False)
class OptionScorer:
    """A scorer of options after prompts, for an admitted request. It counts the tokens of all
    prompts, the cached tokens among them, and one output token for each request to the engine.
    """

    async_llm: AsyncLLM
    request_id: str
    options: RequestOptions
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self._numbers = itertools.count()
        self._may_run = asyncio.Semaphore(MAX_CONCURRENT)

    async def probabilities(
        self, prompt_token_ids: list[int], options: list[list[int]]
    ) -> list[float]:
        """Return the probability of each option after the prompt, given that one option follows.
        The sum is 1. No option may be a prefix of another option. The prompt must not be empty.

        Raises ContextTooLong: the prompt with an option does not fit; EngineError.
        """
        self.num_prompt_tokens += len(prompt_token_ids)
        found = await asyncio.to_thread(branches, options)
        # The first request brings the prompt into the cache.
        for group in (found[:1], found[1:]):
            await gather(
                self._score(prompt_token_ids, branch, token_ids)
                for branch in group
                for token_ids in _batches(list(branch.members))
            )
        result = [1.0] * len(options)
        for members, share in itertools.chain.from_iterable(b.shares() for b in found):
            for member in members:
                result[member] *= share
        total = sum(result)  # above 1 if texts that differ have the same tokens
        return [probability / total for probability in result]

    async def _score(
        self, prompt_token_ids: list[int], branch: Branch, token_ids: list[int]
    ) -> None:
        async with self._may_run:
            output = await self._next_token(prompt_token_ids + branch.path, token_ids)
        assert output.logprobs is not None
        [position] = output.logprobs
        branch.logprobs.update(zip(position.token_ids, position.logprobs, strict=True))
        self.num_output_tokens += 1
        if not branch.path:
            self.num_cached_tokens += output.num_cached_tokens

    async def _next_token(self, prompt: list[int], token_ids: list[int]) -> CompletionOutput:
        request_id = f"{self.request_id}/{next(self._numbers)}"
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=token_ids
        )
        prompts = [Prompt(content=prompt, request_id=request_id, param="input")]
        prepared = await self.async_llm.prepare(prompts, params, self.options, self.deadline)
        for one in prepared:
            one.part_of = self.request_id
        async with aclosing(self.async_llm.generate(prepared, self.deadline)) as outputs:
            async for output in outputs:
                return output
        raise AssertionError("a request ends with an output")


def _batches(token_ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(token_ids), MAX_LOGPROB_TOKEN_IDS):
        yield token_ids[start : start + MAX_LOGPROB_TOKEN_IDS]


async def gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all of `work`. If one part fails or the caller is cancelled, stop all parts."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
