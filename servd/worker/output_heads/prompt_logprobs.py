"""Log-probabilities of prompt tokens, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from servd.messages.engine import ModelRunnerOutput, NewRequest, PromptLogprobs, TokenLogprobs
from servd.messages.params import SamplingParams
from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.device import upload
from servd.worker.output_heads import OutputHead
from servd.worker.sample.logprobs import LogprobsTensors, gather_logprobs


class PromptLogprobsHead(OutputHead):
    """Scores each prompt token by the logits of the token before it. It computes at most as many
    rows at once as a step samples, because memory is reserved for these.
    """

    def __post_init__(self) -> None:
        self.max_rows = self.states.max_num_seqs
        # Slot -> (tokens in the prompt, k most likely).
        self.requested: dict[int, tuple[int, int]] = {}

    def add(self, request: NewRequest) -> None:
        params = request.params
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            self.requested[request.slot] = (request.num_prompt_tokens, params.prompt_logprobs)

    def remove(self, slot: int) -> None:
        self.requested.pop(slot, None)

    def read(self, hidden: Tensor, batch: InputBatch) -> PromptLogprobsPart | None:
        """Score the prompt tokens after each token of the step. `hidden`: [num_tokens, hidden]."""
        if not self.requested:
            return None
        parts: list[tuple[int, int, int]] = []
        tokens: list[np.ndarray] = []  # index in the step
        targets: list[np.ndarray] = []  # index in the sequence of the token that follows
        slots: list[np.ndarray] = []
        num_logprobs: list[int | None] = []
        lens = batch.query_lens
        starts = np.cumsum(lens) - lens
        for row, slot in enumerate(batch.host_slots.tolist()):
            num_prompt_tokens, k = self.requested.get(slot, (0, 0))
            first = int(batch.seq_lens[row] - lens[row])
            count = min(int(lens[row]), num_prompt_tokens - 1 - first)
            if count > 0:
                parts.append((row, first + 1, count))
                tokens.append(np.arange(starts[row], starts[row] + count))
                targets.append(np.arange(first + 1, first + 1 + count))
                slots.append(np.full(count, slot))
                num_logprobs += [k] * count
        if not parts:
            return None
        columns = [np.concatenate(chunks) for chunks in (tokens, slots, targets)]
        packed = upload(np.stack(columns), hidden.device)
        target_ids = self.states.token_ids[packed[1], packed[2]].long()
        return PromptLogprobsPart(parts, self._score(hidden, packed[0], target_ids, num_logprobs))

    def _score(
        self, hidden: Tensor, tokens: Tensor, target_ids: Tensor, num_logprobs: list[int | None]
    ) -> list[LogprobsTensors]:
        slices: list[LogprobsTensors] = []
        for i in range(0, len(tokens), self.max_rows):
            part = slice(i, i + self.max_rows)
            logits = self.compute_logits(hidden[tokens[part]]).float()
            slices.append(gather_logprobs(logits, target_ids[part], num_logprobs[part]))
        return slices


@dataclass(frozen=True, slots=True)
class PromptLogprobsPart:
    # Index in the step, index in the prompt of the first token, tokens.
    parts: list[tuple[int, int, int]]
    slices: list[LogprobsTensors]  # all tokens of all parts, in order

    def to_host(self) -> PromptLogprobsPart:
        return PromptLogprobsPart(self.parts, [tensors.to_host() for tensors in self.slices])

    def write(self, output: ModelRunnerOutput) -> None:
        positions: list[TokenLogprobs] = []
        for tensors in self.slices:
            positions += [p for p in tensors.to_lists() if p is not None]
        begin = 0
        for row, start, count in self.parts:
            output.prompt_logprobs[row] = PromptLogprobs(start, positions[begin : begin + count])
            begin += count
