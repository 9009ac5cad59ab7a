"""Devices that answer later: a slow one, and one with simulated times of host and device."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from servd.core.executor import PendingOutput
from servd.messages.engine import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.core.engines import AuditedExecutor


@dataclass
class SlowStep:
    """A step in flight."""

    begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)


@dataclass
class SlowOutput:
    """Lets the device finish the step when the host waits for it."""

    executor: SlowExecutor
    pending: PendingOutput

    def result(self) -> ModelRunnerOutput:
        self.executor.in_flight.popleft().may_end.set()
        return self.pending.result()


class SlowExecutor(AuditedExecutor):
    """Its device, a thread, ends a step only when the host waits for that.

    And the host launches a step only while the device is at work on the oldest one in flight.
    """

    def start(self):
        self.stream = ThreadPoolExecutor(1, "device")  # also at depth 1
        self.in_flight: deque[SlowStep] = deque()
        self.launching: dict[int, SlowStep] = {}  # by number, until the device begins
        return super().start()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        if self.in_flight:
            self.in_flight[0].begun.wait()
        self.in_flight.append(SlowStep())
        self.launching[scheduled.step] = self.in_flight[-1]
        super().execute_model(scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> PendingOutput:
        return SlowOutput(self, super().sample_tokens(grammar_output))

    def shutdown(self) -> None:
        for step in self.in_flight:  # nobody waits for them any more
            step.may_end.set()
        super().shutdown()

    def _forward(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        step = self.launching.pop(scheduled.step)
        step.begun.set()
        super()._forward(scheduled)
        step.may_end.wait()
        return scheduled


@dataclass
class TimedOutput:
    """Moves the host's clock to the end of the step."""

    executor: TimedExecutor
    pending: PendingOutput
    end: float

    def result(self) -> ModelRunnerOutput:
        self.executor.now = max(self.executor.now, self.end)
        return self.pending.result()


class TimedExecutor(AuditedExecutor):
    """Keeps the clocks of a host (`host` for a step) and of a device (`forward` and `sample`)."""

    host, forward, sample = 1.0, 3.0, 1.0

    def start(self):
        self.now = 0.0  # the host's clock
        self.free = 0.0  # when the device has done all that it was given
        return super().start()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.now += self.host
        super().execute_model(scheduled)
        self._launch(self.forward)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> PendingOutput:
        pending = super().sample_tokens(grammar_output)
        return TimedOutput(self, pending, self._launch(self.sample))

    def _launch(self, duration: float) -> float:
        self.free = max(self.now, self.free) + duration
        return self.free
