"""The host's part of a decode step, in calls of torch: each takes microseconds."""

from __future__ import annotations

import statistics

import pytest

pytest.importorskip("torch")

from benchmarks.host import calls_of_torch, let_all_decode, with_graphs, without_device

NUM_STEPS = 20  # in which some rows begin a block, and others do not


@pytest.mark.parametrize("num_rows", [4, 8])
@pytest.mark.parametrize(("make", "most"), [(without_device, 7), (with_graphs, 3)])
def test_a_steady_decode_step_calls_torch_a_few_times(num_rows: int, make, most: int):
    engine = make(num_rows)
    let_all_decode(engine, num_rows)
    steps = calls_of_torch(engine, NUM_STEPS)
    assert max(map(len, steps)) <= most, statistics.mode(map(tuple, steps))
