"""Timelines: where the time of running, of the most recent and of the slowest requests went."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from servd.account import Account, account
from servd.api.choice import NO_TOKENS
from servd.api.request_state import Observer, RequestState, Timeline
from servd.stats import SchedulerStats
from servd.tracing import Mark, StepRecord, now_ns

if TYPE_CHECKING:
    from servd.api.otel import Spans  # an extra, imported where it is asked for

MAX_RECENT = 1024  # about 3 KB each
MAX_SLOWEST = 32  # each with its account of up to 300 KB
MAX_MARKS = 200_000  # of recent and of the slowest requests; 100 bytes each
MAX_PROMPT_TOKENS = 2_000_000  # of finished requests; 4 bytes each
MAX_STEPS = 8192  # about 700 bytes each
STEPS_PER_LOOK = 1024  # steps between two searches for slow requests with aging steps
STEPS_BEFORE = 256  # steps before a request, from which its usual step times are computed
BY_TIME = attrgetter("at_ns")


class Inquiry(msgspec.Struct):
    """The input of `account`, safe to pass to another thread."""

    timeline: Timeline
    marks: list[Mark]
    steps: Mapping[int, Sequence[StepRecord]]  # all known steps by engine, in order

    @property
    def known(self) -> list[StepRecord]:
        """The steps that its engines ran during the request, and some before them."""
        begin, before, found = self.marks[0].at_ns, STEPS_BEFORE, list[StepRecord]()
        for engine, end in (*self.timeline.earlier, (self.timeline.rank, self.marks[-1].at_ns)):
            steps = self.steps.get(engine, ())
            start = bisect_left(steps, begin, key=attrgetter("harvested_ns"))
            stop = bisect_left(steps, end, key=attrgetter("started_ns"))
            found += steps[max(start - before, 0) : stop]
            begin, before = end, 0
        return found

    def account(self) -> Account:
        """Where the request's time went. Takes 20 ms for a thousand steps."""
        if self.timeline.account is not None:
            return self.timeline.account
        return account(self.marks, self.known, self.timeline.request_id)


@dataclass(eq=False)
class Tracer(Observer):
    """The timelines of the most recent and slowest finished requests, and the latest steps of each
    engine.

    Attributes:
        requests: the running ones, by id: `AsyncLLM.requests`.
    """

    keep: int = MAX_RECENT  # recent requests
    spans: Spans | None = None  # exports OpenTelemetry spans of requests

    def __post_init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self.recent: OrderedDict[str, Timeline] = OrderedDict()
        self.slowest: dict[str, Timeline] = {}
        self._fastest_ns = -1  # the fastest of `slowest`, once it is full
        # By engine, in order.
        self.steps = defaultdict[int, deque[StepRecord]](partial(deque, maxlen=MAX_STEPS))
        self._num_marks = 0  # in `recent`
        self._prompts: deque[Timeline] = deque()  # finished, with their prompts
        self._num_prompt_tokens = 0
        self._accountant = ThreadPoolExecutor(1, "account")

    def began(self, state: RequestState) -> None:
        if state.is_counted:
            state.tokens = array("I", state.prompt_token_ids)
            state.salt = state.request.options.cache_keys
            state.reads_prompt = state.params.prompt_logprobs is not None

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        for step in steps if rank else ():
            step.engine = rank
        kept = self.steps[rank]
        kept.extend(steps)
        if steps and steps[-1].step % STEPS_PER_LOOK < len(steps) and len(kept) == MAX_STEPS:
            self._keep_accounts([t for t in self.slowest.values() if t.rank == rank])

    def lose_engine(self, states: Iterable[RequestState], engine: int) -> None:
        """Record when the engine of these requests was last known to be alive."""
        steps = self.steps[engine]
        last_step = steps[-1].harvested_ns if steps else 0
        for state in states:
            marks = state.recorded.marks
            marks.append(Mark("engine_lost", max(last_step, marks[-1].at_ns)))

    def finish(
        self, state: RequestState, marks: Iterable[Mark] = (), outcome: str = "", status: int = 0
    ) -> Timeline:
        """Keep the timeline of a request whose answer has been written, and forget the rest.

        Args:
            state: of the request.
            marks: those of the response.
            outcome: by default, how the generation ended.
            status: of HTTP; 0 if there was no response.
        """
        self.requests.pop(state.request_id, None)
        num_kept = len(Timeline.__struct_fields__)  # they are the first ones of a RequestState
        timeline = Timeline(*msgspec.structs.astuple(state)[:num_kept])
        timeline.outcome = outcome or state.generated
        timeline.http_status = status
        # Other threads may read the list.
        timeline.marks = sorted([*state.marks, *marks], key=BY_TIME)
        timeline.is_finished = True
        if self.spans is not None and state.tokens:
            timeline.params_of_span = state.params
        before = self.recent.pop(timeline.request_id, None)
        self.recent[timeline.request_id] = timeline
        self._num_marks += len(timeline.marks) - (len(before.marks) if before else 0)
        while len(self.recent) > self.keep or self._num_marks > MAX_MARKS:
            _, oldest = self.recent.popitem(last=False)
            self._num_marks -= len(oldest.marks)
        is_ranked = timeline.outcome != "refused"
        if is_ranked and 0 < len(timeline.marks) <= MAX_MARKS // MAX_SLOWEST:
            self._rank(timeline)
        self._keep_prompt(timeline)
        return timeline

    def _keep_prompt(self, timeline: Timeline) -> None:
        """Keep a prompt to compare later ones with; drop the oldest beyond the bound."""
        self._prompts.append(timeline)
        self._num_prompt_tokens += len(timeline.tokens)
        while self._num_prompt_tokens > MAX_PROMPT_TOKENS or len(self._prompts) > self.keep:
            oldest = self._prompts.popleft()
            self._num_prompt_tokens -= len(oldest.tokens)
            oldest.tokens = NO_TOKENS

    def _rank(self, timeline: Timeline) -> None:
        """Add a finished request to `slowest` if it is slow enough."""
        if timeline.wall_ns <= self._fastest_ns:
            return
        all_slow = {**self.slowest, timeline.request_id: timeline}.values()
        slowest = nlargest(MAX_SLOWEST, all_slow, key=attrgetter("wall_ns"))
        self.slowest = {each.request_id: each for each in slowest}
        if len(slowest) == MAX_SLOWEST:
            self._fastest_ns = slowest[-1].wall_ns
        if len(self.steps[timeline.rank]) == MAX_STEPS:
            self._keep_accounts([timeline])

    def _keep_accounts(self, timelines: Sequence[Timeline]) -> None:
        """Compute the accounts of slow requests whose steps will soon be dropped. Others are
        computed on demand: most are displaced by slower requests first.
        """
        due = [
            each
            for each in timelines
            if each.account is None
            and each.marks[0].at_ns < self.steps[each.rank][MAX_STEPS // 2].started_ns
        ]
        for inquiry in self.inquiries(due):
            self._accountant.submit(self._account, inquiry)

    def _account(self, inquiry: Inquiry) -> None:
        """Compute an account off the event loop, unless slower requests have displaced this one."""
        timeline = inquiry.timeline
        if self.slowest.get(timeline.request_id) is timeline:
            timeline.account = inquiry.account()

    def get(self, request_id: str, owner: str = "") -> Timeline | None:
        """A running, recent or slow request of `owner`, if known.

        Args:
            request_id: the `id` of its answer, whose first prompt it then is; or the
                X-Request-Id: then the newest that had it.
            owner: of the request.
        """
        for name in (request_id, f"{request_id}-0"):
            for kept in (self.requests, self.recent, self.slowest):
                timeline = kept.get(name)
                if timeline is not None and timeline.is_shown_to(owner):
                    return timeline
        newest_first = chain(self.latest(owner), self.longest(owner, MAX_SLOWEST))
        return next((each for each in newest_first if each.http_id == request_id), None)

    def latest(self, owner: str, count: int | None = None) -> list[Timeline]:
        """Requests of `owner`, newest first."""
        newest_first = [*reversed(self.requests.values()), *reversed(self.recent.values())]
        return list(islice((t for t in newest_first if t.is_shown_to(owner)), count))

    def of_owner(self, owner: str) -> list[Timeline]:
        """All known requests of `owner`."""
        known = {**self.slowest, **self.recent, **self.requests}
        return [timeline for timeline in known.values() if timeline.is_shown_to(owner)]

    def longest(self, owner: str, count: int) -> list[Timeline]:
        """The slowest finished requests of `owner`, slowest first."""
        own = [timeline for timeline in self.slowest.values() if timeline.owner == owner]
        return sorted(own, key=lambda timeline: -timeline.wall_ns)[:count]

    def latest_steps(self, count: int, engine: int) -> list[StepRecord]:
        """The latest steps of each engine, in order."""
        return list(islice(reversed(self.steps[engine]), count))[::-1]

    def inquiries(self, timelines: Sequence[Timeline]) -> list[Inquiry]:
        """Collect the input of the accounts of these requests up to now."""
        now = Mark("now", now_ns())
        steps = {engine: [*kept] for engine, kept in self.steps.items() if timelines}
        return [
            Inquiry(t, t.marks if t.is_finished else [*sorted(t.marks, key=BY_TIME), now], steps)
            for t in timelines
        ]
