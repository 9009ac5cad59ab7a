"""Observer: sees requests begin and end, their tokens and the steps of engines."""

import logging
from collections.abc import Sequence

from servd.api.request.request_state import RequestState
from servd.base.tracing import StepRecord
from servd.messages.engine import EngineGone, EngineReady, EngineStatus
from servd.messages.outputs import CompletionOutput
from servd.messages.stats import SchedulerStats

log = logging.getLogger("servd.api")


class Observer:
    """An observer of requests and engine steps. `AsyncLLM.observer` calls all observers."""

    def began(self, state: RequestState) -> None:
        """Handle a request that is about to be sent. Its engine is not chosen yet."""

    def received(self, state: RequestState, delta: CompletionOutput, at_ns: int) -> None:
        """Handle new tokens, or the end, of a choice."""

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        """Handle an engine's report of its latest steps."""

    def ended(self, state: RequestState, status: EngineStatus | EngineReady | EngineGone) -> None:
        """Handle a request's last token or disconnect. `status` is the status of its engine."""


class StatLoggerManager(Observer):
    """The observers of a server: the tracer, the metrics and the logs. A failing observer delays or
    fails no request that has begun.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        # Most observers need neither beginnings nor tokens.
        self.starters = [
            observer for observer in observers if type(observer).began is not Observer.began
        ]
        self.receivers = [
            observer for observer in observers if type(observer).received is not Observer.received
        ]

    def began(self, state: RequestState) -> None:
        for observer in self.starters:
            observer.began(state)

    def received(self, state: RequestState, delta: CompletionOutput, at_ns: int) -> None:
        for observer in self.receivers:
            try:
                observer.received(state, delta, at_ns)
            except Exception:
                name = type(observer).__name__
                log.exception("%s failed at tokens of %s", name, state.request_id)

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
