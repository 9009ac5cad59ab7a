"""KVEvents: publishes changes of the prefix cache, in vLLM's format, for external routers.

Each step has a batch: `[time, [event, ...], rank]`, with events as maps with a `type`. A block's
hash is SHA-256 of its parent's hash, of its tokens as little-endian u32, and of the identifiers of
its pictures (`block_hash`). The parent hash of a first block is `root_hash` of salt and adapter.
"""

import logging
import time
from collections.abc import Iterable, Sequence

import msgspec

from servd.config.kv_events import KVEventsConfig
from servd.core.kv_cache.block_hash import NO_KEYS, is_of_other_group, root_hash
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.request import Request
from servd.messages.multimodal import identifiers_between

logger = logging.getLogger("servd.engine")
DEVICE = "GPU"  # whatever it is: routers know CPU and STORAGE as other places


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The base class of all events."""


class BlockStored(Event):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # Of each block: a hash of salt and adapter, then identifiers of its pictures.
    extra_keys: Sequence[Sequence[str]] | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(Event):
    """An event: the cache is empty."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The changes since the previous batch."""

    ts: float  # Unix time
    events: list[Event]
    data_parallel_rank: int


class NullEvents:
    """Ignores changes of the prefix cache; the subclass `KVEvents` publishes them."""

    def store(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """Note that `blocks` of a request were registered, from the request's index `first` on."""

    def publish(self) -> None:
        """Publish the events since the last call."""

    def close(self) -> None:
        """Stop publishing."""


class KVEvents(NullEvents):
    """Collects and publishes a step's events. `pool`: the device's; `block_size`: in tokens."""

    def __init__(self, config: KVEventsConfig, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.rank = config.data_parallel_rank
        from servd.ipc.channels import Publisher  # here: it needs zmq

        self._publisher = Publisher(
            config.endpoint, config.topic, config.hwm, config.replay_endpoint, config.buffer_steps
        )
        logger.info("KV events: %s %s", self._publisher.manner, config.endpoint)
        self._events: list[Event] = [AllBlocksCleared()]  # the engine before it may have had some
        pool.on_remove = self._remove
        self.publish()

    def store(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """Note that `blocks` of a request were registered, starting at the request's index `first`.

        Skips a block if another block already has its content.
        """
        hashes = request.block_hashes
        size = self.block_size
        root = root_hash(*request.options.cache_keys)
        root_keys = () if root == NO_KEYS else (root.hex(),)
        for start, stop in self._find_new(first, blocks):
            extra_keys: list[Sequence[str]] = []
            for first_token in range(start * size, stop * size, size):
                end = first_token + size
                identifiers = identifiers_between(request.mm_features, first_token, end)
                extra_keys.append((*root_keys, *(key.hex() for key in identifiers)))
            self._events.append(
                BlockStored(
                    hashes[start:stop],
                    hashes[start - 1] if start else None,
                    request.token_ids[start * size : stop * size],
                    size,
                    None,
                    DEVICE,
                    request.adapter.name if request.adapter else None,
                    extra_keys if any(extra_keys) else None,
                )
            )

    def publish(self) -> None:
        if self._events:
            events, self._events = self._events, []
            if self.pool.num_cached == 0 and not isinstance(events[-1], AllBlocksCleared):
                events.append(AllBlocksCleared())
            self._publisher.send(
                msgspec.msgpack.encode(KVEventBatch(time.time(), events, self.rank))
            )

    def close(self) -> None:
        self._publisher.close()

    def _find_new(self, first: int, blocks: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Yield the ranges of registered blocks without duplicates, as indices in the request."""
        start = first
        for index, block in enumerate(blocks, first):
            if self.pool.hashes[block] is None:
                if start < index:
                    yield start, index
                start = index + 1
        end = first + len(blocks)
        if start < end:
            yield start, end

    def _remove(self, block_hash: bytes) -> None:
        if is_of_other_group(block_hash):
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], DEVICE))
