"""InputBatch: the tensors of one step, gathered from the rows of the scheduled requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from servd.messages import ScheduledRequest
from servd.worker.attention import AttentionBatch
from servd.worker.device import upload
from servd.worker.request_states import RequestStates


@dataclass(frozen=True)
class InputBatch:
    """Inputs of the forward pass, and where to sample afterwards. On the device unless said
    otherwise.
    """

    states: RequestStates
    tokens: torch.Tensor  # int64 [2, num_tokens]: slot and position in the sequence of each
    host_slots: np.ndarray  # int64 [num_rows], on the host
    query_lens: np.ndarray  # int64 [num_rows], on the host
    seq_lens: np.ndarray  # int64 [num_rows], on the host: with the tokens of this step
    query_start_loc: torch.Tensor  # int64 [num_rows + 1]
    seq_lens_device: torch.Tensor  # int64 [num_rows]
    slots: torch.Tensor  # int64 [num_rows]
    # int64 [n], on the host: indices in `scheduled` of the rows that sample.
    sample_rows: np.ndarray
    sample_host_slots: np.ndarray  # int64 [n], on the host
    sample_tokens: torch.Tensor  # int64 [n]: index in the step of each one's last token
    sample_slots: torch.Tensor  # int64 [n]
    sample_positions: torch.Tensor  # int64 [n]: index in the sequence that the new token will have

    @classmethod
    def gather(cls, scheduled: list[ScheduledRequest], states: RequestStates) -> InputBatch:
        """Make the batch of a step and bring the block tables up to date. Counts its tokens as
        computed.
        """
        slots = np.array([s.slot for s in scheduled], dtype=np.int64)
        query_lens = np.array([s.num_tokens for s in scheduled], dtype=np.int64)
        samples = np.array([s.samples for s in scheduled], dtype=bool)
        computed = states.num_computed[slots]
        seq_lens = states.num_computed[slots] = computed + query_lens
        ends = np.cumsum(query_lens)
        starts = ends - query_lens
        positions = np.arange(ends[-1]) + np.repeat(computed - starts, query_lens)
        sample_rows = np.flatnonzero(samples)

        # One copy to the device for all indices of the step.
        parts = (
            np.repeat(slots, query_lens), positions, np.append(starts, ends[-1]), seq_lens, slots,
            ends[sample_rows] - 1, slots[sample_rows], seq_lens[sample_rows],
            states.block_tables.take_changes(),
        )  # fmt: skip
        packed = upload(np.concatenate(parts), states.token_ids.device)
        sizes = [2 * len(positions), *(len(part) for part in parts[2:])]
        (
            tokens,
            starts_d,
            lens_d,
            slots_d,
            sample_tokens,
            sample_slots,
            sample_positions,
            changes,
        ) = packed.split(sizes)
        states.block_tables.apply(changes)
        return cls(
            states=states,
            tokens=tokens.view(2, -1),
            host_slots=slots,
            query_lens=query_lens,
            seq_lens=seq_lens,
            query_start_loc=starts_d,
            seq_lens_device=lens_d,
            slots=slots_d,
            sample_rows=sample_rows,
            sample_host_slots=slots[sample_rows],
            sample_tokens=sample_tokens,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
        )

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 [num_tokens]."""
        return self.tokens[1]

    @property
    def is_decode(self) -> bool:
        """Whether each row computes one token."""
        return len(self.host_slots) == self.tokens.shape[1]

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """int64 [num_tokens]."""
        return self.states.token_ids[self.tokens[0], self.tokens[1]].long()

    @cached_property
    def attention(self) -> AttentionBatch:
        """What the attention backend makes its metadata of."""
        tables = self.states.block_tables
        return AttentionBatch(
            query_lens=self.query_lens,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc.int(),
            seq_lens_device=self.seq_lens_device.int(),
            block_tables=tables.tables[self.slots, : tables.blocks_for(int(self.seq_lens.max()))],
            slot_mapping=tables.slot_mapping(self.tokens[0], self.tokens[1]),
        )


def decode_attention(
    states: RequestStates, slots: torch.Tensor, positions: torch.Tensor
) -> AttentionBatch:
    """The attention of one token per row, [num_rows] int64 each, in a form that a graph can capture
    (see `Backend`).
    """
    num_rows, tables = len(slots), states.block_tables
    return AttentionBatch(
        query_lens=np.ones(num_rows, dtype=np.int64),
        seq_lens=np.full(num_rows, states.max_model_len, dtype=np.int64),
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device),
        seq_lens_device=(positions + 1).int(),
        block_tables=tables.tables[slots],
        slot_mapping=tables.slot_mapping(slots, positions),
    )
