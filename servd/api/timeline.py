"""Timelines: what an API process knows about its running, most recent and slowest requests."""

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
from servd.api.choice import Choice
from servd.api.protocol.requests import RequestSummary
from servd.messages import FinishReason
from servd.params import SamplingParams
from servd.tracing import Mark, StepRecord, first, now_ns

if TYPE_CHECKING:
    from servd.api.otel import Spans  # an extra, imported where it is asked for
    from servd.api.recorder import Recorder

MAX_RECENT = 1024  # about 3 KB each
MAX_SLOWEST = 32  # each with its account of up to 300 KB
MAX_MARKS = 200_000  # of recent and of the slowest requests; 100 bytes each
MAX_PROMPT_TOKENS = 2_000_000  # of finished requests; 4 bytes each
MAX_STEPS = 8192  # about 700 bytes each
STEPS_PER_LOOK = 1024  # steps between two searches for slow requests with aging steps
STEPS_BEFORE = 256  # steps before a request, from which its usual step times are computed
BY_TIME = attrgetter("at_ns")


class Timeline(msgspec.Struct, gc=False):
    """One request, or one prompt of a request with several. Thousands are kept, so each should
    consist of few objects: a full garbage collection visits them all.
    """

    id: str
    owner: str = ""
    route: str = ""
    model: str = ""  # as the response names it
    marks: list[Mark] = []
    choices: Sequence[Choice] = ()
    params: SamplingParams | None = None  # while it runs; kept longer if spans export them
    reads_prompt: bool = False  # it asked for results of every prompt token
    prompt: array[int] = array("I")  # token ids; empty once dropped
    salt: tuple[str | None, ...] = ()  # see `RequestOptions.cache_keys`
    # From its first tool call to its end, and how long the parser worked in it.
    parsed_from_ns: int = 0
    parsed_to_ns: int = 0
    parsing_ns: int = 0
    num_bytes: int = 0  # size of its message to the engine, if measured
    engine: int = 0  # rank of the engine that runs or ran it
    earlier: tuple[tuple[int, int], ...] = ()  # engines that ran it before, and until when
    cache_number: int = 0  # how often the engine's prefix cache had been reset before
    is_finished: bool = False
    outcome: str = ""  # once finished: stop, length, abort, error or refused
    http_id: str = ""  # X-Request-Id of its answer
    http_status: int = 0  # of its answer; 0: the client left before it got one
    account: Account | None = None  # computed early for a slow request with aging steps
    summary: RequestSummary | None = None  # cached once it has finished and was listed

    def move(self, engine: int, cache_number: int) -> None:
        """Another engine continues it."""
        self.earlier = (*self.earlier, (self.engine, now_ns()))
        self.engine = engine
        self.cache_number = cache_number

    @property
    def begin_ns(self) -> int:
        """When it arrived, or now if that is unknown."""
        return self.marks[0].at_ns if self.marks else now_ns()

    @property
    def wall_ns(self) -> int:
        """Nanoseconds from its first mark to its last, or to now."""
        return (self.marks[-1].at_ns if self.is_finished else now_ns()) - self.begin_ns

    @property
    def ttft_ns(self) -> int | None:
        """Nanoseconds from its first mark to its first token."""
        at_ns = first(self.marks, "first_token")
        return None if at_ns is None else at_ns - self.begin_ns

    @property
    def generated(self) -> str:
        """How the generation of its choices ended: stop, length, abort or error."""
        reasons = {choice.finish_reason for choice in self.choices}
        for reason in (FinishReason.ERROR, FinishReason.LENGTH):
            if reason in reasons:
                return reason
        has_ended = reasons - {None, FinishReason.ABORT} or not reasons
        return FinishReason.STOP if has_ended else FinishReason.ABORT

    @property
    def num_prompt_tokens(self) -> int:
        """0 until it is sent to the engine."""
        return self.choices[0].num_prompt_tokens if self.choices else 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of its prompt that were in the prefix cache."""
        return self.choices[0].num_cached_tokens if self.choices else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its choices so far."""
        return sum(choice.num_tokens for choice in self.choices)


class Inquiry(msgspec.Struct):
    """The input of `account`, safe to pass to another thread."""

    timeline: Timeline
    marks: list[Mark]
    steps: Mapping[int, Sequence[StepRecord]]  # all known steps by engine, in order

    @property
    def known(self) -> list[StepRecord]:
        """The steps that its engines ran during the request, and some before them."""
        begin, before, found = self.marks[0].at_ns, STEPS_BEFORE, list[StepRecord]()
        for engine, end in (*self.timeline.earlier, (self.timeline.engine, self.marks[-1].at_ns)):
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
        return account(self.marks, self.known, self.timeline.id)


@dataclass(eq=False)
class Tracer:
    """The timelines of running requests and of the most recent and slowest finished ones, and the
    latest steps of each engine.
    """

    keep: int = MAX_RECENT  # recent requests
    spans: Spans | None = None  # exports OpenTelemetry spans of requests
    recorder: Recorder | None = None  # writes requests and steps to a file

    def __post_init__(self) -> None:
        self.running: dict[str, Timeline] = {}
        self.recent: OrderedDict[str, Timeline] = OrderedDict()
        self.slowest: dict[str, Timeline] = {}
        self._fastest_ns = -1  # the fastest of `slowest`, once it is full
        # By engine, in order.
        self.steps = defaultdict[int, deque[StepRecord]](partial(deque, maxlen=MAX_STEPS))
        self._num_marks = 0  # in `recent`
        self._prompts: deque[Timeline] = deque()  # finished, with their prompts
        self._num_prompt_tokens = 0
        self._accountant = ThreadPoolExecutor(1, "account")

    def add_steps(self, steps: Sequence[StepRecord], engine: int) -> None:
        """Add the latest steps of an engine."""
        for step in steps if engine else ():
            step.engine = engine
        if self.recorder is not None:
            self.recorder.add_steps(steps, engine)
        kept = self.steps[engine]
        kept.extend(steps)
        if steps and steps[-1].step % STEPS_PER_LOOK < len(steps) and len(kept) == MAX_STEPS:
            self._keep_accounts([t for t in self.slowest.values() if t.engine == engine])

    def lose_engine(self, timelines: Iterable[Timeline], engine: int) -> None:
        """Record when the engine of these requests was last known to be alive."""
        steps = self.steps[engine]
        last_step = steps[-1].harvested_ns if steps else 0
        for timeline in timelines:
            lost = max(last_step, timeline.marks[-1].at_ns)
            timeline.marks.append(Mark("engine_lost", lost))

    def finish(
        self, request_id: str, marks: Iterable[Mark] = (), outcome: str = "", http_status: int = 0
    ) -> Timeline:
        """Close a request's timeline, merging these marks with its own in order of time.

        Args:
            request_id: of the timeline.
            marks: those of the response.
            outcome: by default, how the generation ended.
            http_status: of the response; 0 if there was none.
        """
        timeline = self.running.pop(request_id, None) or Timeline(request_id)
        timeline.outcome = outcome or timeline.generated
        timeline.http_status = http_status
        # Other threads may read the list.
        timeline.marks = sorted([*timeline.marks, *marks], key=BY_TIME)
        timeline.is_finished = True
        if self.spans is None:
            timeline.params = None  # a dozen lists, most of them empty
        before = self.recent.pop(request_id, None)
        self.recent[request_id] = timeline
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
        self._num_prompt_tokens += len(timeline.prompt)
        while self._num_prompt_tokens > MAX_PROMPT_TOKENS or len(self._prompts) > self.keep:
            oldest = self._prompts.popleft()
            self._num_prompt_tokens -= len(oldest.prompt)
            oldest.prompt = array("I")

    def _rank(self, timeline: Timeline) -> None:
        """Add a finished request to `slowest` if it is slow enough."""
        if timeline.wall_ns <= self._fastest_ns:
            return
        all_slow = {**self.slowest, timeline.id: timeline}.values()
        slowest = nlargest(MAX_SLOWEST, all_slow, key=attrgetter("wall_ns"))
        self.slowest = {each.id: each for each in slowest}
        if len(slowest) == MAX_SLOWEST:
            self._fastest_ns = slowest[-1].wall_ns
        if len(self.steps[timeline.engine]) == MAX_STEPS:
            self._keep_accounts([timeline])

    def _keep_accounts(self, timelines: Sequence[Timeline]) -> None:
        """Compute the accounts of slow requests whose steps will soon be dropped. Others are
        computed on demand: most are displaced by slower requests first.
        """
        due = [
            each
            for each in timelines
            if each.account is None
            and each.marks[0].at_ns < self.steps[each.engine][MAX_STEPS // 2].started_ns
        ]
        for inquiry in self.inquiries(due):
            self._accountant.submit(self._account, inquiry)

    def _account(self, inquiry: Inquiry) -> None:
        """Compute an account off the event loop, unless slower requests have displaced this one."""
        timeline = inquiry.timeline
        if self.slowest.get(timeline.id) is timeline:
            timeline.account = inquiry.account()

    def get(self, request_id: str, owner: str = "") -> Timeline | None:
        """A running, recent or slow request of `owner`, if known.

        Args:
            request_id: the `id` of its answer, or the X-Request-Id: then the newest that had it.
            owner: of the request.
        """
        for kept in (self.running, self.recent, self.slowest):
            timeline = kept.get(request_id)
            if timeline is not None and timeline.owner == owner and timeline.marks:
                return timeline
        newest_first = chain(self.latest(owner), self.longest(owner, MAX_SLOWEST))
        return next((each for each in newest_first if each.http_id == request_id), None)

    def latest(self, owner: str, count: int | None = None) -> list[Timeline]:
        """Requests of `owner`, newest first."""
        newest_first = [*reversed(self.running.values()), *reversed(self.recent.values())]
        return list(islice((t for t in newest_first if t.owner == owner and t.marks), count))

    def of_owner(self, owner: str) -> list[Timeline]:
        """All known requests of `owner`."""
        known = {**self.slowest, **self.recent, **self.running}
        return [timeline for timeline in known.values() if timeline.owner == owner]

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
