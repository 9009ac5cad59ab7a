"""RepetitionDetector: detects an output that may repeat one pattern forever."""

from servd.messages.params import RepetitionDetection


class RepetitionDetector:
    """Tracks one output token by token, in O(max_pattern_size) per token. `params` defines the
    patterns and the number of copies.
    """

    def __init__(self, params: RepetitionDetection) -> None:
        self.sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self.min_count = params.min_count
        # Pattern size -> how many of the last tokens equal the token one pattern earlier.
        self.runs: dict[int, int] = {}

    def append(self, token_ids: list[int], begin: int) -> bool:
        """Process the last of `token_ids`, in which the output starts at index `begin`. Return
        whether the output ends with `min_count` copies of a pattern.
        """
        last = len(token_ids) - 1
        token_id = token_ids[last]
        sizes = self.sizes[: max(last - begin - self.sizes.start + 1, 0)]
        self.runs = {
            size: self.runs.get(size, 0) + 1 for size in sizes if token_ids[last - size] == token_id
        }
        return any(run >= size * (self.min_count - 1) for size, run in self.runs.items())
