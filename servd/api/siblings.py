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
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from servd.api.async_llm import AsyncLLM
from servd.api.explanation import Ran, explain, ran, summarize
from servd.api.metrics import Report
from servd.api.prefix_explanation import Likeness, Sought, explain_prefix
from servd.api.protocol.requests import RequestSummary, RequestTimeline
from servd.api.timeline import Inquiry
from servd.tracing import StepRecord, first

log = logging.getLogger("servd.api")

PATIENCE = 5.0  # seconds for a sibling's answer; half of them where somebody waits for more
CHARS_PER_STEP = 16  # a step takes about as long as so many characters, see `AsyncLLM.offload`


class ListRequests(msgspec.Struct, tag=True):
    """The newest requests of an owner, running ones first, or the slowest finished ones."""

    answer: ClassVar[Any] = list[RequestSummary]
    owner: str
    order: Literal["recent", "slowest"]
    count: int

    async def answered_by(self, server: Siblings) -> list[RequestSummary]:
        """What this server knows."""
        tracer = server.async_llm.tracer
        find = tracer.longest if self.order == "slowest" else tracer.latest
        inquiries = tracer.inquiries(find(self.owner, self.count))
        size = _size(each for each in inquiries if each.timeline.summary is None)
        return await server.async_llm.offload(
            self.owner, size, lambda: [summarize(each) for each in inquiries]
        )


class FindTimeline(msgspec.Struct, tag=True):
    """Where the time of a request went; None if there is no such request of this owner."""

    answer: ClassVar[Any] = RequestTimeline | None
    owner: str
    request_id: str

    async def answered_by(self, server: Siblings) -> RequestTimeline | None:
        """What this server knows, with what others know of the owner's other requests."""
        async_llm = server.async_llm
        timeline = async_llm.tracer.get(self.request_id, self.owner)
        if timeline is None:
            return None
        question = FindOthers.of(timeline)
        own = await question.answered_by(server)
        question.cache_number = None
        found = [own, *await server.ask_others(question)]
        others = {name: when for each in found for name, when in each.ran.items()}
        nearest = [each.nearest for each in found if each.nearest is not None]
        (inquiry,) = async_llm.tracer.inquiries([timeline])

        def explained() -> RequestTimeline:
            result = explain(inquiry, others)
            if timeline.prompt and first(inquiry.marks, "scheduled"):
                result.prefix_cache = explain_prefix(
                    timeline,
                    max(nearest, key=attrgetter("rank"), default=None),
                    async_llm.config.cache,
                    async_llm.processor.tokenizer.token_string,
                )
            return result

        return await async_llm.offload(self.owner, _size([inquiry]), explained)


class Others(msgspec.Struct):
    """What the requests of an owner beside one tell about it."""

    ran: dict[str, Ran | None]  # when those of its engine ran, by id
    nearest: Likeness | None  # the earlier prompt that begins most like its own


class FindOthers(Sought, tag=True):
    """The requests of an owner beside the one that is sought."""

    answer: ClassVar[Any] = Others

    async def answered_by(self, server: Siblings) -> Others:
        """What this server knows."""
        timelines = server.async_llm.tracer.of_owner(self.owner)
        size = sum(CHARS_PER_STEP + len(each.prompt) for each in timelines)

        def found() -> Others:
            own = [each for each in timelines if each.engine == self.engine]
            return Others({each.id: ran([*each.marks]) for each in own}, self.search(timelines))

        return await server.async_llm.offload(self.owner, size, found)


class ListSteps(msgspec.Struct, tag=True):
    """The latest steps of each engine, in order."""

    answer: ClassVar[Any] = list[StepRecord]
    count: int

    async def answered_by(self, server: Siblings) -> list[StepRecord]:
        """What this server has heard of."""
        tracer = server.async_llm.tracer
        return [step for each in [*tracer.steps] for step in tracer.latest_steps(self.count, each)]


class WriteMetrics(msgspec.Struct, tag=True):
    """Publish what is counted, for who reads all API servers' counts; and tell the state of the
    engines.
    """

    answer: ClassVar[Any] = Report

    async def answered_by(self, server: Siblings) -> Report:
        """What this server has heard of."""
        server.async_llm.metrics.write()
        return server.async_llm.metrics.report()


Question = ListRequests | FindTimeline | FindOthers | ListSteps | WriteMetrics


@dataclass(eq=False)
class Siblings:
    """What this API server and its siblings know."""

    async_llm: AsyncLLM  # of this one
    path: Path | None = None  # of its socket, while it listens
    _server: asyncio.Server | None = None

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

    async def list_requests(self, question: ListRequests) -> list[RequestSummary]:
        """Those of all siblings."""
        own = await question.answered_by(self)
        found = chain(own, *await self.ask_others(question))
        key = attrgetter("wall_ms") if question.order == "slowest" else _recency
        return sorted(found, key=key, reverse=True)[: question.count]

    async def find_timeline(self, question: FindTimeline) -> RequestTimeline | None:
        """That of the sibling that has it."""
        if (own := await question.answered_by(self)) is not None:
            return own
        return next(filter(None, await self.ask_others(question)), None)

    async def list_steps(self, question: ListSteps) -> list[StepRecord]:
        """Those of which any has heard."""
        steps = chain(await question.answered_by(self), *await self.ask_others(question))
        by_start = {(step.started_ns, step.engine): step for step in steps}
        return [by_start[start] for start in sorted(by_start)][-question.count :]

    async def ask_others(self, question: Question) -> list[Any]:
        """The answers of all who give one."""
        if self.path is None:
            return []
        others = [path for path in self.path.parent.glob("api-*") if path != self.path]
        asked = (self._ask(path, question) for path in others)
        return [answer for [answer] in filter(None, await asyncio.gather(*asked))]

    async def _ask(self, path: Path, question: Question) -> list[Any]:
        """The answer of one, if it gives any."""
        try:
            is_second = isinstance(question, FindOthers | WriteMetrics)
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
                writer.write(msgspec.msgpack.encode(await question.answered_by(self)))
                await writer.drain()
            except Exception:
                log.exception("a sibling's question could not be answered")


def _recency(request: RequestSummary) -> tuple[bool, float]:
    """Running ones by their begin, others by their end."""
    is_running = request.status == "running"
    return is_running, request.created + (not is_running) * request.wall_ms / 1000


def _size(inquiries: Iterable[Inquiry]) -> int:
    return sum(CHARS_PER_STEP * len(each.steps.get(each.timeline.engine, ())) for each in inquiries)
