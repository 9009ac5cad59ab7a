"""Peer API servers: servers of the same engines answer each other's queries about requests, so that
any server can report the requests of all.

Each server listens on a Unix socket beside the engine's. A query is one message on its own
connection, and so is its reply. A peer that does not reply in time is left out.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from servd.api.engine.async_llm import AsyncLLM
from servd.api.observability.metrics import Report
from servd.api.observability.prefix_misses import explain_prefix
from servd.api.observability.rendering import render_timeline, summarize
from servd.api.observability.tracer import Snapshot
from servd.api.protocol.requests import RequestSummary, RequestTimeline
from servd.base.tracing import StepRecord, first

log = logging.getLogger("servd.api")

TIMEOUT = 3.0  # seconds for a peer's reply; a scrape of /metrics waits for it, too
CHARS_PER_STEP = 16  # a step costs as much as this many characters, see `AsyncLLM.run_in_thread`


class ListRequests(msgspec.Struct, tag=True):
    """A query for an owner's newest requests (running first) or slowest finished requests."""

    reply: ClassVar[Any] = list[RequestSummary]
    owner: str
    order: Literal["recent", "slowest"]
    count: int

    async def answer(self, async_llm: AsyncLLM) -> list[RequestSummary]:
        tracer = async_llm.tracer
        find = tracer.list_slowest if self.order == "slowest" else tracer.list_requests
        snapshots = tracer.take_snapshots(find(self.owner)[: self.count])
        size = _size([snapshot for snapshot in snapshots if snapshot.timeline.summary is None])
        return await async_llm.run_in_thread(
            self.owner, size, lambda: [summarize(snapshot) for snapshot in snapshots]
        )


class FindTimeline(msgspec.Struct, tag=True):
    """A query for the timeline of a request. The reply is None if the owner has no such request."""

    reply: ClassVar[Any] = RequestTimeline | None
    owner: str
    request_id: str

    async def answer(self, async_llm: AsyncLLM) -> RequestTimeline | None:
        timeline = async_llm.tracer.find_request(self.request_id, self.owner)
        if timeline is None:
            return None
        [snapshot] = async_llm.tracer.take_snapshots([timeline])
        timelines = async_llm.tracer.list_requests(self.owner)
        size = _size([snapshot]) + sum(
            CHARS_PER_STEP + len(timeline.tokens) for timeline in timelines
        )

        def render() -> RequestTimeline:
            result = render_timeline(snapshot, timelines)
            if timeline.tokens and first(snapshot.marks, "scheduled"):
                token_text = async_llm.processor.tokenizer.token_string
                cache = async_llm.config.cache
                result.prefix_cache = explain_prefix(timeline, timelines, cache, token_text)
            return result

        return await async_llm.run_in_thread(self.owner, size, render)


class ListSteps(msgspec.Struct, tag=True):
    """A query for the latest steps of each engine, in order, and the tokens of each second."""

    reply: ClassVar[Any] = tuple[list[StepRecord], dict[int, list[int]]]
    count: int

    async def answer(self, async_llm: AsyncLLM) -> tuple[list[StepRecord], dict[int, list[int]]]:
        tracer = async_llm.tracer
        steps = [
            step for engine in [*tracer.steps] for step in tracer.latest_steps(self.count, engine)
        ]
        return steps, tracer.tokens


class WriteMetrics(msgspec.Struct, tag=True):
    """A query that makes a peer publish its counters, because the asking server renders all
    metrics. The reply is the state of the engines.
    """

    reply: ClassVar[Any] = Report

    async def answer(self, async_llm: AsyncLLM) -> Report:
        async_llm.metrics.write()
        return async_llm.metrics.report()


Query = ListRequests | FindTimeline | ListSteps | WriteMetrics


@dataclass(eq=False)
class PeerServers:
    """The peer API servers: sends queries to them, and answers their queries."""

    async_llm: AsyncLLM  # of this server
    path: Path | None = None  # of this server's socket, while it listens
    _server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Answer peers at the socket `path`. Their sockets `api-*` are in the same folder."""
        self.path = path
        self._server = await asyncio.start_unix_server(self._serve, path)

    def close(self) -> None:
        if self._server is not None and self.path is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
            self.path = None

    async def list_requests(self, query: ListRequests) -> list[RequestSummary]:
        answers = chain(await query.answer(self.async_llm), *await self.ask_peers(query))
        key = attrgetter("wall_ms") if query.order == "slowest" else _recency
        return sorted(answers, key=key, reverse=True)[: query.count]

    async def find_timeline(self, query: FindTimeline) -> RequestTimeline | None:
        if (answer := await query.answer(self.async_llm)) is not None:
            return answer
        return next(filter(None, await self.ask_peers(query)), None)

    async def list_steps(self, query: ListSteps) -> tuple[list[StepRecord], dict[int, list[int]]]:
        by_start: dict[tuple[int, int], StepRecord] = {}
        tokens: dict[int, list[int]] = {}
        for steps, counts in [await query.answer(self.async_llm), *await self.ask_peers(query)]:
            by_start |= {(step.started_ns, step.engine): step for step in steps}
            # The larger counts, because servers report the same steps.
            tokens |= {second: max(counts[second], tokens.get(second, [])) for second in counts}
        return [by_start[start] for start in sorted(by_start)][-query.count :], tokens

    async def ask_peers(self, query: Query) -> list[Any]:
        """Return the replies of all peers that answer in time."""
        if self.path is None:
            return []
        paths = [path for path in self.path.parent.glob("api-*") if path != self.path]
        replies = await asyncio.gather(*(self._ask_peer(path, query) for path in paths))
        return [reply for [reply] in filter(None, replies)]

    async def _ask_peer(self, path: Path, query: Query) -> list[Any]:
        try:
            async with asyncio.timeout(TIMEOUT):
                reader, writer = await asyncio.open_unix_connection(path)
                with closing(writer):
                    writer.write(msgspec.msgpack.encode(query))
                    writer.write_eof()
                    data = await reader.read()
            return [msgspec.msgpack.decode(data, type=query.reply)]
        except (OSError, TimeoutError, msgspec.DecodeError):
            return []  # it has ended, or is too busy

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            try:
                query = msgspec.msgpack.decode(await reader.read(), type=Query)
                writer.write(msgspec.msgpack.encode(await query.answer(self.async_llm)))
                await writer.drain()
            except Exception:
                log.exception("cannot answer the query of a peer API server")


def _recency(request: RequestSummary) -> tuple[bool, float]:
    """Return the sort key of a request: whether it is running, and the time of its start or end."""
    if request.status == "running":
        return True, request.created
    return False, request.created + request.wall_ms / 1000


def _size(snapshots: Sequence[Snapshot]) -> int:
    return sum(
        CHARS_PER_STEP * len(snapshot.steps.get(snapshot.timeline.rank, ()))
        for snapshot in snapshots
    )
