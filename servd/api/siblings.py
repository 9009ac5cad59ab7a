"""Siblings: the API servers of one engine exchange what they know of their requests, so that each
answers introspection requests for all.

Each listens on a Unix socket beside the engine's. A query is one message on its own connection, and
so is its reply. A sibling that does not reply in time is left out.
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

PATIENCE = 5.0  # seconds for a sibling's reply; half of it for queries within queries
CHARS_PER_STEP = 16  # a step costs as much as so many characters, see `AsyncLLM.run_in_thread`


class ListRequests(msgspec.Struct, tag=True):
    """The newest requests of an owner, running ones first; or the slowest finished ones."""

    answer: ClassVar[Any] = list[RequestSummary]
    owner: str
    order: Literal["recent", "slowest"]
    count: int

    async def answered_by(self, server: Siblings) -> list[RequestSummary]:
        tracer = server.async_llm.tracer
        find = tracer.longest if self.order == "slowest" else tracer.latest
        inquiries = tracer.inquiries(find(self.owner, self.count))
        size = _size(each for each in inquiries if each.timeline.summary is None)
        return await server.async_llm.run_in_thread(
            self.owner, size, lambda: [summarize(each) for each in inquiries]
        )


class FindTimeline(msgspec.Struct, tag=True):
    """Where a request's time went; None if the owner has no such request."""

    answer: ClassVar[Any] = RequestTimeline | None
    owner: str
    request_id: str

    async def answered_by(self, server: Siblings) -> RequestTimeline | None:
        """What this server knows, and what its siblings know of the owner's other requests."""
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
            if timeline.tokens and first(inquiry.marks, "scheduled"):
                result.prefix_cache = explain_prefix(
                    timeline,
                    max(nearest, key=attrgetter("rank"), default=None),
                    async_llm.config.cache,
                    async_llm.processor.tokenizer.token_string,
                )
            return result

        return await async_llm.run_in_thread(self.owner, _size([inquiry]), explained)


class Others(msgspec.Struct):
    """What an owner's other requests explain about one."""

    ran: dict[str, Ran | None]  # when those on the same engine ran, by id
    nearest: Likeness | None  # the earlier prompt with the longest common prefix


class FindOthers(Sought, tag=True):
    """The other requests of the owner of the request that is explained."""

    answer: ClassVar[Any] = Others

    async def answered_by(self, server: Siblings) -> Others:
        timelines = server.async_llm.tracer.of_owner(self.owner)
        size = sum(CHARS_PER_STEP + len(each.tokens) for each in timelines)

        def found() -> Others:
            own = [each for each in timelines if each.rank == self.engine]
            times = {each.request_id: ran([*each.marks]) for each in own}
            return Others(times, self.search(timelines))

        return await server.async_llm.run_in_thread(self.owner, size, found)


class ListSteps(msgspec.Struct, tag=True):
    """The latest steps of each engine, in order."""

    answer: ClassVar[Any] = list[StepRecord]
    count: int

    async def answered_by(self, server: Siblings) -> list[StepRecord]:
        tracer = server.async_llm.tracer
        return [step for each in [*tracer.steps] for step in tracer.latest_steps(self.count, each)]


class WriteMetrics(msgspec.Struct, tag=True):
    """Publish the counters for the server that aggregates all API servers' metrics, and reply with
    the state of the engines.
    """

    answer: ClassVar[Any] = Report

    async def answered_by(self, server: Siblings) -> Report:
        server.async_llm.metrics.write()
        return server.async_llm.metrics.report()


Question = ListRequests | FindTimeline | FindOthers | ListSteps | WriteMetrics


@dataclass(eq=False)
class Siblings:
    """Queries that this API server and its siblings answer together."""

    async_llm: AsyncLLM  # of this one
    path: Path | None = None  # of this server's socket, while it listens
    _server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Answer siblings, whose sockets are in the same folder with the same name prefix."""
        self.path = path
        self._server = await asyncio.start_unix_server(self._serve, path)

    def close(self) -> None:
        if self._server is not None and self.path is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
            self.path = None

    async def list_requests(self, question: ListRequests) -> list[RequestSummary]:
        own = await question.answered_by(self)
        found = chain(own, *await self.ask_others(question))
        key = attrgetter("wall_ms") if question.order == "slowest" else _recency
        return sorted(found, key=key, reverse=True)[: question.count]

    async def find_timeline(self, question: FindTimeline) -> RequestTimeline | None:
        if (own := await question.answered_by(self)) is not None:
            return own
        return next(filter(None, await self.ask_others(question)), None)

    async def list_steps(self, question: ListSteps) -> list[StepRecord]:
        steps = chain(await question.answered_by(self), *await self.ask_others(question))
        by_start = {(step.started_ns, step.engine): step for step in steps}
        return [by_start[start] for start in sorted(by_start)][-question.count :]

    async def ask_others(self, question: Question) -> list[Any]:
        if self.path is None:
            return []
        others = [path for path in self.path.parent.glob("api-*") if path != self.path]
        asked = (self._ask(path, question) for path in others)
        return [answer for [answer] in filter(None, await asyncio.gather(*asked))]

    async def _ask(self, path: Path, question: Question) -> list[Any]:
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
    """Sort key: running requests by their start, others by their end."""
    is_running = request.status == "running"
    return is_running, request.created + (not is_running) * request.wall_ms / 1000


def _size(inquiries: Iterable[Inquiry]) -> int:
    return sum(CHARS_PER_STEP * len(each.steps.get(each.timeline.rank, ())) for each in inquiries)
