"""RequestState: the API server's state of a prompt until its response has been written."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from servd.api.output.output_parser import ExpectedOutput
from servd.api.protocol.requests import RequestSummary
from servd.api.request.choice import NO_TOKENS, Choice
from servd.api.request.delta_stream import DeltaStream
from servd.api.request.latency import Breakdown
from servd.base.tracing import Mark, StepRecord, first, now_ns
from servd.messages.engine import (
    EngineCoreRequest,
    EngineGone,
    EngineReady,
    EngineStatus,
    FinishReason,
)
from servd.messages.outputs import RequestOutput
from servd.messages.params import SamplingParams
from servd.messages.stats import SchedulerStats

log = logging.getLogger("servd.api")

NOT_YET: Any = None  # of a field that is set before anybody reads it


class Unfinished(msgspec.Struct):
    """An unfinished request of the engine, as /health needs it."""

    sent_ns: int
    num_prompt_tokens: int
    has_begun: bool  # the first token has arrived
    is_due: bool = True  # it waits for engine steps only, not for a grammar or another resource


class Routed(Protocol):
    """A prompt that the load balancer counts toward an engine's pending work."""

    rank: int

    def answer(self, num_cached: int) -> None: ...

    def leave(self, num_tokens: int) -> None: ...

    def end(self, num_tokens: Sequence[int]) -> None: ...


class Timeline(msgspec.Struct, gc=False):
    """The data that is kept of a finished request, or of one of its prompts. Thousands are kept, so
    each should have few objects: a full garbage collection visits them all.
    """

    request_id: str
    owner: str = ""  # name of the API key
    route: str = ""  # "" if no client sent it, or it is a part of a request: then it is not shown
    model: str = ""  # as the response names it
    marks: list[Mark] = []
    choices: list[Choice] = []  # empty until the request is sent to the engine
    reads_prompt: bool = False  # the client asked for results of every prompt token
    tokens: array[int] = NO_TOKENS  # tokens of the prompt; empty once dropped
    salt: tuple[str | None, ...] = (None, None)  # see `RequestOptions.cache_keys`
    num_bytes: int = 0  # size of its message to the engine, if measured
    rank: int = 0  # rank of the engine that runs or ran the request
    earlier: tuple[tuple[int, int], ...] = ()  # previous engines, and when they lost it
    cache_number: int = 0  # how often the engine's prefix cache had been reset before
    is_finished: bool = False
    outcome: str = ""  # once finished: stop, length, abort, error or refused
    http_id: str = ""  # X-Request-Id of its answer
    http_status: int = 0  # of the response; 0: the client left before it
    breakdown: Breakdown | None = None  # computed early for a slow request with aging steps
    summary: RequestSummary | None = None  # cached once it has finished and was listed

    def is_shown_to(self, owner: str) -> bool:
        """Return whether a client with this API key's name sent the request."""
        return self.owner == owner and bool(self.route) and bool(self.marks)

    @property
    def begin_ns(self) -> int:
        """The time of the first mark in nanoseconds, or now without marks."""
        return self.marks[0].at_ns if self.marks else now_ns()

    @property
    def wall_ns(self) -> int:
        """The nanoseconds from the first mark to the last mark, or to now while unfinished."""
        return (self.marks[-1].at_ns if self.is_finished else now_ns()) - self.begin_ns

    @property
    def ttft_ns(self) -> int | None:
        """The time to first token in nanoseconds; None before the first token."""
        at_ns = first(self.marks, "first_token")
        return None if at_ns is None else at_ns - self.begin_ns

    @property
    def generated(self) -> FinishReason:
        """The reason why generation ended: stop, length, abort or error."""
        reasons = {choice.finish_reason for choice in self.choices}
        for reason in (FinishReason.ERROR, FinishReason.LENGTH):
            if reason in reasons:
                return reason
        has_ended = reasons - {None, FinishReason.ABORT} or not reasons
        return FinishReason.STOP if has_ended else FinishReason.ABORT

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens; 0 until the prompt is sent to the engine."""
        return self.choices[0].num_prompt_tokens if self.choices else 0

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache."""
        return self.choices[0].num_cached_tokens if self.choices else 0

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens so far, of all choices."""
        return sum(choice.num_tokens for choice in self.choices)


class RequestState(Timeline, kw_only=True, gc=True, eq=False):
    """The state of one prompt of a request. `Call.open_request` creates a client's state,
    `Processor.process` creates other states and prepares all states, and `start` creates the
    choices. `AsyncLLM.requests` keeps the state until the response has been written.
    """

    # Set by `Processor.process`.
    request: EngineCoreRequest = NOT_YET
    params: SamplingParams = NOT_YET  # seed and max_tokens filled in; PROMPT_ONLY for pooling
    prompt: str | None = None  # None if given as token ids
    expected: ExpectedOutput = ExpectedOutput()
    part_of: str = ""  # id of the request of which this is a part; metrics count that request once
    # Set by `AsyncLLM` when the prompt starts.
    whole: RequestState | None = None  # for the first part: the request that gets its marks
    stream: DeltaStream = NOT_YET
    first_index: int = 0  # index of the first choice in the stream
    routed: Routed | None = None  # with several engines
    sent_ns: int = 0
    output: RequestOutput | None = None  # offline: the output so far

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def is_counted(self) -> bool:
        """Whether the metrics count this prompt as a request of its own."""
        return not self.part_of

    @property
    def is_open(self) -> bool:
        """Whether a choice is unfinished."""
        return any(choice.is_open for choice in self.choices)

    @property
    def recorded(self) -> RequestState:
        """The request whose timeline gets the marks: `whole` for the first part of a request."""
        return self if self.whole is None else self.whole

    def start(self, arrival_ns: int, exemplar: dict[str, str] | None = None) -> None:
        """Create the choices. `exemplar` is the label of the request's trace, for OpenMetrics."""
        num_prompt_tokens = len(self.prompt_token_ids)
        self.choices = [
            Choice(
                arrival_ns, num_prompt_tokens, index=index, engine_id=engine_id, exemplar=exemplar
            )
            for index, engine_id in enumerate(self.request.choice_ids)
        ]

    def move(self, rank: int, cache_number: int) -> None:
        """Record that the engine `rank` continues the request."""
        recorded = self.recorded
        recorded.earlier = (*recorded.earlier, (recorded.rank, now_ns()))
        recorded.cache_number = cache_number
        recorded.rank = rank
        self.rank = rank

    def open_engine_ids(self) -> list[str]:
        """Return the engine's ids of the unfinished choices."""
        return [choice.engine_id for choice in self.choices if choice.is_open]

    def open_token_ids(self) -> dict[int, list[int]]:
        """Return the output tokens of the unfinished choices, by index."""
        return {each.index: each.token_ids.tolist() for each in self.choices if each.is_open}

    def unfinished(self) -> Unfinished:
        """Return the state for /health, which detects an engine without progress."""
        has_begun = bool(self.choices[0].marks)
        # Before its first step a structured output waits for its grammar.
        is_due = has_begun or self.params.structured_output is None
        return Unfinished(self.sent_ns, len(self.prompt_token_ids), has_begun, is_due)


class Observer:
    """An observer of requests and engine steps. `AsyncLLM.observer` calls all observers."""

    def began(self, state: RequestState) -> None:
        """Handle a request that is about to be sent. Its engine is not chosen yet."""

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        """Handle an engine's report of its latest steps."""

    def ended(self, state: RequestState, status: EngineStatus | EngineReady | EngineGone) -> None:
        """Handle a request's last token or disconnect. `status` is the status of its engine."""


class Observers(Observer):
    """A group of observers. A failing observer delays or fails no request that has begun."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def began(self, state: RequestState) -> None:
        for observer in self.observers:
            observer.began(state)

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        for observer in self.observers:
            try:
                observer.stepped(steps, stats, rank)
            except Exception:
                log.exception("%s failed at steps of engine %d", type(observer).__name__, rank)

    def ended(self, state: RequestState, status: EngineStatus | EngineReady | EngineGone) -> None:
        for observer in self.observers:
            try:
                observer.ended(state, status)
            except Exception:
                name = type(observer).__name__
                log.exception("%s failed at the end of %s", name, state.request_id)


def find_choice(
    requests: Mapping[str, RequestState], engine_id: str
) -> tuple[RequestState, Choice] | None:
    """Return the unfinished request and choice that the engine calls `engine_id` (see `choice_ids`
    of EngineCoreRequest), or None.
    """
    state = requests.get(engine_id)
    index = 0
    if state is None or len(state.choices) > 1:
        request_id, _, number = engine_id.rpartition("_")
        state = requests.get(request_id)
        if state is None or not number.isdecimal() or int(number) >= len(state.choices):
            return None
        index = int(number)
    choice = state.choices[index]
    return (state, choice) if choice.is_open else None
