"""LoadBalancer: sends a prompt to the engine of --data-parallel-size with the lowest cost.

The cost is counted in tokens. It adds the prompt's tokens that are not in the engine's prefix
cache, a part of the work queued before it, and the engine's recent tokens beyond its fair share.
The last term bounds the imbalance when no requests queue.
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
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams

# the largest values of their options
MAX_ENGINES = 32
MAX_SERVERS = 64
NUM_ENTRIES = 1 << 20  # cached blocks in the table, 8 bytes each; older ones are overwritten
ROW = 2 * MAX_ENGINES  # numbers per API server: each engine's pending work and its recent tokens
TABLE = 8 * ROW * MAX_SERVERS  # byte offset of the table of blocks
SIZE = TABLE + 8 * NUM_ENTRIES
PART = 1 << 17  # bytes of the table that `forget` processes at once
# each of the first FINE_BLOCKS blocks has an entry, then every COARSE-th block
FINE_BLOCKS = 256
COARSE = 16
WINDOW = 1 << 20  # recent tokens after which all counts are halved
SLACK = 1.05  # multiple of its fair share that an engine may receive at no cost
# Below 1: computing a prefix twice costs others time and cache space, too; waiting does not.
WAIT_WEIGHT = 1 / 3
OUTPUT_WEIGHT = 0.25  # decoding is no queue, but slows down the steps of prompts
FIRST_GUESS = 128.0  # output tokens of a request, before any has finished
LEARNING_RATE = 1 / 64


@dataclass(slots=True)
class Routed:
    """A prompt that was sent to an engine, and its part of the engine's pending work."""

    load_balancer: LoadBalancer
    rank: int
    prompt: int  # prompt tokens to compute; 0 after the first output token
    cached: int  # tokens expected in the engine's prefix cache
    output: float  # expected output tokens of all choices

    def answer(self, num_cached: int) -> None:
        """Record the first token of the output. `num_cached` tokens of the prompt were cached."""
        if self.prompt:
            self.load_balancer.add_work(self.rank, -self.prompt, self.cached - num_cached)
            self.prompt = 0

    def leave(self, num_tokens: int) -> None:
        """Record that the prompt left the engine, with `num_tokens` output tokens in all."""
        work = self.prompt + OUTPUT_WEIGHT * self.output
        self.load_balancer.add_work(self.rank, -work, num_tokens - self.output - self.prompt)

    def end(self, num_tokens: Sequence[int]) -> None:
        """Record that the prompt finished, with `num_tokens` output tokens for each choice."""
        total = sum(num_tokens)
        self.leave(total)
        if self.output:
            self.load_balancer.learn(total / len(num_tokens))


def make_file() -> int:
    """Return the descriptor of a new anonymous file that the API servers share."""
    descriptor = os.memfd_create("routing")
    os.ftruncate(descriptor, SIZE)  # memory is allocated as pages are written
    return descriptor


class LoadBalancer:
    """A load balancer that tracks what all API servers have sent to each engine. `descriptor` is
    the shared memory from `make_file`, or -1 if there is only one API server.

    Each API server writes its own row of numbers, at `place`. All servers write the table of
    blocks. An entry has the checksum of a prompt up to the end of a block, and a bit for each
    engine that computed the block. Evictions are not recorded: the engine computes the block again
    for the next prompt, so the entry is true again. Without a prefix cache, `block_size` is 0.
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
        self._numbers = view[:TABLE].cast("d")
        self._table = self._bytes.cast("Q")
        begin = place * ROW
        self._work = self._numbers[begin : begin + MAX_ENGINES]
        self._recent = self._numbers[begin + MAX_ENGINES : begin + ROW]
        for i in range(MAX_ENGINES):  # an earlier server at this index may have died
            self._work[i] = self._recent[i] = 0.0
        self.expected_output = FIRST_GUESS

    @classmethod
    def of(cls, config: Config, place: int = 0, descriptor: int = -1) -> LoadBalancer | None:
        """Return a load balancer if there is more than one engine, else None."""
        size = config.parallel.data_parallel_size
        cache = config.cache
        block_size = cache.block_size if cache.enable_prefix_caching else 0
        num_servers = config.server.api_server_count
        return cls(size, block_size, place, descriptor, num_servers) if size > 1 else None

    def route(self, request: EngineCoreRequest, serving: Sequence[int]) -> Routed:
        """Choose one of the `serving` engines, and add the request to the engine's pending work."""
        sums = self._checksums(request)
        num_tokens = len(request.prompt_token_ids)
        cached = self._cached(sums, num_tokens)
        if isinstance(params := request.params, SamplingParams):
            output = params.n * min(self.expected_output, params.max_tokens or num_tokens)
        else:
            output = 0.0
        rank = request.options.rank
        if rank is None:
            work = self._sum(0)
            recent = self._sum(MAX_ENGINES)
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
        self._work[rank] += tokens
        self._recent[rank] += recent

    def learn(self, num_tokens: float) -> None:
        self.expected_output += LEARNING_RATE * (num_tokens - self.expected_output)

    def forget(self, rank: int) -> None:
        """Clear an engine's bits in the table, because its prefix cache is empty."""
        order = sys.byteorder
        others = (1 << 64) - 1 - (1 << rank)
        mask = int.from_bytes(others.to_bytes(8, order) * (PART // 8), order)
        nothing = bytes(PART)
        for begin in range(0, len(self._bytes), PART):
            part = self._bytes[begin : begin + PART]
            if (known := part.tobytes()) != nothing:  # a memoryview compares byte by byte
                part[:] = (int.from_bytes(known, order) & mask).to_bytes(PART, order)

    def start_anew(self) -> None:
        """Set each engine's recent tokens to the mean: a restarted engine need not catch up."""
        mean = sum(self._recent) / len(self.ranks)
        for rank in self.ranks:
            self._recent[rank] = mean

    def _sum(self, first: int) -> list[float]:
        """Return each engine's sum over all API servers of the numbers from `first` in each row."""
        numbers = self._numbers
        count = len(self.ranks)
        rows = [numbers[at : at + count] for at in range(first, self._used, ROW)]
        return [*map(sum, zip(*rows, strict=True))]

    def _checksums(self, request: EngineCoreRequest) -> dict[int, int]:
        """Return the checksum of the prompt up to each position in `_ends`."""
        params = request.params
        is_read = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if is_read or not self.block_size:
            return {}
        data = memoryview(array("I", request.prompt_token_ids)).cast("B")
        last = crc32(repr(request.options.cache_keys).encode())
        sums = {}
        for begin, end in pairwise(self._ends(len(request.prompt_token_ids))):
            sums[end] = last = crc32(data[4 * begin : 4 * end], last)
        return sums

    def _ends(self, num_tokens: int) -> Iterable[int]:
        """Return 0 and the block ends in the table: the first FINE_BLOCKS, then every COARSE-th."""
        size = self.block_size
        fine = range(0, min(num_tokens, FINE_BLOCKS * size) + 1, size)
        return [*fine, *range((FINE_BLOCKS + COARSE) * size, num_tokens + 1, COARSE * size)]

    def _cached(self, sums: dict[int, int], num_tokens: int) -> list[int]:
        """Estimate how many tokens of the prompt each engine has cached. An engine that computed a
        block has computed all blocks before it. The last token is always computed.
        """
        table = self._table
        found = [0] * len(self.ranks)
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
