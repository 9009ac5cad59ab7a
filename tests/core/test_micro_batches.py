"""Steps that go through stages one behind the other: each has requests of its own."""

import pytest

from tests.core.engines import generate, make_engine, make_request, solo


def slots_of(step) -> set[int]:
    return {row.slot for row in step.rows}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_blocks", [64, 13], ids=["roomy", "preempting"])
def test_no_step_in_flight_awaits_the_token_of_another(num_blocks, num_stages, depth):
    engine = make_engine(num_blocks, depth, pipeline_parallel_size=num_stages)
    num_in_flight: list[int] = []  # when each step is scheduled
    engine.on_scheduled = lambda _: num_in_flight.append(len(engine.in_flight))
    requests = [make_request(str(i), [i, 2, 3, 4] * (1 + i % 3), 9 + i) for i in range(8)]
    log = generate(engine, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
    assert bool(log.total("num_preemptions")) is (num_blocks == 13)
    assert max(num_in_flight) == num_stages + depth - 2
    steps = engine.executor.steps
    for index, step in enumerate(steps):
        awaited = {
            row.slot
            for before in steps[index - num_in_flight[index] : index]
            for row in before.rows
            if row.samples
        }
        # Another request may be in the slot of one that has yielded or ended.
        assert awaited & slots_of(step) <= {new.slot for new in step.new_requests}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_each_step_has_its_share(num_stages):
    """Requests that arrive together do not stay together."""
    engine = make_engine(pipeline_parallel_size=num_stages)
    generate(engine, *[make_request(str(i), [i, 2], 12) for i in range(7)])
    decoding = [slots_of(step) for step in engine.executor.steps if not step.new_requests][:20]
    for first in range(20 - num_stages):
        window = decoding[first : first + num_stages]
        assert set().union(*window) == set(range(7))
        assert max(map(len, window)) - min(map(len, window)) <= 2


def test_a_prompt_goes_on_in_the_very_next_step():
    engine = make_engine(max_num_batched_tokens=8, pipeline_parallel_size=3)
    engine.handle(make_request("long", list(range(40)), 4))
    for launched in (1, 2, 3):
        engine.step()
        assert len(engine.executor.steps) == launched
    assert [step.total_num_scheduled_tokens for step in engine.executor.steps] == [8, 8, 8]


def test_one_request_runs_as_ever():
    engine = make_engine(pipeline_parallel_size=2)
    request = make_request("a", [1, 2, 3], 10)
    assert generate(engine, request).token_ids("a") == solo(request)
    assert len(engine.executor.steps) == 10
