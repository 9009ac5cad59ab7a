"""Fleet: servers with engines in virtual time, the real Router between them, and what became of
requests.
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from math import log
from random import Random
from typing import cast

from servd.api.recorder import RequestLine
from servd.api.routing import Routed, Router
from servd.cli._costs import Costs
from servd.cli._engine import FAR, NEVER, Clock, Engine, virtual_time, zeros
from servd.config import Config
from servd.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    RequestOptions,
    WorkerReady,
)
from servd.params import PoolingParams, SamplingParams

LOOKED_AT = 16  # caches that a request is compared with on average; at most 64, or only some are
ROUTING, BALANCING = "servd", "round-robin"  # where nothing else is asked for
OWN_BLOCK = 1 << 70  # blocks that no other request has are numbered from here


@dataclass(slots=True)
class Open:
    """A request on its way."""

    arrived_ns: int
    num_prompt: int
    num_output: int
    rank: int
    routed: Routed | None
    first_ns: int = 0


@dataclass
class Server:
    """Engines behind one port."""

    ranks: range
    router: Router | None
    num_open: int = 0


@dataclass
class Tally:
    """What became of requests; times in nanoseconds."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))  # after the first, each
    latency: array[float] = field(default_factory=lambda: array("d"))
    gaps: Counter[int] = field(default_factory=Counter)  # between tokens: 100 * log -> how many
    num_prompt: int = 0  # tokens
    num_output: int = 0
    num_cached: int = 0
    num_refused: int = 0  # requests too long for the model or the cache
    num_compared: int = 0  # prompt tokens of requests that were compared with all caches
    num_lost: int = 0  # those that another engine of the server had cached, the chosen one not
    num_lost_outside: int = 0  # further ones that an engine of another server had
    num_steps: int = 0
    began_ns: int = 0
    ended_ns: int = 0


def blocks_of(line: RequestLine, number: int, block_size: int) -> list[int]:
    """What identifies each full block of a request with its answer, in blocks of the engine's size.

    Args:
        line: with blocks of its own size.
        number: of the request, for what it shares with none.
        block_size: tokens.
    """
    size, num_full = line.block_size, line.input_length // line.block_size
    known = [*line.hash_ids[:num_full], *line.output_hash_ids]
    count = (line.input_length + line.output_length) // block_size
    if size != block_size:  # a part of a larger block is equal where that is, and what is before it
        if not line.output_hash_ids:
            known += line.hash_ids[num_full:]  # filled in part
        ends = range(block_size, count * block_size + 1, block_size)
        last = len(known) * size if line.output_hash_ids else line.input_length
        known = [
            (known[(end - 1) // size] << 10) + end % size
            for end in ends
            if end <= last and (end - 1) // size < len(known)
        ]
    own = OWN_BLOCK + (number << 24)
    return [*known[:count], *range(own + len(known), own + count)]


Load = Callable[[int], int]


def round_robin(fleet: Fleet, places: range, load: Load, line: RequestLine) -> int:
    return places[fleet.num_requests % len(places)]


def at_random(fleet: Fleet, places: range, load: Load, line: RequestLine) -> int:
    return places[fleet.random.randrange(len(places))]


def least(fleet: Fleet, places: range, load: Load, line: RequestLine) -> int:
    first = fleet.num_requests % len(places)
    return min([*places[first:], *places[:first]], key=load)


def by_prefix(fleet: Fleet, places: range, load: Load, line: RequestLine) -> int:
    """The same for prompts that begin with the same block, whatever its load."""
    if not line.hash_ids:
        return at_random(fleet, places, load, line)
    return places[mixed(line.hash_ids[0]) % len(places)]


CHOICES = {"round-robin": round_robin, "random": at_random, "least": least, "prefix": by_prefix}


def mixed(block: int) -> int:
    """32 bits that depend on all of a block's."""
    return (block * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFFFFF


@contextmanager
def no_collection() -> Iterator[None]:
    """To look for circles takes a fifth of a large simulation's time, and there are none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@lru_cache(1 << 12)
def sampling(max_tokens: int | None) -> SamplingParams:
    """The same for all requests of that length: nobody changes it."""
    return SamplingParams(max_tokens=max_tokens)


@lru_cache(1 << 12)
def options_of(client: str) -> RequestOptions:
    """The same for all requests of a client."""
    return RequestOptions(owner=client)


class Fleet:
    """Servers with engines, and requests on their way.

    Args:
        config: of each server.
        worker: of each engine.
        max_model_len: in tokens.
        costs: of steps.
        num_servers: behind one load balancer.
        routing: among the engines of a server.
        balancing: among servers.
        concurrency: most requests at once, as a client that waits; None: they come when they come.
    """

    def __init__(
        self,
        config: Config,
        worker: WorkerReady,
        max_model_len: int,
        costs: Costs,
        num_servers: int = 1,
        routing: str = ROUTING,
        balancing: str = BALANCING,
        concurrency: int | None = None,
    ) -> None:
        self.clock, self.costs, self.tally = Clock(), costs, Tally()
        self.concurrency = concurrency or FAR
        self.cache = config.cache
        size = config.parallel.data_parallel_size
        block_size = self.cache.block_size if self.cache.enable_prefix_caching else 0
        with virtual_time(self.clock):
            self.engines = [
                Engine(config, worker, max_model_len, costs, self.clock)
                for _ in range(size * num_servers)
            ]
        self.servers = [
            Server(
                range(first, first + size),
                Router(size, block_size, num_servers=1)
                if size > 1 and routing == "servd"
                else None,
            )
            for first in range(0, size * num_servers, size)
        ]
        self.find = [engine.scheduler.kv_cache.pool.find for engine in self.engines]
        self.has_groups = worker.kv_windows != (None,)
        self.choose_server = CHOICES[balancing]
        self.choose_engine = CHOICES.get(routing)
        self.random = Random(0)
        self.open: dict[str, Open] = {}
        self.events: list[tuple[int, int, int]] = []  # when, engine, its number then
        self.num_requests = 0

    def run(self, lines: Iterable[RequestLine], on_progress: Callable[[int], None]) -> Tally:
        with virtual_time(self.clock), no_collection():
            held: deque[RequestLine] = deque()
            zero = None
            for line in lines:
                at = round(line.timestamp * 1e6)
                zero = at - self.clock.ns if zero is None else zero
                self._run_until(at - zero + self.costs.of_arrival(line.input_length), held)
                held.append(line)
                self._admit(held)
                if self.num_requests % 1000 == 0:
                    on_progress(self.num_requests)
            self._run_until(NEVER, held)
        self.tally.ended_ns = self.clock.ns
        return self.tally

    def _admit(self, held: deque[RequestLine]) -> None:
        while held and len(self.open) < self.concurrency:
            self._send(held.popleft())

    def _run_until(self, end: int, held: deque[RequestLine]) -> None:
        events, clock = self.events, self.clock
        while events and events[0][0] <= end:
            at, rank, number = heappop(events)
            engine = self.engines[rank]
            if number != engine.number:
                continue  # it was woken since
            clock.ns = at
            began = engine.began
            outputs, num_decoded, steps = engine.proceed()
            if not engine.is_idle:
                heappush(events, (engine.until, rank, engine.number))
            if steps:
                self.tally.num_steps += steps
                num_decoded += self._take(engine, outputs)
                if num_decoded:
                    gap = round(100 * log((at - began) / steps + 1))
                    self.tally.gaps[gap] += num_decoded * steps
                self._admit(held)
        if end < NEVER:
            clock.ns = max(clock.ns, end)

    def _send(self, line: RequestLine) -> None:
        tally, clock, self.num_requests = self.tally, self.clock, self.num_requests + 1
        limit = self.engines[0].scheduler.max_model_len
        tally.began_ns = tally.began_ns or clock.ns
        if line.input_length + line.output_length > limit or not line.input_length:
            tally.num_refused += 1
            return
        blocks = blocks_of(line, self.num_requests, self.cache.block_size)
        message = self._message(line, blocks)
        server = self.choose_server(self, range(len(self.servers)), self._load_of_server, line)
        ranks, router = self.servers[server].ranks, self.servers[server].router
        routed = None
        if router is not None:
            routed = router.route(message, range(len(ranks)))
            rank = ranks[routed.rank]
        elif len(ranks) > 1:
            assert self.choose_engine is not None
            rank = self.choose_engine(self, ranks, self._load_of_engine, line)
        else:
            rank = ranks[0]
        # Hashes of one group of layers are only compared, and may be numbers.
        hashes = cast("list[bytes]", blocks)
        if self.has_groups:
            hashes = [each.to_bytes(16, "big", signed=True) for each in blocks]
        size = len(self.engines)
        if size > 1 and self.num_requests % (1 if size <= 64 else size // LOOKED_AT) == 0:
            tally.num_compared += line.input_length
            self._compare(hashes[: (line.input_length - 1) // self.cache.block_size], rank)
        message.block_hashes = hashes
        if line.output_length:
            message.params = sampling(line.output_length)
        arrived = clock.ns - self.costs.of_arrival(line.input_length)
        self.open[message.request_id] = Open(
            arrived, line.input_length, line.output_length, rank, routed
        )
        engine = self.engines[rank]
        engine.num_open += 1
        self.servers[server].num_open += 1
        engine.arrived.append(message)
        if engine.wake():
            heappush(self.events, (engine.until, rank, engine.number))

    def _message(self, line: RequestLine, blocks: list[int]) -> EngineCoreRequest:
        """As the API process has it. Tokens are equal where blocks are, for the router."""
        size, num_prompt = self.cache.block_size, line.input_length
        if self.servers[0].router is None:
            token_ids = zeros(num_prompt)
        else:
            token_ids = []
            for block in blocks[: num_prompt // size]:
                token_ids += [mixed(block)] * size
            token_ids += [self.num_requests] * (num_prompt - len(token_ids))
        params = PoolingParams()
        if line.output_length:
            params = sampling(line.max_tokens)
        options = options_of(line.client)
        return EngineCoreRequest(str(self.num_requests), token_ids, params, options=options)

    def _take(self, engine: Engine, outputs: list[EngineCoreOutput]) -> int:
        """Outputs reach the API process; returns how many of them are later than the first of a
        request.
        """
        tally, now = self.tally, self.clock.ns
        decoding = 0
        for output in outputs:
            request = self.open[output.request_id]
            if not request.first_ns:
                request.first_ns = now
                tally.ttft.append(now - request.arrived_ns + self.costs.after)
                tally.num_prompt += request.num_prompt
                tally.num_cached += output.num_cached_tokens
                if request.routed is not None:
                    request.routed.answer(output.num_cached_tokens)
            else:
                decoding += 1
            if output.finish_reason is not None:
                del self.open[output.request_id]
                took = now - request.arrived_ns + self.costs.after
                tally.latency.append(took)
                tally.num_output += request.num_output
                if request.num_output > 1:
                    tally.tpot.append((now - request.first_ns) / (request.num_output - 1))
                engine.num_open -= 1
                self.servers[request.rank // len(self.servers[0].ranks)].num_open -= 1
                if request.routed is not None:
                    request.routed.end([request.num_output])
        return decoding

    def _compare(self, hashes: list[bytes], chosen: int) -> None:
        num_blocks = len(hashes)

        def most_cached(ranks: Iterable[int], most: int) -> int:
            for rank in ranks:
                if most == num_blocks:
                    break
                find = self.find[rank]
                while most < num_blocks and find(hashes[most]) is not None:
                    most += 1
            return most

        own = most_cached([chosen], 0)
        here = most_cached(self.servers[chosen // len(self.servers[0].ranks)].ranks, own)
        most = most_cached(range(len(self.find)), here) if len(self.servers) > 1 else here
        self.tally.num_lost += (here - own) * self.cache.block_size
        self.tally.num_lost_outside += (most - here) * self.cache.block_size

    def _load_of_server(self, place: int) -> int:
        return self.servers[place].num_open

    def _load_of_engine(self, rank: int) -> int:
        return self.engines[rank].num_open
