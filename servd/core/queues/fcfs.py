"""fcfs: first come, first served, whoever sent it."""

from __future__ import annotations

from servd.core.queues import fair


class WaitingQueue(fair.WaitingQueue):
    """All requests have one owner."""

    by_owner = False
