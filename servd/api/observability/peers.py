"""Peer API servers: those of one engine exchange what they know of their requests, so that each
answers for all.

Each listens on a Unix socket beside the engine's. A query is one message on its own connection, and
so is its reply. A peer that does not reply in time is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from servd.api.async_llm import AsyncLLM
from servd.api.metrics import Report
from servd.api.observability.prefix_misses import EarlierPrompt, PromptQuery, explain_prefix
from servd.api.observability.rendering import Interval, render_timeline, run_interval, summarize
from servd.api.observability.tracer import Snapshot
from servd.api.protocol.requests import RequestSummary, RequestTimeline
from servd.tracing import StepRecord, first

log = logging.getLogger("servd.api")

TIMEOUT = 5.0  # seconds for a peer's reply; half of it for queries within queries
CHARS_PER_STEP = 16  # a step costs as much as so many characters, see `AsyncLLM.run_in_thread`


class ListRequests(msgspec.Struct, tag=True):
    """The newest requests of an owner, running ones first; or the slowest finished ones."""

    reply: ClassVar[Any] = list[RequestSummary]
    owner: str
    order: Literal["recent", "slowest"]
    count: int

    async def answer(self, peers: PeerServers) -> list[RequestSummary]:
        tracer = peers.async_llm.tracer
        find = tracer.longest if self.order == "slowest" else tracer.of_owner
        snapshots = tracer.snapshots(find(self.owner)[: self.count])
        size = _size([each for each in snapshots if each.timeline.summary is None])
        return await peers.async_llm.run_in_thread(
            self.owner, size, lambda: [summarize(each) for each in snapshots]
        )


class OtherRequests(msgspec.Struct):
    """What an owner's other requests explain about one."""

    intervals: dict[str, Interval | None]  # when those on the same engine ran, by id
    nearest: EarlierPrompt | None


class FindOthers(PromptQuery, tag=True):
    """The other requests of the owner of a request that is explained."""

    reply: ClassVar[Any] = OtherRequests

    async def answer(self, peers: PeerServers) -> OtherRequests:
        timelines = peers.async_llm.tracer.of_owner(self.owner)
        size = sum(CHARS_PER_STEP + len(each.tokens) for each in timelines)

        def find() -> OtherRequests:
            beside = [each for each in timelines if each.rank == self.engine]
            intervals = {each.request_id: run_interval([*each.marks]) for each in beside}
            return OtherRequests(intervals, self.search(timelines))

        return await peers.async_llm.run_in_thread(self.owner, size, find)


class FindTimeline(msgspec.Struct, tag=True):
    """Where a request's time went; None if the owner has no such request."""

    reply: ClassVar[Any] = RequestTimeline | None
    owner: str
    request_id: str

    async def answer(self, peers: PeerServers) -> RequestTimeline | None:
        """What this server knows, and what its peers know of the owner's other requests."""
        async_llm = peers.async_llm
        timeline = async_llm.tracer.find(self.request_id, self.owner)
        if timeline is None:
            return None
        query = FindOthers(
            self.owner,
            timeline.request_id,
            timeline.tokens.tobytes(),
            timeline.salt,
            timeline.rank,
            first(timeline.marks, "scheduled") or 0,
            timeline.cache_number,
        )
        found = [await query.answer(peers)]
        query.cache_number = None
        found += await peers.ask(query)
        [snapshot] = async_llm.tracer.snapshots([timeline])

        def render() -> RequestTimeline:
            intervals = {name: each for other in found for name, each in other.intervals.items()}
            result = render_timeline(snapshot, intervals)
            if timeline.tokens and first(snapshot.marks, "scheduled"):
                nearest = [other.nearest for other in found if other.nearest is not None]
                result.prefix_cache = explain_prefix(
                    timeline,
                    max(nearest, default=None),
                    async_llm.config.cache,
                    async_llm.processor.tokenizer.token_string,
                )
            return result

        return await async_llm.run_in_thread(self.owner, _size([snapshot]), render)


class ListSteps(msgspec.Struct, tag=True):
    """The latest steps of each engine, in order."""

    reply: ClassVar[Any] = list[StepRecord]
    count: int

    async def answer(self, peers: PeerServers) -> list[StepRecord]:
        tracer = peers.async_llm.tracer
        return [step for each in [*tracer.steps] for step in tracer.latest_steps(self.count, each)]


class WriteMetrics(msgspec.Struct, tag=True):
    """Publish the counters for the server that aggregates all API servers' metrics, and reply with
    the state of the engines.
    """

    reply: ClassVar[Any] = Report

    async def answer(self, peers: PeerServers) -> Report:
        peers.async_llm.metrics.write()
        return peers.async_llm.metrics.report()


Query = ListRequests | FindTimeline | FindOthers | ListSteps | WriteMetrics


@dataclass(eq=False)
class PeerServers:
    """Queries that this API server and its peers answer together."""

    async_llm: AsyncLLM  # of this one
    path: Path | None = None  # of this server's socket, while it listens
    _server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Answer peers, whose sockets are in the same folder with the same name prefix."""
        self.path = path
        self._server = await asyncio.start_unix_server(self._serve, path)

    def close(self) -> None:
        if self._server is not None and self.path is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
            self.path = None

    async def list_requests(self, query: ListRequests) -> list[RequestSummary]:
        found = chain(await query.answer(self), *await self.ask(query))
        key = _wall_ms if query.order == "slowest" else _recency
        return sorted(found, key=key, reverse=True)[: query.count]

    async def find_timeline(self, query: FindTimeline) -> RequestTimeline | None:
        if (own := await query.answer(self)) is not None:
            return own
        return next(filter(None, await self.ask(query)), None)

    async def list_steps(self, query: ListSteps) -> list[StepRecord]:
        steps = chain(await query.answer(self), *await self.ask(query))
        by_start = {(step.started_ns, step.engine): step for step in steps}
        return [by_start[start] for start in sorted(by_start)][-query.count :]

    async def ask(self, query: Query) -> list[Any]:
        """Return the replies of all peers that are there."""
        if self.path is None:
            return []
        others = [path for path in self.path.parent.glob("api-*") if path != self.path]
        replies = await asyncio.gather(*(self._ask(path, query) for path in others))
        return [reply for [reply] in filter(None, replies)]

    async def _ask(self, path: Path, query: Query) -> list[Any]:
        is_second = isinstance(query, FindOthers | WriteMetrics)
        try:
            async with asyncio.timeout(TIMEOUT / (1 + is_second)):
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
                writer.write(msgspec.msgpack.encode(await query.answer(self)))
                await writer.drain()
            except Exception:
                log.exception("cannot answer the query of a peer API server")


def _wall_ms(request: RequestSummary) -> float:
    return request.wall_ms


def _recency(request: RequestSummary) -> tuple[bool, float]:
    """Sort key: running requests by their start, others by their end."""
    if request.status == "running":
        return True, request.created
    return False, request.created + request.wall_ms / 1000


def _size(snapshots: Sequence[Snapshot]) -> int:
    return sum(CHARS_PER_STEP * len(each.steps.get(each.timeline.rank, ())) for each in snapshots)
