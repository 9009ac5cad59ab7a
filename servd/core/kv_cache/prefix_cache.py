"""PrefixCache: finds the cached blocks of a request's beginning by chained hashes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from servd.base.tracing import Clock, now_ns
from servd.config import CacheConfig
from servd.config.kv_layout import KVLayout
from servd.core.kv_cache.block_hash import block_hash, of_group, root_hash
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.events import NullEvents
from servd.core.kv_cache.pinned_prefixes import PinnedPrefixes
from servd.core.request import Request
from servd.messages.multimodal import identifiers_between

FOREVER = 1 << 62  # nanoseconds
NO_BLOCK = -1  # among a request's block ids: a block that was freed before its group's window


def loadable_hashes(request: Request, block_size: int, num_cached: int = 0) -> Sequence[bytes]:
    """Return the hashes of the blocks after the first `num_cached` that a cache may provide.

    At least one token is left to compute, because sampling needs its hidden state.
    """
    if request.reads_prompt:
        return []
    return request.block_hashes[num_cached : (len(request.token_ids) - 1) // block_size]


def hashes_to_load(request: Request, block_size: int, num_cached: int) -> Sequence[bytes]:
    """Return the hashes of what a KV connector may load for a request that the device has the first
    `num_cached` blocks of.
    """
    if request.loads is not None:
        return request.loads
    return loadable_hashes(request, block_size, num_cached)


def only_held(block_ids: Iterable[int]) -> list[int]:
    return [block for block in block_ids if block != NO_BLOCK]


@dataclass(eq=False)
class PrefixCache:
    """The hashed blocks of a pool, for a model whose layers have no windows.

    Full blocks are registered when their tokens are scheduled, before they are computed. Workers
    run steps in order. Within a step, they write all keys and values of a layer before its
    attention reads any. Therefore a cached block can be shared even in the step that fills it.
    """

    pool: BlockPool
    config: CacheConfig
    layout: KVLayout
    events: NullEvents
    clock: Clock = now_ns

    def __post_init__(self) -> None:
        self.num_groups = len(self.layout.windows)
        self.block_size = self.config.block_size
        max_pinned = int(self.pool.num_blocks * self.config.max_pinned_share)
        self.pinned = PinnedPrefixes(self.pool, max_pinned)

    def find_prefix(self, request: Request) -> list[int]:
        self._extend_hashes(request)
        return self._find(loadable_hashes(request, self.block_size))

    def find_evicted_at_ns(self, request: Request) -> int:
        """Return when the first block that a newly admitted request must compute was evicted; 0 if
        that block was not cached recently.
        """
        index = request.num_registered_blocks
        if index >= len(request.block_hashes):
            return 0
        return max(self.pool.evicted_at_ns.get(key, 0) for key in self._keys(request, index))

    def register(self, request: Request, first: int, end: int) -> None:
        """Register a request's blocks `first` to `end`, filled by its tokens, in the cache."""
        self._extend_hashes(request)
        for index in range(first, end):
            keys = self._keys(request, index)
            blocks = request.block_ids[index * len(keys) : (index + 1) * len(keys)]
            for key, block in zip(keys, blocks, strict=True):
                self.pool.register(block, key)
        # Only the first group's blocks, because routers do not know groups.
        blocks = request.block_ids[first * self.num_groups : end * self.num_groups]
        self.events.store(request, first, blocks[:: self.num_groups])
        request.num_registered_blocks = end

    def find_sharers(
        self, request: Request, num_tokens: int, candidates: Iterable[Request]
    ) -> list[Request]:
        """Return the `candidates` that attached blocks which `request` filled after its
        first `num_tokens` tokens, even if those blocks were freed since.
        """
        first = max(request.num_attached_blocks, num_tokens // self.block_size)
        filled = self.find_blocks(request, slice(first, None))
        sharers: list[Request] = []
        for other in candidates:
            if not filled.isdisjoint(self.find_blocks(other, slice(other.num_attached_blocks))):
                sharers.append(other)
        return sharers

    def find_blocks(self, request: Request, part: slice) -> set[int]:
        """Return the blocks in a part of a request, including freed blocks that are cached."""
        num_groups = self.num_groups
        block_ids = request.block_ids
        hashes = request.block_hashes
        blocks: set[int] = set()
        for index in range(len(block_ids) // num_groups or len(hashes))[part]:
            held = block_ids[index * num_groups : (index + 1) * num_groups]
            for group, block in enumerate(held or [NO_BLOCK] * num_groups):
                cached = None
                if block == NO_BLOCK and index < len(hashes):
                    cached = self.pool.find(of_group(hashes[index], group))
                blocks.add(block if cached is None else cached)
        return blocks - {NO_BLOCK}

    def pin_prompt(self, request: Request) -> None:
        """Pin the computed part of the prompt of a request that ends."""
        hashes = request.block_hashes[: request.num_prompt_tokens // self.block_size]
        end_ns = self.clock() + round(request.options.retention * 1e9)
        self.pinned.add(self._find_pinnable(hashes, end_ns), end_ns)

    def unpin(self, num_blocks: int, is_alone: bool = False) -> int:
        """Unpin up to `num_blocks` and return how many: expired blocks, or any blocks if the
        request that needs them `is_alone` and could otherwise never continue.
        """
        return self.pinned.unpin(num_blocks, FOREVER + 1 if is_alone else self.clock())

    def forget(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self.pinned.drop(blocks)
        self.pool.forget(blocks)

    def clear(self) -> None:
        self.pinned.clear()
        self.pool.forget_cached()

    def _keys(self, request: Request, index: int) -> list[bytes]:
        """Return the hashes of a request's blocks at an index, one hash for each group."""
        return [request.block_hashes[index]]

    def _find(self, hashes: Sequence[bytes]) -> list[int]:
        return self.pool.find_prefix(hashes)

    def _find_pinnable(self, hashes: Sequence[bytes], end_ns: int) -> Sequence[int]:
        """Return the blocks to pin for a prefix, the most useful first."""
        return self._find(hashes)

    def _extend_hashes(self, request: Request) -> None:
        hashes = request.block_hashes
        size = self.block_size
        if len(request.token_ids) < (len(hashes) + 1) * size:
            return
        if len(hashes) <= request.num_prompt_tokens // size < len(request.token_ids) // size:
            hashes = hashes.copy()  # all choices share the hashes of the prompt
            request.block_hashes = hashes
        parent = hashes[-1] if hashes else root_hash(*request.options.cache_keys)
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            identifiers = identifiers_between(request.mm_features, start, start + size)
            parent = block_hash(parent, request.token_ids[start : start + size], identifiers)
            hashes.append(parent)
