"""Siblings: the API servers of one engine tell each other of their requests, so that each of them
answers for all.

Each listens on a Unix socket beside the engine's. A question is one message on a connection of its
own, and so is its answer. Who does not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from servd.api.async_llm import AsyncLLM
from servd.api.explanation import Ran, explain, ran, summarize
from servd.api.prefix_explanation import FindPrompt, Likeness, explain_prefix
from servd.api.protocol.requests import RequestSummary, RequestTimeline
from servd.api.timeline import Inquiry, Timeline
from servd.tracing import StepRecord

log = logging.getLogger("servd.api")

PATIENCE = 5.0  # seconds for a sibling's answer; half of them where somebody waits for more
CHARS_PER_STEP = 16  # a step takes about as long as so many characters, see `AsyncLLM.offload`


class ListRequests(msgspec.Struct, tag=True):
    """The newest requests of an owner, running ones first, or the slowest finished ones."""

    answer: ClassVar[Any] = list[RequestSummary]
    owner: str
    order: Literal["recent", "slowest"]
    count: int


class FindTimeline(msgspec.Struct, tag=True):
    """Where the time of a request went; None if there is no such request of this owner."""

    answer: ClassVar[Any] = RequestTimeline | None
    owner: str
    request_id: str


class WhenRan(msgspec.Struct, tag=True):
    """When the requests of an owner ran on an engine, by id."""

    answer: ClassVar[Any] = dict[str, Ran | None]
    owner: str
    engine: int


class ListSteps(msgspec.Struct, tag=True):
    """The latest steps of each engine, in order."""

    answer: ClassVar[Any] = list[StepRecord]
    count: int


class WriteMetrics(msgspec.Struct, tag=True):
    """Publish what is counted, for who reads all API servers' counts."""

    answer: ClassVar[Any] = None


Question = ListRequests | FindTimeline | WhenRan | FindPrompt | ListSteps | WriteMetrics


class Siblings:
    """What this API server and its siblings know.

    Args:
        async_llm: of this one.
    """

    def __init__(self, async_llm: AsyncLLM) -> None:
        self.async_llm = async_llm
        self.tracer = async_llm.tracer
        self.path: Path | None = None
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Answer siblings, whose sockets are in the same folder and have names that begin alike."""
        self.path = path
        self._server = await asyncio.start_unix_server(self._serve, path)

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None and self.path is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
            self.path = None

    # ---- for routes ----

    async def list_requests(self, question: ListRequests) -> list[RequestSummary]:
        """Those of all siblings."""
        found = chain.from_iterable(await self._ask_all(question))
        key = _slowness if question.order == "slowest" else _recency
        return sorted(found, key=key, reverse=True)[: question.count]

    async def find_timeline(self, question: FindTimeline) -> RequestTimeline | None:
        """That of the sibling that has it."""
        if (own := await self._answer(question)) is not None:
            return own
        return next((each for each in await self._ask_others(question) if each is not None), None)

    async def list_steps(self, question: ListSteps) -> list[StepRecord]:
        """Those of which any has heard."""
        steps = chain.from_iterable(await self._ask_all(question))
        by_start = {(step.started_ns, step.engine): step for step in steps}
        return [by_start[start] for start in sorted(by_start)][-question.count :]

    async def write_metrics(self) -> None:
        """Have the others publish theirs."""
        await self._ask_others(WriteMetrics())

    # ---- between siblings ----

    async def _ask_all(self, question: Question) -> list[Any]:
        """The answers of all, this one's first."""
        return [await self._answer(question), *await self._ask_others(question)]

    async def _ask_others(self, question: Question) -> list[Any]:
        if self.path is None:
            return []
        others = [path for path in self.path.parent.glob("api-*") if path != self.path]
        asked = (self._ask(path, question) for path in others)
        return [answer for [answer] in filter(None, await asyncio.gather(*asked))]

    async def _ask(self, path: Path, question: Question) -> list[Any]:
        """The answer of one, if it gives any."""
        try:
            is_second = isinstance(question, WhenRan | FindPrompt | WriteMetrics)
            async with asyncio.timeout(PATIENCE / (1 + is_second)):
                reader, writer = await asyncio.open_unix_connection(path)
                with closing(writer):
                    writer.write(msgspec.msgpack.encode(question))
                    writer.write_eof()
                    data = await reader.read()
            return [msgspec.msgpack.decode(data, type=question.answer)]
        except (OSError, TimeoutError, msgspec.DecodeError):
            return []  # it has ended, or is too busy

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            try:
                question = msgspec.msgpack.decode(await reader.read(), type=Question)
                writer.write(msgspec.msgpack.encode(await self._answer(question)))
                await writer.drain()
            except Exception:
                log.exception("a sibling's question could not be answered")

    async def _answer(self, question: Question) -> Any:
        """What this one knows."""
        match question:
            case ListRequests():
                return await self._summaries(question)
            case FindTimeline():
                return await self._timeline(question)
            case WhenRan(owner, engine):
                timelines = [t for t in self.tracer.of_owner(owner) if t.engine == engine]
                size = len(timelines) * CHARS_PER_STEP
                return await self.async_llm.offload(
                    owner, size, lambda: {each.id: ran([*each.marks]) for each in timelines}
                )
            case FindPrompt(owner):
                prompts = self.tracer.latest(owner, self.tracer.keep)
                size = sum(len(other.prompt) for other in prompts)
                return await self.async_llm.offload(owner, size, lambda: question.search(prompts))
            case ListSteps(count):
                engines = [*self.tracer.steps]
                return [step for each in engines for step in self.tracer.latest_steps(count, each)]
            case WriteMetrics():
                return self.async_llm.metrics.write()

    async def _summaries(self, question: ListRequests) -> list[RequestSummary]:
        find = self.tracer.longest if question.order == "slowest" else self.tracer.latest
        inquiries = self.tracer.inquiries(find(question.owner, question.count))
        size = _size(each for each in inquiries if each.timeline.summary is None)
        return await self.async_llm.offload(
            question.owner, size, lambda: list(map(summarize, inquiries))
        )

    async def _timeline(self, question: FindTimeline) -> RequestTimeline | None:
        tracer, owner = self.tracer, question.owner
        timeline = tracer.get(question.request_id, owner)
        if timeline is None:
            return None
        times, nearest = await asyncio.gather(
            self._ask_all(WhenRan(owner, timeline.engine)), self._nearest(timeline)
        )
        others = {name: when for each in times for name, when in each.items()}
        (inquiry,) = tracer.inquiries([timeline])

        def explained() -> RequestTimeline:
            found = explain(inquiry, others)
            if timeline.prompt and any(mark.stage == "scheduled" for mark in inquiry.marks):
                cache = self.async_llm.config.cache
                token_text = self.async_llm.processor.tokenizer.token_string
                found.prefix_cache = explain_prefix(timeline, nearest, cache, token_text)
            return found

        return await self.async_llm.offload(owner, _size([inquiry]), explained)

    async def _nearest(self, timeline: Timeline) -> Likeness | None:
        """The earlier prompt that begins most like this one's, whoever has it."""
        question = FindPrompt.of(timeline)
        own = await self._answer(question)
        question.cache_number = None
        found = filter(None, [own, *await self._ask_others(question)])
        return max(found, key=lambda each: (each.length, sum(each.could_be_found)), default=None)


def _slowness(request: RequestSummary) -> float:
    return request.wall_ms


def _recency(request: RequestSummary) -> tuple[bool, float]:
    """Running ones by their begin, others by their end."""
    is_running = request.status == "running"
    return is_running, request.created + (not is_running) * request.wall_ms / 1000


def _size(inquiries: Iterable[Inquiry]) -> int:
    return sum(CHARS_PER_STEP * len(inquiry.steps) for inquiry in inquiries)
