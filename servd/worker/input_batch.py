"""InputBatch: the tensors of one step, gathered from the rows of the scheduled requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from servd.messages import ScheduledRequest
from servd.worker.attention._base import AttentionBatch
from servd.worker.device import upload
from servd.worker.request_states import RequestStates


@dataclass(frozen=True)
class InputBatch:
    """Inputs of the forward pass, and where to sample afterwards. On the device unless said otherwise."""

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    attention: AttentionBatch
    host_slots: np.ndarray  # int64 [len(scheduled)], on the host
    sample_rows: np.ndarray  # int64 [n], on the host: indices in `scheduled` of the rows that sample
    sample_host_slots: np.ndarray  # int64 [n], on the host
    sample_tokens: torch.Tensor  # int64 [n]: index in the step of each one's last token
    sample_slots: torch.Tensor  # int64 [n]
    sample_positions: torch.Tensor  # int64 [n]: index in the sequence that the new token will have

    @classmethod
    def gather(cls, scheduled: list[ScheduledRequest], states: RequestStates) -> InputBatch:
        """Make the batch of a step; its blocks are in the tables already. Counts its tokens as computed."""
        device = states.token_ids.device
        slots = np.array([s.slot for s in scheduled], dtype=np.int64)
        query_lens = np.array([s.num_tokens for s in scheduled], dtype=np.int64)
        samples = np.array([s.samples for s in scheduled], dtype=bool)
        computed = states.num_computed[slots]
        seq_lens = states.num_computed[slots] = computed + query_lens
        ends = np.cumsum(query_lens)
        starts = ends - query_lens
        positions = np.arange(ends[-1]) + np.repeat(computed - starts, query_lens)
        token_slots = np.repeat(slots, query_lens)
        sample_rows = np.flatnonzero(samples)

        # One copy to the device for all index tensors.
        parts = (
            token_slots, positions, np.append(starts, ends[-1]), seq_lens, slots,
            ends[sample_rows] - 1, slots[sample_rows], seq_lens[sample_rows],
        )  # fmt: skip
        packed = upload(np.concatenate(parts), device)
        (
            token_slots_d,
            positions_d,
            query_start_loc,
            seq_lens_d,
            slots_d,
            sample_tokens,
            sample_slots,
            sample_positions,
        ) = packed.split([len(part) for part in parts])
        tables = states.block_tables
        return cls(
            input_ids=states.token_ids[token_slots_d, positions_d].long(),
            positions=positions_d,
            attention=AttentionBatch(
                query_lens=query_lens,
                seq_lens=seq_lens,
                query_start_loc=query_start_loc.int(),
                seq_lens_device=seq_lens_d.int(),
                block_tables=tables.tables[slots_d, : tables.blocks_for(int(seq_lens.max()))],
                slot_mapping=tables.slot_mapping(token_slots_d, positions_d),
            ),
            host_slots=slots,
            sample_rows=sample_rows,
            sample_host_slots=slots[sample_rows],
            sample_tokens=sample_tokens,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
        )
