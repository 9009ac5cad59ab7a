"""draft_model: a smaller model with the same vocabulary drafts tokens
(https://arxiv.org/abs/2211.17192).

Its own KV cache has the block numbers of the target's cache. A pass never reads keys and values
after a row's newest token, which belong to rejected drafts; later passes overwrite them.
"""

import numpy as np
import torch
from torch import Tensor

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.config.speculative import SpeculativeConfig
from servd.messages.engine import NewRequest
from servd.worker.attention import AttentionBatch
from servd.worker.batch.draft_chain import Pass
from servd.worker.batch.input_batch import AttentionRows, InputBatch
from servd.worker.device.device import upload
from servd.worker.kv import kv_cache
from servd.worker.layers.attention import ForwardContext
from servd.worker.loading import model_loader
from servd.worker.sample import ops
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.spec_decode import Proposer, Target

MAX_DECODE_TOKENS = 8  # per row, in a pass where each token is a row of the attention


class DraftModelProposer(Proposer):
    """In one pass, catches up with the rows that need drafts and drafts their first token. Each
    further draft takes one more pass.

    Prompts are computed immediately, because other requests may find them in the prefix cache. Rows
    that need no drafts are not computed, which saves time where drafts do not pay. Raises
    ConfigError if the draft has another vocabulary, keeps a state, or cannot run here.
    """

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        options = target.config
        parallel = target.parallel
        assert options.scheduler.max_num_seqs is not None
        assert options.scheduler.max_num_batched_tokens is not None
        spec = read_spec(target.find_draft())
        if spec.vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"--speculative-config: the draft {config.model} has {spec.vocab_size} tokens in "
                f"its vocabulary, but the model has {target.spec.vocab_size}: use a draft of the "
                "same family"
            )
        if spec.keeps_state:
            raise ConfigError(
                f"--speculative-config: layers of the draft {config.model} ({spec.model_type}) "
                "keep a state that cannot drop rejected drafts: use a draft whose layers all "
                "have a KV cache"
            )
        dtype = target.backend.spec.dtype
        device = target.backend.spec.device
        self.spec = spec
        self.model = target.load(
            lambda: model_loader.build_model(spec, dtype, device, parallel), spec.folder
        )
        self.backend = target.make_backend(self.model)
        self.ops = ops.for_device(device)
        self.max_model_len = min(
            config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings
        )
        max_num_seqs = options.scheduler.max_num_seqs
        # A step of the target, and the newest token of each row.
        self.max_num_tokens = options.scheduler.max_num_batched_tokens + max_num_seqs
        self.max_num_rows = (config.num_speculative_tokens + 1) * max_num_seqs
        # Tokens of each slot that the target has computed and the draft has not, at most: the host
        # counts drafts that were not kept. -1: the draft has computed the newest token as well.
        self.behind = np.zeros(max_num_seqs, dtype=np.int64)

    @property
    def bytes_per_block(self) -> int:
        return kv_cache.bytes_per_block(self.backend, self.model)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache, and a chain whose graphs contain its addresses."""
        self.kv_caches = kv_cache.allocate(self.backend, self.model, num_blocks)
        self.chain = self.target.make_chain(self, self.states.max_num_seqs, self.max_num_rows)

    def add(self, request: NewRequest) -> None:
        """Note that a request enters its slot. The draft's blocks are cached like the target's."""
        self.behind[request.slot] = 0

    def follow(self, batch: InputBatch, hidden: Tensor, num_kept: Tensor | None) -> None:
        """Compute the step's tokens, tokens skipped before, and the newest token of rows that need
        drafts. Rows without skipped tokens can draft.
        """
        if batch.is_plain:
            self.behind[batch.host_slots] += 1
            return
        slots = batch.host_slots
        room = self.max_model_len - batch.seq_lens
        limits = np.minimum(batch.max_new_drafts, room).clip(0)  # [num_rows]
        wants = limits > 0
        missing = np.minimum(self.behind[slots] + batch.query_lens, batch.seq_lens) + wants
        runs = wants | ((batch.query_lens > 1) & (room >= 0))
        # Short rows first, so that a long row, computed in pieces, delays no other row.
        order = np.argsort(missing)
        lens = np.where(runs, missing, 0)
        room_left = self.max_num_tokens - np.cumsum(lens[order]) + lens[order]
        lens[order] = np.minimum(lens[order], room_left.clip(0))
        self.behind[slots] = missing - wants - lens
        limits[lens < missing] = 0
        if limits.max(initial=0) > 1:  # chains overwrite the newest token of rows with one draft
            self.behind[slots[limits == 1]] += 1
        self.limits = limits[batch.max_new_drafts > 0]
        if lens.any():
            self.first = self._catch_up(batch, lens, missing - wants, np.flatnonzero(limits))
            if not limits.any():
                self.chain.run(self.first)

    def _catch_up(
        self, batch: InputBatch, lens: np.ndarray, behind: np.ndarray, drafting: np.ndarray
    ) -> Pass:
        """Return the pass over tokens of a step's rows. It stays within a row's blocks, which have
        room for `seq_lens` tokens and the newest token.

        Args:
            lens: [num_rows] int64: how many tokens of each row the pass computes.
            behind: [num_rows] int64: how far before its newest token a row's pass begins, but not
                before its first token.
            drafting: [n] int64: rows whose newest token the pass computes.
        """
        rows = np.flatnonzero(lens)
        ends = np.cumsum(lens)
        firsts = ends - lens
        parts = (
            np.repeat(batch.host_slots, lens),
            np.repeat(behind, lens),
            np.arange(ends[-1]) - np.repeat(firsts, lens),
            firsts[drafting],
            ends[rows] - 1,
        )
        packed = upload(np.concatenate(parts), batch.tokens.device)
        slots, back, offsets, firsts_d, ends_d = packed.split([len(part) for part in parts])
        newest = self.states.num_computed[slots]
        positions = (newest - back).clamp_(min=0) + offsets
        input_ids = self.states.token_ids[slots, positions].long()
        attention_rows = None
        if len(slots) > self.max_num_rows or lens.max() > MAX_DECODE_TOKENS:
            bounds = batch.seq_lens[rows] + 1
            if positions.device.type == "cpu":
                bounds = positions.numpy()[ends[rows] - 1] + 1
            attention_rows = AttentionRows(lens[rows], bounds, ends_d)
        last = firsts_d + newest[firsts_d] - positions[firsts_d]
        return Pass(input_ids, positions, slots, positions, (), last, attention_rows)

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        drafts = slots.new_full((len(slots), num_drafts), -1)
        rows = np.flatnonzero(self.limits)
        max_drafts = int(self.limits.max(initial=0))
        if not max_drafts:
            return drafts
        limits = upload(self.limits[rows], slots.device)
        index = upload(rows, slots.device)
        slots = slots[index]
        # A row has blocks for its drafts except the last, which is not computed: the chain puts
        # further drafts in the row's last place.
        depths = torch.minimum(self.after[: max_drafts - 1].unsqueeze(1), limits - 1)
        positions = self.states.num_computed[slots] + depths  # [most - 1, n]
        made = self.chain(self.first, slots, positions, positions)
        drafts[index, :max_drafts] = made.masked_fill_(
            self.after[:max_drafts] > limits.unsqueeze(1), -1
        )
        return drafts

    def top(self, features: Tensor) -> Tensor:
        return self.ops.edit_logits(self.model.compute_logits(features), LogitEdits())

    def advance(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, features: Tensor
    ) -> Tensor:
        return self.begin(token_ids, positions, attention)

    def begin(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, *read: Tensor
    ) -> Tensor:
        ctx = ForwardContext(self.backend, attention, self.kv_caches)
        return self.model(token_ids, positions, ctx)
