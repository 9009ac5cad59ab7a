"""Step: one step from its scheduling to its harvest; StepLog: what is remembered of the latest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec

from servd.core.request import Request
from servd.messages import BlockCopies, NewRequest, ScheduledRequest
from servd.tracing import Pace, StepRecord

MAX_RECORDS = 1024  # kept for clients that have not been given them, about half a kilobyte each
NEWS_INTERVAL = 256  # steps
MAX_SILENCE = 1_000_000_000  # nanoseconds


class Step(msgspec.Struct):
    """A step while it is put together and until it is harvested.

    Holds the requests themselves, row by row: an id may be finished, aborted and used again
    meanwhile.
    """

    record: StepRecord
    scheduled: list[ScheduledRequest] = []
    requests: list[Request] = []
    new_requests: list[NewRequest] = []
    copies: BlockCopies | None = None

    def chose_drafts_of(self, request: Request) -> bool:
        """Whether it verifies drafts which only the workers know, so that nobody can say where the
        request's next step begins.
        """
        return any(
            each is request and scheduled.num_drafts > len(scheduled.draft_token_ids)
            for each, scheduled in zip(self.requests, self.scheduled, strict=True)
        )


class StepLog:
    """The records of harvested steps. Each client gets each of them once, with its outputs."""

    def __init__(self) -> None:
        self._harvested_ns = 0
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._num_added = 0
        self._num_given: dict[int, int] = {}  # by client, of all that were added
        self._announced_ns = 0

    def add(self, record: StepRecord) -> tuple[int, bool]:
        """A step is harvested.

        Returns:
            the nanoseconds since the one before: with what the engine does between two steps, and
            where it had nothing to do, with that;
            whether clients with requests should get the records, whatever came out for them: they
            judge by those whether the engine stands still.
        """
        now, before = record.harvested_ns, self._harvested_ns
        self._records.append(record)
        self._harvested_ns = now
        self._num_added += 1
        is_late = now - self._announced_ns >= MAX_SILENCE
        if is_late:
            self._announced_ns = now
        return now - before, is_late or self._num_added % NEWS_INTERVAL == 0

    @property
    def pace(self) -> Pace:
        """How long the latest took."""
        return Pace.of(list(islice(reversed(self._records), NEWS_INTERVAL)))

    @property
    def clients(self) -> Iterable[int]:
        """Those that have been given any."""
        return self._num_given.keys()

    def news(self, client: int) -> list[StepRecord]:
        """The records since the last call for this client, as far as they are kept."""
        num_new = self._num_added - self._num_given.get(client, 0)
        self._num_given[client] = self._num_added
        if num_new == 1:  # mostly
            return [self._records[-1]]
        return list(islice(reversed(self._records), num_new))[::-1]
