"""Log-probabilities of the sampled and of the most likely tokens, before any transformation of the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from servd.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities of the m rows that asked for them, out of the n of a step."""

    token_ids: Tensor  # [m, 1 + k_max] int64: the sampled token, then the k_max most likely
    logprobs: Tensor  # [m, 1 + k_max] float32
    ranks: Tensor  # [m] int64: of the sampled token in the vocabulary, from 1
    num_logprobs: list[int | None]  # [n]: k of each row, None where not asked

    def to_host(self) -> LogprobsTensors:
        """Start the copy to the host; on CUDA the caller waits for the stream before `to_lists`."""
        token_ids, logprobs, ranks = (
            t.to("cpu", non_blocking=True) for t in (self.token_ids, self.logprobs, self.ranks)
        )
        return replace(self, token_ids=token_ids, logprobs=logprobs, ranks=ranks)

    def to_lists(self) -> list[TokenLogprobs | None]:
        """One entry per row of the step, None where not asked. The tensors must be on the host."""
        asked = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        rows: list[TokenLogprobs | None] = []
        for k in self.num_logprobs:
            if k is None:
                rows.append(None)
            else:
                token_ids, logprobs, rank = next(asked)
                rows.append(TokenLogprobs(token_ids=token_ids[: 1 + k], logprobs=logprobs[: 1 + k], rank=rank))
        return rows


def gather_logprobs(logprobs: Tensor, sampled: Tensor, num_logprobs: list[int | None]) -> LogprobsTensors:
    """Pick what the rows asked for.

    Args:
        logprobs: [m, vocab] float32, log-softmax of the raw logits of the rows that asked.
        sampled: [m] int64, their sampled tokens.
        num_logprobs: [n], k of each row of the step, None where not asked.
    """
    k_max = max(k for k in num_logprobs if k is not None)
    sampled = sampled.unsqueeze(1)
    sampled_logprob = logprobs.gather(1, sampled)
    ranks = (logprobs > sampled_logprob).sum(dim=-1) + 1
    top_logprobs, top_ids = logprobs.topk(min(k_max, logprobs.shape[1]), dim=-1)
    return LogprobsTensors(
        torch.cat([sampled, top_ids], dim=1), torch.cat([sampled_logprob, top_logprobs], dim=1), ranks, num_logprobs
    )
