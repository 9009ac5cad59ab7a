"""Tracer: keeps the timelines of running requests, recent requests and the slowest requests."""

from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from operator import attrgetter

import msgspec

from servd.api.request.choice import NO_TOKENS
from servd.api.request.latency import Breakdown, break_down, step_times
from servd.api.request.observer import Observer
from servd.api.request.request_state import RequestState
from servd.api.request.timeline import Timeline
from servd.base.tracing import Mark, StepRecord, now_ns
from servd.messages.stats import SchedulerStats

MAX_RECENT = 1024  # finished requests, about 3 KB each
MAX_BYTES = 32_000_000  # of the marks and prompts of these
MAX_SLOWEST = 32  # each with its breakdown of up to 300 KB
MAX_SLOW_MARKS = 6_000  # of each of these
MAX_STEPS = 8192  # about 700 bytes each
SECOND = 1_000_000_000
MAX_SECONDS = 120  # in which tokens were generated
STEPS_PER_LOOK = 1024  # steps between two searches for slow requests with aging steps
STEPS_BEFORE = 256  # steps before a request, from which its usual step times are computed
BY_TIME = attrgetter("at_ns")
BY_WALL_TIME = attrgetter("wall_ns")


class Snapshot(msgspec.Struct):
    """A snapshot of a request, from which any thread can compute the latency breakdown."""

    timeline: Timeline
    marks: list[Mark]  # of a running request, with a last mark for now
    steps: Mapping[int, Sequence[StepRecord]]  # all known steps by engine, in order

    def breakdown(self) -> Breakdown:
        """Return the latency breakdown. Takes 20 ms for a thousand steps."""
        if self.timeline.breakdown is not None:
            return self.timeline.breakdown
        return break_down(self.marks, self.own_steps(), self.timeline.request_id)

    def own_steps(self) -> list[StepRecord]:
        """Return the steps of the request's engines during the request, and some steps before."""
        begin_ns = self.marks[0].at_ns
        num_before = STEPS_BEFORE
        records: list[StepRecord] = []
        engines = [*self.timeline.earlier, (self.timeline.rank, self.marks[-1].at_ns)]
        for engine, end_ns in engines:
            steps = self.steps.get(engine, ())
            start = bisect_left(steps, begin_ns, key=attrgetter("collected_ns"))
            stop = bisect_left(steps, end_ns, key=attrgetter("started_ns"))
            records += steps[max(start - num_before, 0) : stop]
            begin_ns = end_ns
            num_before = 0
        return records


class Tracer(Observer):
    """An observer that keeps timelines of requests, and the latest steps of each engine."""

    def __init__(self, keep: int = MAX_RECENT) -> None:
        self.keep = keep
        self.running: dict[str, Timeline] = {}  # requests whose responses are not written yet
        self.recent: OrderedDict[str, Timeline] = OrderedDict()  # finished requests, newest last
        self.slowest: dict[str, Timeline] = {}
        self.steps = defaultdict[int, deque[StepRecord]](partial(deque, maxlen=MAX_STEPS))
        # Generated and prompt tokens of all engines by the second of `now_ns`.
        self.tokens = defaultdict[int, list[int]](lambda: [0, 0])
        self._fastest_ns = -1  # the fastest of `slowest`, once it is full
        self._num_bytes = 0  # in `recent`
        self._thread = ThreadPoolExecutor(1, "latency")

    def began(self, state: RequestState) -> None:
        if not state.is_part:
            timeline = state.timeline
            timeline.tokens = array("I", state.prompt_token_ids)
            timeline.salt = state.request.options.cache_keys
            timeline.reads_prompt = state.params.prompt_logprobs is not None

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        for begin_ns, end_ns, step, num_extra in step_times(steps):
            step.engine = rank
            self.tokens[end_ns // SECOND][0] += step.num_tokens - num_extra
            seconds = range(begin_ns // SECOND, end_ns // SECOND + 1)
            for second in seconds:  # a chunk of a prompt may take long
                self.tokens[second][1] += step.num_prompt_tokens // len(seconds)
        while len(self.tokens) > MAX_SECONDS + 1:  # and the current one
            del self.tokens[min(self.tokens)]
        kept = self.steps[rank]
        kept.extend(steps)
        if steps and steps[-1].step % STEPS_PER_LOOK < len(steps) and len(kept) == MAX_STEPS:
            self._keep_breakdowns(rank)

    def lose_engine(self, states: Iterable[RequestState], engine: int) -> None:
        """Mark the time at which the engine of these requests was last known to be alive."""
        steps = self.steps[engine]
        last_ns = steps[-1].collected_ns if steps else 0
        for state in states:
            marks = state.timeline.marks
            marks.append(Mark("engine_lost", max(last_ns, marks[-1].at_ns)))

    def finish(
        self, timeline: Timeline, marks: Iterable[Mark] = (), outcome: str = "", status: int = 0
    ) -> None:
        """Keep the timeline of a request whose response has been written. `marks` time the
        response. The default of `outcome` is how the generation ended.
        """
        self.running.pop(timeline.request_id, None)
        timeline.outcome = outcome or timeline.generated
        timeline.http_status = status
        # Other threads may read the list.
        timeline.marks = sorted([*timeline.marks, *marks], key=BY_TIME)
        timeline.params = None
        timeline.is_finished = True
        self.recent[timeline.request_id] = timeline
        self._num_bytes += _num_bytes(timeline)
        while len(self.recent) > self.keep or self._num_bytes > MAX_BYTES:
            _, oldest = self.recent.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)
            oldest.tokens = NO_TOKENS  # `slowest` may keep the timeline
        if timeline.outcome != "refused" and 0 < len(timeline.marks) <= MAX_SLOW_MARKS:
            self._rank(timeline)

    def add_late_marks(self, request_id: str, marks: Iterable[Mark]) -> None:
        """Add what the engine did for an aborted request, which it tells after the abort. Marks
        after the request's end belong to nobody.
        """
        running = self.running.get(request_id)
        if running is not None:
            running.marks += marks
            return
        timeline = self.recent.get(request_id)
        if timeline is None or not timeline.marks:
            return
        end_ns = timeline.marks[-1].at_ns
        # Other threads may read the list. The last mark stays the last.
        *earlier, last = timeline.marks
        earlier += [mark for mark in marks if mark.at_ns <= end_ns]
        timeline.marks = [*sorted(earlier, key=BY_TIME), last]
        timeline.breakdown = None
        timeline.summary = None

    def _rank(self, timeline: Timeline) -> None:
        """Add a finished request to `slowest` if it is among the slowest."""
        if timeline.wall_ns <= self._fastest_ns:
            return
        self.slowest[timeline.request_id] = timeline
        if len(self.slowest) > MAX_SLOWEST:
            fastest = min(self.slowest.values(), key=BY_WALL_TIME)
            del self.slowest[fastest.request_id]
            self._fastest_ns = min(map(BY_WALL_TIME, self.slowest.values()))

    def _keep_breakdowns(self, rank: int) -> None:
        """Compute the breakdowns of slow requests before their steps are dropped, off the event
        loop. Start late, when slower requests have displaced most of the slow requests.
        """
        aging_ns = self.steps[rank][MAX_STEPS // 2].started_ns
        due = [
            timeline
            for timeline in self.slowest.values()
            if timeline.rank == rank and timeline.breakdown is None and timeline.begin_ns < aging_ns
        ]
        for snapshot in self.take_snapshots(due):
            self._thread.submit(self._keep_breakdown, snapshot)

    def _keep_breakdown(self, snapshot: Snapshot) -> None:
        timeline = snapshot.timeline
        if self.slowest.get(timeline.request_id) is timeline:  # else it was displaced
            timeline.breakdown = snapshot.breakdown()

    def find_request(self, request_id: str, owner: str) -> Timeline | None:
        """Return the timeline of `owner`'s request whose response has this `id`, or of the newest
        with this X-Request-Id. If the request has several prompts, return the first timeline.
        """
        timelines = self.list_requests(owner)
        by_id = {timeline.request_id: timeline for timeline in timelines}
        for name in (request_id, f"{request_id}-0", request_id.removesuffix("-0")):
            if name in by_id:
                return by_id[name]
        return next((timeline for timeline in timelines if timeline.http_id == request_id), None)

    def list_requests(self, owner: str) -> list[Timeline]:
        """Return running and recent requests of `owner`, newest first, then older slow requests."""
        finished = chain(reversed(self.recent.values()), self.slowest.values())
        newest_first = chain(reversed(self.running.values()), finished)
        visible = [timeline for timeline in newest_first if timeline.is_shown_to(owner)]
        return [*{timeline.request_id: timeline for timeline in visible}.values()]

    def list_slowest(self, owner: str) -> list[Timeline]:
        """Return the slowest finished requests of `owner`, slowest first."""
        visible = [timeline for timeline in self.slowest.values() if timeline.owner == owner]
        return sorted(visible, key=BY_WALL_TIME, reverse=True)

    def latest_steps(self, count: int, engine: int) -> list[StepRecord]:
        """Return the latest `count` steps of an engine, in order."""
        return list(islice(reversed(self.steps[engine]), count))[::-1]

    def take_snapshots(self, timelines: Sequence[Timeline]) -> list[Snapshot]:
        """Return a snapshot of each request, as of now."""
        now = Mark("now", now_ns())
        steps = {engine: [*kept] for engine, kept in self.steps.items() if timelines}
        snapshots: list[Snapshot] = []
        for timeline in timelines:
            marks = timeline.marks
            if not timeline.is_finished:
                marks = [*sorted(marks, key=BY_TIME), now]
            snapshots.append(Snapshot(timeline, marks, steps))
        return snapshots


def _num_bytes(timeline: Timeline) -> int:
    return 100 * len(timeline.marks) + 4 * len(timeline.tokens)
