"""Answer: the deltas of a request's choices become one JSON body, or the events of a stream."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servd.api.beam_search import BeamSearch
from servd.api.processor import Prepared
from servd.api.protocol.generation import (
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from servd.api.routes._context import context_of, ignored_header
from servd.api.streaming import EventStream, event, until_disconnect
from servd.outputs import CompletionOutput

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class Answer(ABC):
    """One request's answer in the making. Subclasses know the shapes of chunks and bodies.

    Both ways consume the same deltas, so a stream joined is the whole answer.

    Args:
        answer_id: the `id` of the body and of all chunks.
        model: the name to answer with.
        body: as the client sent it.
        prepared: one per prompt, each with the same number of choices.
    """

    def __init__(
        self,
        request: Request,
        answer_id: str,
        model: str,
        body: GenerationRequest,
        prepared: list[Prepared],
    ) -> None:
        self.request = request
        self.context = context_of(request)
        self.id = answer_id
        self.created = int(time.time())
        self.model = model
        self.body = body
        self.prepared = prepared
        self.n = prepared[0].params.n
        self.num_choices = self.n * len(prepared)
        self.num_output_tokens = 0
        self.num_cached_tokens = [0] * len(prepared)
        self.tokenizer = self.context.async_llm.processor.tokenizer

    @abstractmethod
    def chunks(self, output: CompletionOutput) -> Sequence[msgspec.Struct]:
        """What a stream says about one delta; may be nothing."""

    @abstractmethod
    def last_chunk(self) -> msgspec.Struct:
        """The chunk without choices that tells the usage."""

    @abstractmethod
    def whole(self, choices: list[CompletionOutput]) -> msgspec.Struct:
        """The body for all choices, in order."""

    async def respond(self) -> Response:
        """Stream, or wait for all of it; the engine stops when the client leaves.

        Raises:
            ClientDisconnect: the client left before a whole answer was there.
        """
        headers = ignored_header(self.body)
        if self.body.stream:
            return EventStream(
                self._frames(),
                request_id=self.request.state.request_id,
                keep_alive=self.context.keep_alive,
                headers=headers,
            )
        content = await until_disconnect(self._collect(), self.request.receive)
        return Response(content, headers=headers, media_type="application/json")

    def usage(self) -> Usage:
        """Tokens so far."""
        num_prompt_tokens = sum(len(p.prompt_token_ids) for p in self.prepared)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.num_cached_tokens)),
        )

    def chunk_usage(self) -> Usage | None | UnsetType:
        """The `usage` of an ordinary chunk: there only if the client asked for usage."""
        if self.body.continuous_usage:
            return self.usage()
        return None if self.body.include_usage else UNSET

    def has_news(self, output: CompletionOutput) -> bool:
        """Whether a stream says something about a delta; text may be held back for a stop
        string.
        """
        asked_for_tokens = (
            output.logprobs or self.body.return_token_ids or self.body.continuous_usage
        )
        return bool(output.text or output.finish_reason or (output.token_ids and asked_for_tokens))

    def token_name(self, token_id: int) -> str:
        """How log-probabilities name a token."""
        return (
            f"token_id:{token_id}"
            if self.body.return_tokens_as_token_ids
            else self.tokenizer.token_string(token_id)
        )

    def prompt_text(self, prepared: Prepared) -> str:
        """The prompt, written out where only its tokens are known."""
        if prepared.prompt is not None:
            return prepared.prompt
        return self.tokenizer.decode(prepared.prompt_token_ids, skip_special_tokens=False)

    def prompt_logprobs(self, output: CompletionOutput) -> PromptLogprobs | UnsetType:
        """What `prompt_logprobs` asks for; `output` is the first choice of its prompt."""
        k = self.body.prompt_logprobs
        if k is None:
            return UNSET
        name = self.tokenizer.token_string
        entries: PromptLogprobs = [None]
        for position in output.prompt_logprobs or []:
            likely = zip(position.token_ids[: 1 + k], position.logprobs, strict=False)
            ranked = {
                i: PromptLogprob(max(logprob, MIN_LOGPROB), None, name(i)) for i, logprob in likely
            }
            for rank, i in enumerate(position.token_ids[1 : 1 + k], 1):
                ranked[i].rank = rank
            ranked[position.token_ids[0]].rank = position.rank
            entries.append(ranked)
        return entries

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        encode = msgspec.json.Encoder().encode
        async with aclosing(generate(self._run, self.prepared, self.n)) as outputs:
            async for output in outputs:
                self._count(output)
                if chunks := self.chunks(output):
                    yield b"".join([event(encode(chunk)) for chunk in chunks])
        if self.body.include_usage:
            yield event(encode(self.last_chunk()))

    async def _collect(self) -> bytes:
        choices = [CompletionOutput(index=i) for i in range(self.num_choices)]
        async with aclosing(generate(self._run, self.prepared, self.n)) as outputs:
            async for output in outputs:
                self._count(output)
                choices[output.index].add(output)
        return msgspec.json.encode(self.whole(choices))

    def _count(self, output: CompletionOutput) -> None:
        self.num_output_tokens += len(output.token_ids)
        prompt, choice = divmod(output.index, self.n)
        if choice == 0:  # later choices find what the first one computed
            self.num_cached_tokens[prompt] = max(
                self.num_cached_tokens[prompt], output.num_cached_tokens
            )

    def _run(self, prepared: Prepared) -> AsyncGenerator[CompletionOutput, None]:
        body = self.body
        if not body.use_beam_search:
            return self.context.async_llm.generate(prepared)
        length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return BeamSearch(prepared, length_penalty, body.early_stopping or False).run(
            self.context.async_llm
        )


Run = Callable[[Prepared], AsyncGenerator[CompletionOutput, None]]


def generate(run: Run, prepared: list[Prepared], n: int) -> AsyncGenerator[CompletionOutput, None]:
    """Outputs of several prompts with `n` choices each, as they come; index = prompt number * n +
    i.
    """
    if len(prepared) == 1:
        return run(prepared[0])
    return _merge(run, prepared, n)


async def _merge(
    run: Run, prepared: list[Prepared], n: int
) -> AsyncGenerator[CompletionOutput, None]:
    # Bounded, so that what waits for a slow client waits in AsyncLLM, which merges it.
    arrived: asyncio.Queue[CompletionOutput | Exception | None] = asyncio.Queue(
        maxsize=len(prepared)
    )

    async def forward(number: int) -> None:
        try:
            async with aclosing(run(prepared[number])) as outputs:
                async for output in outputs:
                    output.index += number * n
                    await arrived.put(output)
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(forward(number)) for number in range(len(prepared))]
    num_running = len(tasks)
    try:
        while num_running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
