"""Sampler: one token per row of logits, each row by its own request's parameters.

    sampler = Sampler(vocab_size, max_num_seqs, device)
    sampler.add(slot, params, prompt_token_ids, output_token_ids, eos_token_ids)   # a request
    enters its slot output = sampler(logits, slots, host_slots, positions, bitmask)                #
    overwrites the logits sampler.remove(slot)

Order, equal in effect to vLLM's: log-probabilities of the raw logits; min_tokens, bad_words;
logit_bias; allowed_token_ids, grammar bitmask; penalties; thinking_token_budget; temperature;
min-p; top-k and top-p; draw. Which features a step needs is known on the host, and nothing on the
device is waited for. A token depends only on its row's logits, parameters, earlier tokens, seed and
position, never on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servd.params import SamplingParams
from servd.worker.sample import ops
from servd.worker.sample.allowed_tokens import AllowedTokens
from servd.worker.sample.bad_words import BadWords
from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step
from servd.worker.sample.logit_bias import LogitBias
from servd.worker.sample.logprobs import LogprobsTensors, gather_logprobs
from servd.worker.sample.min_tokens import MinTokens
from servd.worker.sample.narrowing import Narrowing
from servd.worker.sample.penalties import Penalties
from servd.worker.sample.thinking_budget import ThinkingBudget
from servd.worker.sample.weights import MAX_VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What a step sampled, still on the device."""

    token_ids: Tensor  # [n] int64
    logprobs: LogprobsTensors | None  # None if no row asked

    def to_host(self) -> SamplerOutput:
        """Start the copy to the host."""
        return SamplerOutput(
            self.token_ids.to("cpu", non_blocking=True), self.logprobs and self.logprobs.to_host()
        )


class Sampler:
    """Holds the sampling state of every slot and samples for any subset of the slots.

    Args:
        vocab_size: columns of the logits.
        max_num_seqs: number of slots.
        device: where the logits will be.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        assert vocab_size <= MAX_VOCAB_SIZE, vocab_size
        self.features = np.zeros(max_num_seqs, dtype=np.int64)  # Feature bits per slot
        self.num_logprobs: list[int | None] = [None] * max_num_seqs
        self.named: dict[
            int, list[int]
        ] = {}  # slot -> tokens whose log-probabilities are asked for by name
        self.temperature = torch.ones(max_num_seqs, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.ops = ops.for_device(device)
        self.bad_words = BadWords(max_num_seqs, device)
        self.steps: list[Step] = [MinTokens(max_num_seqs, device), self.bad_words]
        self.logit_bias = LogitBias(device)
        self.allowed_tokens = AllowedTokens(vocab_size, max_num_seqs, device)
        self.penalties = Penalties(vocab_size, max_num_seqs, device)
        self.thinking_budget = ThinkingBudget(max_num_seqs, device)
        self.narrowing = Narrowing(vocab_size, max_num_seqs, device, self.ops)  # of random rows

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        """A request enters the slot. After preemption it enters with its outputs so far and goes on
        as if never gone.

        Args:
            slot: its row of state.
            params: of the request.
            prompt_token_ids: at least one.
            output_token_ids: sampled before; empty at first.
            eos_token_ids: forbidden, with params.stop_token_ids, for the first params.min_tokens
                outputs.
        """
        request = SlotRequest(slot, params, prompt_token_ids, output_token_ids, eos_token_ids)
        features = Feature(0)
        for parameter in (
            *self.steps,
            self.logit_bias,
            self.allowed_tokens,
            self.penalties,
            self.thinking_budget,
        ):
            features |= parameter.add(request)
        if not params.is_greedy:
            features |= Feature.RANDOM
            self.temperature[slot] = params.temperature
            self.seeds[slot] = params.seed or 0
            features |= self.narrowing.add(request)
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
        self.num_logprobs[slot] = params.logprobs
        self.named.pop(slot, None)
        if params.logprob_token_ids:
            self.named[slot] = params.logprob_token_ids
        self.features[slot] = int(features)

    def remove(self, slot: int) -> None:
        """The request leaves its slot."""
        self.features[slot] = 0

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        host_slots: Sequence[int] | npt.NDArray[np.int64],
        positions: Tensor,
        bitmask: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: [n, vocab] float32; overwritten. A row without a finite maximum (all -inf, +inf,
                NaN) yields its argmax, greedy or not, and leaves the other rows alone.
            slots: [n] int64 on the device, distinct.
            host_slots: the same on the host.
            positions: [n] int64 on the device: the index in the sequence that the sampled token
                will have.
            bitmask: [n, ceil(vocab / 32)] int32 on the device, bit set = allowed; all -1 in rows
                without a grammar.
        """
        host_slots = np.asarray(host_slots, dtype=np.int64)
        batch = Batch(slots, positions, host_slots, self.features[host_slots])
        raw_logits = self._raw_logits(logits, batch)
        for step in self.steps:
            if batch.uses(step.features):
                step.apply(logits, batch)
        biased = self.logit_bias.of(batch) if batch.uses(Feature.LOGIT_BIAS) else None
        if batch.uses(Feature.ALLOWED_TOKENS):
            bitmask = self.allowed_tokens.restrict(bitmask, batch)
        penalized = self.penalties.of(batch) if batch.uses(Feature.PENALTIES) else None
        token_ids = self.ops.shift(logits, biased, bitmask, penalized)
        if batch.uses(Feature.THINKING_BUDGET):
            self.thinking_budget.apply(logits, batch)
            token_ids = self.ops.shift(logits)
        if batch.uses(Feature.RANDOM):
            self._sample(logits, token_ids, batch)
        if batch.uses(Feature.PENALTIES):
            self.penalties.update(token_ids, batch)
        if batch.uses(Feature.BAD_WORDS):
            self.bad_words.update(token_ids, batch)
        if batch.uses(Feature.THINKING_BUDGET):
            self.thinking_budget.update(token_ids, batch)
        return SamplerOutput(token_ids, self._logprobs(raw_logits, token_ids, batch))

    def _sample(self, logits: Tensor, token_ids: Tensor, batch: Batch) -> None:
        """Replace the most probable tokens of random rows by drawn ones."""
        rows, random = batch.subset(Feature.RANDOM)
        best, logits = token_ids[rows], logits[rows]
        peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)  # NaN if the row holds any
        weights = self.ops.to_weights(logits, peaks, self.temperature[random.slots])
        lowest = self.narrowing.lowest(weights, random)
        drawn = self.ops.draw(weights, lowest, self.seeds[random.slots], random.positions)
        token_ids[rows] = torch.where(peaks.isfinite(), drawn, best)

    def _raw_logits(self, logits: Tensor, batch: Batch) -> Tensor | None:
        """A copy of the rows whose log-probabilities are asked for."""
        if not batch.uses(Feature.LOGPROBS):
            return None
        rows, _ = batch.subset(Feature.LOGPROBS)
        return logits.clone() if isinstance(rows, slice) else logits[rows]

    def _logprobs(
        self, raw_logits: Tensor | None, token_ids: Tensor, batch: Batch
    ) -> LogprobsTensors | None:
        if raw_logits is None:
            return None
        rows, asked = batch.subset(Feature.LOGPROBS)
        named = (
            [self.named.get(slot, []) for slot in asked.host_slots.tolist()] if self.named else []
        )
        num_logprobs = [self.num_logprobs[slot] for slot in batch.host_slots]
        return gather_logprobs(raw_logits, token_ids[rows], num_logprobs, named)
