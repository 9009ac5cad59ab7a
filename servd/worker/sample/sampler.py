"""Sampler: samples one token per row of logits, by the parameters of the row's request.

    sampler = Sampler(vocab_size, max_num_seqs, device)
    sampler.add(slot, params, prompt_token_ids, output_token_ids, eos_token_ids)  # a request enters
    metadata = sampler.make_metadata(slots, host_slots, positions)
    output = sampler(logits, metadata, bitmask)  # overwrites the logits
    sampler.remove(slot)

Order, equivalent to vLLM's: log-probabilities of the raw logits; the logits processors in the order
of their package; the fused pass of bias, bitmask and penalties; temperature; min-p; top-k and
top-p; log-probabilities of the processed logits, if those are asked for; draw. Requests with a
sampler of llama.cpp have its order, in which the temperature comes last. The host knows what each
step needs, and never waits for the device. A token depends only on its row's logits,
parameters, earlier tokens, seed and position, never on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servd.messages.params import MAX_LOGPROBS, LogprobsMode, SamplingParams
from servd.worker.device.device import upload
from servd.worker.sample import logits_processors, ops
from servd.worker.sample.fixed_point import MAX_VOCAB_SIZE
from servd.worker.sample.logit_edits import Bitmasks, LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.logprobs import LogprobsTensors, SampledLogprobs
from servd.worker.sample.sampling_metadata import SamplingMetadata
from servd.worker.sample.top_k_top_p import TopKTopPFilter
from servd.worker.sample.verification import SpecDecodeMetadata

# Features that a row can use, as bits; from FIRST_PROCESSOR on one for each logits processor.
RANDOM = 1
FILTERED = 2
LOGPROBS = 4
IN_ORDER = 8  # of llama.cpp
FIRST_PROCESSOR = 16
# Turns of logits processors: the first after the fused pass, the first of those that make a row
# IN_ORDER, and those of top-k, and of top-p and min-p, in such rows.
LATE = 100
FIRST_IN_ORDER = 110
TOP_K = 120
TOP_P = 140
MAX_NUMBERS = 2**21  # logits that such a processor changes at once: it takes 60 bytes for each


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of a step, on the device."""

    token_ids: Tensor  # [n] int64; if `best` is None, as returned by `reference.choose`
    logprobs: LogprobsTensors | None  # None: no row requested any
    num_kept: Tensor | None = None  # [rows] int64: accepted drafts; None: the step had no drafts
    # [n] int64, with draft trees: index in the step of each token, sorted so that those after
    # accepted drafts come first in each row.
    order: Tensor | None = None
    best: Tensor | None = None  # [n, 1]: logits of the tokens, of any type

    @property
    def best_logits(self) -> npt.NDArray[np.float32]:
        """The logits of the tokens, float32 [n], on the host: NaN or +inf if the row has such
        logits, -inf if all of its tokens are forbidden.
        """
        assert self.best is not None
        return self.best.float().numpy()[:, 0]  # NaN counts as the maximum

    def to_host(self) -> SamplerOutput:
        return SamplerOutput(
            self.token_ids.to("cpu", non_blocking=True),
            self.logprobs and self.logprobs.to_host(),
            None if self.num_kept is None else self.num_kept.to("cpu", non_blocking=True),
            best=None if self.best is None else self.best.to("cpu", non_blocking=True),
        )


class Sampler:
    """Holds the sampling state of every slot and samples for any subset of the slots."""

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        device: torch.device,
        mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        assert vocab_size <= MAX_VOCAB_SIZE, vocab_size
        self.features = np.zeros(max_num_seqs, dtype=np.int64)  # feature bits of each slot
        self.temperature = torch.ones(max_num_seqs, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.ops = ops.for_device(device)
        self.top_k_top_p = TopKTopPFilter(vocab_size, max_num_seqs, device)
        self.top_k = TopKTopPFilter(vocab_size, max_num_seqs, device)  # IN_ORDER
        self.top_p = TopKTopPFilter(vocab_size, max_num_seqs, device)
        self.logprobs = SampledLogprobs(mode.endswith("logits"))
        self.tells_processed = mode.startswith("processed")
        self.null_slot = max_num_seqs  # for rows after a rejected draft, which must change no state
        processors = logits_processors.load(vocab_size, max_num_seqs + 1, device)
        self.processors = [(FIRST_PROCESSOR << i, p) for i, p in enumerate(processors)]
        self.late = sum(bit for bit, p in self.processors if p.order >= LATE)
        self.in_order = sum(bit for bit, p in self.processors if p.order >= FIRST_IN_ORDER)
        # The bits of processors that depend on the tokens sampled before.
        self.stateful = sum(
            bit for bit, p in self.processors if type(p).update is not LogitsProcessor.update
        )

    @property
    def costliest(self) -> SamplingParams:
        """Parameters that use every feature, for the memory profile."""
        examples = [processor.example.items() for _, processor in self.processors]
        fields = dict(item for items in examples for item in items)
        return SamplingParams(
            top_p=0.9, top_k=50, min_p=0.1, seed=0, logprobs=MAX_LOGPROBS, **fields
        )

    @property
    def examples(self) -> list[SamplingParams]:
        """Parameters for each way to sample, to compile and warm up all kernels."""
        plain: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {},
            {"logprobs": 1},
            {"top_p": 0.9},
            {"top_k": 50},
            {"min_p": 0.1},
            {"logit_bias": {0: 1.0}, "repetition_penalty": 1.1},  # in one pass
        ]
        featured = [dict(processor.example) for _, processor in self.processors]
        return [SamplingParams(seed=0, **fields) for fields in [*plain, *featured]]

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> bool:
        """Add a request; after preemption, with its outputs so far. Return whether its drafts may
        be trees: only without a stateful processor or grammar. `prompt_token_ids`: at
        least one. `output_token_ids`: sampled before; empty at first. `eos_token_ids`: forbidden,
        with params.stop_token_ids, for the first params.min_tokens outputs.
        """
        request = SlotRequest(slot, params, prompt_token_ids, output_token_ids, eos_token_ids)
        self.features[slot] = 0
        features = sum(bit for bit, processor in self.processors if processor.add(request))
        if not params.is_greedy:
            features |= RANDOM
            self.temperature[slot] = params.temperature
            self.seeds[slot] = params.seed or 0
            limits = params
            if features & self.in_order:
                features |= IN_ORDER
                limits = SamplingParams() if params.mirostat else params
                self.top_k.add(slot, SamplingParams(top_k=limits.top_k))
                self.top_p.add(slot, SamplingParams(top_p=limits.top_p, min_p=limits.min_p))
                limits = SamplingParams()
            if self.top_k_top_p.add(slot, limits):
                features |= FILTERED
        may_branch = not (features & self.stateful or params.structured_output)
        if self.logprobs.add(slot, params):
            features |= LOGPROBS
        self.features[slot] = features
        return may_branch

    def is_plain(self, host_slots: npt.NDArray[np.int64]) -> bool:
        return not self.features[host_slots].any()

    def remove(self, slot: int) -> None:
        self.features[slot] = 0

    def make_metadata(
        self, slots: Tensor, host_slots: Sequence[int] | npt.NDArray[np.int64], positions: Tensor
    ) -> SamplingMetadata:
        """Return the rows of a step; for the arguments see `SamplingMetadata`. `slots` are distinct
        without drafts.
        """
        host_slots = np.asarray(host_slots, dtype=np.int64)
        return SamplingMetadata(slots, positions, host_slots, self.features[host_slots])

    def __call__(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        bitmasks: Bitmasks | None = None,
        drafts: SpecDecodeMetadata | None = None,
    ) -> SamplerOutput:
        """Sample one token per row. A request with drafts has one more row for each draft.

        Args:
            logits: [n, vocab] float32 or narrower; overwritten. A row without a finite maximum (all
                -inf, +inf, NaN) yields its argmax, greedy or not, and does not affect other rows.
            bitmasks: of the rows with a grammar, on the device.
            drafts: the drafts of a step with drafts; then n is `SpecDecodeMetadata`'s m.
        """
        used = int(np.bitwise_or.reduce(metadata.features))
        if used & ~(RANDOM | FILTERED):  # a mask rounds nothing
            logits = logits.float()
        reported_rows = metadata.subset(LOGPROBS) if used & LOGPROBS else None
        reported = None  # logits to report, of requesting rows; of all rows, if `order` may change
        in_order = drafts is None or drafts.parents is None
        if reported_rows is not None and not self.tells_processed:
            reported = reported_rows.copy_of(logits) if in_order else logits.clone()
        if drafts is not None and used & self.stateful:
            token_ids = self._choose_in_turn(logits, metadata, bitmasks, drafts)
        else:
            token_ids = self._choose(logits, metadata, bitmasks)
        if reported_rows is not None and reported is None:
            reported = reported_rows.copy_of(logits) if in_order else logits
        best = logits.gather(1, token_ids.unsqueeze(1))
        num_kept = None
        order = None
        logprobs = None
        if drafts is not None:
            token_ids = drafts.settle(token_ids)
            num_kept, order = drafts.verify(token_ids)
        if order is not None:
            token_ids = token_ids[order]
            best = best[order]
            if reported_rows is not None and reported is not None:
                reported = reported[order[reported_rows.index]]
        if reported_rows is not None and reported is not None:
            logprobs = self.logprobs.gather(
                reported, token_ids, reported_rows, len(metadata.host_slots)
            )
        return SamplerOutput(token_ids, logprobs, num_kept, order, best)

    def _choose(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        bitmasks: Bitmasks | None,
        is_kept: Tensor | None = None,
    ) -> Tensor:
        """Return sampled tokens [n]. Rows that are not `is_kept`, [n] bool, change no state."""
        used = int(np.bitwise_or.reduce(metadata.features))
        active = [(bit, p, metadata.subset(bit)) for bit, p in self.processors if used & bit]
        edits = LogitEdits(bitmasks=bitmasks)
        for _, processor, rows in active:
            if processor.order < LATE:
                processor.apply(logits, rows, edits)
        token_ids = self.ops.edit_logits(logits, edits)
        if used & self.late:
            turns = [(p.order, p.apply, rows) for _, p, rows in active if p.order >= LATE]
            if used & IN_ORDER:
                rows = metadata.subset(IN_ORDER)
                turns += [(TOP_K, self.top_k.apply, rows), (TOP_P, self.top_p.apply, rows)]
            size = max(MAX_NUMBERS // logits.shape[1], 1)
            for _, apply, rows in sorted(turns, key=itemgetter(0)):
                for part in rows.parts(size):
                    apply(logits, part, edits)
            rows = metadata.subset(self.late)
            token_ids[rows.index] = logits[rows.index].argmax(dim=-1)
        if used & RANDOM:
            self._draw(logits, token_ids, metadata.subset(RANDOM))
        if is_kept is not None:
            metadata = replace(metadata, slots=metadata.slots.masked_fill(~is_kept, self.null_slot))
        for bit, processor, rows in active:
            processor.update(token_ids, rows if is_kept is None else metadata.subset(bit))
        return token_ids

    def _choose_in_turn(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        bitmasks: Bitmasks | None,
        drafts: SpecDecodeMetadata,
    ) -> Tensor:
        """Sample rows whose processors depend on earlier drafts: draft by draft in all rows."""
        token_ids = torch.empty_like(metadata.slots)
        is_kept = torch.ones(len(drafts.num_drafts), dtype=torch.bool, device=metadata.slots.device)
        for rows, tokens in drafts.turns():
            row, index = upload(np.stack((rows, tokens)), metadata.slots.device)
            part = metadata.select(index, tokens, None)
            masks = None if bitmasks is None else bitmasks.of_rows(index)
            row_logits = logits[index]
            choices = self._choose(row_logits, part, masks, is_kept[row])
            token_ids[index] = choices
            if self.tells_processed:
                logits[index] = row_logits
            else:  # those of the choices, which show whether every token was forbidden
                logits[index, choices] = row_logits.gather(1, choices.unsqueeze(1)).squeeze(1)
            is_kept[row] &= token_ids[index] == drafts.draft_ids[index]
        return token_ids

    def _draw(self, logits: Tensor, token_ids: Tensor, rows: SamplingMetadata) -> None:
        """Replace the most probable tokens by drawn tokens in the rows that draw. If processed
        logits are reported, replace the rows' logits too.
        """
        best = token_ids[rows.index]
        row_logits = logits[rows.index].float()
        peaks = row_logits.gather(1, best.unsqueeze(1)).squeeze(1)  # NaN if the row holds any
        weights = self.ops.to_weights(row_logits, peaks, self.temperature[rows.slots])
        lowest = self.top_k_top_p.lowest(weights, rows, FILTERED)
        drawn = self.ops.draw(weights, lowest, self.seeds[rows.slots], rows.positions)
        token_ids[rows.index] = torch.where(peaks.isfinite(), drawn, best)
        if self.tells_processed and (rows.features & LOGPROBS).any():
            scaled = row_logits / self.temperature[rows.slots].unsqueeze(1)
            logits[rows.index] = scaled.masked_fill_(weights < lowest.unsqueeze(1), -torch.inf)
