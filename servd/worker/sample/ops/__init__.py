"""SamplingOps: the sampler's operations on logits, in plain torch and faster for devices."""

from typing import Protocol

import torch
from torch import Tensor

from servd.worker.ops import native as kernels
from servd.worker.ops import target
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.ops import native, reference


class SamplingOps(Protocol):
    """The operations of each module of this package; tests/worker/sample/test_ops.py runs its
    contract over all modules.

    Logits are float32 [n, vocab], each row contiguous. Weights are defined in `fixed_point.py`, and
    contiguous. Everything after `to_weights` is integer arithmetic, with equal results in all
    modules. Rows whose most probable token has no finite logit have undefined weights; any valid
    token is drawn from them.
    """

    def edit_logits(self, logits: Tensor, changes: LogitEdits) -> Tensor:
        """Add biases, forbid tokens by bitmasks, penalize; in place. Logits without biases and
        penalties may be of a narrower type; on a CPU those without masks.

        Returns:
            [n] int64, the most probable token of each row: the first one that is NaN, or else the
            first maximum.
        """
        ...

    def choose(self, logits: Tensor, slots: Tensor, columns: Tensor, token_ids: Tensor) -> Tensor:
        """Return each row's most probable token, like `edit_logits`, and write it to `token_ids`.

        Args:
            logits: [n, vocab], of any floating type.
            slots: [n] int64, rows of `token_ids`.
            columns: [n] int64.
            token_ids: int32 [slots, columns], each row contiguous.

        Returns:
            [n] int64: the token; or ~token, which is negative, if its logit is NaN or +inf.
        """
        ...

    def to_weights(self, logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
        """Return weights [n, vocab] for logits, row maxima `peaks` [n], and `temperatures` [n]."""
        ...

    def filter_top_k_top_p(
        self, weights: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the smallest weight that top-k and then top-p keep of the weights that are at
        least `lowest`.

        Tokens with the same weight as the last kept token are kept too, so the order of equal
        values has no effect.

        Args:
            weights: [n, vocab].
            lowest: [n] float32.
            top_k: [n] int64; 0 or less keeps all.
            top_p: [n] float64 in (0, 1].

        Returns:
            [n] float32, not below `lowest`.
        """
        ...

    def draw(self, weights: Tensor, lowest: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Return one token per row, [n] int64, drawn by inverse CDF over the weights that are at
        least `lowest` [n].

        The random number is `uniform(seeds, positions)`. A token of weight zero is never drawn.
        """
        ...

    def score(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of each row's sum of exponentials, [n] float32, and the rank (from
        1) of its token, [n] int64.
        """
        ...


def for_device(device: torch.device) -> SamplingOps:
    """Return the fastest operations that run on `device`."""
    if target.runs_triton(device):
        from servd.worker.sample.ops import triton

        return triton
    return reference if device.type != "cpu" or kernels.library() is None else native
