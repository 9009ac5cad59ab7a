"""Step: one step from its scheduling to its harvest; StepLog: what is remembered of the latest."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import count, islice

import msgspec

from servd.core.request import GrammarEnd, Request
from servd.messages import (
    BlockCopies,
    Decodes,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
)
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
    decoding: list[Request] = []  # the first rows
    new_blocks: dict[int, int] = {}  # of those, by slot
    decodes: Decodes = msgspec.field(default_factory=Decodes)  # what the workers are told of those
    requests: list[Request] = []  # the other rows
    scheduled: list[ScheduledRequest] = []
    new_requests: list[NewRequest] = []
    copies: BlockCopies | None = None

    def __contains__(self, request: Request) -> bool:
        return request in self.requests or request in self.decoding

    def decode(self, request: Request) -> None:
        """Count a request's next token as computed, and the one after it as known to come."""
        request.num_computed_tokens += 1
        request.num_tokens += 1
        self.decoding.append(request)

    def add(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Any other part of a request in the step."""
        self.requests.append(request)
        self.scheduled.append(scheduled)

    def launch(self, freed_slots: list[int]) -> SchedulerOutput:
        """It is put together: what the workers are told."""
        if self.decoding:
            slots = [request.slot for request in self.decoding]
            computed = [request.num_computed_tokens - 1 for request in self.decoding]
            self.decodes = Decodes(slots, computed, self.new_blocks)
        return SchedulerOutput(
            self.record.step, self.scheduled, self.new_requests, freed_slots, self.copies,
            self.decodes,
        )  # fmt: skip

    def go_on(
        self, result: ModelRunnerOutput, ends: Mapping[int, GrammarEnd]
    ) -> tuple[dict[int, dict[str, int]], list[int]]:
        """Add the sampled tokens after which nothing changes.

        Returns:
            them, by client and request;
            the rows of which more is to be said, e.g. that their output ends.
        """
        tokens: defaultdict[int, dict[str, int]] = defaultdict(dict)
        special, rows = {*result.errors, *result.logprobs, *ends}, []
        assert len(self.decoding) == len(result.decoded)
        for row, request, token_id in zip(count(), self.decoding, result.decoded, strict=False):
            if request.slot >= 0 and row not in special and request.go_on(token_id):
                tokens[request.client][request.request_id] = token_id
            else:
                rows.append(row)
        num_decodes = len(self.decoding)
        return tokens, [*rows, *range(num_decodes, num_decodes + len(self.scheduled))]

    @property
    def all_requests(self) -> list[Request]:
        """Of all rows."""
        return self.decoding + self.requests

    def row(self, index: int) -> tuple[Request, ScheduledRequest]:
        """A row's request, and its part in the step."""
        if (other := index - len(self.decoding)) < 0:
            return self.decoding[index], self.decodes.row(index)
        return self.requests[other], self.scheduled[other]

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
