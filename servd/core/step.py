"""Step: one step from its scheduling to its harvest; StepLog: what is remembered of the latest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from servd.core.request import Request
from servd.messages import NewRequest, ScheduledRequest
from servd.tracing import Pace, StepRecord, now_ns

MAX_RECORDS = 1024  # kept for clients that have not been given them, about half a kilobyte each
NEWS_INTERVAL = 256  # steps
MAX_SILENCE = 1_000_000_000  # nanoseconds


@dataclass(slots=True)
class Step:
    """A step while it is put together and until it is harvested.

    Holds the requests themselves, row by row: an id may be finished, aborted and used again
    meanwhile.
    """

    record: StepRecord
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)

    def add(self, request: Request, scheduled: ScheduledRequest) -> None:
        """A request takes part."""
        self.scheduled.append(scheduled)
        self.requests.append(request)
        if scheduled.num_tokens > 1 or not scheduled.samples:
            num_tokens = scheduled.num_tokens - scheduled.num_drafts
            if num_tokens > 1 or not scheduled.samples:
                self.record.prefills[request.request_id] = num_tokens

    def end_scheduling(self, num_tokens: int, num_waiting: int, has_slots: bool) -> None:
        """All that take part are added. Where nothing else held up the first of those that wait,
        its turn did not come.
        """
        record = self.record
        record.num_tokens, record.num_requests = num_tokens, len(self.scheduled)
        if num_waiting:
            record.num_waiting = num_waiting
            record.waits_for = (record.waits_for or "budget") if has_slots else "slots"
        record.scheduled_ns = now_ns()


class StepLog:
    """The records of harvested steps. Each client gets each of them once, with its outputs."""

    def __init__(self) -> None:
        self._harvested_ns = 0
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._num_added = 0
        self._num_given: dict[int, int] = {}  # by client, of all that were added
        self._announced_ns = 0

    def add(self, record: StepRecord, harvested_ns: int, worker_ns: list[int]) -> int:
        """A step is harvested. Returns the nanoseconds since the one before: with what the engine
        does between two steps, and where it had nothing to do, with that.
        """
        record.harvested_ns, record.worker_ns = harvested_ns, worker_ns
        self._records.append(record)
        self._num_added += 1
        before, self._harvested_ns = self._harvested_ns, harvested_ns
        return harvested_ns - before

    def take_news_due(self) -> bool:
        """Whether clients with requests should get the records, whatever came out for them: they
        judge by those whether the engine stands still. Asked once a step.
        """
        is_late = self._harvested_ns - self._announced_ns >= MAX_SILENCE
        if is_late:
            self._announced_ns = self._harvested_ns
        return is_late or self._num_added % NEWS_INTERVAL == 0

    @property
    def pace(self) -> Pace:
        """How long the latest took."""
        return Pace.of(list(islice(reversed(self._records), NEWS_INTERVAL)))

    def news(self, client: int) -> list[StepRecord]:
        """The records since the last call for this client, as far as they are kept."""
        num_new = self._num_added - self._num_given.get(client, 0)
        self._num_given[client] = self._num_added
        return list(islice(reversed(self._records), num_new))[::-1]
