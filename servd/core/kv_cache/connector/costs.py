"""LoadCosts: decides whether loading a block is faster than computing it."""

import logging

logger = logging.getLogger("servd.engine")

FADING = 0.8  # weight of all earlier measurements beside the newest
RETRY_FADING = 0.99  # of a price that is too high, with each block that is not loaded
UNKNOWN_COST = 1_000_000  # nanoseconds to compute a token, before any was computed


class Cost:
    """The recent mean duration of an operation. Larger batches have more weight."""

    def __init__(self) -> None:
        self.ns = 0.0
        self.count = 0.0

    def add(self, ns: float, count: int) -> None:
        self.ns = self.ns * FADING + ns
        self.count = self.count * FADING + count

    @property
    def mean_ns(self) -> float:
        return self.ns / self.count if self.count else 0.0


class LoadCosts:
    """Compares the time to load a block, from each storage, with the time to compute it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.computing = Cost()  # of a token, in steps with prompts
        self.loading = {"host": Cost(), "disk": Cost(), "remote": Cost()}  # of a block
        self.skipped: set[str] = set()  # places from which loading is slower

    @property
    def compute_ns(self) -> float:
        return (self.computing.mean_ns or UNKNOWN_COST) * self.block_size

    def is_worth_loading(self, place: str) -> bool:
        """Return whether loading a block is faster than computing it.

        The cost of a storage that is too slow decreases with every call, so that it is tried again.
        """
        cost = self.loading[place]
        is_worth = cost.mean_ns <= self.compute_ns
        if is_worth is (place in self.skipped):
            logger.info(
                "%s KV blocks from %s: loading one takes %.2f ms, computing it %.2f ms",
                "loading" if is_worth else "not loading",
                place,
                cost.mean_ns / 1e6,
                self.compute_ns / 1e6,
            )
        if is_worth:
            self.skipped.discard(place)
        else:
            self.skipped.add(place)
            cost.ns *= RETRY_FADING
        return is_worth
