"""SampledTokens: the sampler's output of a step, to be written to ModelRunnerOutput."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from servd.messages.engine import ModelRunnerOutput
from servd.worker.sample.sampler import SamplerOutput

NOT_FINITE = "the model's logits are NaN or infinite for this request, so no token can follow"


@dataclass(frozen=True)
class SampledTokens:
    rows: np.ndarray  # int64 [num_rows]: indices in the step
    num_drafts: np.ndarray  # int64 [num_rows]
    sampled: SamplerOutput

    def to_host(self) -> Self:
        return replace(self, sampled=self.sampled.to_host())

    def write(self, output: ModelRunnerOutput) -> None:
        sampled = self.sampled
        num_decodes = len(output.decoded)
        numbers = sampled.token_ids.numpy()
        is_void = numbers < 0
        if sampled.best is not None:
            best = sampled.best_logits
            is_void = ~(best < np.inf)
            is_forbidden = best == -np.inf
            for row, part in self._parts() if is_forbidden.any() else ():
                if is_forbidden[part].any():  # the first choice among forbidden tokens
                    output.dead_ends[row] = int(is_forbidden[part].argmax()) + 1
        token_ids = np.where(numbers < 0, ~numbers, numbers).tolist()
        output.decoded = token_ids[:num_decodes]
        for row, part in self._parts(num_decodes) if output.sampled_token_ids else ():
            output.sampled_token_ids[row - num_decodes] = token_ids[part]
        if is_void.any():
            void = [row for row, part in self._parts() if is_void[part].any()]
            output.errors = output.errors | dict.fromkeys(void, NOT_FINITE)
        if sampled.logprobs:
            logprobs = sampled.logprobs.to_lists()
            row_logprobs = {row: [x for x in logprobs[part] if x] for row, part in self._parts()}
            output.logprobs |= {row: entries for row, entries in row_logprobs.items() if entries}

    def _parts(self, first: int = 0) -> Iterator[tuple[int, slice]]:
        """Yield rows from number `first` on, with slices of tokens. Earlier rows have one token."""
        rows = self.rows[first:]
        num_drafts = self.num_drafts[first:]
        kept = self.sampled.num_kept
        num_kept = np.zeros_like(rows) if kept is None else kept[first:]
        columns = rows.tolist(), num_drafts.tolist(), num_kept.tolist()
        for row, num_drafts_of_row, num_kept_of_row in zip(*columns, strict=True):
            yield row, slice(first, first + num_kept_of_row + 1)
            first += num_drafts_of_row + 1
