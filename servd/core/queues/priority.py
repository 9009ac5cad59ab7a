"""priority: the lowest `priority` first; owners share as under `fair` among equal ones."""

from servd.core.queues import fair
from servd.messages.engine import RequestOptions


class WaitingQueue(fair.WaitingQueue):
    """Fair among requests of one priority."""

    def order(self, options: RequestOptions) -> tuple[int, int, int]:
        priority_class, _, arrival = super().order(options)
        return priority_class, options.priority, arrival
