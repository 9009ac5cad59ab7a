"""LoadBalancer: sends a prompt to the engine of --data-parallel-size with the lowest cost: the
tokens that the engine would compute, plus a part of the tokens that are pending there, plus its
recent tokens beyond a fair share, so that prompts with a long common prefix use all engines.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self
from zlib import crc32

from servd.config import Config
from servd.messages.engine import EngineCoreRequest
from servd.messages.multimodal import identifiers_between
from servd.messages.params import SamplingParams

MAX_PREFIXES = 1 << 16  # per engine; the least recently used ones are forgotten
# Each of the first FINE_BLOCKS block ends makes a prefix, then every COARSE-th.
FINE_BLOCKS = 256
COARSE = 16
# Below 1: computing a prefix twice costs others time and cache space, too; waiting does not.
WAIT_WEIGHT = 1 / 3
EXPECTED_OUTPUT = 256  # tokens, if max_tokens is not below
MAX_RECENT = 1 << 20  # tokens sent to all engines; beyond, all counts are halved
SLACK = 1.05  # multiple of its fair share that an engine may receive at no cost
SPREAD = 8192  # tokens beyond, for one of several servers: its counts vary more by chance


@dataclass(slots=True)
class Routed:
    """A prompt that was sent to an engine, and its part of the tokens pending there."""

    pending: list[int]  # of all engines, by rank
    rank: int
    prompt: int  # tokens to compute; 0 after the first output token
    output: int  # expected tokens; 0 after the end

    def end_prompt(self) -> None:
        """Record the first output token."""
        self.pending[self.rank] -= self.prompt
        self.prompt = 0

    def end(self) -> None:
        """Record that the prompt has left the engine."""
        self.pending[self.rank] -= self.prompt + self.output
        self.prompt = 0
        self.output = 0


class LoadBalancer:
    """The load balancer of one API server. It knows the prefixes and tokens that this server sent
    to each engine. Of other servers it assumes that they send as much, and that a prompt is cached
    at its home, an engine that all servers derive from it. Evictions are not recorded: the engine
    computes a lost block again for the next prompt. `block_size` is 0 without a prefix cache.
    """

    def __init__(self, num_engines: int, block_size: int, num_servers: int = 1) -> None:
        self.block_size = block_size
        self.num_servers = num_servers
        self.spread = SPREAD if num_servers > 1 else 0
        self.pending = [0] * num_engines  # tokens
        self.recent = [0.0] * num_engines  # tokens
        self.prefixes: list[dict[int, None]] = [{} for _ in range(num_engines)]  # in order of use
        self.num_routed = 0

    @classmethod
    def from_config(cls, config: Config) -> Self | None:
        """Return a load balancer if there is more than one engine, else None."""
        num_engines = config.parallel.data_parallel_size
        if num_engines == 1:
            return None
        block_size = config.cache.block_size if config.cache.enable_prefix_caching else 0
        return cls(num_engines, block_size, config.server.api_server_count)

    def route(self, request: EngineCoreRequest, ranks: Sequence[int]) -> Routed:
        """Choose an engine among `ranks`, and add the request to its pending tokens."""
        hashes = self.hash_prefixes(request)
        num_tokens = len(request.prompt_token_ids)
        output = 0
        if isinstance(params := request.params, SamplingParams):
            max_tokens = min(EXPECTED_OUTPUT, params.max_tokens or EXPECTED_OUTPUT)
            output = params.n * max_tokens
        self.num_routed += 1
        home = self._find_home(hashes) if self.num_servers > 1 else None
        self._forgive_absence(ranks)
        mean = (sum(self.recent) + num_tokens + output) / len(self.recent)
        limit = SLACK * mean + self.spread

        def cost(rank: int) -> tuple[float, int]:
            cached = num_tokens if rank == home else self.count_cached(rank, hashes)
            waiting = WAIT_WEIGHT * self.num_servers * self.pending[rank]
            excess = max(self.recent[rank] + num_tokens - cached + output - limit, 0.0)
            turn = (rank - self.num_routed) % len(self.pending)
            return waiting + excess - cached, turn

        rank = request.options.rank
        if rank is None:
            rank = min(ranks, key=cost)
        num_new = num_tokens - self.count_cached(rank, hashes)
        self.pending[rank] += num_new + output
        self.recent[rank] += num_new + output
        if sum(self.recent) > MAX_RECENT:
            self.recent = [num_sent / 2 for num_sent in self.recent]
        self._add_prefixes(rank, hashes)
        return Routed(self.pending, rank, num_new, output)

    def hash_prefixes(self, request: EngineCoreRequest) -> dict[int, int]:
        """Return hashes of prefixes by their numbers of tokens. The last token is computed always,
        so that it is in no prefix.
        """
        params = request.params
        num_tokens = len(request.prompt_token_ids)
        size = self.block_size
        needs_logits = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if needs_logits or size == 0:
            return {}
        ends = [*range(0, min(num_tokens, FINE_BLOCKS * size + 1), size)]
        ends += range((FINE_BLOCKS + COARSE) * size, num_tokens, COARSE * size)
        tokens = memoryview(array("I", request.prompt_token_ids)).cast("B")
        prefix = crc32(repr(request.options.cache_keys).encode())
        hashes = {}
        for begin, end in pairwise(ends):
            prefix = crc32(tokens[4 * begin : 4 * end], prefix)
            for identifier in identifiers_between(request.mm_features, begin, end):
                prefix = crc32(identifier, prefix)
            hashes[end] = prefix
        return hashes

    def count_cached(self, rank: int, hashes: dict[int, int]) -> int:
        """Return how many tokens of the prompt the engine has probably cached."""
        cached = 0
        for num_tokens, prefix in hashes.items():
            if prefix not in self.prefixes[rank]:
                break
            cached = num_tokens
        return cached

    def _find_home(self, hashes: dict[int, int]) -> int | None:
        """Return the engine where other servers probably sent earlier turns. It depends on the
        first block that is not everywhere, because many conversations share the blocks before.
        """
        for prefix in hashes.values():
            if any(prefix not in prefixes for prefixes in self.prefixes):
                return prefix % len(self.prefixes)
        return None

    def _forgive_absence(self, ranks: Sequence[int]) -> None:
        """Set the tokens of engines outside `ranks` to the mean, so that they need not catch up."""
        mean = sum(self.recent[rank] for rank in ranks) / len(ranks)
        for rank in range(len(self.recent)):
            if rank not in ranks:
                self.recent[rank] = mean

    def _add_prefixes(self, rank: int, hashes: dict[int, int]) -> None:
        prefixes = self.prefixes[rank]
        for prefix in reversed(hashes.values()):  # so that the longest is forgotten first
            prefixes.pop(prefix, None)
            prefixes[prefix] = None
        while len(prefixes) > MAX_PREFIXES:
            del prefixes[next(iter(prefixes))]

    def forget(self, rank: int) -> None:
        """Forget an engine's prefixes, because its prefix cache is empty."""
        self.prefixes[rank].clear()
