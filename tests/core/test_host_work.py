"""What the engine does for each request in a decode step, counted: it grows with the batch, and the
device waits for it.
"""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from servd.core import engine_core
from tests.core.engines import Log, make_engine, make_request

CORE = engine_core.__file__.removesuffix("engine_core.py")
NUM_STEPS = 8
PER_ROW = 2  # Step.decode and Request.go_on


def decoding(num_rows: int, depth: int, block_size: int = 64):
    """An engine whose requests all decode."""
    engine = make_engine(
        num_blocks=256, depth=depth, block_size=block_size, max_num_seqs=num_rows,
        max_num_batched_tokens=512,
    )  # fmt: skip
    for i in range(num_rows):
        engine.handle(make_request(str(i), [i, 2, 3], 40))
    for _ in range(depth + 2):
        engine.step()
    return engine


def calls_per_step(num_rows: int, depth: int) -> float:
    """Python functions of this package that are called in a step, without those of the executor."""
    engine, calls = decoding(num_rows, depth), []

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(CORE) and "executor" not in name:
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        for _ in range(NUM_STEPS):
            engine.step()
    finally:
        sys.setprofile(None)
    return len(calls) / NUM_STEPS


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_decodes_costs_two_calls(depth):
    few, many = calls_per_step(8, depth), calls_per_step(40, depth)
    assert many - few == PER_ROW * (40 - 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_decode_are_columns_of_the_message(depth):
    """Also in the steps in which they get another block."""
    engine = decoding(6, depth, block_size=4)
    before = len(engine.executor.steps)
    assert Log().run(engine)
    steps = engine.executor.steps[before:]
    assert len(steps) > 20 and all(not step.scheduled for step in steps)
    assert all(len(step.decodes.slots) == 6 for step in steps)
    new_blocks = [len(step.decodes.new_blocks) for step in steps]
    assert {*new_blocks} == {0, 6} and sum(map(bool, new_blocks)) in range(
        len(steps) // 4, len(steps) // 4 + 2
    )
