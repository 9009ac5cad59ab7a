"""Engine: the real Scheduler and KV cache in virtual time; a step takes what Costs say.

As long as an engine only decodes and nothing reaches it, its steps are all alike: they are put off
until something does. Then the requests get the tokens and blocks of all of them at once, as those
steps would have left them; but the Scheduler makes a last one after which a request may end.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from servd.cli._costs import Costs
from servd.config import Config
from servd.core.kv_cache.connector.offload import make_connector
from servd.core.kv_cache.manager import KVCacheManager
from servd.core.scheduler import Scheduler
from servd.core.step import StepLog
from servd.hf import FAKE_SPEC
from servd.kv_layout import KVLayout
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
    def __init__(self) -> None:
        self.ns = 1_000_000_000  # 0 means "not yet" in many places

    def now_ns(self) -> int:
        return self.ns


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """The core reads this clock."""
    modules: list[Any] = [
        module
        for name, module in sys.modules.items()
        if name.startswith("servd.core") and hasattr(module, "now_ns")
    ]
    before = [module.now_ns for module in modules]
    try:
        for module in modules:
            module.now_ns = clock.now_ns
        yield
    finally:
        for module, now_ns in zip(modules, before, strict=True):
            module.now_ns = now_ns


@lru_cache(1 << 12)
def zeros(count: int) -> list[int]:
    """Tokens of which only the number counts; nobody changes the list."""
    return [0] * count


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
        layout = KVLayout.of(config, worker.kv_windows)
        kv_cache = KVCacheManager(worker.num_blocks, config.cache, layout)
        self.scheduler = Scheduler(config.scheduler, max_model_len, kv_cache)
        self.scheduler.step_log = StepLog(max_records=1)  # nobody reads a fleet's gigabyte of them
        self.costs, self.clock = costs, clock
        self.copy_ns = costs.copied_byte * worker.kv_bytes_per_block
        self.copies_blocks = config.cache.has_connector
        if self.copies_blocks:
            connector = make_connector(config, FAKE_SPEC, worker)
            connector.costs.loading["host"].add(self.copy_ns, 1)
            kv_cache.connect(connector)
        self.arrived: list[EngineCoreRequest] = []
        self.number = 0  # of what it does now, as events name it
        self.until = NEVER  # when that ends
        self.began = 0
        self.num_steps = 0  # in it
        self.is_cut = False  # it ends before the last of the steps that were put off
        self.num_tokens = 0  # that it computes
        self.launched: SchedulerOutput | None = None  # its step; None: decoding steps, put off
        self.decoding = 0.0, 0.0  # what the first of those takes, and each later one more
        self.owners: set[str] = set()  # of all requests so far
        self.is_stuck = False  # none of those that wait can start before something changes
        self.busy_ns = 0.0
        self.num_open = 0  # requests

    @property
    def is_idle(self) -> bool:
        return self.until == NEVER

    def wake(self) -> bool:
        """Something has arrived: it ends what it put off after the step that runs now. Returns
        whether that changes when it is next heard of.
        """
        now = self.clock.ns
        if self.is_idle:
            self.until = now
        elif self.launched is None and self.num_steps > 1:
            low = 1 + bisect_left(range(1, self.num_steps), now - self.began, key=self._decoding_ns)
            if low == self.num_steps:
                return False
            self.num_steps, self.is_cut = low, True
            self.until = self.began + self._decoding_ns(low)
        else:
            return False
        self.number += 1
        return True

    def proceed(self) -> tuple[list[EngineCoreOutput], int, int]:
        """Harvest what ends now, take in what has arrived, begin what is next.

        Returns:
            Outputs but for those that are just another token; how many those are; and of how many
            steps, in each of which there were as many.
        """
        scheduler, outputs, steps, num_decoded = self.scheduler, [], 0, 0
        was_idle = not self.num_steps
        if self.num_steps:
            steps, self.num_steps = self.num_steps, 0
            self.busy_ns += self.clock.ns - self.began
            if self.launched is None:
                self._skip(steps - (not self.is_cut))
            if self.is_cut:
                num_decoded, self.is_cut = len(scheduler.running), False
            else:
                outputs, num_decoded = self._harvest(self.launched or self._schedule())
                self.launched = None
            if self.is_stuck and any(each.finish_reason is not None for each in outputs):
                self.is_stuck = False
        if self.arrived:
            for message in self.arrived:
                scheduler.add_request(message)
                self.owners.add(message.options.owner)
            self.arrived, self.is_stuck = [], False
        self._begin(was_idle)
        return outputs, num_decoded, steps

    def max_steps(self) -> int:
        """Decoding steps in a row until one may differ from the one before: a request ends, blocks
        could run short, or one that waits could start, by which a step is more than a token of each
        running request. 0 if the next one is.
        """
        scheduler = self.scheduler
        if not scheduler.running or (scheduler.waiting and not self.is_stuck):
            return 0
        if self.copies_blocks:  # any step may copy blocks, which takes time
            return 0
        least, context = FAR, 0
        for request in scheduler.running:
            if request.num_tokens - request.num_computed_tokens != 1:
                return 0
            if request.num_tokens == request.num_prompt_tokens:  # its first token is news
                return 0
            least = min(least, request.max_num_tokens - request.num_tokens)
            context += request.num_tokens
        self.decoding = self.costs.of_decoding(len(scheduler.running), context)
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
            launched = self._schedule()
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
        first, more = self.decoding
        return round(steps * first + more * steps * (steps - 1) / 2)

    def _step_ns(self, step: SchedulerOutput, was_idle: bool) -> int:
        tokens = len(step.decodes.slots)
        context, pairs = sum(step.decodes.num_computed_tokens) + tokens, 0
        for each in step.scheduled:
            tokens += each.num_tokens
            if each.num_tokens == 1:
                context += each.num_computed_tokens + 1
            else:
                pairs += each.num_tokens * (each.num_computed_tokens + each.num_tokens / 2)
        copies = len(step.copies.copies) if step.copies is not None else 0
        took = self.costs.of_step(tokens, step.num_rows, context, pairs, was_idle)
        return round(took + self.copy_ns * copies)

    def _schedule(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        assert scheduled is not None, "what waits fits, and there are no files to be read"
        return scheduled

    def _harvest(self, step: SchedulerOutput) -> tuple[list[EngineCoreOutput], int]:
        """What came of a step; see `proceed`."""
        sampled = [zeros(1) if each.samples else [] for each in step.scheduled]
        decoded = zeros(len(step.decodes.slots))
        self.scheduler.update_from_output(ModelRunnerOutput(sampled, decoded=decoded), {})
        for message in self.scheduler.outputs.take().values():  # of one client at most
            return message.outputs, len(message.decoded)
        return [], 0

    def _skip(self, steps: int) -> None:
        """Leave the requests as so many decoding steps would, after which none ends."""
        scheduler, cache, tokens = self.scheduler, self.scheduler.kv_cache, zeros(steps)
        for _ in range(steps if len(self.owners) > 1 else 0):  # who pay for slots by the step
            scheduler.waiting.begin_step()
        for request in scheduler.running if steps else ():
            request.token_ids += tokens
            request.num_tokens += steps
            request.num_computed_tokens = end = request.num_computed_tokens + steps
            while end > request.decodes_until:
                request.num_computed_tokens = request.decodes_until
                new_block_ids = cache.allocate(request, 1)
                assert new_block_ids, "max_steps has looked at what is free"
                request.decodes_until = cache.room_of(request)
                cache.commit(request)
                request.num_computed_tokens = end
