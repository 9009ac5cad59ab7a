"""RequestStates: one row per running request, kept across steps."""

from __future__ import annotations

import numpy as np
import torch

from servd.errors import InvalidRequest
from servd.messages import NewRequest, ScheduledRequest
from servd.speculative import MOST_DRAFTS
from servd.worker import ops
from servd.worker.block_table import NO_CHANGES, BlockTables
from servd.worker.decode_inputs import Columns, DecodeInputs
from servd.worker.device import upload
from servd.worker.draft_tree import DraftTree


class RequestStates:
    """Token ids, counters and block table of every slot, on the device.

    Sampled tokens are written on the device, so the next step can be gathered before the host has
    seen them, or knows how many drafts were kept. Drafts stand behind the tokens of their row, -1
    where fewer were found than asked for. The row after the last slot, `null_slot`, belongs to no
    request.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        vocab_size: int,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.null_slot = max_num_seqs
        # More columns: a step launched before a request is known to be full still writes its token,
        # and a row's drafts may be fewer than the step's.
        num_columns = max_model_len + 1 + MOST_DRAFTS
        self.token_ids = torch.zeros(
            (max_num_seqs + 1, num_columns), dtype=torch.int32, device=device
        )
        self.block_tables = BlockTables(max_num_seqs, max_model_len, block_size, device)
        self.num_computed = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        # Of steps with one token in each row: indices, and two constants.
        self.indices = np.arange(max_num_seqs, dtype=np.int64)
        self.ones, self.zeros = np.ones_like(self.indices), np.zeros_like(self.indices)
        self.inputs = DecodeInputs(max_num_seqs, self.null_slot, device)
        self.ops = ops.for_device(device)
        # What layers keep of each slot, float32 [max_num_seqs + 1, n]; see layers/state.py. Nothing
        # of it is read before it is written.
        self.of_layers: torch.Tensor | None = None
        self.tree: DraftTree | None = None  # what the drafts of `is_tree` make; of others a chain
        self.is_tree = np.zeros(max_num_seqs + 1, dtype=bool)  # by slot, on the host

    def make_room(self, num_columns: int) -> None:
        """For so many numbers that layers keep of each request."""
        if num_columns:
            shape, device = (len(self.token_ids), num_columns), self.token_ids.device
            self.of_layers = torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of what is large."""
        parts = self.token_ids, self.block_tables.tables, self.of_layers
        return sum(part.nbytes for part in parts if part is not None)

    def add(self, request: NewRequest) -> None:
        """A request enters its slot, in full.

        Raises:
            InvalidRequest: a token id that the embedding has no row for.
        """
        assert self.of_layers is None or not request.num_computed_tokens, "states are not cached"
        slot = request.slot
        token_ids = np.asarray(request.token_ids, dtype=np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise InvalidRequest(
                f"a token id is not in the vocabulary, which has {self.vocab_size} tokens"
            )
        token_ids = upload(token_ids.astype(np.int32), self.token_ids.device)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_computed[slot] = request.num_computed_tokens
        self.block_tables.clear(slot)
        if request.block_ids:
            # Negative: it is not read, but is to be a block.
            self.block_tables.append(slot, [max(block, 0) for block in request.block_ids])

    def pad(self, block_id: int) -> None:
        """Padding computes in this block."""
        self.block_tables.pad(block_id)
        self.inputs.pad(block_id)

    def begin_decode(self, columns: Columns) -> None:
        """Find on the device what follows from what a step was given."""
        tables = self.block_tables
        self.ops.begin_decode(
            columns.step, columns.seq_lens, self.token_ids, self.num_computed, tables.tables,
            tables.block_size,
        )  # fmt: skip

    def begin_verify(
        self, slots: np.ndarray, token_slots: np.ndarray, offsets: np.ndarray
    ) -> Columns:
        """Begin a step in which each slot computes its next token, and drafts behind it, on a CPU.

        Args:
            slots: int64 [n].
            token_slots: of each token, int64 [m].
            offsets: int64 [m]: how far each is behind its row's first one.
        """
        num_computed = self.num_computed.numpy()
        columns = num_computed[token_slots] + offsets
        num_computed[slots] += 1
        step, _ = self.inputs.fill(token_slots, self.take_changes(len(offsets)), columns)
        self.begin_decode(step)
        return step

    def take_changes(self, most: int) -> np.ndarray:
        """See `BlockTables.take_changes`; if there are more blocks they are written at once."""
        changes = self.block_tables.take_changes()
        if len(changes) <= 3 * most:
            return changes
        self.block_tables.apply(upload(changes, self.token_ids.device))
        return NO_CHANGES

    def keep(self, slots: np.ndarray, num_kept: torch.Tensor) -> None:
        """Count drafts of slots, int64 [n] each, as computed."""
        self.num_computed.index_add_(0, upload(slots, num_kept.device), num_kept)

    def read(self, slots: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Tokens, or -1, of the rows of their slots; int64 each."""
        if self.inputs.is_shared:  # in a third of the time that torch takes for a few
            found = self.token_ids.numpy()[slots.numpy(), columns.numpy()]
            return torch.from_numpy(found.astype(np.int64))
        return self.token_ids[slots, columns].long()

    def write(self, slots: torch.Tensor, columns: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store tokens in the rows of their slots. int64 each, as many as slots and columns."""
        if self.inputs.is_shared:
            self.token_ids.numpy()[slots.numpy(), columns.numpy()] = token_ids.numpy()
        else:
            self.token_ids[slots, columns] = token_ids.int()

    def positions(self, columns: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Positions of tokens in their texts, int64 [n]; places are those of `DraftTree`."""
        return (
            columns if self.tree is None or places is None else self.tree.positions(columns, places)
        )

    def tails(
        self, slots: torch.Tensor, columns: torch.Tensor, places: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `AttentionBatch.tails`."""
        if self.tree is None or places is None:
            return None
        return self.block_tables.slot_mapping(slots.unsqueeze(-1), self.tree.tails(columns, places))

    def write_drafts(self, scheduled: list[ScheduledRequest]) -> None:
        """Store the engine's drafts behind the known tokens of their rows."""
        drafts = [
            (row.slot, row.num_tokens - row.num_drafts + offset, token_id)
            for row in scheduled
            for offset, token_id in enumerate(row.draft_token_ids)
        ]
        if not drafts:
            return
        columns = np.array(drafts, dtype=np.int64).T
        slots, offsets, token_ids = upload(columns, self.token_ids.device)
        self.write(slots, self.num_computed[slots] + offsets, token_ids)
