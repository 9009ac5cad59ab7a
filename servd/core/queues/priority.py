"""The priority policy: the lowest `priority` first. Equal priorities share as under `fair`."""

from servd.core.queues.fair import FairQueue
from servd.messages.engine import RequestOptions


class PriorityQueue(FairQueue):
    """The fair queue, applied among requests of equal priority."""

    def order(self, options: RequestOptions) -> tuple[int, int, int]:
        priority_class, _, arrival = super().order(options)
        return priority_class, options.priority, arrival
