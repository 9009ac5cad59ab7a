"""Engines over a fake executor that audits the whole KV cache, and a loop that checks every
step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from servd.config import Config
from servd.core.audit import problems
from servd.core.engine_core import EngineCore
from servd.core.executor.fake import FakeExecutor, expected_tokens, next_state
from servd.hf import FAKE_SPEC
from servd.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestOptions,
    SchedulerOutput,
)
from servd.params import SamplingParams

VOCAB_SIZE = FAKE_SPEC.vocab_size
EOS = FAKE_SPEC.eos_token_ids


class AuditedExecutor(FakeExecutor):
    """Checks every step against the rules, and the cache of every scheduled row over its whole
    length.
    """

    def start(self):
        self.steps: list[SchedulerOutput] = []
        return super().start()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.steps.append(scheduled)
        config = self.config.scheduler
        slots = [item.slot for item in scheduled.rows]
        assert slots or scheduled.copies is not None
        assert len(set(slots)) == len(slots) <= config.max_num_seqs
        assert all(item.num_tokens > 0 for item in scheduled.rows)
        assert scheduled.num_tokens <= config.max_num_batched_tokens
        for new in scheduled.new_requests:
            assert new.slot in slots
            assert (
                new.num_computed_tokens == len(new.block_ids) * self.block_size < len(new.token_ids)
            )
        super().execute_model(scheduled)

    def _forward(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        for new in scheduled.new_requests:
            assert new.slot not in self.rows or new.slot in scheduled.freed_slots
        super()._forward(scheduled)
        for item in scheduled.rows:
            self._audit(self.rows[item.slot])
        return scheduled

    def _audit(self, row) -> None:
        num_tokens = row.num_computed_tokens + len(row.drafts)
        if not self.config.model.speculative_config:
            assert len(row.block_ids) == -(-num_tokens // self.block_size)
        assert len(row.block_ids) >= -(-num_tokens // self.block_size)
        state = 0
        for i in range(row.num_computed_tokens):
            state = next_state(state, row.token_ids[i])
            assert self.cache[self._position(row, i)] == state, f"the cache lost token {i}"


def make_engine(
    num_blocks: int = 64,
    depth: int = 1,
    executor_class: type[AuditedExecutor] = AuditedExecutor,
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
    engine = EngineCore(config, FAKE_SPEC, executor, executor.start())
    num_stages = config.parallel.pipeline_parallel_size
    assert engine.depth == min(depth, 2) - 1 + num_stages
    if num_stages == 1:
        engine.depth = depth  # the loop knows no limit, only the configuration does
    return engine


def make_request(
    request_id: str, prompt: list[int], max_tokens: int | None = 8, **options
) -> EngineCoreRequest:
    """A request; options that a message does not have go to its SamplingParams."""

    def taken(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    served = RequestOptions(**taken(RequestOptions.__struct_fields__))
    fields = {"options": served} | taken(EngineCoreRequest.__struct_fields__)
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
    assert cache.pool.num_free + len(cache.pins) == cache.pool.num_blocks and not cache.num_holders


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
