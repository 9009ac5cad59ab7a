"""Engine: the real Scheduler and KV cache in virtual time; a step takes what Costs say.

As long as an engine only decodes and nothing reaches it, its steps are all alike: they are put off
until something does, and scheduled as one, in which every request has as many tokens as it would
have got. That is what the Scheduler does with tokens that are known beforehand, and leaves it as
those steps would have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import servd.core.request
from servd.cli._costs import Costs
from servd.config import Config
from servd.core.executor import Executor, Progress
from servd.core.kv_cache import groups, tiers
from servd.core.scheduler import Scheduler
from servd.hf import FAKE_SPEC
from servd.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerReady,
)

NEVER = 1 << 62  # nanoseconds
FAR = 1 << 40  # tokens: no limit


class Clock:
    """Virtual nanoseconds."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000  # 0 means "not yet" in many places

    def now_ns(self) -> int:
        """The time."""
        return self.ns


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """The core reads this clock, and takes any number of tokens that are known beforehand."""
    places: list[tuple[Any, str, Any]] = [
        (module, "now_ns", clock.now_ns)
        for name, module in sys.modules.items()
        if name.startswith("servd.core") and hasattr(module, "now_ns")
    ]
    places.append((servd.core.request, "MAX_FORCED_TOKENS", FAR))
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


@lru_cache(1 << 12)
def zeros(count: int) -> list[int]:
    """Tokens of which only the number counts; nobody changes the list."""
    return [0] * count


class Copier(Executor):
    """Copies blocks in virtual time, for `tiers.Tiers.measure`."""

    def __init__(self, clock: Clock, block_ns: float, config: Config, progress: Progress) -> None:
        super().__init__(config, FAKE_SPEC, progress)
        self.clock, self.block_ns = clock, block_ns

    def start(self) -> WorkerReady:
        """Nobody asks."""
        raise NotImplementedError

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Take the time."""
        assert scheduled.copies is not None
        self.clock.ns += round(self.block_ns * len(scheduled.copies.copies))

    def sample_tokens(self, bitmask: object = None) -> Copier:
        """It is done."""
        return self

    def result(self) -> ModelRunnerOutput:
        """Nothing is computed."""
        return ModelRunnerOutput([])

    def shutdown(self) -> None:
        """Nothing runs."""


class Engine:
    """A Scheduler, and the step that it is in.

    Args:
        config: with every size that the Scheduler needs.
        worker: the size of its cache.
        max_model_len: longest prompt and answer, in tokens.
        costs: of steps.
        clock: the fleet's.
    """

    def __init__(
        self, config: Config, worker: WorkerReady, max_model_len: int, costs: Costs, clock: Clock
    ) -> None:
        kv_cache = groups.load(config, worker)
        self.scheduler = Scheduler(config.scheduler, max_model_len, kv_cache)
        self.costs, self.clock = costs, clock
        self.copy_ns = costs.copied_byte * worker.kv_bytes_per_block
        copier = Copier(clock, self.copy_ns, config, lambda phase, fraction: None)
        self.scheduler.kv_cache.connect(tiers.load(config, FAKE_SPEC, worker, copier))
        self.arrived: list[EngineCoreRequest] = []
        self.number = 0  # of what it does now, as events name it
        self.until = NEVER  # when that ends
        self.began = 0
        self.num_steps = 0  # in it
        self.num_tokens = 0  # that it computes
        self.launched: SchedulerOutput | None = None  # its step; None: decoding steps, put off
        self.context = 0  # tokens that the first of those looks at
        self.owners: set[str] = set()  # of all requests so far
        self.is_stuck = False  # none of those that wait can start before something changes
        self.busy_ns = 0.0
        self.num_open = 0  # requests

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing."""
        return self.until == NEVER

    def wake(self) -> bool:
        """Something has arrived: it ends what it put off after the step that runs now. Returns
        whether that changes when it is next heard of.
        """
        now = self.clock.ns
        if self.is_idle:
            self.until = now
        elif self.launched is None and self.num_steps > 1:
            low, high = 1, self.num_steps
            while low < high:
                middle = (low + high) // 2
                if self.began + self._decoding_ns(middle) >= now:
                    high = middle
                else:
                    low = middle + 1
            if low == self.num_steps:
                return False
            self.num_steps, self.until = low, self.began + self._decoding_ns(low)
        else:
            return False
        self.number += 1
        return True

    def proceed(self) -> tuple[list[EngineCoreOutput], int]:
        """Harvest what ends now, take in what has arrived, begin what is next.

        Returns:
            Outputs, and how many steps they came of.
        """
        scheduler, outputs, steps = self.scheduler, [], 0
        was_idle = not self.num_steps
        if self.num_steps:
            steps, launched = self.num_steps, self.launched or self._decode(self.num_steps)
            self.busy_ns += self.clock.ns - self.began
            sampled = [zeros(x.num_drafts + 1) if x.samples else [] for x in launched.scheduled]
            decoded = zeros(len(launched.decodes.slots))
            scheduler.update_from_output(ModelRunnerOutput(sampled, decoded=decoded), {})
            taken = scheduler.take_outputs()
            outputs = taken[0].all_outputs if 0 in taken else []
            self.num_steps, self.launched = 0, None
            if self.is_stuck and any(each.finish_reason is not None for each in outputs):
                self.is_stuck = False
        if self.arrived:
            for message in self.arrived:
                scheduler.add(message)
                self.owners.add(message.options.owner)
            self.arrived, self.is_stuck = [], False
        self._begin(was_idle)
        return outputs, steps

    def max_steps(self) -> int:
        """Decoding steps in a row until one may differ from the one before: a request ends, blocks
        could run short, or one that waits could start, by which a step is more than a token of each
        running request. 0 if the next one is.
        """
        scheduler = self.scheduler
        if not scheduler.running or (scheduler.waiting and not self.is_stuck):
            return 0
        if scheduler.kv_cache.tiers is not None:  # any step may copy blocks, which takes time
            return 0
        least, context = FAR, 0
        for request in scheduler.running:
            if request.num_tokens - request.num_computed_tokens != 1:
                return 0
            if request.num_tokens == request.num_prompt_tokens:  # its first token is news
                return 0
            least = min(least, request.max_num_tokens - request.num_tokens)
            context += request.num_tokens
        self.context = context
        cache = scheduler.kv_cache
        per_request = cache.pool.num_free // (len(scheduler.running) * cache.num_groups)
        return min(least, per_request * cache.block_size)

    def _begin(self, was_idle: bool) -> None:
        scheduler = self.scheduler
        self.began, self.number, self.until = self.clock.ns, self.number + 1, NEVER
        if steps := self.max_steps():
            self.num_steps = steps
            self.until = self.began + self._decoding_ns(steps)
        elif scheduler.requests:
            launched = scheduler.schedule()
            assert launched is not None, "what waits fits, and there are no files to be read"
            self.launched, self.num_steps = launched, 1
            # Where owners compete, whose turn it is also depends on the steps they had.
            self.is_stuck = bool(scheduler.waiting) and not (
                launched.new_requests
                or scheduler.newest.prefills
                or scheduler.newest.num_preempted
                or (scheduler.waiting.by_owner and len(self.owners) > 1)
            )
            self.until = self.began + self._step_ns(launched, was_idle)

    def _decoding_ns(self, steps: int) -> int:
        rows = len(self.scheduler.running)
        return round(self.costs.of_decoding(steps, rows, self.context))

    def _step_ns(self, step: SchedulerOutput, was_idle: bool) -> int:
        tokens = context = pairs = 0
        for each in step.rows:
            tokens += each.num_tokens
            if each.num_tokens == 1:
                context += each.num_computed_tokens + 1
            else:
                pairs += each.num_tokens * (each.num_computed_tokens + each.num_tokens / 2)
        copies = len(step.copies.copies) if step.copies is not None else 0
        took = self.costs.of_step(tokens, step.num_rows, context, pairs, was_idle)
        return round(took + self.copy_ns * copies)

    def _decode(self, steps: int) -> SchedulerOutput:
        """Schedule steps that were put off."""
        scheduler = self.scheduler
        limits = scheduler.max_num_batched_tokens, scheduler.max_num_samples
        scheduler.max_num_batched_tokens = scheduler.max_num_samples = FAR
        for _ in range(steps - 1 if len(self.owners) > 1 else 0):  # who pay for slots by the step
            scheduler.waiting.begin_step()
        forced = {request.slot: zeros(steps - 1) for request in scheduler.running}
        scheduled = scheduler.schedule(forced_tokens=forced)
        scheduler.max_num_batched_tokens, scheduler.max_num_samples = limits
        assert scheduled is not None and all(x.num_tokens == steps for x in scheduled.rows)
        return scheduled
