"""Scheduler: budgets, order, preemption, and the end of requests, seen through whole steps."""

import pytest

from servd.messages.engine import AbortRequests, FinishReason
from tests.core.engines import (
    EOS,
    VOCAB_SIZE,
    Log,
    check_idle,
    generate,
    make_engine,
    make_request,
    solo,
)
from tests.fake_tokens import expected_tokens


def run_and_list_steps(engine, *requests) -> tuple[Log, list[dict[int, int]]]:
    """For every step: {slot: tokens}. Slots count from 0, so slot i is the i-th request's."""
    log = generate(engine, *requests)
    return log, [
        {item.slot: item.num_scheduled_tokens for item in step.rows}
        for step in engine.executor.steps
    ]


# ---- the token budget ----


def test_a_long_prompt_is_computed_in_chunks():
    _, steps = run_and_list_steps(
        make_engine(max_num_batched_tokens=10), make_request("a", list(range(25)), 2)
    )
    assert steps == [{0: 10}, {0: 10}, {0: 5}, {0: 1}]


def test_decoding_goes_on_beside_a_long_prompt():
    engine = make_engine(max_num_batched_tokens=8)
    _, steps = run_and_list_steps(
        engine, make_request("a", [1], 6), make_request("b", list(range(30)), 1)
    )
    assert steps == [{0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 2}, {0: 1}]


@pytest.mark.parametrize(
    ("is_chunked", "steps"),
    [
        (True, [{0: 1, 1: 50, 2: 13}, {0: 1, 1: 1, 2: 17}, {0: 1, 1: 1, 2: 1}]),
        (False, [{0: 1, 1: 50}, {0: 1, 1: 1, 2: 30}, {0: 1, 1: 1, 2: 1}]),
    ],
)
def test_a_budget_of_64_beside_a_running_request_and_prompts_of_50_and_30(is_chunked, steps):
    """The classic exercise: of the 13 tokens that are left, a chunk is made or none."""
    engine = make_engine(
        max_num_batched_tokens=64,
        enable_chunked_prefill=is_chunked,
        scheduling_policy="fcfs",
        long_prefill_token_threshold=64,  # by default the prompt of 50 is long, and 30 overtakes it
    )
    engine.handle(make_request("running", [1], 5))
    engine.step()
    first = len(engine.executor.steps)
    engine.handle(make_request("50", [*range(50)], 3))
    engine.handle(make_request("30", [*range(100, 130)], 2))
    Log().run(engine)
    scheduled = engine.executor.steps[first : first + len(steps)]
    assert steps == [
        {row.slot: row.num_scheduled_tokens for row in step.rows} for step in scheduled
    ]


def test_a_long_urgent_prompt_leaves_a_token_to_each_request_behind_it():
    engine = make_engine(max_num_batched_tokens=8, scheduling_policy="priority")
    log = Log()
    engine.handle(make_request("a", [1], 12))
    log.step(engine)
    engine.handle(make_request("urgent", list(range(30)), 1, priority=-1))
    log.run(engine)
    assert all(0 in [item.slot for item in step.rows] for step in engine.executor.steps)


# ---- order ----


def order_of_first_tokens(engine, *requests) -> list[str]:
    log = generate(engine, *requests)
    return sorted(log.outputs, key=lambda name: log.outputs[name][0].marks[-1].at_ns)


def test_priority_decides_who_runs_next_and_arrival_among_equals():
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    priorities = {"a": 5, "b": 1, "c": 5, "d": -2, "e": 1}
    requests = [
        make_request(name, [1], 1, priority=priority) for name, priority in priorities.items()
    ]
    assert order_of_first_tokens(engine, *requests) == ["d", "b", "e", "a", "c"]


def test_a_newcomer_waits_for_no_more_than_the_turn_being_served():
    engine, log = make_engine(max_num_seqs=1), Log()
    engine.handle(make_request("many", [1], 1, n=8, owner="a"))
    for _ in range(4):
        log.step(engine)
    assert [*log.outputs] == ["many_0", "many_1", "many_2", "many_3"]
    engine.handle(make_request("new", [1], 1, owner="b"))
    engine.handle(make_request("again", [1], 1, owner="b"))
    log.run(engine)
    assert [*log.outputs][4:8] == ["new", "many_4", "again", "many_5"]


def test_requests_that_were_aborted_while_they_waited_took_no_turns():
    engine = make_engine(max_num_seqs=1)
    engine.handle(make_request("running", [1], 2, owner="b"))
    engine.step()
    given_up = [make_request(f"a{i}", [1], 1, owner="a") for i in range(9)]
    for request in (*given_up, make_request("b1", [1], 1, owner="b")):
        engine.handle(request)
    engine.handle(AbortRequests([request.request_id for request in given_up]))
    for request in (make_request("a", [1], 1, owner="a"), make_request("b2", [1], 1, owner="b")):
        engine.handle(request)
    log = Log()
    log.run(engine)
    assert [i for i in log.outputs if i != "running"] == ["a", "b1", "b2"]


# ---- preemption ----


def preempted(log: Log) -> set[str]:
    return {
        name
        for name, outputs in log.outputs.items()
        if any(mark.stage == "preempted" for output in outputs for mark in output.marks)
    }


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("policy", "yields"), [("fcfs", {"b"}), ("priority", {"a"})])
def test_the_last_in_order_yields_when_blocks_run_out_and_loses_nothing(depth, policy, yields):
    engine = make_engine(num_blocks=8, depth=depth, max_model_len=32, scheduling_policy=policy)
    requests = [
        make_request("a", [1, 2, 3], 20, priority=1),
        make_request("b", [4, 5, 6], 20, priority=0),
    ]
    log = generate(engine, *requests)
    assert preempted(log) == yields
    assert log.total("num_preemptions") >= 1
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)


def test_recomputed_tokens_do_not_count_as_prefix_hits():
    engine = make_engine(num_blocks=8, max_model_len=32)
    log = generate(engine, make_request("a", [1, 2, 3], 20), make_request("b", [4, 5, 6], 20))
    assert log.total("num_preemptions") >= 1
    assert (log.total("prefix_cache_queries"), log.total("prefix_cache_hits")) == (6, 0)
    assert all(
        output.num_cached_tokens == 0 for outputs in log.outputs.values() for output in outputs
    )


def test_a_request_that_does_not_fit_yet_is_not_overtaken():
    engine = make_engine(num_blocks=8, max_model_len=32, long_prefill_token_threshold=32)
    log = Log()
    for request in (
        make_request("a", list(range(20)), 4),
        make_request("b", list(range(50, 70)), 1),
    ):
        engine.handle(request)
    log.step(engine)
    engine.handle(make_request("small", [1], 1))
    log.run(engine)
    first_steps = {name: outputs[0].marks[1].step for name, outputs in log.outputs.items()}
    assert first_steps["b"] <= first_steps["small"]


# ---- the end of a request ----


def finish(log: Log, name: str) -> tuple[FinishReason | None, int | None]:
    return log.outputs[name][-1].finish_reason, log.outputs[name][-1].stop_reason


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_tokens_end_a_request_and_are_its_last_token(depth):
    prompt = [1, 2, 3]
    text = expected_tokens(prompt, 30, VOCAB_SIZE)
    stop = text[7]
    log = generate(make_engine(depth=depth), make_request("a", prompt, 30, stop_token_ids=[stop]))
    assert log.token_ids("a") == text[: text.index(stop) + 1]
    assert finish(log, "a") == (FinishReason.STOP, stop)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_end_of_sequence_ends_a_request_without_a_stop_reason(depth):
    text = expected_tokens([1], 30, VOCAB_SIZE)
    log = generate(make_engine(depth=depth), make_request("a", [1], 30, eos_token_ids=[text[3]]))
    assert log.token_ids("a") == text[: text.index(text[3]) + 1]
    assert finish(log, "a") == (FinishReason.STOP, None)


def test_min_tokens_outlasts_a_stop_token():
    text = expected_tokens([1], 30, VOCAB_SIZE)
    log = generate(make_engine(), make_request("a", [1], 30, stop_token_ids=text[:1], min_tokens=5))
    assert log.token_ids("a")[:5] == text[:5]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"),
    [(10, 5, 5), (10, None, 22), (10, 100, 22), (31, None, 1)],
)
def test_max_tokens_and_max_model_len_bound_the_output(depth, num_prompt, max_tokens, num_output):
    engine = make_engine(depth=depth, max_model_len=32)
    prompt = list(range(num_prompt))
    log = generate(engine, make_request("a", prompt, max_tokens))
    assert log.token_ids("a") == expected_tokens(prompt, num_output, VOCAB_SIZE)
    assert finish(log, "a") == (FinishReason.LENGTH, None)
    assert (
        sum(step.total_num_scheduled_tokens for step in engine.executor.steps)
        == num_prompt + num_output - 1
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cache_smaller_than_the_model_length_bounds_the_output(depth):
    engine = make_engine(num_blocks=4, depth=depth, max_model_len=64)
    log = generate(
        engine,
        make_request("a", list(range(10)), None),
        make_request("b", list(range(20, 30)), None),
    )
    for name in "ab":
        assert len(log.token_ids(name)) == 6 and finish(log, name) == (FinishReason.LENGTH, None)


def test_a_prompt_larger_than_the_cache_is_an_error():
    engine = make_engine(num_blocks=4, max_model_len=64)
    log = generate(engine, make_request("a", list(range(40))), make_request("b", [1], 2))
    [output] = log.outputs["a"]
    assert output.finish_reason is FinishReason.ERROR and output.new_token_ids == []
    assert all(part in output.error for part in ("40 tokens", "16 tokens", "--kv-cache-memory"))
    assert len(log.token_ids("b")) == 2


# ---- abort ----


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_at_any_moment_frees_everything_and_disturbs_nobody(depth, num_steps):
    """Steps 0 to 3 fall into the prompt of "a"; later, someone is preempted."""
    engine = make_engine(num_blocks=14, depth=depth, max_num_batched_tokens=8, max_model_len=56)
    log = Log()
    stays = make_request("stays", [9, 8, 7], 25)
    for request in (
        make_request("a", list(range(24)), 9),
        stays,
        make_request("waits", list(range(30, 50)), 3),
    ):
        engine.handle(request)
    for _ in range(num_steps):
        log.step(engine)
    num_outputs = len(log.outputs["a"])
    engine.handle(AbortRequests(["a", "waits", "unknown"]))
    log.run(engine)
    assert len(log.outputs["a"]) == num_outputs and not log.finished("a")
    assert log.token_ids("stays") == solo(stays)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_id_may_be_reused_with_steps_in_flight(depth):
    engine = make_engine(depth=depth)
    log = Log()
    engine.handle(make_request("a", [1, 2, 3], 9))
    log.step(engine)
    log.step(engine)
    engine.handle(AbortRequests(["a"]))
    again = make_request("a", [4, 5], 6)
    engine.handle(again)
    log.outputs.clear()
    log.run(engine)
    assert log.token_ids("a") == solo(again)


# ---- reports ----


def test_marks_tell_the_whole_story_in_order():
    engine = make_engine(max_num_batched_tokens=10)
    log = generate(engine, make_request("a", list(range(15)), 3), make_request("b", [1], 1))
    outputs = log.outputs["a"]
    assert [[(m.stage, m.step) for m in output.marks] for output in outputs] == [
        [("queued", -1), ("scheduled", 0), ("first_token", 1)],
        [],
        [("finished", 3)],
    ]
    [only] = log.outputs["b"]
    assert [m.stage for m in only.marks] == ["queued", "scheduled", "first_token", "finished"]
    times = [m.at_ns for output in outputs for m in output.marks]
    assert times == sorted(times)


def test_every_client_gets_its_own_outputs_and_the_state_of_the_engine():
    engine = make_engine()
    log = generate(engine, *(make_request(str(i), [1, i], 3, client=i % 2) for i in range(4)))
    for client in (0, 1):
        names = {
            output.request_id for report in log.by_client[client] for output in report.all_outputs
        }
        assert names == {str(client), str(client + 2)}
        assert log.by_client[client][-1].stats.num_running == 0
    assert log.total("prefix_cache_queries") == 8


def test_an_engine_without_requests_has_no_work_and_makes_no_step():
    engine = make_engine()
    assert not engine.has_work and engine.step() == {}
    engine.handle(AbortRequests(["nobody"]))
    assert not engine.has_work
    check_idle(engine)


def test_logprobs_come_with_their_token():
    log = generate(
        make_engine(), make_request("a", [1, 2], 3, logprobs=2), make_request("b", [3], 3)
    )
    for output in log.outputs["a"]:
        assert [entry.token_ids[0] for entry in output.logprobs] == output.new_token_ids
    assert all(output.logprobs is None for output in log.outputs["b"])
    assert EOS[0] not in log.token_ids("a")


def test_prompts_that_may_not_be_split_wait_for_a_step_with_room():
    whole = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    engine = make_engine(max_num_batched_tokens=32, max_model_len=32, **whole)
    lengths = {"a": 20, "b": 20, "c": 12, "d": 31}
    requests = [make_request(name, [1] * n, 0) for name, n in lengths.items()]
    requests.append(make_request("background", [1] * 32, 0, priority_class=1))
    _, steps = run_and_list_steps(engine, *requests)
    assert sorted(n for step in steps for n in step.values()) == [12, 20, 20, 31, 32]
    assert all(sum(step.values()) <= 32 for step in steps)
