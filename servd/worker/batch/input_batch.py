"""InputBatch: the tensors of one step, gathered from the states of the scheduled requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from servd.messages.engine import SchedulerOutput
from servd.worker.attention import AttentionBatch
from servd.worker.batch.decode_inputs import PLACE, DecodeBuffers
from servd.worker.batch.request_states import RequestStates
from servd.worker.device.device import upload
from servd.worker.layers.image_embeddings import ImageEmbeddings

Forward = Callable[..., Tensor]
"""A model: from input_ids and positions, int64 [num_tokens] each, an AttentionBatch, and further
inputs, float32 [num_tokens, n], to hidden states [num_tokens, hidden].
"""


ROW = np.dtype(
    [
        ("slot", np.int64),
        ("num_tokens", np.int64),
        ("num_computed_tokens", np.int64),
        ("num_drafts", np.int64),  # at the end of the row's tokens
        ("max_new_drafts", np.int64),  # for the next step
        ("samples", np.bool_),
    ],
    align=True,
)
"""A row of a step, on the host; see `ScheduledRequest`."""
FIELDS = "slot num_scheduled_tokens num_computed_tokens num_drafts max_new_drafts samples"
ROW_OF = attrgetter(*FIELDS.split())


def gather_rows(scheduled: SchedulerOutput) -> np.ndarray:
    """Return the rows of a step: ROW [num_rows]."""
    decodes = scheduled.decodes
    num_decodes = len(decodes.slots)
    rows = np.zeros(scheduled.num_rows, dtype=ROW)
    decode_rows = rows[:num_decodes]
    decode_rows["slot"] = decodes.slots
    decode_rows["num_tokens"] = 1
    decode_rows["num_computed_tokens"] = decodes.num_computed_tokens
    decode_rows["samples"] = True
    if scheduled.scheduled:
        rows[num_decodes:] = [*map(ROW_OF, scheduled.scheduled)]
    return rows


class TokenIndices(NamedTuple):
    """The tokens of a step, on the host; all are int64."""

    slots: np.ndarray  # [num_tokens]: of each token's request
    offsets: np.ndarray  # [num_tokens]: from the first token of its row
    places: np.ndarray  # [num_tokens]: see `DraftTree`; empty without trees
    bounds: np.ndarray  # [num_tokens]: upper bound of the sequence's length at each token
    known_ends: np.ndarray  # [num_rows]: index of the last token that is known
    row_ends: np.ndarray  # [n]: index of the last token of each row of the attention
    sample_rows: np.ndarray  # [n]: see `InputBatch`
    sample_tokens: np.ndarray  # [m]

    @classmethod
    def from_rows(cls, rows: np.ndarray, states: RequestStates) -> TokenIndices:
        query_lens = rows["num_tokens"]
        num_drafts = rows["num_drafts"]
        ends = query_lens.cumsum()
        row_indices = np.arange(len(rows)).repeat(query_lens)
        tokens = np.arange(len(row_indices))
        offsets = tokens - (ends - query_lens)[row_indices]
        slots = rows["slot"][row_indices]
        bounds = rows["num_computed_tokens"][row_indices] + offsets + 1
        places = tokens[:0]
        if states.tree is not None:
            num_known = query_lens - num_drafts
            places = np.maximum(offsets + 1 - num_known[row_indices], 0) * states.is_tree[slots]
            bounds += states.tree.host_shifts[places]
        known_ends = ends - 1 - num_drafts
        row_ends = ends - 1
        sample_rows = np.flatnonzero(rows["samples"])
        sample_tokens = known_ends[sample_rows]
        if len(sample_rows) + num_drafts.sum() == len(tokens):  # each token is sampled
            row_ends = tokens
            sample_tokens = tokens
        elif num_drafts.any():
            is_end = num_drafts[row_indices] > 0
            is_end[row_ends] = True
            row_ends = np.flatnonzero(is_end)
            counts = num_drafts[sample_rows] + 1
            sample_tokens = np.repeat(sample_tokens - np.cumsum(counts) + counts, counts)
            sample_tokens += np.arange(len(sample_tokens))
        return cls(slots, offsets, places, bounds, known_ends, row_ends, sample_rows, sample_tokens)

    @classmethod
    def from_decodes(cls, rows: np.ndarray, states: RequestStates) -> TokenIndices:
        """Return the tokens of rows that compute one token each, and sample, from constants."""
        indices = states.indices[: len(rows)]
        zeros = states.zeros[: len(rows)]
        bounds = rows["num_computed_tokens"] + 1
        return cls(rows["slot"], zeros, zeros[:0], bounds, indices, indices, indices, indices)


class DeviceTokens(NamedTuple):
    """The tokens of a step, on the device; see `InputBatch`."""

    tokens: Tensor
    positions: Tensor
    sample_tokens: Tensor
    sample_slots: Tensor
    sample_positions: Tensor
    row_ends: Tensor | None = None  # int64 [n]; None: each token is a row of the attention
    buffers: DecodeBuffers | None = None

    @classmethod
    def from_buffers(cls, step: DecodeBuffers) -> DeviceTokens:
        return cls(
            step.tokens, step.columns, step.indices, step.slots, step.next_columns, buffers=step
        )

    @classmethod
    def upload(cls, rows: np.ndarray, host: TokenIndices, states: RequestStates) -> DeviceTokens:
        """Copy all indices of the step to the device at once, and count its tokens as computed."""
        parts = (
            host.slots,
            host.offsets,
            host.places,
            host.row_ends,
            host.sample_tokens,
            host.slots[host.sample_tokens],
            rows["slot"],
            rows["num_tokens"] - rows["num_drafts"],
            states.block_tables.take_changes(),
        )
        packed = upload(np.concatenate(parts), states.token_ids.device)
        slots, columns, places, row_ends, sample_tokens, sample_slots, *row_parts = packed.split(
            [len(part) for part in parts]
        )
        row_slots, num_known, changes = row_parts
        states.block_tables.apply(changes)
        columns += states.num_computed.index_select(0, slots)
        states.num_computed.index_add_(0, row_slots, num_known)
        positions = states.positions(columns, places)
        num_tokens = len(slots)
        return cls(
            packed[: 2 * num_tokens + len(places)].view(-1, num_tokens),
            positions,
            sample_tokens,
            sample_slots,
            positions.index_select(0, sample_tokens) + 1,
            row_ends=None if len(row_ends) == num_tokens else row_ends,
        )


@dataclass(frozen=True)
class InputBatch:
    """Inputs of the forward pass, and where to sample afterwards; on the device, unless stated
    otherwise.

    A row with drafts is sampled after its last known token and after each draft. In the attention,
    each of these tokens is a separate row, as in a decode step. Therefore a token's result does not
    depend on the number of drafts.
    """

    states: RequestStates
    rows: np.ndarray  # ROW [num_rows], on the host
    # int64 [2 or 3, num_tokens]: slot, column, and with draft trees place of each token; see
    # `DraftTree`.
    tokens: Tensor
    positions: Tensor  # int64 [num_tokens]: of each token in its sequence
    known_ends: np.ndarray  # int64 [num_rows], on the host: index of the last token that is known
    attention_rows: AttentionRows
    sample_rows: np.ndarray  # int64 [n], on the host: indices of the rows that sample
    # One entry per token to sample: one for each of these rows, and one for each of its drafts.
    sample_host_slots: np.ndarray  # int64 [m], on the host
    sample_tokens: Tensor  # int64 [m]: index of the token before the sampled token
    sample_slots: Tensor  # int64 [m]
    sample_positions: Tensor  # int64 [m]: position of the sampled token in its sequence
    # Set if each row computes one known token and samples (on a CPU also with drafts): the buffers
    # of the step, of which this batch's tensors are views until the next step is gathered.
    buffers: DecodeBuffers | None
    # Whether it is known that each row computes one token, without drafts for this step or the
    # next.
    is_plain: bool
    is_eager: bool = False  # whether graphs must not be used: for a part of a step, or for images
    images: ImageEmbeddings | None = None
    # int64 [3, num_tokens], with M-RoPE and images: time, row and column; None: `positions`, which
    # the states may shift.
    image_positions: Tensor | None = None

    @classmethod
    def from_rows(cls, rows: np.ndarray, states: RequestStates, is_plain: bool) -> InputBatch:
        """Return the batch of a step's rows, and update the block tables. The step's tokens, except
        drafts, count as computed from now on. `is_plain`: see above.
        """
        inputs = states.inputs
        if is_plain:
            # One kernel computes all inputs: the first kernel of the graph, if there is a graph.
            host = TokenIndices.from_decodes(rows, states)
            device = DeviceTokens.from_buffers(states.begin_decodes(rows["slot"]))
        else:
            host = TokenIndices.from_rows(rows, states)
            is_decode = len(host.slots) == len(host.sample_tokens) <= inputs.max_num_tokens
            if is_decode and inputs.is_shared and not inputs.sizes and states.tree is None:
                step = states.begin_verify(rows["slot"], host.slots, host.offsets)
                device = DeviceTokens.from_buffers(step)
            else:
                device = DeviceTokens.upload(rows, host, states)
        bounds = host.bounds
        is_known = not (is_plain and inputs.sizes)  # else a graph will compute positions
        if device.positions.device.type == "cpu" and is_known:
            bounds = device.positions.numpy() + 1  # exact, as the host can read them
        sample_host_slots = host.slots
        if is_plain:
            row_lens = states.ones[: len(rows)]
        elif device.buffers is not None:  # each token is a row, and is sampled
            row_lens = np.ones_like(host.offsets)
        else:
            row_lens = np.diff(host.row_ends, prepend=-1)
            bounds = bounds[host.row_ends]
            sample_host_slots = host.slots[host.sample_tokens]
        return cls(
            states=states,
            rows=rows,
            tokens=device.tokens,
            positions=device.positions,
            known_ends=host.known_ends,
            attention_rows=AttentionRows(row_lens, bounds, device.row_ends),
            sample_rows=host.sample_rows,
            sample_host_slots=sample_host_slots,
            sample_tokens=device.sample_tokens,
            sample_slots=device.sample_slots,
            sample_positions=device.sample_positions,
            buffers=device.buffers,
            is_plain=is_plain,
        )

    @property
    def host_slots(self) -> np.ndarray:
        """Slots of the rows, int64 [num_rows], on the host."""
        return self.rows["slot"]

    @property
    def query_lens(self) -> np.ndarray:
        """Numbers of tokens of the rows, int64 [num_rows], on the host."""
        return self.rows["num_tokens"]

    @property
    def num_drafts(self) -> np.ndarray:
        """Numbers of drafts at the rows' ends, int64 [num_rows], on the host."""
        return self.rows["num_drafts"]

    @property
    def max_new_drafts(self) -> np.ndarray:
        """Numbers of drafts for the rows' next step, int64 [num_rows], on the host."""
        return self.rows["max_new_drafts"]

    @property
    def seq_lens(self) -> np.ndarray:
        """Lengths after this step, if all drafts are accepted: int64 [num_rows], on the host."""
        return self.rows["num_computed_tokens"] + self.rows["num_tokens"]

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
            rows=self.rows[first:end],
            attention_rows=self.attention_rows.part(begin, stop),
            buffers=None,
            is_eager=True,
        )

    @property
    def rotary_positions(self) -> Tensor:
        """The positions by which tokens rotate, int64 [num_tokens] or [3, num_tokens]."""
        if self.image_positions is not None:
            return self.image_positions
        if not self.states.shifted_slots:
            return self.positions
        return self.states.rotary_positions(self.tokens[0], self.positions)

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
    def sample_columns(self) -> Tensor:
        """Columns to which the sampled tokens are written, replacing drafts, int64 [m]."""
        if self.states.tree is None:
            return self.sample_positions
        return self.tokens[1, self.sample_tokens] + 1

    @cached_property
    def token_ids(self) -> Tensor:
        """Token ids, int64 [num_tokens]; -1 for a draft that was not found."""
        has_drafts = len(self.sample_host_slots) > len(self.sample_rows)
        if self.buffers is not None and not has_drafts:
            return self.buffers.token_ids
        return self.states.read(self.tokens[0], self.tokens[1])

    @property
    def input_ids(self) -> Tensor:
        """Token ids, int64 [num_tokens], with an arbitrary token for a draft that was not found."""
        if self.buffers is not None:
            return self.buffers.token_ids
        return self.token_ids.clamp(min=0) if self.num_drafts.any() else self.token_ids

    def ends(self, num_kept: Tensor | None) -> Tensor:
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


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a step as the attention sees them."""

    query_lens: np.ndarray  # int64 [num_rows], on the host
    seq_lens: np.ndarray  # int64 [num_rows], on the host: upper bounds
    ends: Tensor | None  # int64 [num_rows]: index of the last token; None: 1 token each
    bidirectional: np.ndarray | None = None  # see AttentionBatch

    def part(self, begin: int, stop: int) -> AttentionRows:
        """Return the rows of the tokens [begin, stop), which must be whole rows."""
        ends = np.cumsum(self.query_lens)
        rows = slice(*np.searchsorted(ends, [begin, stop], side="right").tolist())
        row_ends = None if self.ends is None else self.ends[rows] - begin
        return AttentionRows(self.query_lens[rows], self.seq_lens[rows], row_ends)

    def with_images(self, spans: Sequence[tuple[int, int]], device: torch.device) -> AttentionRows:
        """Return the rows cut so that each span of tokens, [first, end), is a row whose tokens see
        each other.
        """
        firsts, stops = np.array(spans, dtype=np.int64).T
        old_ends = np.cumsum(self.query_lens) - 1
        ends = np.union1d(old_ends, np.concatenate((firsts - 1, stops - 1)))
        ends = ends[ends >= 0]
        rows = np.searchsorted(old_ends, ends)
        seq_lens = self.seq_lens[rows] - (old_ends[rows] - ends)
        device_ends = upload(ends, device)
        is_image = np.isin(ends, stops - 1)
        return AttentionRows(np.diff(ends, prepend=-1), seq_lens, device_ends, is_image)

    def gather(
        self, states: RequestStates, slots: Tensor, columns: Tensor, places: Tensor | None = None
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
            bidirectional=self.bidirectional,
        )
        return _with_groups(batch, states, slots, columns, last)


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
    return _with_groups(batch, states, slots, buffers.columns, (slots, buffers.columns, None))


def captured_attention(states: RequestStates, buffers: DecodeBuffers) -> AttentionBatch:
    num_rows = len(buffers.slots)
    if states.tree is not None:
        places = buffers.step[PLACE]
        return decode_attention(states, buffers.slots, buffers.columns, places, is_captured=True)
    longest = np.full(num_rows, states.max_model_len, dtype=np.int64)
    return buffers_attention(states, buffers, np.ones_like(longest), longest)


def decode_attention(
    states: RequestStates,
    slots: Tensor,
    columns: Tensor,
    places: Tensor | None = None,
    is_captured: bool = False,
) -> AttentionBatch:
    """Return the attention batch of one token per row, in a form that a graph can capture. On a
    CPU, lengths are exact unless `is_captured`.
    """
    if slots.device.type == "cpu" and not is_captured:
        seq_lens = states.positions(columns, places).numpy() + 1
    else:
        seq_lens = np.full(len(slots), states.max_model_len, dtype=np.int64)
    rows = AttentionRows(np.ones_like(seq_lens), seq_lens, ends=None)
    return rows.gather(states, slots, columns, places)


def mixed_attention(states: RequestStates, tokens: Tensor, ends: Tensor) -> AttentionBatch:
    """Return the attention batch of rows that end at `ends`, in a form that a graph can capture. A
    row with the same end as the row before has no token.
    """
    query_lens = np.full(len(ends), tokens.shape[1], dtype=np.int64)
    seq_lens = np.full(len(ends), states.max_model_len, dtype=np.int64)
    attention = AttentionRows(query_lens, seq_lens, ends).gather(states, *tokens)
    groups = [replace(group, has_exact_query_lens=False) for group in attention.other_groups]
    return replace(attention, has_exact_query_lens=False, other_groups=groups)


def _with_groups(
    batch: AttentionBatch,
    states: RequestStates,
    slots: Tensor,
    columns: Tensor,
    last: tuple[Tensor, Tensor, Tensor | None],
) -> AttentionBatch:
    """Return `batch` with `other_groups`: batches of further groups of layers. `last`: slots,
    columns and places of the last token of each row.
    """
    tables = states.block_tables
    if tables.num_groups == 1:
        return batch
    (last_slots, last_columns, last_places) = last
    groups = []
    for first_row in tables.other_groups:
        last_rows = first_row + last_slots
        # Tensors of their own, not rows of one: Triton compiles kernels again for other alignments.
        other = replace(
            batch,
            slot_mapping=tables.slot_mapping(first_row + slots, columns),
            block_tables=tables.tables[last_rows, : batch.block_tables.shape[1]],
            tails=states.tails(last_rows, last_columns, last_places),
        )
        groups.append(other)
    return replace(batch, other_groups=groups)
