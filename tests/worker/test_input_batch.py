"""The batch of a step: rows in columns are gathered as they are one by one."""

import dataclasses
import random

import numpy as np
import torch

from servd.messages.engine import DecodeBatch, NewRequest, ScheduledRequest, SchedulerOutput
from servd.messages.params import SamplingParams
from servd.worker.batch.input_batch import AttentionRows, InputBatch, gather_rows
from servd.worker.batch.request_states import RequestStates

NUM_SLOTS = 9
BLOCK_SIZE = 4
VOCAB_SIZE = 50


def filled_states(seed: int) -> tuple[RequestStates, dict[int, int]]:
    """Requests in all slots, and how many of their tokens are computed, by slot."""
    draw = random.Random(seed)
    states = RequestStates(NUM_SLOTS, 64, BLOCK_SIZE, torch.device("cpu"), VOCAB_SIZE)
    computed = {slot: BLOCK_SIZE * draw.randint(0, 3) for slot in range(NUM_SLOTS)}
    for slot, num_computed in computed.items():
        token_ids = [draw.randrange(VOCAB_SIZE) for _ in range(num_computed + 1)]
        blocks = draw.sample(range(90), num_computed // BLOCK_SIZE)
        params = SamplingParams()
        states.add(NewRequest(slot, token_ids, len(token_ids), num_computed, blocks, params))
    return states, computed


def prepare(scheduled: SchedulerOutput, states: RequestStates) -> InputBatch:
    return InputBatch.from_rows(gather_rows(scheduled), states, not scheduled.scheduled)


def plain(value: object) -> object:
    """To compare."""
    if isinstance(value, AttentionRows):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value


def test_columns_are_gathered_as_rows_are():
    for seed in range(20):
        batches = []
        draw = random.Random(seed)
        slots = draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS))
        for is_columns in (True, False):
            states, computed = filled_states(seed)
            blocks = {slot: 100 + slot for slot in slots}
            for slot in slots:
                states.block_tables.append(slot, [blocks[slot]])
            decodes = DecodeBatch(slots, [computed[slot] for slot in slots], blocks)
            step = SchedulerOutput(1, [], decodes=decodes)
            if not is_columns:
                step = SchedulerOutput(1, step.rows)
            batches.append(prepare(step, states))
            assert states.block_tables.tables[slots, :4].max(1).values.tolist() == [
                100 + slot for slot in slots
            ]
        batch, other = batches
        for field in dataclasses.fields(InputBatch):
            if field.name not in ("states", "buffers", "is_plain"):
                assert plain(getattr(batch, field.name)) == plain(getattr(other, field.name)), field
        assert batch.states.num_computed.tolist() == other.states.num_computed.tolist()
        assert plain(batch.token_ids) == plain(other.token_ids)
        for name in ("query_start_loc", "seq_lens_device", "block_tables", "slot_mapping"):
            assert plain(getattr(batch.attention, name)) == plain(getattr(other.attention, name))
        assert batch.is_decode and batch.samples_all and batch.is_plain


def test_drafts_at_hand_are_gathered_as_those_of_a_device_are():
    for seed in range(20):
        batches = []
        draw = random.Random(seed)
        slots = draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS))
        drafts = [
            [draw.randrange(-1, VOCAB_SIZE) for _ in range(draw.randint(0, 5))] for _ in slots
        ]
        for room in (NUM_SLOTS * 6, 0):
            states, computed = filled_states(seed)
            states.inputs.reserve(room)
            rows = [
                ScheduledRequest(
                    slot, 1 + len(ids), [40 + slot, 60 + slot], True, computed[slot], len(ids)
                )
                for slot, ids in zip(slots, drafts, strict=True)
            ]
            for row, ids in zip(rows, drafts, strict=True):
                states.block_tables.append(row.slot, row.new_block_ids)
                first = computed[row.slot] + 1
                states.token_ids[row.slot, first : first + len(ids)] = torch.tensor(ids).int()
            batches.append(prepare(SchedulerOutput(1, rows), states))
        batch, other = batches
        assert batch.buffers is not None and other.buffers is None
        for field in dataclasses.fields(InputBatch):
            if field.name not in ("states", "buffers"):
                assert plain(getattr(batch, field.name)) == plain(getattr(other, field.name)), field
        assert batch.states.num_computed.tolist() == other.states.num_computed.tolist()
        for name in ("token_ids", "input_ids", "sample_columns"):
            assert plain(getattr(batch, name)) == plain(getattr(other, name))
        for name in ("query_start_loc", "seq_lens_device", "block_tables", "slot_mapping"):
            assert plain(getattr(batch.attention, name)) == plain(getattr(other.attention, name))


def test_columns_come_before_rows():
    """In one step, as the answer of the workers is read."""
    states, computed = filled_states(0)
    decodes = DecodeBatch([5, 2], [computed[5], computed[2]])
    rows = SchedulerOutput(1, [], decodes=DecodeBatch([7], [computed[7]])).rows
    batch = prepare(SchedulerOutput(1, rows, decodes=decodes), states)
    assert batch.host_slots.tolist() == [5, 2, 7]
    assert batch.seq_lens.tolist() == [computed[slot] + 1 for slot in (5, 2, 7)]
    assert batch.sample_rows.tolist() == [0, 1, 2]


def test_a_part_of_columns_is_computed_though_the_whole_has_not_begun():
    """As when a graph fails; and that it has begun is no harm."""
    expected, computed = filled_states(0)
    decodes = DecodeBatch([5, 2, 7], [computed[slot] for slot in (5, 2, 7)])
    whole = prepare(SchedulerOutput(1, [], decodes=decodes), expected)
    states, _ = filled_states(0)
    states.inputs.sizes = [4]  # of graphs
    batch = prepare(SchedulerOutput(1, [], decodes=decodes), states)
    assert states.num_computed.tolist() != expected.num_computed.tolist()
    for first, end in ((0, 2), (2, 3)):
        part = batch.part(first, end)
        same = whole.part(first, end)
        assert plain(part.input_ids) == plain(same.input_ids)
        assert plain(part.positions) == plain(same.positions)
        assert plain(part.attention.slot_mapping) == plain(same.attention.slot_mapping)
    assert states.num_computed.tolist() == expected.num_computed.tolist()
