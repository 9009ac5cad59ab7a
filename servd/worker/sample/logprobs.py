"""Log-probabilities of the sampled and of the most likely tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from servd.messages.engine import TokenLogprobs
from servd.messages.params import SamplingParams
from servd.worker.device.device import upload
from servd.worker.sample import ops
from servd.worker.sample.sampling_metadata import SamplingMetadata


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities of the rows that request them: m of a step's n rows."""

    # [m, 1 + k_max + named_max] int64: the sampled token, the k_max most likely, named tokens
    token_ids: Tensor
    logprobs: Tensor  # [m, 1 + k_max + named_max] float32
    ranks: Tensor  # [m] int64: rank of the sampled token in the vocabulary, from 1
    num_logprobs: list[int | None]  # [n]: k of each row, None if not requested
    num_named: list[int]  # [m]: number of tokens named by each requesting row

    def to_host(self) -> Self:
        """Start the copy to the host. On CUDA, callers wait for the stream before `to_lists`."""
        token_ids, logprobs, ranks = (
            t.to("cpu", non_blocking=True) for t in (self.token_ids, self.logprobs, self.ranks)
        )
        return replace(self, token_ids=token_ids, logprobs=logprobs, ranks=ranks)

    def to_lists(self) -> list[TokenLogprobs | None]:
        """Return one entry per row of the step, None if not requested. Call on host tensors."""
        tensors = self.token_ids, self.logprobs, self.ranks
        entries = zip(*(tensor.tolist() for tensor in tensors), self.num_named, strict=True)
        first_named = self.token_ids.shape[1] - max(self.num_named, default=0)
        rows: list[TokenLogprobs | None] = []
        for k in self.num_logprobs:
            if k is None:
                rows.append(None)
            else:
                token_ids, logprobs, rank, num_named = next(entries)
                likely = slice(1 + k)
                extra = slice(first_named, first_named + num_named)
                token_ids = token_ids[likely] + token_ids[extra]
                logprobs = logprobs[likely] + logprobs[extra]
                rows.append(TokenLogprobs(token_ids, logprobs, rank))
        return rows


class SampledLogprobs:
    """The slots that request log-probabilities of sampled tokens, and how many other tokens each
    requests. `are_logits`: report logits instead.
    """

    def __init__(self, are_logits: bool = False) -> None:
        self.are_logits = are_logits
        self.num_logprobs: dict[int, int] = {}  # slot -> k
        self.requested_ids: dict[int, list[int]] = {}  # slot -> token ids requested by name

    def add(self, slot: int, params: SamplingParams) -> bool:
        self.requested_ids.pop(slot, None)
        if params.logprobs is None:
            return False
        self.num_logprobs[slot] = params.logprobs
        if params.logprob_token_ids:
            self.requested_ids[slot] = params.logprob_token_ids
        return True

    def gather(
        self, logits: Tensor, sampled: Tensor, rows: SamplingMetadata, num_rows: int
    ) -> LogprobsTensors:
        """Return the log-probabilities that `rows`, of the step's `num_rows`, request. `logits`:
        [m, vocab] float32, of these rows; `sampled`: [num_rows] int64.
        """
        num_logprobs: list[int | None] = [None] * num_rows
        slots = rows.host_slots.tolist()
        for row, slot in zip(rows.host_index.tolist(), slots, strict=True):
            num_logprobs[row] = self.num_logprobs[slot]
        requested_ids = (
            [self.requested_ids.get(slot, []) for slot in slots] if self.requested_ids else []
        )
        reported = gather_logprobs(logits, sampled[rows.index], num_logprobs, requested_ids)
        if self.are_logits:
            return replace(reported, logprobs=logits.gather(1, reported.token_ids))
        return reported


def gather_logprobs(
    logits: Tensor,
    sampled: Tensor,
    num_logprobs: list[int | None],
    requested_ids: Sequence[Sequence[int]] = (),
) -> LogprobsTensors:
    """Return the log-probabilities that the rows request.

    Args:
        logits: [m, vocab] float32, for the rows that request log-probabilities.
        sampled: [m] int64, the sampled tokens of these rows.
        num_logprobs: [n], k of each row of the step, None where not requested.
        named: [m] token ids that each row requests by name; empty if none does.
    """
    k_max = max(k for k in num_logprobs if k is not None)
    log_totals, ranks = ops.for_device(logits.device).score(logits, sampled)
    columns = [sampled.unsqueeze(1), logits.topk(min(k_max, logits.shape[1]), dim=-1).indices]
    num_named = [len(ids) for ids in requested_ids] or [0] * len(logits)
    if any(num_named):
        padded = np.zeros((len(requested_ids), max(num_named)), dtype=np.int64)
        for row, ids in zip(padded, requested_ids, strict=True):
            row[: len(ids)] = ids
        columns.append(upload(padded, logits.device))
    token_ids = torch.cat(columns, dim=1)
    logprobs = logits.gather(1, token_ids) - log_totals.unsqueeze(1)
    return LogprobsTensors(token_ids, logprobs, ranks, num_logprobs, num_named)
