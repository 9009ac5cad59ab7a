"""draft_model: a smaller model with the same vocabulary writes ahead
(https://arxiv.org/abs/2211.17192).

Its keys and values lie in blocks with the numbers of the target's, so that block tables and the
prefix cache hold for both. Those past a row's newest token are of drafts that were not kept; a pass
reads none of them, and computes them again when the row comes there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servd.errors import ConfigError
from servd.hf import read_spec
from servd.messages import NewRequest
from servd.speculative import SpeculativeConfig
from servd.worker import kv_cache, model_loader
from servd.worker.attention import AttentionBatch
from servd.worker.device import upload
from servd.worker.input_batch import AttentionRows, InputBatch
from servd.worker.layers.attention import ForwardContext
from servd.worker.sample import ops
from servd.worker.spec_decode import Proposer, Target

MAX_DECODE_TOKENS = 8  # of a row in a pass where each token is a row of the attention
MAX_LEFT = 64  # tokens that are computed when a request leaves


class DraftModelProposer(Proposer):
    """Catches up with the rows that want drafts and writes the first one in one pass, then each
    further draft in one more.

    Prompts are followed at once, since others may find them in the prefix cache. Rows that want no
    drafts are left behind, which costs nothing where drafts do not pay.

    Raises:
        ConfigError: the draft has another vocabulary, or cannot run here.
    """

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        options, parallel = target.config, target.parallel
        assert options.scheduler.max_num_seqs is not None
        assert options.scheduler.max_num_batched_tokens is not None
        spec = read_spec(target.find_draft())
        if spec.vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"--speculative-config: the draft {config.model} has {spec.vocab_size} tokens in "
                f"its vocabulary and the model {target.spec.vocab_size}: name a draft of the same "
                "family"
            )
        dtype, device = target.backend.spec.dtype, target.backend.spec.device
        self.spec = spec
        self.model = target.load(
            lambda: model_loader.build_model(spec, dtype, device, parallel), spec.folder
        )
        self.backend = target.make_backend(spec, self.model.sliding_window)
        self.ops = ops.for_device(device)
        self.max_model_len = min(
            config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings
        )
        self.max_num_tokens = options.scheduler.max_num_batched_tokens
        self.max_num_rows = max(
            (config.num_speculative_tokens + 2) * options.scheduler.max_num_seqs, MAX_LEFT
        )
        # Tokens of each slot that the target has computed and the draft has not.
        self.behind = np.zeros(options.scheduler.max_num_seqs, dtype=np.int64)

    @property
    def bytes_per_block(self) -> int:
        """Of its own layers."""
        return kv_cache.bytes_per_block(self.backend, self.spec.num_layers)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Programs know its addresses."""
        self.kv_caches = kv_cache.allocate(self.backend, self.spec, num_blocks)
        self.decode = self.target.make_decoder(self._run, self.max_num_rows)

    def add(self, request: NewRequest) -> None:
        """What the prefix cache has of the target, it has of the draft."""
        self.behind[request.slot] = 0

    def remove(self, slot: int) -> None:
        """Others may find its blocks in the prefix cache."""
        behind, self.behind[slot] = int(self.behind[slot]), 0
        if 0 < behind <= MAX_LEFT:
            slots = self.states.num_computed.new_full((behind,), slot)
            positions = self.states.num_computed[slots] + torch.arange(-behind, 0).to(slots)
            self.decode(slots, positions)

    def follow(self, batch: InputBatch, hidden: Tensor) -> None:
        """Compute the tokens of the step, those before that were left, and the newest one of rows
        that want drafts.
        """
        room = self.max_model_len - batch.seq_lens
        limits = np.minimum(batch.max_new_drafts, room).clip(0)  # [num_rows]
        num_tokens = self.behind[batch.host_slots] + batch.query_lens
        runs = (limits > 0) | ((batch.query_lens > 1) & (room >= 0))
        runs &= np.cumsum(np.where(runs, num_tokens, 0)) <= self.max_num_tokens
        limits[~runs] = 0
        self.behind[batch.host_slots] = np.where(runs, 0, num_tokens)
        self.limits = limits[batch.max_new_drafts > 0]
        if runs.any():
            hidden = self._catch_up(batch, np.flatnonzero(runs), num_tokens, limits > 0)
            if len(hidden):
                self.first = self._choose(hidden)

    def _catch_up(
        self, batch: InputBatch, rows: np.ndarray, num_tokens: np.ndarray, wants: np.ndarray
    ) -> Tensor:
        """Compute the last tokens of rows of a step.

        Args:
            batch: the step.
            rows: [n] int64: indices in it.
            num_tokens: [num_rows] int64: of each row up to its last token in the step.
            wants: [num_rows] bool: rows whose newest token is computed too.

        Returns:
            hidden states of the newest tokens, [wants.sum(), hidden].
        """
        states, lens = self.states, num_tokens[rows]
        wanted, ends = np.flatnonzero(wants), np.cumsum(lens)
        # From the last tokens of the rows in the step, whose positions the device knows.
        last = np.repeat((np.cumsum(batch.query_lens) - 1)[rows], lens)
        offsets = np.arange(ends[-1]) - np.repeat(ends - 1, lens)
        parts = last, offsets, batch.host_slots[wanted]
        packed = upload(np.concatenate(parts), batch.tokens.device)
        last_d, offsets_d, wanted_d = packed.split([len(part) for part in parts])
        slots, positions = batch.tokens[:, last_d]
        newest = states.num_computed[wanted_d]
        slots, positions = torch.cat((slots, wanted_d)), torch.cat((positions + offsets_d, newest))
        if len(slots) <= self.max_num_rows and lens.max() <= MAX_DECODE_TOKENS:
            return self.decode(slots, positions)[ends[-1] :]
        lens = np.concatenate((lens, np.ones_like(wanted)))
        ends = np.cumsum(lens) - 1
        bounds = np.concatenate((batch.seq_lens[rows], batch.seq_lens[wanted] + 1))
        if positions.device.type == "cpu":
            bounds = positions.numpy()[ends] + 1
        attention = AttentionRows(lens, bounds, upload(ends, positions.device)).gather(
            states, slots, positions
        )
        input_ids = states.token_ids[slots, positions].long()
        return self._run(input_ids, positions, attention)[len(slots) - len(wanted) :]

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, one after the other."""
        newest = self.states.num_computed[slots]  # [n]
        drafts = slots.new_zeros(len(slots), num_drafts)
        for step in range(num_drafts):
            rows = upload(np.flatnonzero(self.limits > step), slots.device)
            if not len(rows):
                break
            positions = newest[rows] + step
            tokens = self._choose(self.decode(slots[rows], positions)) if step else self.first
            drafts[rows, step] = tokens
            self.states.write(slots[rows], positions + 1, tokens)
        return drafts, upload(self.limits, slots.device)

    def _run(self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch) -> Tensor:
        ctx = ForwardContext(self.backend, self.backend.build_metadata(attention), self.kv_caches)
        return self.model(input_ids, positions, ctx)

    def _choose(self, hidden: Tensor) -> Tensor:
        """The likeliest next tokens, [n] int64, after [n, hidden]."""
        return self.ops.shift(self.model.compute_logits(hidden).float())


Proposer = DraftModelProposer  # the name that every file of this package has
