"""ServingDecisions: answers questions with the probability that a model gives each option.

The options are token sequences in a trie. At each branch of the trie, one-token requests ask the
engine for the probability of each next token. An option's probability is the product along its
path, as if every answer had to be one of the options. All requests continue the same prompt, whose
blocks stay in the prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from fastapi import Request, Response

from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.context import json_response
from servd.api.engine.async_llm import AsyncLLM, gather
from servd.api.protocol.decisions import Answer, DecisionResponse, DecisionsRequest, Question
from servd.api.protocol.decisions import answer as make_answer
from servd.api.protocol.decisions import options as options_of
from servd.api.protocol.responses import ResponseUsage, chat_messages
from servd.api.request.timeline import Timeline
from servd.api.serving.serving import OpenAIServing
from servd.api.text.prompt import Chat, Prompt
from servd.base.errors import DeadlineExceeded
from servd.messages.engine import RequestOptions
from servd.messages.outputs import CompletionOutput
from servd.messages.params import MAX_LOGPROB_TOKEN_IDS, SamplingParams

MAX_CONCURRENT = 64  # requests to the engine
MAX_CONCURRENT_QUESTIONS = 16
NO_REASONING = {"enable_thinking": False, "thinking": False}  # as `reasoning_effort: none`


class Branch(msgspec.Struct):
    path: list[int]  # tokens that lead to the branch
    members: dict[int, list[int]]  # next token -> the options that continue with it
    logprobs: dict[int, float] = {}  # by next token, from the model

    def shares(self) -> Iterator[tuple[list[int], float]]:
        """For each next token, yield the options that continue with it, and its probability."""
        highest = max(self.logprobs[token_id] for token_id in self.members)
        weights = [math.exp(self.logprobs[token_id] - highest) for token_id in self.members]
        for members, weight in zip(self.members.values(), weights, strict=True):
            yield members, weight / sum(weights)


def branches(options: list[list[int]]) -> list[Branch]:
    """Return the branches where the options differ, shortest prefix first, in linear time."""
    tree: list[Branch] = []
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
                tree.append(Branch(options[members[0]][: depth - 1], by_token))
                groups += [(depth, group) for group in by_token.values() if len(group) > 1]
                break
    return tree


class ServingDecisions(OpenAIServing):
    """Serves decisions; see OpenAIServing."""

    async def create_decision(self, body: DecisionsRequest, request: Request) -> Response:
        """Answer questions with the probabilities of the given options.

        The model answers each question twice, with the options in both orders. The response has the
        mean probabilities, because models favour the first or the last option.
        """
        call = call_of(request)
        self.processor.check_sums()
        request_id = f"decision-{call.unique_id}"
        options = RequestOptions(body.priority or 0, cache_salt=body.prompt_cache_key)
        options = self.request_options(request, options)
        with self.async_llm.admit(call, options, [request_id]) as admitted:
            scorer = OptionScorer(self.async_llm, options, admitted.timelines[0])
            try:
                async with asyncio.timeout_at(call.deadline), while_connected(request.receive):
                    answers = await self._answers(scorer, body)
            except TimeoutError:
                raise DeadlineExceeded from None
        usage = ResponseUsage.from_counts(
            scorer.num_prompt_tokens, scorer.num_cached_tokens, scorer.num_output_tokens
        )
        return json_response(DecisionResponse(call.model, answers, usage))

    async def _answers(self, scorer: OptionScorer, body: DecisionsRequest) -> list[Answer]:
        messages = chat_messages(None, cast(list[dict[str, Any]], body.input))
        may_run = asyncio.Semaphore(MAX_CONCURRENT_QUESTIONS)

        async def bounded(question: Question) -> Answer:
            async with may_run:
                return await self._answer(scorer, messages, question)

        first = await bounded(body.questions[0])  # brings the input into the prefix cache
        return [first, *await gather(map(bounded, body.questions[1:]))]

    async def _answer(
        self, scorer: OptionScorer, messages: list[dict[str, Any]], question: Question
    ) -> Answer:
        listed = options_of(question)
        forward = await self._probabilities(scorer, messages, question, listed)
        reverse = await self._probabilities(scorer, messages, question, listed[::-1])
        pairs = zip(forward, reverse[::-1], strict=True)
        return make_answer(question, list(map(statistics.fmean, pairs)))

    async def _probabilities(
        self,
        scorer: OptionScorer,
        messages: list[dict[str, Any]],
        question: Question,
        listed: list[tuple[str, str]],
    ) -> list[float]:
        """Return the probability of each option, in the order of `listed`."""
        async_llm = self.async_llm
        lines = [f"- {text}: {meaning}" if meaning else f"- {text}" for text, meaning in listed]
        task = [question["instructions"], "", "Answer with one of these only:", *lines]
        conversation = [*messages, {"role": "user", "content": "\n".join(task)}]
        chat = Chat(messages=conversation, chat_template_kwargs=NO_REASONING)
        prompt = Prompt(content=chat, param="input")
        owner = scorer.options.owner
        token_ids = await async_llm.run_in_thread(
            owner, prompt.num_chars, lambda: self.processor.tokenize(prompt)
        )
        # Distinguishes "no" from the beginning of "nothing".
        end = async_llm.spec.eos_token_ids[:1]
        encode = self.processor.tokenizer.encode

        def encode_options() -> list[list[int]]:
            return [[*encode(text, False), *end] for text, _ in listed]

        size = sum(len(text) for text, _ in listed)
        option_ids = await async_llm.run_in_thread(owner, size, encode_options)
        return await scorer.probabilities(token_ids, option_ids)


@dataclass(eq=False)
class OptionScorer:
    """A scorer of options after prompts, for an admitted request. It counts the tokens of all
    prompts, the cached tokens among them, and one output token for each request to the engine.
    """

    async_llm: AsyncLLM
    options: RequestOptions
    timeline: Timeline  # of the request

    def __post_init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
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
        tree = await asyncio.to_thread(branches, options)
        # The first request brings the prompt into the cache.
        for group in (tree[:1], tree[1:]):
            await gather(
                self._score(prompt_token_ids, branch, token_ids)
                for branch in group
                for token_ids in _batches(list(branch.members))
            )
        result = [1.0] * len(options)
        for members, share in itertools.chain.from_iterable(b.shares() for b in tree):
            for member in members:
                result[member] *= share
        total = sum(result)  # above 1 if texts that differ have the same tokens
        return [probability / total for probability in result]

    async def _score(
        self, prompt_token_ids: list[int], branch: Branch, token_ids: list[int]
    ) -> None:
        async with self._may_run:
            output = await self._next_token(prompt_token_ids + branch.path, token_ids)
        assert output.positions is not None
        [position] = output.positions
        branch.logprobs.update(zip(position.token_ids, position.logprobs, strict=True))
        self.num_output_tokens += 1
        if not branch.path:
            self.num_cached_tokens += output.num_cached_tokens

    async def _next_token(self, prompt: list[int], token_ids: list[int]) -> CompletionOutput:
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=token_ids
        )
        outputs = self.async_llm.generate(
            Prompt(content=prompt, param="input"),
            params,
            f"{self.timeline.request_id}/{next(self._numbers)}",
            self.options,
            parent=self.timeline,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.outputs:
                    return output.outputs[0]
        raise AssertionError("a request ends with an output")


def _batches(token_ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(token_ids), MAX_LOGPROB_TOKEN_IDS):
        yield token_ids[start : start + MAX_LOGPROB_TOKEN_IDS]
