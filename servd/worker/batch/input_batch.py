"""InputBatch: the tensors of one step, gathered from the states of the scheduled requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from servd.messages.engine import DecodeBatch, SchedulerOutput
from servd.worker.attention import AttentionBatch
from servd.worker.batch.decode_inputs import PLACE, DecodeBuffers
from servd.worker.batch.request_states import RequestStates
from servd.worker.device.device import upload

Forward = Callable[..., torch.Tensor]
"""A model: from input_ids and positions, int64 [num_tokens] each, an AttentionBatch, and further
inputs, float32 [num_tokens, n], to hidden states [num_tokens, hidden].
"""


@dataclass(frozen=True)
class InputBatch:
    """Inputs of the forward pass, and where to sample afterwards; on the device, unless stated
    otherwise.

    A row with drafts is sampled after its last known token and after each draft. In the attention,
    each of these tokens is a separate row, as in a decode step. Therefore a token's result does not
    depend on the number of drafts.
    """

    states: RequestStates
    # int64 [2 or 3, num_tokens]: slot, column, and with draft trees place of each token; see
    # `DraftTree`.
    tokens: torch.Tensor
    positions: torch.Tensor  # int64 [num_tokens]: of each token in its sequence
    host_slots: np.ndarray  # int64 [num_rows], on the host
    query_lens: np.ndarray  # int64 [num_rows], on the host
    # int64 [num_rows], on the host: lengths after this step, if all drafts are accepted.
    seq_lens: np.ndarray
    num_drafts: np.ndarray  # int64 [num_rows], on the host: drafts at each row's end
    known_ends: np.ndarray  # int64 [num_rows], on the host: index of the last token that is known
    max_new_drafts: np.ndarray  # int64 [num_rows], on the host: drafts for the next step
    attention_rows: AttentionRows
    sample_rows: np.ndarray  # int64 [n], on the host: indices of the rows that sample
    # One entry per token to sample: one for each of these rows, and one for each of its drafts.
    sample_host_slots: np.ndarray  # int64 [m], on the host
    sample_tokens: torch.Tensor  # int64 [m]: index of the token before the sampled token
    sample_slots: torch.Tensor  # int64 [m]
    sample_positions: torch.Tensor  # int64 [m]: position of the sampled token in its sequence
    # Set if each row computes one known token and samples (on a CPU also with drafts): the buffers
    # of the step, of which this batch's tensors are views until the next step is gathered.
    buffers: DecodeBuffers | None = None
    is_part: bool = False  # whether it is a part of a step, for which graphs must not be used
    # Whether it is known that each row computes one token, without drafts for this step or the
    # next.
    is_plain: bool = False

    @classmethod
    def gather(cls, scheduled: SchedulerOutput, states: RequestStates) -> InputBatch:
        """Return the batch of a step, and update the block tables. The step's tokens, except
        drafts, count as computed from now on.
        """
        if not scheduled.scheduled and states.tree is None:
            return cls._decode(scheduled.decodes, states)
        rows = _columns(scheduled)
        slots, query_lens, computed, num_drafts, max_new_drafts, samples = rows
        if samples.all() and (query_lens - num_drafts).max() == 1:
            return cls._verify(slots, computed, num_drafts, max_new_drafts, states)
        return cls._gather(rows, states)

    @classmethod
    def _gather(cls, rows: np.ndarray, states: RequestStates) -> InputBatch:
        slots, query_lens, computed, num_drafts, max_new_drafts, samples = rows
        ends = np.cumsum(query_lens)
        token_slots = np.repeat(slots, query_lens)
        offsets = np.arange(ends[-1]) - np.repeat(ends - query_lens, query_lens)
        bounds = np.repeat(computed, query_lens) + offsets + 1
        sample_rows = np.flatnonzero(samples)
        row_ends = ends - 1
        known_ends = ends - 1 - num_drafts
        sample_tokens = known_ends[sample_rows]
        places = token_slots[:0]
        if num_drafts.any():
            is_end = np.repeat(num_drafts > 0, query_lens)
            is_end[row_ends] = True
            row_ends = np.flatnonzero(is_end)
            counts = num_drafts[sample_rows] + 1
            sample_tokens = np.repeat(sample_tokens - np.cumsum(counts) + counts, counts)
            sample_tokens += np.arange(len(sample_tokens))

        if states.tree is not None:
            places = np.maximum(offsets + 1 - np.repeat(query_lens - num_drafts, query_lens), 0)
            places *= states.is_tree[token_slots]
            bounds += states.tree.host_shifts[places]

        sample_host_slots = token_slots[sample_tokens]
        # All indices of the step go to the device in one copy.
        parts = (
            token_slots,
            offsets,
            places,
            row_ends,
            slots,
            query_lens - num_drafts,
            sample_tokens,
            sample_host_slots,
            states.block_tables.take_changes(),
        )
        packed = upload(np.concatenate(parts), states.token_ids.device)
        (
            slots_d,
            columns,
            places_d,
            row_ends_d,
            row_slots,
            num_known,
            sample_tokens_d,
            sample_slots,
            changes,
        ) = packed.split([len(part) for part in parts])
        states.block_tables.apply(changes)
        columns += states.num_computed.index_select(0, slots_d)
        states.num_computed.index_add_(0, row_slots, num_known)
        positions = states.positions(columns, places_d)
        if positions.device.type == "cpu":
            bounds = positions.numpy() + 1  # exact, as the host can read them
        row_lens = np.diff(row_ends, prepend=-1)
        return cls(
            states=states,
            tokens=packed[: 2 * len(columns) + len(places)].view(-1, len(columns)),
            positions=positions,
            host_slots=slots,
            query_lens=query_lens,
            seq_lens=computed + query_lens,
            num_drafts=num_drafts,
            known_ends=known_ends,
            max_new_drafts=max_new_drafts,
            attention_rows=AttentionRows(row_lens, bounds[row_ends], row_ends_d),
            sample_rows=sample_rows,
            sample_host_slots=sample_host_slots,
            sample_tokens=sample_tokens_d,
            sample_slots=sample_slots,
            sample_positions=positions.index_select(0, sample_tokens_d) + 1,
        )

    @classmethod
    def _decode(cls, decodes: DecodeBatch, states: RequestStates) -> InputBatch:
        """Return a step in which each row decodes one token. One kernel computes all inputs: the
        first kernel of the graph, if there is a graph.
        """
        num_rows = len(decodes.slots)
        inputs = states.inputs
        buffers, slots = inputs.fill(decodes.slots, states.take_changes(num_rows))
        if not inputs.sizes:
            states.begin_decode(buffers)
        if inputs.is_shared and not inputs.sizes:  # the host can read the exact lengths
            seq_lens = buffers.next_columns.numpy()
        else:
            seq_lens = np.array(decodes.num_computed_tokens, dtype=np.int64) + 1
        indices, ones, zeros = (
            each[:num_rows] for each in (states.indices, states.ones, states.zeros)
        )
        return cls(
            states=states,
            tokens=buffers.tokens,
            positions=buffers.columns,
            host_slots=slots,
            query_lens=ones,
            seq_lens=seq_lens,
            num_drafts=zeros,
            known_ends=indices,
            max_new_drafts=zeros,
            attention_rows=AttentionRows(ones, seq_lens, None),
            sample_rows=indices,
            sample_host_slots=slots,
            sample_tokens=buffers.indices,
            sample_slots=buffers.slots,
            sample_positions=buffers.next_columns,
            buffers=buffers,
            is_plain=True,
        )

    @classmethod
    def _verify(
        cls,
        slots: np.ndarray,
        computed: np.ndarray,
        num_drafts: np.ndarray,
        max_new_drafts: np.ndarray,
        states: RequestStates,
    ) -> InputBatch:
        """Return a step in which each row computes one known token and its drafts. Arrays are int64
        [num_rows], on the host.
        """
        query_lens = num_drafts + 1
        step = None
        indices = states.indices[: len(slots)]
        known_ends = query_lens.cumsum() - query_lens
        rows = indices.repeat(query_lens)
        offsets = np.arange(len(rows)) - known_ends[rows]
        token_slots = slots[rows]
        bounds = computed[rows] + offsets + 1
        inputs = states.inputs
        is_shared = inputs.is_shared and not inputs.sizes and len(rows) <= inputs.max_num_tokens
        if is_shared and states.tree is None:
            step = states.begin_verify(slots, token_slots, offsets)
            tokens = step.tokens
            positions = step.columns
            next_positions = step.next_columns
        else:
            tokens, positions, bounds = _find(states, token_slots, offsets, bounds)
            next_positions = positions + 1
        if positions.device.type == "cpu":
            bounds = next_positions.numpy()  # exact, as the host can read them
        ones = np.ones_like(offsets)
        return cls(
            states=states,
            tokens=tokens,
            positions=positions,
            host_slots=slots,
            query_lens=query_lens,
            seq_lens=computed + query_lens,
            num_drafts=num_drafts,
            known_ends=known_ends,
            max_new_drafts=max_new_drafts,
            attention_rows=AttentionRows(ones, bounds, None),
            sample_rows=indices,
            sample_host_slots=token_slots,
            sample_tokens=torch.arange(len(rows), device=positions.device),
            sample_slots=tokens[0],
            sample_positions=next_positions,
            buffers=step,
        )

    def part(self, first: int, end: int) -> InputBatch:
        """Return only the rows [first, end), for the forward pass."""
        if self.buffers is not None:  # repeating this finds the same inputs
            self.states.begin_decode(self.buffers)
        ends = np.cumsum(self.query_lens)
        begin = int(ends[first] - self.query_lens[first])
        stop = int(ends[end - 1])
        return replace(
            self,
            tokens=self.tokens[:, begin:stop],
            positions=self.positions[begin:stop],
            host_slots=self.host_slots[first:end],
            query_lens=self.query_lens[first:end],
            num_drafts=self.num_drafts[first:end],
            attention_rows=self.attention_rows.part(begin, stop),
            buffers=None,
            is_part=True,
        )

    @property
    def is_decode(self) -> bool:
        return len(self.attention_rows.query_lens) == self.tokens.shape[1]

    @cached_property
    def drafting_rows(self) -> np.ndarray:
        """Indices of the rows that need drafts for the next step, int64 [n], on the host."""
        return np.flatnonzero(self.max_new_drafts)

    @property
    def samples_all(self) -> bool:
        return len(self.sample_host_slots) == self.tokens.shape[1]

    @cached_property
    def sample_columns(self) -> torch.Tensor:
        """Columns to which the sampled tokens are written, replacing drafts, int64 [m]."""
        if self.states.tree is None:
            return self.sample_positions
        return self.tokens[1, self.sample_tokens] + 1

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """Token ids, int64 [num_tokens]; -1 for a draft that was not found."""
        has_drafts = len(self.sample_host_slots) > len(self.sample_rows)
        if self.buffers is not None and not has_drafts:
            return self.buffers.token_ids
        return self.states.read(self.tokens[0], self.tokens[1])

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids, int64 [num_tokens], with an arbitrary token for a draft that was not found."""
        if self.buffers is not None:
            return self.buffers.token_ids
        return self.token_ids.clamp(min=0) if self.num_drafts.any() else self.token_ids

    def ends(self, num_kept: torch.Tensor | None) -> torch.Tensor:
        """Return the index of each row's last token that is known or an accepted draft, int64
        [num_rows]; see `SamplerOutput`.
        """
        ends = upload(self.known_ends, self.tokens.device)
        device = self.tokens.device
        if num_kept is None:
            return ends
        if len(num_kept) == len(ends):
            return ends + num_kept
        return ends.index_add(0, upload(self.sample_rows, device), num_kept)

    @cached_property
    def attention(self) -> AttentionBatch:
        if self.buffers is not None:
            rows = self.attention_rows
            return buffers_attention(self.states, self.buffers, rows.query_lens, rows.seq_lens)
        return self.attention_rows.gather(self.states, *self.tokens)


def _find(
    states: RequestStates, token_slots: np.ndarray, offsets: np.ndarray, bounds: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return tokens, positions and bounds of rows that compute one known token and drafts.
    `token_slots`: each token's slot; `offsets`: each token's distance from the first token of its
    row; `bounds`: upper bounds of the sequence lengths at each token, if drafts are chains.
    """
    num_tokens = len(offsets)
    changes = states.block_tables.take_changes()
    places = offsets[:0]
    if states.tree is not None:
        places = offsets * states.is_tree[token_slots]
        bounds = bounds + states.tree.host_shifts[places]
    parts = token_slots, offsets, places, changes
    packed = upload(np.concatenate(parts), states.token_ids.device)
    tokens = packed[: 2 * num_tokens + len(places)].view(-1, num_tokens)
    states.block_tables.apply(packed[2 * num_tokens + len(places) :])
    slots, columns, *rest = tokens.unbind()
    is_known = columns.eq(0).long()
    columns += states.num_computed.index_select(0, slots)
    states.num_computed.index_add_(0, slots, is_known)
    return tokens, states.positions(columns, rest[0]) if rest else columns, bounds


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a step as the attention sees them."""

    query_lens: np.ndarray  # int64 [num_rows], on the host
    seq_lens: np.ndarray  # int64 [num_rows], on the host: upper bounds
    ends: torch.Tensor | None  # int64 [num_rows]: index of the last token; None: 1 token each

    def part(self, begin: int, stop: int) -> AttentionRows:
        """Return the rows of the tokens [begin, stop), which must be whole rows."""
        ends = np.cumsum(self.query_lens)
        rows = slice(*np.searchsorted(ends, [begin, stop], side="right").tolist())
        own = None if self.ends is None else self.ends[rows] - begin
        return AttentionRows(self.query_lens[rows], self.seq_lens[rows], own)

    def gather(
        self,
        states: RequestStates,
        slots: torch.Tensor,
        columns: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> AttentionBatch:
        """Return the attention batch of tokens with these slots, columns and places."""
        tables = states.block_tables
        ends = self.ends
        if ends is None:
            last = slots, columns, places
            starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        else:
            last = slots[ends], columns[ends], None if places is None else places[ends]
            starts = ends.new_zeros(len(ends) + 1, dtype=torch.int32)
            starts[1:] = ends + 1
        batch = AttentionBatch(
            query_lens=self.query_lens,
            seq_lens=self.seq_lens,
            query_start_loc=starts,
            seq_lens_device=(states.positions(*last[1:]) + 1).int(),
            block_tables=tables.tables[last[0], : tables.blocks_for(int(self.seq_lens.max()))],
            slot_mapping=tables.slot_mapping(slots, columns),
            tails=states.tails(*last),
            slots=last[0],
        )
        return batch if tables.num_groups == 1 else _of_groups(batch, states, slots, columns, last)


def _columns(scheduled: SchedulerOutput) -> np.ndarray:
    """Return slot, tokens, computed tokens, drafts, new drafts and samples: int64 [6, num_rows]."""
    decodes = scheduled.decodes
    first = len(scheduled.decodes.slots)
    columns = np.empty((6, scheduled.num_rows), dtype=np.int64)
    columns[0, :first] = decodes.slots
    columns[2, :first] = decodes.num_computed_tokens
    columns[1, :first] = columns[5, :first] = 1
    columns[3:5, :first] = 0
    if scheduled.scheduled:
        columns[:, first:].T[:] = [
            (
                s.slot,
                s.num_scheduled_tokens,
                s.num_computed_tokens,
                s.num_drafts,
                s.max_new_drafts,
                s.samples,
            )
            for s in scheduled.scheduled
        ]
    return columns


def buffers_attention(
    states: RequestStates, buffers: DecodeBuffers, query_lens: np.ndarray, seq_lens: np.ndarray
) -> AttentionBatch:
    """Return the attention batch of complete inputs; for lengths see `AttentionBatch`."""
    tables = states.block_tables
    slots = buffers.slots
    blocks = tables.tables[:, : tables.blocks_for(int(seq_lens.max()))]
    batch = AttentionBatch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        query_start_loc=buffers.starts,
        seq_lens_device=buffers.seq_lens[: len(slots)],
        block_tables=blocks.index_select(0, slots),
        slot_mapping=buffers.kv_slots,
        slots=slots,
    )
    if tables.num_groups == 1:
        return batch
    return _of_groups(batch, states, slots, buffers.columns, (slots, buffers.columns, None))


def captured_attention(states: RequestStates, buffers: DecodeBuffers) -> AttentionBatch:
    num_rows = len(buffers.slots)
    if states.tree is not None:
        places = buffers.step[PLACE]
        return decode_attention(states, buffers.slots, buffers.columns, places, is_captured=True)
    longest = np.full(num_rows, states.max_model_len, dtype=np.int64)
    return buffers_attention(states, buffers, np.ones_like(longest), longest)


def decode_attention(
    states: RequestStates,
    slots: torch.Tensor,
    columns: torch.Tensor,
    places: torch.Tensor | None = None,
    is_captured: bool = False,
) -> AttentionBatch:
    """Return the attention batch of one token per row, in a form that a graph can capture. On a
    CPU, lengths are exact unless `is_captured`.
    """
    num_rows = len(slots)
    tables = states.block_tables
    positions = states.positions(columns, places)
    if positions.device.type == "cpu" and not is_captured:
        seq_lens = positions.numpy() + 1
    else:
        seq_lens = np.full(num_rows, states.max_model_len, dtype=np.int64)
    batch = AttentionBatch(
        query_lens=np.ones(num_rows, dtype=np.int64),
        seq_lens=seq_lens,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device),
        seq_lens_device=(positions + 1).int(),
        block_tables=tables.tables[slots],
        slot_mapping=tables.slot_mapping(slots, columns),
        tails=states.tails(slots, columns, places),
    )
    if tables.num_groups == 1:
        return batch
    return _of_groups(batch, states, slots, columns, (slots, columns, places))


def mixed_attention(
    states: RequestStates, tokens: torch.Tensor, ends: torch.Tensor
) -> AttentionBatch:
    """Return the attention batch of rows that end at `ends`, in a form that a graph can capture. A
    row with the same end as the row before has no token.
    """
    query_lens = np.full(len(ends), tokens.shape[1], dtype=np.int64)
    seq_lens = np.full(len(ends), states.max_model_len, dtype=np.int64)
    attention = AttentionRows(query_lens, seq_lens, ends).gather(states, *tokens)
    others = [replace(each, has_exact_query_lens=False) for each in attention.others]
    return replace(attention, has_exact_query_lens=False, others=others)


def _of_groups(
    batch: AttentionBatch,
    states: RequestStates,
    slots: torch.Tensor,
    columns: torch.Tensor,
    last: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> AttentionBatch:
    """Return `batch` with `others`: the batches of further groups of layers. `last`: slots, columns
    and places of the last token of each row.
    """
    tables = states.block_tables
    (last_slots, last_columns, last_places) = last
    others = []
    for first_row in tables.other_groups:
        last_rows = first_row + last_slots
        # Tensors of their own, not rows of one: Triton compiles kernels again for other alignments.
        other = replace(
            batch,
            slot_mapping=tables.slot_mapping(first_row + slots, columns),
            block_tables=tables.tables[last_rows, : batch.block_tables.shape[1]],
            tails=states.tails(last_rows, last_columns, last_places),
        )
        others.append(other)
    return replace(batch, others=others)
