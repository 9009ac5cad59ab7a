"""ClusterSim: simulates servers with engines in virtual time, with servd's router among the
engines, and records the requests.
"""

import gc
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log
from operator import attrgetter
from random import Random
from typing import Any, TypeVar, cast

import msgspec

from servd.api.engine.load_balancer import LoadBalancer, Routed
from servd.base.errors import ConfigError
from servd.config import Config
from servd.messages.engine import EngineCoreOutput, EngineCoreRequest, RequestOptions, WorkerReady
from servd.messages.params import PoolingParams, SamplingParams
from servd.simulate.costs import Costs
from servd.simulate.engine import SimulatedEngine, VirtualClock
from servd.simulate.traces import RequestLine, ServerLine

POLICIES = ("round-robin", "random", "least", "prefix")
OWN_ROUTER = "servd"
COMPARED_CACHES = 16  # that a request is compared with on average; at most 64, or only some are
OWN_BLOCK = 1 << 70  # blocks that no other request has are numbered from here
NEVER = 1 << 62  # nanoseconds
MAX_MODEL_LEN = 1 << 15  # where nothing else is known
SIZES = {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512}  # as on a CPU
UNKNOWN_SERVER = ServerLine(0, 1 << 20, {"max_model_len": MAX_MODEL_LEN, **SIZES})


class ClusterOptions(msgspec.Struct):
    """The options of a simulated cluster. Defaults come from the recording."""

    servers: int = 1  # behind one load balancer
    routing: str = OWN_ROUTER  # among the engines of a server
    balancing: str = POLICIES[0]  # among servers
    num_blocks: int | None = None  # of each engine's KV cache
    concurrency: int | None = None  # most requests at once; None: they come when they come
    config: dict[str, Any] = {}  # options of `servd serve`


@dataclass(slots=True)
class SimulatedServer:
    """A server: engines behind one port."""

    engines: list[SimulatedEngine]
    load_balancer: LoadBalancer | None = None

    @property
    def num_open(self) -> int:
        return sum(engine.num_open for engine in self.engines)


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request, with the data that a recording would have."""

    line: RequestLine
    arrived_ns: int
    engine: SimulatedEngine
    routed: Routed | None


Place = TypeVar("Place", SimulatedServer, SimulatedEngine)


class ClusterSim:
    """A cluster of servers with engines, and unfinished requests. `options` override the recording.
    Raises ConfigError if an option is wrong, or the size of the KV cache is unknown.
    """

    def __init__(self, recorded: ServerLine, costs: Costs, options: ClusterOptions) -> None:
        self.options = options
        self.costs = costs
        self.clock = VirtualClock()
        settings = {**recorded.options, **options.config}
        config = Config.load(settings)
        config.cache.validate()
        num_tokens = config.scheduler.max_num_batched_tokens or 0
        num_seqs = config.scheduler.max_num_seqs or 0
        if num_tokens < num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {num_tokens} is below --max-num-seqs {num_seqs}"
            )
        self.block_size = config.cache.block_size
        recorded_size = recorded.options["block_size"]  # as much memory, in blocks of another size
        num_blocks = options.num_blocks or recorded.num_blocks * recorded_size // self.block_size
        if not num_blocks:
            raise ConfigError("set --num-blocks, the size of an engine's KV cache")
        kv_bytes = recorded.kv_bytes_per_block * self.block_size // recorded_size
        windows = recorded.kv_windows
        if config.cache.has_connector:  # then layers form one group
            num_blocks //= len(windows)
            kv_bytes *= len(windows)
            windows = (None,)
        self.has_groups = windows != (None,)
        worker = WorkerReady("none", "none", "none", num_blocks, 0, kv_bytes, kv_windows=windows)
        max_model_len = int(settings["max_model_len"])
        size = config.parallel.data_parallel_size
        self.engines = [
            SimulatedEngine(rank, config, worker, max_model_len, costs, self.clock)
            for rank in range(size * options.servers)
        ]
        self.servers: list[SimulatedServer] = []
        for first in range(0, len(self.engines), size):
            server = SimulatedServer(self.engines[first : first + size])
            if size > 1 and options.routing == OWN_ROUTER:
                cached_size = self.block_size if config.cache.enable_prefix_caching else 0
                server.load_balancer = LoadBalancer(size, cached_size)
            self.servers.append(server)
        self.served: list[RequestLine] = []  # finished requests, as in a recording
        self.gaps: Counter[int] = Counter()  # between tokens: 100 * log(nanoseconds) -> how many
        self.num_refused = 0  # requests too long for the model or the cache
        # Prompt tokens: of requests that were compared with all caches; tokens that another engine
        # of the server had cached, but not the chosen engine; tokens that only another server had.
        self.num_compared = 0
        self.num_lost = 0
        self.num_lost_outside = 0
        self.num_steps = 0
        self.num_requests = 0
        self._random = Random(0)
        self._open: dict[str, OpenRequest] = {}
        self._held: deque[RequestLine] = deque()  # until clients may send more
        self._events: list[tuple[int, int]] = []  # (end of a step, engine)

    def run(self, lines: Iterable[RequestLine]) -> None:
        """Serve all requests until they end."""
        offset_ns: int | None = None
        gc.disable()  # to look for reference cycles takes a fifth of the time, and there are none
        try:
            for line in lines:
                arrival_ns = round(line.timestamp * 1e6)
                if offset_ns is None:
                    offset_ns = self.clock.ns - arrival_ns
                sent_ns = arrival_ns + offset_ns + self.costs.of_arrival(line.input_length)
                self._run_until(sent_ns)
                self.clock.ns = max(self.clock.ns, sent_ns)
                self._held.append(line)
                self._admit()
            self._run_until(NEVER)
        finally:
            gc.enable()

    def _run_until(self, end_ns: int) -> None:
        while self._events and self._events[0][0] <= end_ns:
            self.clock.ns, rank = heappop(self._events)
            engine = self.engines[rank]
            was_idle = engine.launched is None
            if not was_idle:
                outputs, num_later = engine.end_step()
                num_later += self._deliver(outputs)
                self.num_steps += 1
                if num_later:
                    self.gaps[round(100 * log(self.clock.ns - engine.began_ns + 1))] += num_later
            next_ns = engine.begin_step(was_idle)
            if next_ns is not None:
                heappush(self._events, (next_ns, rank))
            self._admit()

    def _admit(self) -> None:
        limit = self.options.concurrency
        while self._held and (limit is None or len(self._open) < limit):
            self._send(self._held.popleft())

    def _send(self, line: RequestLine) -> None:
        self.num_requests += 1
        limit = self.engines[0].scheduler.max_model_len
        if line.input_length + line.output_length > limit or not line.input_length:
            self.num_refused += 1
            return
        blocks = identify_blocks(line, self.num_requests, self.block_size)
        message = self._make_message(line, blocks)
        server = self._choose(self.options.balancing, self.servers, line)
        engine = server.engines[0]
        routed = None
        if server.load_balancer is not None:
            routed = server.load_balancer.route(message, range(len(server.engines)))
            engine = server.engines[routed.rank]
        elif len(server.engines) > 1:
            engine = self._choose(self.options.routing, server.engines, line)
        # Hashes of one group of layers are only compared, and may be numbers.
        hashes = cast("list[bytes]", blocks)
        if self.has_groups:
            hashes = [block.to_bytes(16, "big", signed=True) for block in blocks]
        self._compare(hashes[: (line.input_length - 1) // self.block_size], engine, server, line)
        message.block_hashes = hashes
        if line.output_length:  # which only the simulation knows
            message.params = SamplingParams(max_tokens=line.output_length)
        before_ns = self.costs.of_arrival(line.input_length)
        arrived_ns = self.clock.ns - before_ns
        line = RequestLine(arrived_ns / 1e6, line.input_length, line.output_length)
        line.sent = before_ns / 1e6
        self._open[message.request_id] = OpenRequest(line, arrived_ns, engine, routed)
        engine.num_open += 1
        if engine.launched is None and not engine.arrived:
            heappush(self._events, (self.clock.ns, engine.rank))
        engine.arrived.append(message)

    def _choose(self, policy: str, places: Sequence[Place], line: RequestLine) -> Place:
        first = self.num_requests % len(places)
        if policy == "round-robin":
            return places[first]
        if policy == "least":
            return min([*places[first:], *places[:first]], key=attrgetter("num_open"))
        if policy == "prefix" and line.hash_ids:  # whatever the load of that place
            return places[_mix(line.hash_ids[0]) % len(places)]
        return places[self._random.randrange(len(places))]

    def _make_message(self, line: RequestLine, blocks: Sequence[int]) -> EngineCoreRequest:
        """Return the message of an API process. Equal blocks get equal tokens, for the router."""
        token_ids = [0] * line.input_length
        if self.servers[0].load_balancer is not None:
            num_full = line.input_length // self.block_size
            token_ids = [_mix(block) for block in blocks[:num_full] for _ in range(self.block_size)]
            token_ids += [self.num_requests] * (line.input_length - len(token_ids))
        params = SamplingParams(max_tokens=line.max_tokens)
        if not line.output_length:
            params = PoolingParams()
        options = RequestOptions(owner=line.client)
        return EngineCoreRequest(str(self.num_requests), token_ids, params, options=options)

    def _deliver(self, outputs: Iterable[EngineCoreOutput]) -> int:
        """Pass outputs to the clients; return how many are not the first of their request."""
        num_later = 0
        for output in outputs:
            request = self._open[output.request_id]
            line = request.line
            passed = (self.clock.ns - request.arrived_ns) / 1e6
            if line.first_token:
                num_later += 1
            else:
                line.first_token = passed
                line.cached = output.num_cached_tokens
                if request.routed is not None:
                    request.routed.end_prompt()
            if output.finish_reason is None:
                continue
            line.finished = passed
            line.returned = passed + self.costs.after / 1e6
            self.served.append(line)
            del self._open[output.request_id]
            request.engine.num_open -= 1
            if request.routed is not None:
                request.routed.end()
        return num_later

    def _compare(
        self,
        hashes: Sequence[bytes],
        chosen: SimulatedEngine,
        server: SimulatedServer,
        line: RequestLine,
    ) -> None:
        """Count a prompt's blocks that other engines have cached, but not the chosen engine."""
        size = len(self.engines)
        if size == 1 or (size > 64 and self.num_requests % (size // COMPARED_CACHES)):
            return

        def count_cached(engines: Iterable[SimulatedEngine], num_cached: int) -> int:
            for engine in engines:
                find = engine.scheduler.kv_cache.pool.find
                while num_cached < len(hashes) and find(hashes[num_cached]) is not None:
                    num_cached += 1
            return num_cached

        cached_here = count_cached([chosen], 0)
        cached_inside = count_cached(server.engines, cached_here)
        cached_anywhere = cached_inside
        if len(self.servers) > 1:
            cached_anywhere = count_cached(self.engines, cached_inside)
        self.num_compared += line.input_length
        self.num_lost += (cached_inside - cached_here) * self.block_size
        self.num_lost_outside += (cached_anywhere - cached_inside) * self.block_size


def identify_blocks(line: RequestLine, number: int, block_size: int) -> list[int]:
    """Return an id for each full block of request number `number`, including its answer. `line` has
    its own block size.
    """
    size = line.block_size
    num_full = line.input_length // size
    blocks = [*line.hash_ids[:num_full], *line.output_hash_ids]
    count = (line.input_length + line.output_length) // block_size
    if size != block_size:  # a part of a larger block is equal where that is, and what is before it
        num_known = len(blocks) * size
        if not line.output_hash_ids:
            num_known = line.input_length
            blocks += line.hash_ids[num_full:]  # filled in part
        last = min(count * block_size, num_known, len(blocks) * size)
        ends = range(block_size, last + 1, block_size)
        blocks = [(blocks[(end - 1) // size] << 10) + end % size for end in ends]
    first_unique = OWN_BLOCK + (number << 24)
    return [*blocks[:count], *range(first_unique + len(blocks), first_unique + count)]


def _mix(block: int) -> int:
    """Return 32 bits that depend on all bits of a block's id."""
    return (block * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFFFFF
