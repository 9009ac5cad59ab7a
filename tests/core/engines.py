"""Engines over a fake executor that audits the whole KV cache, and a loop that checks each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servd.base.tracing import Clock, now_ns
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.core.audit import problems
from servd.core.engine_core import EngineCore
from servd.core.executor.fake import FakeExecutor, next_state
from servd.core.kv_cache.block_pool import BlockPool
from servd.messages.engine import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestOptions,
    SchedulerOutput,
)
from servd.messages.params import SamplingParams
from tests.fake_tokens import expected_tokens

VOCAB_SIZE = FAKE_SPEC.vocab_size
EOS = FAKE_SPEC.eos_token_ids


class AuditedExecutor(FakeExecutor):
    """Checks every step against the rules, and of the cache of every scheduled row all that its
    tokens read, in each group of layers.
    """

    windows: tuple[int | None, ...] = (None,)  # of the groups; each keeps the state of a token

    def start(self):
        self.steps: list[SchedulerOutput] = []
        self.firsts: dict[int, int] = {}  # row -> its first token in the step
        self.pool: BlockPool | None = None  # the engine's, from when there is one
        self.unowned: dict[int, set[int]] = {}  # step -> the blocks that nobody owns
        return msgspec.structs.replace(super().start(), kv_windows=self.windows)

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.steps.append(scheduled)
        config = self.config.scheduler
        slots = [item.slot for item in scheduled.rows]
        assert slots or scheduled.swaps is not None
        assert len(set(slots)) == len(slots) <= config.max_num_seqs
        assert all(item.num_scheduled_tokens > 0 for item in scheduled.rows)
        assert scheduled.total_num_scheduled_tokens <= config.max_num_batched_tokens
        for new in scheduled.new_requests:
            assert new.slot in slots
            num_blocks = len(new.block_ids) // len(self.windows)
            assert new.num_computed_tokens == num_blocks * self.block_size < len(new.token_ids)
        if self.pool is not None:
            counts = enumerate(self.pool.ref_counts)
            self.unowned[scheduled.step] = {block for block, count in counts if count == 0}
        super().execute_model(scheduled)

    def _forward(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        for new in scheduled.new_requests:
            assert new.slot not in self.rows or new.slot in scheduled.freed_slots
        super()._forward(scheduled)
        free = self.unowned.pop(scheduled.step, set())
        for item in scheduled.rows:
            self._audit(self.rows[item.slot], free)
        return scheduled

    def _audit(self, row, free: set[int]) -> None:
        num_tokens, num_blocks = row.num_computed_tokens + len(row.drafts), len(row.block_ids)
        min_blocks = -(-num_tokens // self.block_size) * len(self.windows)
        assert num_blocks >= min_blocks and num_blocks % len(self.windows) == 0
        assert num_blocks == min_blocks or self.config.model.speculative_config
        state, first = 0, self.firsts[id(row)]
        for i in range(row.num_computed_tokens):
            state = next_state(state, row.token_ids[i])
            for window, place in zip(self.windows, self._places(row, i), strict=True):
                if window is None or i > first - window:
                    assert place >= 0 and self.cache[place] == state, f"the cache lost token {i}"
                    assert place // self.block_size not in free, f"token {i} is in a free block"

    def _compute(self, row, num_tokens) -> None:
        first = self.firsts[id(row)] = row.num_computed_tokens
        super()._compute(row, num_tokens)
        self._copy(row, range(first, row.num_computed_tokens))

    def _compute_drafts(self, row) -> None:
        super()._compute_drafts(row)
        first = row.num_computed_tokens
        self._copy(row, range(first, first + len(row.drafts)))

    def _copy(self, row, tokens: range) -> None:
        """What the first group keeps of tokens, to the other groups."""
        for i in tokens if len(self.windows) > 1 else ():
            place, *reads = self._places(row, i)
            for other in reads:
                self.cache[other] = self.cache[place]

    def _places(self, row, token: int) -> list[int]:
        """Where the cache keeps a token, by group."""
        num_groups, size = len(self.windows), self.block_size
        first = token // size * num_groups
        blocks = row.block_ids[first : first + num_groups]
        return [block * size + token % size for block in blocks]

    def _position(self, row, token: int) -> int:
        return self._places(row, token)[0]


def with_windows(
    *windows: int | None, base: type[AuditedExecutor] = AuditedExecutor
) -> type[AuditedExecutor]:
    """An executor with groups of layers."""
    return type("WithWindows", (base,), {"windows": windows})


def make_engine(
    num_blocks: int = 64,
    depth: int = 1,
    executor_class: type[AuditedExecutor] = AuditedExecutor,
    clock: Clock = now_ns,
    **options,
) -> EngineCore:
    """An engine with a small cache; `options` as in Config."""
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "max_model_len": 64,
    } | options
    memory = num_blocks * options["block_size"] * FAKE_SPEC.kv_bytes_per_token(4)
    config = Config.load(options | {"kv_cache_memory": memory, "async_scheduling": depth > 1})
    executor = executor_class(config, FAKE_SPEC, lambda phase, fraction: None)
    engine = EngineCore(config, FAKE_SPEC, executor, executor.start(), clock)
    executor.pool = engine.scheduler.kv_cache.pool
    num_stages = config.parallel.pipeline_parallel_size
    assert engine.depth == min(depth, 2) - 1 + num_stages
    if num_stages == 1:
        engine.depth = depth  # the loop knows no limit, only the configuration does
    return engine


def make_request(
    request_id: str, prompt: list[int], max_tokens: int | None = 8, **options
) -> EngineCoreRequest:
    """A request; options that a message does not have go to its SamplingParams."""

    def pop_options(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    served = RequestOptions(**pop_options(RequestOptions.__struct_fields__))
    fields = {"options": served} | pop_options(EngineCoreRequest.__struct_fields__)
    return EngineCoreRequest(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **options),
        **{"eos_token_ids": EOS} | fields,
    )


def check(engine: EngineCore) -> None:
    """What `/debug/audit` looks at."""
    assert problems(engine) == []


def check_idle(engine: EngineCore) -> None:
    """Nothing is left of any request."""
    check(engine)
    scheduler = engine.scheduler
    assert not scheduler.requests and not engine.in_flight and not scheduler._in_flight
    cache = scheduler.kv_cache
    assert (
        cache.pool.num_free + len(cache.prefix_cache.pinned) == cache.pool.num_blocks
        and not cache.num_holders
    )


class Log:
    """All outputs of an engine, by request."""

    def __init__(self) -> None:
        self.outputs: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        self.by_client: defaultdict[int, list[EngineCoreOutputs]] = defaultdict(list)

    def step(self, engine: EngineCore) -> None:
        """One checked step."""
        for client, outputs in engine.step().items():
            self.by_client[client].append(outputs)
            for output in outputs.all_outputs:
                assert not self.finished(output.request_id), "an output after the last"
                self.outputs[output.request_id].append(output)
        check(engine)

    def run(self, engine: EngineCore, max_steps: int = 2000) -> Log:
        """Until there is no work; fails if that takes too long."""
        for _ in range(max_steps):
            if not engine.has_work:
                check_idle(engine)
                return self
            self.step(engine)
        raise AssertionError(f"work is left after {max_steps} steps")

    def finished(self, request_id: str) -> bool:
        """Whether the terminal output came."""
        outputs = self.outputs[request_id]
        return bool(outputs) and outputs[-1].finish_reason is not None

    def token_ids(self, request_id: str) -> list[int]:
        """All tokens of a request."""
        return [
            token_id for output in self.outputs[request_id] for token_id in output.new_token_ids
        ]

    def total(self, counter: str) -> int:
        """Sum of a counter of SchedulerStats over all reports."""
        return sum(
            getattr(report.stats, counter)
            for reports in self.by_client.values()
            for report in reports
        )


def generate(engine: EngineCore, *requests: EngineCoreRequest) -> Log:
    """Run requests that arrive together until all are done."""
    for request in requests:
        engine.handle(request)
    return Log().run(engine)


def solo(request: EngineCoreRequest) -> list[int]:
    """What a request must get when it ends by its max_tokens."""
    return expected_tokens(request.prompt_token_ids, request.params.max_tokens, VOCAB_SIZE)


def run_arrivals(
    engine: EngineCore, arrivals: Sequence[Any], requests: Mapping[str, EngineCoreRequest]
) -> Log:
    """Run requests "0", "1", ... to their ends. An arrival has the `step` in which its request
    comes, and after how many steps it is aborted (`abort_after`), or None.
    """
    log = Log()
    for step in range(max(arrival.step + (arrival.abort_after or 0) for arrival in arrivals) + 1):
        for i, arrival in enumerate(arrivals):
            if arrival.step == step:
                engine.handle(requests[str(i)])
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.handle(AbortRequests([str(i)]))
        log.step(engine)
    log.run(engine)
    return log
