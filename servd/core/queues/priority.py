"""priority: the lowest `priority` first; owners share as under `fair` among equal ones."""

from __future__ import annotations

from servd.core.queues import fair


class WaitingQueue(fair.WaitingQueue):
    """Fair among requests of one priority."""

    by_priority = True
