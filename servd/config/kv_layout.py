"""KVLayout: how many KV cache blocks a request needs, including sliding-window layers."""

from bisect import bisect_right
from typing import Self

import msgspec

from servd.config import Config


class KVLayout(msgspec.Struct, frozen=True):
    """The layout of KV cache blocks. Layers form groups of equal size. A block can be allocated to
    any group, and then holds tokens for its layers.
    """

    block_size: int  # tokens
    max_step: int  # most tokens of a request in a step
    windows: tuple[int | None, ...] = (None,)  # see WorkerReady.kv_windows

    @classmethod
    def from_config(cls, config: Config, windows: tuple[int | None, ...] = (None,)) -> Self:
        """Return the layout for workers with these windows. `config` is resolved."""
        assert config.scheduler.max_num_batched_tokens is not None
        return cls(config.cache.block_size, config.scheduler.max_num_batched_tokens, windows)

    def first_read(self, position: int, window: int | None) -> int:
        """Return the first block of a group that the token at `position` attends to."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def first_reads(self, position: int) -> list[int]:
        """Return `first_read` for each group."""
        return [self.first_read(position, window) for window in self.windows]

    def max_blocks(self, window: int | None, num_tokens: int, num_new: int | None = None) -> int:
        """Return an upper bound of a request's blocks in one group, for `num_tokens` tokens, of
        which a step computes `num_new` (default: `max_step`).
        """
        num_blocks = -(-num_tokens // self.block_size)
        if window is None:
            return num_blocks
        # From the first key of the first token to the last token, and a token of a step in flight.
        num_read = window + (num_new or self.max_step)
        return min(num_blocks, (num_read - 2) // self.block_size + 2)

    def blocks(self, num_tokens: int, num_new: int | None = None) -> int:
        return sum(self.max_blocks(window, num_tokens, num_new) for window in self.windows)

    def num_tokens(self, num_blocks: int, request_len: int) -> int:
        """Return how many tokens fit in `num_blocks` blocks, in requests of this length."""
        size = self.block_size
        return num_blocks * (-(-request_len // size) * size) // self.blocks(request_len)

    def max_tokens(self, num_blocks: int, longest: int) -> int:
        """Return the length of the longest request that fits in `num_blocks`, a multiple of the
        block size; at least `longest` if that fits.
        """
        size = self.block_size
        sizes = range(0, longest + 2 * size, size)
        return size * (bisect_right(sizes, num_blocks, key=self.blocks) - 1)
