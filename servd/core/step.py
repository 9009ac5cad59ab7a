"""Step: one step until its output is collected; StepLog: the records of the latest steps."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import count, islice

import msgspec

from servd.base.tracing import Pace, StepRecord
from servd.core.request import OutputEnd, Request
from servd.messages.engine import (
    BlockSwaps,
    DecodeBatch,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
)

NO_DRAFTS: list[int] = []
MAX_RECORDS = 1024  # kept for clients that lack them, about half a kilobyte each
REPORT_INTERVAL = 256  # steps
MAX_SILENCE = 1_000_000_000  # nanoseconds


class Step(msgspec.Struct):
    """A step, from its scheduling until its output is collected.

    Its rows hold request objects instead of ids, because a request may end meanwhile and its id may
    be used again.
    """

    record: StepRecord
    decoding: list[Request] = []  # the first rows: one token each, no drafts
    new_blocks: dict[int, int] = {}  # of the decoding rows, by slot
    # The decoding rows, as workers get them.
    decodes: DecodeBatch = msgspec.field(default_factory=DecodeBatch)
    requests: list[Request] = []  # the other rows
    scheduled: list[ScheduledRequest] = []
    new_requests: list[NewRequest] = []
    swaps: BlockSwaps | None = None
    encoder_inputs: list[tuple[int, int]] = []  # see SchedulerOutput
    freed_encoder_outputs: list[bytes] = []

    def __contains__(self, request: Request) -> bool:
        return request in self.requests or request in self.decoding

    def add_decode(self, request: Request) -> None:
        """Add a row that decodes one token: it counts as computed, the next token as sampled."""
        request.num_computed_tokens += 1
        request.num_tokens += 1
        self.decoding.append(request)

    def add_row(
        self,
        request: Request,
        num_tokens: int,
        new_block_ids: list[int],
        num_drafts: int = 0,
        draft_token_ids: list[int] = NO_DRAFTS,
    ) -> ScheduledRequest:
        """Add a row that is no plain decode: `num_tokens` known tokens, then drafts. All count as
        computed now. If the row samples, all drafts count as accepted, and one token as sampled.
        """
        samples = request.num_computed_tokens + num_tokens == request.num_tokens
        scheduled = ScheduledRequest(
            request.slot,
            num_tokens + num_drafts,
            new_block_ids,
            samples,
            request.num_computed_tokens,
            num_drafts,
            0,
            draft_token_ids,
        )
        request.num_computed_tokens += scheduled.num_scheduled_tokens
        if samples:
            request.num_tokens += num_drafts + 1
        if num_tokens > 1 or not samples:
            self.record.prefills[request.request_id] = num_tokens
            if request.options.reports_progress:
                self.record.computed[request.request_id] = request.num_computed_tokens
        self.requests.append(request)
        self.scheduled.append(scheduled)
        return scheduled

    def build_output(self, freed_slots: list[int]) -> SchedulerOutput:
        if self.decoding:
            slots = [request.slot for request in self.decoding]
            computed = [request.num_computed_tokens - 1 for request in self.decoding]
            self.decodes = DecodeBatch(slots, computed, self.new_blocks)
        rows = self.scheduled, self.new_requests, freed_slots
        pictures = self.encoder_inputs, self.freed_encoder_outputs
        return SchedulerOutput(self.record.step, *rows, self.swaps, self.decodes, *pictures)

    def append_decoded(
        self, result: ModelRunnerOutput, ends: Mapping[int, OutputEnd]
    ) -> tuple[dict[int, dict[str, int]], list[int]]:
        """Append the sampled tokens of rows whose output continues and has nothing else to report.
        Returns these tokens, by client and request id, and the other rows, such as rows whose
        output ends.
        """
        tokens: defaultdict[int, dict[str, int]] = defaultdict(dict)
        reporting = {*result.errors, *result.logprobs, *ends}
        rows: list[int] = []
        assert len(self.decoding) == len(result.decoded)
        for row, request, token_id in zip(count(), self.decoding, result.decoded, strict=False):
            if request.slot >= 0 and row not in reporting and request.append_decoded(token_id):
                tokens[request.client][request.request_id] = token_id
            else:
                rows.append(row)
        num_decodes = len(self.decoding)
        return tokens, [*rows, *range(num_decodes, num_decodes + len(self.scheduled))]

    @property
    def all_requests(self) -> list[Request]:
        return self.decoding + self.requests

    def row(self, index: int) -> tuple[Request, ScheduledRequest]:
        if (other := index - len(self.decoding)) < 0:
            return self.decoding[index], self.decodes.row(index)
        return self.requests[other], self.scheduled[other]

    def chose_drafts_of(self, request: Request) -> bool:
        """Return whether the step verifies drafts that only the workers know. The engine then needs
        the step's output to know at which token the request's next step begins.
        """
        return any(
            other is request and scheduled.num_drafts > len(scheduled.scheduled_spec_decode_tokens)
            for other, scheduled in zip(self.requests, self.scheduled, strict=True)
        )


class StepLog:
    """The records of collected steps. Each client gets each record once, with its outputs."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._collected_ns = 0
        self._records: deque[StepRecord] = deque(maxlen=max_records)
        self._num_added = 0
        self._num_given: dict[int, int] = {}  # by client, of all that were added
        self._announced_ns = 0

    def add(self, record: StepRecord) -> tuple[int, bool]:
        """Add the record of a collected step. Returns nanoseconds since the previous step's output,
        including idle time; and whether all clients with requests get the records, even
        clients without outputs. From the records, clients detect an engine that makes no progress.
        """
        now = record.collected_ns
        before = self._collected_ns
        self._records.append(record)
        self._collected_ns = now
        self._num_added += 1
        is_late = now - self._announced_ns >= MAX_SILENCE
        if is_late:
            self._announced_ns = now
        return now - before, is_late or self._num_added % REPORT_INTERVAL == 0

    @property
    def pace(self) -> Pace:
        return Pace.of(list(islice(reversed(self._records), REPORT_INTERVAL)))

    @property
    def clients(self) -> Iterable[int]:
        return self._num_given.keys()

    def take_new(self, client: int) -> list[StepRecord]:
        """Return the records since this client's last call, as far as they are kept."""
        num_new = self._num_added - self._num_given.get(client, 0)
        self._num_given[client] = self._num_added
        if num_new == 1:  # mostly
            return [self._records[-1]]
        return list(islice(reversed(self._records), num_new))[::-1]
