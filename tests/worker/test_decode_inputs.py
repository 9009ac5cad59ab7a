"""What a decode step is given: padding, new blocks, and pinned memory that is not used early."""

import numpy as np
import torch

from servd.worker.batch.block_table import NO_CHANGES
from servd.worker.batch.decode_inputs import NUM_BUFFERS, NUM_GIVEN, DecodeInputs

NULL = 9
BLOCK = 50
PADDING = [NULL, 0, 0, NULL, 0, BLOCK]


def make_inputs(**changes: object) -> DecodeInputs:
    inputs = DecodeInputs(8, NULL, torch.device("cpu"))
    inputs.pad(BLOCK)
    return inputs


def rows_of(inputs: DecodeInputs, size: int) -> list[list[int]]:
    """By token."""
    return inputs.buffers_of(size).step[:NUM_GIVEN].T.tolist()


def test_steps_are_padded_to_the_sizes_of_graphs():
    inputs = make_inputs()
    step = inputs.fill([4, 1, 3], np.array([4, 9, 0, 2, 11, 12]))
    assert step.slots.tolist() == [4, 1, 3]
    rows = [[4, -1, 0, 4, 0, 11], [1, -1, 0, 9, 2, 12], [3, -1, 0, NULL, 0, BLOCK]]
    assert rows_of(inputs, 3) == rows
    inputs.sizes = [2, 4, 8]
    step = inputs.fill([4, 1, 3], np.array([4, 9, 0, 2, 11, 12]))
    assert rows_of(inputs, 4) == [*rows, PADDING]
    assert step.step.shape[1] == 4 and step.slots.tolist() == [4, 1, 3]
    inputs.fill([2], NO_CHANGES)
    assert rows_of(inputs, 2) == [[2, -1, 0, *PADDING[3:]], PADDING]


def test_any_tokens_are_padded_too():
    inputs = make_inputs()
    inputs.fill([4, 1, 3], np.array([4, 0, 11]))
    inputs.put(torch.tensor([[5, 5], [7, 8], [1, 2]]), 4)
    assert rows_of(inputs, 4) == [
        [5, 7, 1, *PADDING[3:]],
        [5, 8, 2, *PADDING[3:]],
        PADDING,
        PADDING,
    ]


class LazyEvent:
    """Says that the device has read the memory when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def record(self) -> None:
        self.log.append(f"send {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


def test_pinned_memory_is_filled_when_the_device_has_read_it():
    inputs = make_inputs()
    log = []
    pinned = [torch.zeros_like(inputs.memory) for _ in range(NUM_BUFFERS)]
    inputs.make_buffers = lambda: [
        (memory.numpy(), memory, LazyEvent(log, str(i))) for i, memory in enumerate(pinned)
    ]
    for step in range(NUM_BUFFERS + 1):
        inputs.fill([step], NO_CHANGES)
        assert rows_of(inputs, 1) == [[step, -1, 0, *PADDING[3:]]]
    names = [str(i % NUM_BUFFERS) for i in range(NUM_BUFFERS + 1)]
    assert log == [f"{what} {name}" for name in names for what in ("wait", "send")]
    assert [int(memory[0]) for memory in pinned] == [NUM_BUFFERS, 1, 2, 3]
