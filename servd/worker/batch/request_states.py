"""RequestStates: one row per running request, kept across steps."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servd.base.errors import InvalidRequest
from servd.config.speculative import MOST_DRAFTS
from servd.messages.engine import BlockSwaps, NewRequest, ScheduledRequest
from servd.worker import ops
from servd.worker.batch.block_table import NO_CHANGES, BlockTables
from servd.worker.batch.decode_inputs import DecodeBuffers, DecodeInputs
from servd.worker.batch.draft_tree import DraftTree
from servd.worker.device.device import upload
from servd.worker.ops._decode_rows import SlotTensors
from servd.worker.ops._state_rows import StateMemory


@dataclass(eq=False)
class RequestStates:
    """Token ids, counters and block table of every slot, on the device.

    Sampled tokens are written on the device. The next step can therefore be gathered before the
    host has the tokens, or knows how many drafts were accepted. Drafts are stored after the tokens
    of their row; -1 stands for drafts that were not found. The row after the last slot,
    `null_slot`, belongs to no request.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    device: torch.device
    vocab_size: int

    def __post_init__(self) -> None:
        self.null_slot = self.max_num_seqs
        num_slots = self.max_num_seqs + 1
        # More columns than tokens: a step launched before a request is known to have ended writes
        # one token more, and all rows have room for the drafts of a step.
        shape = num_slots, self.max_model_len + 1 + MOST_DRAFTS
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        sizes = self.max_num_seqs, self.max_model_len, self.block_size
        self.block_tables = BlockTables(*sizes, self.device)
        self.num_computed = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        # Constants of steps with one token in each row.
        self.indices = np.arange(self.max_num_seqs, dtype=np.int64)
        self.ones = np.ones_like(self.indices)
        self.zeros = np.zeros_like(self.indices)
        self.inputs = DecodeInputs(self.max_num_seqs, self.null_slot, self.device)
        self.ops = ops.for_device(self.device)
        self.state_memory: StateMemory | None = None  # numbers are written before they are read
        self.tree: DraftTree | None = None  # the shape of drafts in slots with `is_tree`
        self.is_tree = np.zeros(num_slots, dtype=bool)  # by slot, on the host
        # int64 [max_num_seqs + 1], with M-RoPE: rotary position less column of the tokens after a
        # slot's pictures.
        self.rotary_shifts: Tensor | None = None
        self.shifted_slots = set[int]()  # whose shift is not 0

    def make_room(self, num_columns: int) -> None:
        if num_columns:
            shape = len(self.token_ids), num_columns
            live = torch.empty(shape, dtype=torch.float32, device=self.device)
            self.state_memory = StateMemory(live, live[:0], torch.empty(0, 2, dtype=torch.int64))

    @property
    def state_bytes(self) -> int:
        """The bytes of a request's recurrent states."""
        return 0 if self.state_memory is None else self.state_memory.live[0].nbytes

    def allocate_checkpoints(self, num_checkpoints: int) -> None:
        memory = self.state_memory
        if memory is not None:
            # By NumPy: see `kv_cache.allocate`.
            shape = num_checkpoints, memory.live.shape[1]
            checkpoints = torch.from_numpy(np.zeros(shape, np.float32)).to(memory.live.device)
            self.state_memory = memory._replace(checkpoints=checkpoints)

    def begin_states(self, swaps: BlockSwaps | None, rows: np.ndarray) -> None:
        """Copy checkpoints to and from slots, as they are before a step of these rows (see ROW);
        leave the other saves, which are inside of rows, to the layers.
        """
        memory = self.state_memory
        if memory is None or (swaps is None and not len(memory.saves)):
            return
        saves: list[tuple[int, int]] = []
        if swaps is not None:
            for checkpoint, slot in swaps.states_to_load:
                memory.live[slot] = memory.checkpoints[checkpoint]
            starts = (rows["num_tokens"].cumsum() - rows["num_tokens"]).tolist()
            firsts = rows["num_computed_tokens"].tolist()
            places = dict(zip(rows["slot"].tolist(), zip(starts, firsts, strict=True), strict=True))
            for slot, num_tokens, checkpoint in swaps.states_to_save:
                start, first = places[slot]
                if num_tokens == first:
                    memory.checkpoints[checkpoint] = memory.live[slot]
                else:
                    saves.append((start + num_tokens - first, checkpoint))
        saved = torch.tensor(sorted(saves), dtype=torch.int64).view(-1, 2)
        self.state_memory = memory._replace(saves=saved)

    @property
    def nbytes(self) -> int:
        parts = self.token_ids, self.block_tables.tables, *(self.state_memory or ())
        return sum(part.nbytes for part in parts)

    def add(self, request: NewRequest) -> None:
        """Put a request in its slot. Raises InvalidRequest if a token id is out of vocabulary."""
        slot = request.slot
        token_ids = np.asarray(request.token_ids, dtype=np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise InvalidRequest(
                f"a token id is not in the vocabulary, which has {self.vocab_size} tokens"
            )
        token_ids = upload(token_ids.astype(np.int32), self.device)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_computed[slot] = request.num_computed_tokens
        self.block_tables.clear(slot)
        if request.block_ids:
            # NO_BLOCK is negative; it is never read, but must be a valid block.
            self.block_tables.append(slot, [max(block, 0) for block in request.block_ids])

    def pad(self, block_id: int) -> None:
        self.block_tables.pad(block_id)
        self.inputs.pad(block_id)

    def begin_decode(self, buffers: DecodeBuffers) -> None:
        tables = self.block_tables
        state = SlotTensors(self.token_ids, self.num_computed, tables.tables)
        self.ops.begin_decode(buffers.step, buffers.seq_lens, state, tables.block_size)

    def begin_decodes(self, slots: np.ndarray) -> DecodeBuffers:
        """Return the inputs of a step in which slots, int64 [n], compute their next token; before a
        graph, without those that `begin_decode` computes.
        """
        step = self.inputs.fill(slots, self.take_changes(len(slots)))
        if not self.inputs.sizes:
            self.begin_decode(step)
        return step

    def begin_verify(
        self, slots: np.ndarray, token_slots: np.ndarray, offsets: np.ndarray
    ) -> DecodeBuffers:
        """Return the inputs of a step, on a CPU, in which slots compute their next token and
        drafts. `slots`: int64 [n]; `token_slots`: each token's slot, int64 [m]; `offsets`: each
        token's distance from the first token of its row, int64 [m].
        """
        num_computed = self.num_computed.numpy()
        columns = num_computed[token_slots] + offsets
        num_computed[slots] += 1
        step = self.inputs.fill(token_slots, self.take_changes(len(offsets)), columns)
        self.begin_decode(step)
        return step

    def take_changes(self, max_changes: int) -> np.ndarray:
        """Return the changes of the block tables, or apply them if they exceed `max_changes`."""
        changes = self.block_tables.take_changes()
        if len(changes) <= 3 * max_changes:
            return changes
        self.block_tables.apply(upload(changes, self.device))
        return NO_CHANGES

    def keep(self, slots: np.ndarray, num_kept: Tensor) -> None:
        """Count accepted drafts as computed. Both arguments are int64 [n]."""
        self.num_computed.index_add_(0, upload(slots, num_kept.device), num_kept)

    def read(self, slots: Tensor, columns: Tensor) -> Tensor:
        """Return token ids, or -1, at these columns of the slots; all are int64."""
        if self.inputs.is_shared:  # NumPy takes a third of torch's time for few tokens
            token_ids = self.token_ids.numpy()[slots.numpy(), columns.numpy()]
            return torch.from_numpy(token_ids.astype(np.int64))
        return self.token_ids[slots, columns].long()

    def write(self, slots: Tensor, columns: Tensor, token_ids: Tensor) -> None:
        """Store token ids at these columns of the slots; all are int64 of the same shape."""
        if self.inputs.is_shared:
            self.token_ids.numpy()[slots.numpy(), columns.numpy()] = token_ids.numpy()
        else:
            self.token_ids[slots, columns] = token_ids.int()

    def positions(self, columns: Tensor, places: Tensor | None) -> Tensor:
        """Return tokens' positions in their sequences, int64 [n]; for `places` see `DraftTree`."""
        return (
            columns if self.tree is None or places is None else self.tree.positions(columns, places)
        )

    def rotary_positions(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the positions by which tokens after all pictures rotate; all are int64 [n]."""
        if self.rotary_shifts is None:
            return positions
        return positions + self.rotary_shifts[slots]

    def shift(self, slot: int, shift: int) -> None:
        """Set the shift of a slot's rotary positions."""
        if self.rotary_shifts is not None and (shift or slot in self.shifted_slots):
            self.rotary_shifts[slot] = shift
            self.shifted_slots.add(slot)
            if not shift:
                self.shifted_slots.remove(slot)

    def tails(self, slots: Tensor, columns: Tensor, places: Tensor | None) -> Tensor | None:
        if self.tree is None or places is None:
            return None
        return self.block_tables.slot_mapping(slots.unsqueeze(-1), self.tree.tails(columns, places))

    def write_drafts(self, scheduled: list[ScheduledRequest]) -> None:
        drafts = [
            (row.slot, row.num_scheduled_tokens - row.num_drafts + offset, token_id)
            for row in scheduled
            for offset, token_id in enumerate(row.scheduled_spec_decode_tokens)
        ]
        if not drafts:
            return
        columns = np.array(drafts, dtype=np.int64).T
        slots, offsets, token_ids = upload(columns, self.device)
        self.write(slots, self.num_computed[slots] + offsets, token_ids)
