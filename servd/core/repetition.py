"""Repetition: an output that ends in copies of one pattern, and will hardly end by itself."""

from __future__ import annotations

from servd.params import RepetitionDetection


class RepetitionDetector:
    """Follows one output, token by token; the work per token is that of looking at
    `max_pattern_size` tokens.

    Args:
        params: which patterns count, and how many copies.
    """

    def __init__(self, params: RepetitionDetection) -> None:
        self.sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self.min_count = params.min_count
        # Size -> how many of the last tokens equal the one that far before them.
        self.runs: dict[int, int] = {}

    def append(self, token_ids: list[int], begin: int) -> bool:
        """Take in the last of `token_ids`, of which the output is from index `begin` on.

        Returns:
            Whether the output ends in `min_count` copies of a pattern.
        """
        last = len(token_ids) - 1
        token_id = token_ids[last]
        sizes = self.sizes[: max(last - begin - self.sizes.start + 1, 0)]
        self.runs = {
            size: self.runs.get(size, 0) + 1 for size in sizes if token_ids[last - size] == token_id
        }
        return any(run >= size * (self.min_count - 1) for size, run in self.runs.items())
