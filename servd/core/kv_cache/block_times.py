"""BlockTimes: lifetime, idle time and reuse gaps of a sample of the prefix cache's blocks."""

from collections.abc import Iterable
from itertools import pairwise

from servd.base.tracing import Clock, now_ns
from servd.messages.stats import BlockEviction

MAX_USES = 4  # latest uses that are kept for each block


class BlockTimes:
    """Tracks one of every `interval` blocks from its allocation to its eviction."""

    def __init__(self, interval: int, clock: Clock = now_ns) -> None:
        self._clock = clock
        self._interval = interval
        self._num_taken = 0
        # Block -> when it was taken, and when it was found in the prefix cache.
        self._times: dict[int, list[int]] = {}
        self._evictions: list[BlockEviction] = []

    def begin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._times.pop(block, None)
            self._num_taken += 1
            if self._num_taken % self._interval == 0:
                self._times[block] = [self._clock()]

    def use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if times := self._times.get(block):
                times.append(self._clock())
                del times[1:-MAX_USES]

    def evict(self, block: int) -> None:
        if times := self._times.pop(block, None):
            now = self._clock()
            gaps = [later - earlier for earlier, later in pairwise(times[1:])]
            self._evictions.append(BlockEviction(now - times[0], now - times[-1], gaps))

    def news(self) -> list[BlockEviction]:
        news, self._evictions = self._evictions, []
        return news
