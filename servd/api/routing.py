"""Routing: which engine of --data-parallel-size gets a prompt, by what it would cost there.

The cost is in tokens to compute: those of the prompt that the engine has not in its prefix cache,
a part of those of requests before it, and what the engine got beyond its share of late, which
bounds the imbalance where there is no queue.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

from servd.config import Config
from servd.messages import EngineCoreRequest
from servd.params import SamplingParams

MAX_ENGINES, MAX_SERVERS = 32, 64  # bounds of their options
NUM_ENTRIES = 1 << 20  # blocks known, of 8 bytes each; older ones are overwritten
ROW = 2 * MAX_ENGINES  # numbers of an API server: work of each engine, and its recent tokens
TABLE = 8 * ROW * MAX_SERVERS  # where the table begins, in bytes
SIZE = TABLE + 8 * NUM_ENTRIES
PART = 1 << 17  # bytes of the table that are looked at together
FINE_BLOCKS, COARSE = 256, 16  # so many blocks are told apart, then so many at once
WINDOW = 1 << 20  # recent tokens after which all count half
SLACK = 1.05  # times its share that an engine may get for nothing
# What is computed twice takes time from others, too, and a place in a cache; a wait passes.
WAIT_WEIGHT = 1 / 3
OUTPUT_WEIGHT = 0.25  # answers are no queue, but slow down the steps of prompts
FIRST_GUESS = 128.0  # output tokens of a request, before any has ended
LEARNING_RATE = 1 / 64


@dataclass(slots=True)
class Routed:
    """A prompt on an engine, as far as it counts as work there."""

    router: Router
    rank: int
    prompt: int  # tokens to compute until it is answered; 0 from then on
    cached: int  # tokens that were expected in the prefix cache
    output: float  # tokens expected of all its choices

    def answer(self, num_cached: int) -> None:
        """The first token is there, and so many of the prompt's were cached."""
        if self.prompt:
            self.router.add_work(self.rank, -self.prompt, self.cached - num_cached)
            self.prompt = 0

    def leave(self, num_tokens: int) -> None:
        """The engine has it no longer, after so many tokens of all its choices."""
        work = self.prompt + OUTPUT_WEIGHT * self.output
        self.router.add_work(self.rank, -work, num_tokens - self.output - self.prompt)

    def end(self, num_tokens: Sequence[int]) -> None:
        """It has ended, each of its choices with so many tokens."""
        total = sum(num_tokens)
        self.leave(total)
        if self.output:
            self.router.learn(total / len(num_tokens))


def make_file() -> int:
    """The descriptor of a new file that the API servers of a tree share; it has no name."""
    descriptor = os.memfd_create("routing")
    os.ftruncate(descriptor, SIZE)  # pages are taken as they are written
    return descriptor


class Router:
    """Knows what was sent to which engine, by all API servers of the tree.

    Each of them writes the numbers of its own row. The table of blocks is everybody's: an entry has
    the checksum of a prompt up to the end of the block, and a bit for each engine that computed it.
    What an engine has evicted since is found out when the prompt is computed there, which makes the
    entry true again.

    Args:
        num_engines: how many there are.
        block_size: tokens of a block; 0 if the engines keep no prefixes.
        place: of this API server among its siblings.
        descriptor: by `make_file`; -1 if there are no siblings.
        num_servers: how many there are, with this one.
    """

    def __init__(
        self,
        num_engines: int,
        block_size: int,
        place: int = 0,
        descriptor: int = -1,
        num_servers: int = MAX_SERVERS,
    ) -> None:
        self.ranks = range(num_engines)
        self._used = num_servers * ROW
        self.block_size = block_size
        view = memoryview(mmap.mmap(descriptor, SIZE))
        self._bytes = view[TABLE:]
        self._numbers, self._table = view[:TABLE].cast("d"), self._bytes.cast("Q")
        begin = place * ROW
        self._work = self._numbers[begin : begin + MAX_ENGINES]
        self._recent = self._numbers[begin + MAX_ENGINES : begin + ROW]
        for i in range(MAX_ENGINES):  # a server that had the place before may have died
            self._work[i] = self._recent[i] = 0.0
        self.expected_output = FIRST_GUESS

    @classmethod
    def of(cls, config: Config, place: int = 0, descriptor: int = -1) -> Router | None:
        """Where there is something to choose."""
        size, cache = config.parallel.data_parallel_size, config.cache
        block_size = cache.block_size if cache.enable_prefix_caching else 0
        num_servers = config.server.api_server_count
        return cls(size, block_size, place, descriptor, num_servers) if size > 1 else None

    def route(self, request: EngineCoreRequest, serving: Sequence[int]) -> Routed:
        """Choose an engine, and count the request as work there.

        Args:
            request: may name its engine.
            serving: ranks to choose from.
        """
        sums, num_tokens = self._checksums(request), len(request.prompt_token_ids)
        cached = self._cached(sums, num_tokens)
        if isinstance(params := request.params, SamplingParams):
            output = params.n * min(self.expected_output, params.max_tokens or num_tokens)
        else:
            output = 0.0
        rank = request.options.rank
        if rank is None:
            work, recent = self._sum(0), self._sum(MAX_ENGINES)
            share = SLACK * (sum(recent) + num_tokens + output) / len(self.ranks)

            def cost(rank: int) -> tuple[float, float]:
                own = num_tokens - cached[rank] + output
                overdraft = max(recent[rank] + own - share, 0.0)
                return own + WAIT_WEIGHT * work[rank] + overdraft, recent[rank]

            rank = min(serving, key=cost)
        self._remember(sums, rank)
        routed = Routed(self, rank, num_tokens - cached[rank], cached[rank], output)
        new_work = routed.prompt + OUTPUT_WEIGHT * output
        self.add_work(rank, new_work, routed.prompt + output)
        if sum(self._recent) > WINDOW:
            for each in self.ranks:
                self._recent[each] /= 2
        return routed

    def add_work(self, rank: int, tokens: float, recent: float) -> None:
        """An engine has so much more to do, and has got so much more of late."""
        self._work[rank] += tokens
        self._recent[rank] += recent

    def learn(self, num_tokens: float) -> None:
        """A request has ended after so many tokens."""
        self.expected_output += LEARNING_RATE * (num_tokens - self.expected_output)

    def forget(self, rank: int) -> None:
        """The prefix cache of an engine is empty: it has ended, or sleeps."""
        order, others = sys.byteorder, (1 << 64) - 1 - (1 << rank)
        mask = int.from_bytes(others.to_bytes(8, order) * (PART // 8), order)
        nothing = bytes(PART)
        for begin in range(0, len(self._bytes), PART):
            part = self._bytes[begin : begin + PART]
            if (known := part.tobytes()) != nothing:  # views are compared byte by byte
                part[:] = (int.from_bytes(known, order) & mask).to_bytes(PART, order)

    def start_anew(self) -> None:
        """Nobody has a debt: an engine that was away need not catch up."""
        mean = sum(self._recent) / len(self.ranks)
        for rank in self.ranks:
            self._recent[rank] = mean

    def _sum(self, first: int) -> list[float]:
        """Numbers of each engine, over all API servers."""
        numbers, count = self._numbers, len(self.ranks)
        rows = [numbers[at : at + count] for at in range(first, self._used, ROW)]
        return [*map(sum, zip(*rows, strict=True))]

    def _checksums(self, request: EngineCoreRequest) -> dict[int, int]:
        """Checksums of the prompt up to the ends of its blocks, by their place."""
        params = request.params
        is_read = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if is_read or not self.block_size:
            return {}
        data = memoryview(array("I", request.prompt_token_ids)).cast("B")
        last, sums = crc32(repr(request.options.cache_keys).encode()), {}
        for begin, end in pairwise(self._ends(len(request.prompt_token_ids))):
            sums[end] = last = crc32(data[4 * begin : 4 * end], last)
        return sums

    def _ends(self, num_tokens: int) -> Iterable[int]:
        """Where blocks end that are told apart; in long prompts, each of several."""
        size = self.block_size
        fine = range(0, min(num_tokens, FINE_BLOCKS * size) + 1, size)
        return [*fine, *range((FINE_BLOCKS + COARSE) * size, num_tokens + 1, COARSE * size)]

    def _cached(self, sums: dict[int, int], num_tokens: int) -> list[int]:
        """Tokens that each engine should have in its cache: an engine that computed a block has
        computed all before it. The last token of a prompt is always computed.
        """
        table, found = self._table, [0] * len(self.ranks)
        missing = (1 << len(found)) - 1
        for end, checksum in reversed(sums.items()):
            entry = table[checksum % NUM_ENTRIES]
            if entry >> 32 == checksum and end < num_tokens and (new := entry & missing):
                missing &= ~new
                while new:
                    found[new.bit_length() - 1] = end
                    new ^= 1 << new.bit_length() - 1
                if not missing:
                    break
        return found

    def _remember(self, sums: dict[int, int], rank: int) -> None:
        table = self._table
        for checksum in sums.values():
            entry = table[at := checksum % NUM_ENTRIES]
            known = entry if entry >> 32 == checksum else checksum << 32
            table[at] = known | 1 << rank
