"""Checkpoints of recurrent states: every request goes on from the states of its own tokens."""

import threading
from functools import reduce
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.checkpoint.model_spec import FAKE_SPEC
from servd.core.executor.fake import next_state
from servd.core.kv_cache.connector import io_workers
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.disk import Disk
from servd.messages.engine import AbortRequests, BlockSwaps, SchedulerOutput
from tests.core.devices import SlowExecutor
from tests.core.engines import (
    AuditedExecutor,
    Log,
    generate,
    make_engine,
    make_request,
    run_arrivals,
    solo,
)
from tests.limits import WAIT_SECONDS

SIZE = 4
PROMPT = list(range(40))


class StatefulExecutor(AuditedExecutor):
    """Keeps the state of each slot, as layers of a model do, and looks at every checkpoint."""

    num_checkpoints = 16
    num_parts = 2  # of a checkpoint in host memory
    has_blocks = True  # False: blocks hold nothing, as in a model without attention

    def start(self):
        self.live: dict[int, int] = {}  # slot -> hash of its computed tokens
        self.checkpoints = [0] * self.num_checkpoints
        self.loaded: dict[int, int] = {}  # of this step: slot -> state
        self.saves: dict[tuple[int, int], int] = {}  # (slot, tokens) -> checkpoint
        ready = super().start()
        ready.num_checkpoints = self.num_checkpoints
        ready.state_bytes = self.num_parts * self.bytes_per_block
        if not self.has_blocks:
            self.num_parts = 1
            ready.state_bytes = self.bytes_per_block
            ready.kv_bytes_per_block = 0
        return ready

    def _forward(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        self.loaded = {}
        self.saves = {}
        super()._forward(scheduled)
        assert not self.loaded, "a request that does not run"
        assert not self.saves, "states that the step does not compute"
        return scheduled

    def _swap_blocks(self, swaps: BlockSwaps) -> None:
        if swaps.memory:
            super()._swap_blocks(swaps)
        stride = self.bytes_per_block
        for checkpoint, slots in swaps.states_to_swap_out:
            memory = self.memories[swaps.memory]
            for part, slot in enumerate(slots):
                if slot >= 0:
                    number = (self.checkpoints[checkpoint] + part) % 2**64
                    memory[slot * stride : slot * stride + 8] = number.to_bytes(8)
        for slots, checkpoint in swaps.states_to_swap_in:
            memory = self.memories[swaps.memory]
            parts = [int.from_bytes(memory[slot * stride : slot * stride + 8]) for slot in slots]
            assert parts == [(parts[0] + part) % 2**64 for part in range(self.num_parts)]
            self.checkpoints[checkpoint] = parts[0]
        for checkpoint, slot in swaps.states_to_load:
            assert slot not in self.loaded
            self.loaded[slot] = self.checkpoints[checkpoint]
        for slot, num_tokens, checkpoint in swaps.states_to_save:
            assert checkpoint not in self.saves.values()
            self.saves[slot, num_tokens] = checkpoint

    def _compute(self, row, num_tokens) -> None:
        [slot] = [slot for slot, other in self.rows.items() if other is row]
        first = row.num_computed_tokens
        state = self.loaded.pop(slot, self.live.get(slot, 0)) if first else 0
        assert state == reduce(next_state, row.token_ids[:first], 0), "states of other tokens"
        for at in range(first, first + num_tokens):
            checkpoint = self.saves.pop((slot, at), None)
            if checkpoint is not None:
                assert at % self.block_size == 0
                self.checkpoints[checkpoint] = state
            state = next_state(state, row.token_ids[at])
        self.live[slot] = state
        if first and not self.has_blocks:
            self.cache[self._position(row, first - 1)] = reduce(
                next_state, row.token_ids[:first], 0
            )
        super()._compute(row, num_tokens)

    def _audit(self, row, free: set[int]) -> None:
        if self.has_blocks:
            super()._audit(row, free)


def stateful(base=AuditedExecutor, **options):
    return type("Stateful", (StatefulExecutor, base), options)


def cached_tokens(log: Log, name: str) -> int:
    return log.outputs[name][0].num_cached_tokens


def num_computed(engine) -> int:
    return sum(step.total_num_scheduled_tokens for step in engine.executor.steps)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_conversation_goes_on_where_it_ended(depth):
    engine = make_engine(64, depth, stateful())
    log = generate(engine, make_request("a", PROMPT[:18], 13))
    text = [*PROMPT[:18], *log.token_ids("a")]  # 31 tokens, of which the last is not computed
    again = make_request("b", [*text, 1, 2, 3], 4)
    log = generate(engine, again)
    assert cached_tokens(log, "b") == 28
    assert log.token_ids("b") == solo(again)


def test_a_prompt_is_found_at_its_last_border_and_before_its_last_message():
    engine = make_engine(64, 1, stateful(), state_checkpoint_interval=1000)
    generate(engine, make_request("a", PROMPT[:30], 2, turn_start=18))
    log = generate(engine, make_request("b", [*PROMPT[:29], 99], 2))
    assert cached_tokens(log, "b") == 28
    log = generate(engine, make_request("c", [*PROMPT[:27], 99], 2))
    assert cached_tokens(log, "c") == 16, "the border before the message"
    [output] = [o for o in log.outputs["c"] if o.num_cached_tokens]
    assert output.num_uncovered_tokens == 8
    log = generate(engine, make_request("d", [*PROMPT[:15], 99], 2))
    assert cached_tokens(log, "d") == 0


def test_long_prompts_have_checkpoints_at_an_interval():
    engine = make_engine(64, 1, stateful(), state_checkpoint_interval=9)  # 12: whole blocks
    generate(engine, make_request("a", PROMPT, 2))
    for length, cached in ((38, 36), (35, 24), (25, 24), (23, 12), (11, 0)):
        log = generate(engine, make_request(f"b{length}", [*PROMPT[:length], 99], 1))
        assert cached_tokens(log, f"b{length}") == cached


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_compute_their_prompt_once(depth):
    engine = make_engine(64, depth, stateful())
    request = make_request("a", PROMPT[:30], 5, n=4, seed=1)
    generate(engine, request)
    assert num_computed(engine) <= 30 + 3 * 2 + 4 * 5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_computes_about_a_block_again(depth):
    engine = make_engine(14, depth, stateful(), max_num_seqs=2)
    requests = [make_request(str(i), [i, *PROMPT[:15]], 30) for i in range(2)]
    log = generate(engine, *requests)
    marks = [mark.stage for request_id in "01" for o in log.outputs[request_id] for mark in o.marks]
    assert "preempted" in marks
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
    assert num_computed(engine) <= 2 * 46 + 3 * 2 * SIZE


def test_salts_do_not_share_states():
    engine = make_engine(64, 1, stateful())
    generate(engine, make_request("a", PROMPT[:30], 2, cache_salt="a"))
    log = generate(engine, make_request("b", PROMPT[:30], 2, cache_salt="b"))
    assert cached_tokens(log, "b") == 0


def test_a_reset_forgets_all_checkpoints():
    engine = make_engine(64, 1, stateful())
    generate(engine, make_request("a", PROMPT[:30], 2))
    engine.scheduler.kv_cache.reset()
    assert engine.scheduler.kv_cache.states.pool.num_cached == 0
    log = generate(engine, make_request("b", PROMPT[:30], 2))
    assert cached_tokens(log, "b") == 0


def test_pinned_prompts_keep_their_checkpoint():
    engine = make_engine(64, 1, stateful(num_checkpoints=8), max_pinned_share=0.9)
    generate(engine, make_request("a", PROMPT[:14], 2, retention=99.0))
    for i in range(20):
        generate(engine, make_request(f"other{i}", [50 + i, *PROMPT], 9))
    log = generate(engine, make_request("b", PROMPT[:14], 2))
    assert cached_tokens(log, "b") == 12


arrivals = st.builds(
    SimpleNamespace,
    step=st.integers(0, 12),
    first=st.sampled_from([0, 0, 0, 1]),
    length=st.integers(1, 36),
    max_tokens=st.integers(1, 24),
    abort_after=st.none() | st.integers(0, 25),
    retention=st.sampled_from([0.0, 0.0, 99.0]),
    turn_start=st.integers(0, 36),
)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=8),
    depth=st.integers(1, 3),
    base=st.sampled_from([AuditedExecutor, SlowExecutor]),
    num_blocks=st.sampled_from([16, 24, 200]),
    num_checkpoints=st.integers(0, 12),
    interval=st.sampled_from([4, 12, 1000]),
    budget=st.sampled_from([8, 24, 64]),
)
def test_no_checkpoint_is_both_free_and_used(
    arrivals, depth, base, num_blocks, num_checkpoints, interval, budget
):
    """The executor compares every state with the tokens before it, in every step."""
    run_schedule(
        arrivals,
        num_blocks=num_blocks,
        depth=depth,
        executor_class=stateful(base, num_checkpoints=num_checkpoints),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        state_checkpoint_interval=interval,
    )


def run_schedule(arrivals, **options) -> None:
    engine = make_engine(**options)
    requests = {
        str(i): make_request(
            str(i),
            PROMPT[arrival.first :][: arrival.length],
            arrival.max_tokens,
            retention=arrival.retention,
            turn_start=arrival.turn_start,
        )
        for i, arrival in enumerate(arrivals)
    }
    log = run_arrivals(engine, arrivals, requests)
    for request_id, request in requests.items():
        token_ids = log.token_ids(request_id)
        assert token_ids == solo(request)[: len(token_ids)]


# ---- host memory and files ----

MIB = 1 / 1024  # --kv-offloading-size is in GiB


@pytest.fixture(autouse=True)
def _fakes_compute_faster_than_they_copy(monkeypatch):
    monkeypatch.setattr(LoadCosts, "is_worth_loading", lambda costs, place: True)


def settle(engine) -> None:
    """Until nothing is copied, read or written."""
    while engine.has_work or engine.scheduler.kv_cache.connector.wait():
        engine.step()


@pytest.mark.parametrize("has_blocks", [True, False], ids=["hybrid", "only states"])
def test_evicted_checkpoints_come_back_from_the_host(has_blocks):
    executor_class = stateful(num_checkpoints=3, has_blocks=has_blocks)
    engine = make_engine(64, 1, executor_class, kv_offloading_size=MIB)
    request = make_request("a", PROMPT[:30], 9)
    log = generate(engine, request)
    text = [*PROMPT[:30], *log.token_ids("a")]
    for i in range(9):
        generate(engine, make_request(f"other{i}", [50 + i, *PROMPT[:30]], 9))
    again = make_request("b", [*text, 1, 2], 4)
    log = generate(engine, again)
    assert cached_tokens(log, "b") == 36
    assert log.token_ids("b") == solo(again)


@pytest.mark.parametrize("has_blocks", [True, False], ids=["hybrid", "only states"])
def test_a_conversation_goes_on_after_a_restart(tmp_path, has_blocks):
    text = PROMPT[:18]
    for turn in range(4):
        options = {"max_model_len": 128, "kv_cache_dir": str(tmp_path)}
        engine = make_engine(64, 1, stateful(has_blocks=has_blocks), **options)
        engine.scheduler.kv_cache.connector.disk.is_open.wait()
        request = make_request(f"a{turn}", text, 13)
        log = generate(engine, request)
        assert log.token_ids(request.request_id) == solo(request)
        num_before = len(text) - 4 if turn else 0  # without the last of the output
        assert cached_tokens(log, request.request_id) == num_before // SIZE * SIZE
        text = [*text, *log.token_ids(request.request_id), 1, 2, 3]
        settle(engine)
        engine.scheduler.kv_cache.connector.flush()


def test_no_request_starts_on_blocks_that_a_lost_checkpoint_would_have_spared(monkeypatch):
    executor_class = stateful(num_checkpoints=2)
    engine = make_engine(16, 1, executor_class, kv_offloading_size=MIB)
    log = Log()
    engine.handle(make_request("a", PROMPT[:30], 34))
    for _ in range(5):
        log.step(engine)
    engine.handle(make_request("b", [50, *PROMPT[:4]], 1))  # evicts the checkpoint of a's prompt
    log.step(engine)
    connector = engine.scheduler.kv_cache.connector
    monkeypatch.setattr(connector, "claim_slots", lambda request, num_cached: [])
    again = make_request("c", [*PROMPT[:30], 99], 4)
    engine.handle(again)  # there is only room for it with blocks of a, up to that checkpoint
    log.run(engine)
    assert log.token_ids("c") == solo(again)
    assert not log.total("num_preemptions")


def test_a_disk_that_hangs_keeps_no_engine_busy(tmp_path, monkeypatch):
    """If only checkpoints wait for it, as they do in the end: each is saved after all blocks."""
    executor_class = stateful(num_checkpoints=64, has_blocks=False)
    memory = 8 * SIZE * FAKE_SPEC.kv_bytes_per_token(4) / 2**30
    options = {"kv_cache_dir": str(tmp_path), "kv_offloading_size": memory}
    engine = make_engine(64, 1, executor_class, state_checkpoint_interval=4, **options)
    engine.scheduler.kv_cache.connector.flush()
    monkeypatch.setattr(io_workers, "HANG_TIMEOUT", 0.05)
    may_write = threading.Event()
    write = Disk.write
    monkeypatch.setattr(
        Disk, "write", lambda *arguments: may_write.wait(WAIT_SECONDS) and write(*arguments)
    )
    request = make_request("a", PROMPT, 5)
    try:
        assert generate(engine, request).token_ids("a") == solo(request)
        assert not engine.has_work
    finally:
        may_write.set()
    settle(engine)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=8),
    depth=st.integers(1, 3),
    num_blocks=st.sampled_from([16, 24, 200]),
    num_checkpoints=st.integers(0, 12),
    has_blocks=st.booleans(),
    num_slots=st.integers(8, 60),
    budget=st.sampled_from([8, 24, 64]),
)
def test_what_comes_back_from_the_host_is_what_went_there(
    arrivals, depth, num_blocks, num_checkpoints, has_blocks, num_slots, budget
):
    slot_bytes = SIZE * FAKE_SPEC.kv_bytes_per_token(4)
    run_schedule(
        arrivals,
        num_blocks=num_blocks,
        depth=depth,
        executor_class=stateful(num_checkpoints=num_checkpoints, has_blocks=has_blocks),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        state_checkpoint_interval=12,
        kv_offloading_size=num_slots * slot_bytes / 2**30,
    )


def test_a_failed_request_drops_its_checkpoints():
    engine = make_engine(64, 1, stateful(), state_checkpoint_interval=8)
    generate(engine, make_request("before", PROMPT[:10], 2))
    engine.handle(make_request("a", PROMPT[:30], 20))
    for _ in range(9):
        engine.step()
    [request] = engine.scheduler.running
    pool = engine.scheduler.kv_cache.states.pool
    engine.scheduler.kv_cache.forget(request)
    assert request.num_attached_blocks and len(request.block_hashes) > 7
    assert all(pool.find(key) is None for key in request.block_hashes)
    engine.handle(AbortRequests(["a"]))
    Log().run(engine)
    log = generate(engine, make_request("b", PROMPT[:30], 2))
    assert cached_tokens(log, "b") == 0


def test_a_replayed_request_keeps_the_border_of_its_prompt():
    engine = make_engine(64, 1, stateful(), state_checkpoint_interval=1000)
    generate(engine, make_request("a", PROMPT[:14], 20, output_token_ids={0: [1] * 12}))
    log = generate(engine, make_request("b", PROMPT[:14], 2))
    assert cached_tokens(log, "b") == 12
