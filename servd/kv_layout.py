"""KVLayout: how many blocks of the KV cache a request takes, where layers keep only a window."""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from servd.config import Config


class KVLayout(msgspec.Struct, frozen=True):
    """The layers in groups of the same number: a block holds tokens of one group's layers, and any
    group can have it.
    """

    block_size: int  # tokens
    max_step: int  # the most tokens that a step computes of a request
    windows: tuple[int | None, ...] = (None,)  # see WorkerReady.kv_windows

    @classmethod
    def of(cls, config: Config, windows: tuple[int | None, ...] = (None,)) -> KVLayout:
        """Of workers with these windows; `config` is resolved."""
        assert config.scheduler.max_num_batched_tokens is not None
        return cls(config.cache.block_size, config.scheduler.max_num_batched_tokens, windows)

    def first_read(self, position: int, window: int | None) -> int:
        """The first block of a group that the token at a position, and those after it, read."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def most(self, window: int | None, num_tokens: int, num_new: int | None = None) -> int:
        """Blocks that a request of so many tokens has of one group at once, at most, if it computes
        `num_new` of them at once; by default as many as a step may.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if window is None:
            return num_blocks
        # From the first key of the first token to the last token, and one whose step is in flight.
        num_read = window + (num_new or self.max_step)
        return min(num_blocks, (num_read - 2) // self.block_size + 2)

    def blocks(self, num_tokens: int, num_new: int | None = None) -> int:
        """The same of all groups."""
        return sum(self.most(window, num_tokens, num_new) for window in self.windows)

    def num_tokens(self, num_blocks: int, each: int) -> int:
        """What requests of `each` tokens have in so many blocks, all together."""
        size = self.block_size
        return num_blocks * (-(-each // size) * size) // self.blocks(each)

    def max_tokens(self, num_blocks: int, longest: int) -> int:
        """The longest request that so many blocks hold, a multiple of the block size; more than
        `longest` if it is so long.
        """
        size = self.block_size
        sizes = range(0, longest + 2 * size, size)
        return size * (bisect_right(sizes, num_blocks, key=self.blocks) - 1)
