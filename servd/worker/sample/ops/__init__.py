"""SamplingOps: the sampler's operations on logits. `reference.py` is in plain torch; other modules
are faster on their devices.
"""

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from servd.worker.ops import native as kernels
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.ops import native, reference


class SamplingOps(Protocol):
    """The interface of each module of this package, tested by tests/worker/sample/test_ops.py.

    Logits are float32 [n, vocab], each row contiguous. Weights are defined in `fixed_point.py`, and
    contiguous. Operations on weights use integers and give equal results in all modules. If the
    most probable token of a row has no finite logit, the row's weights are undefined, and any valid
    token may be drawn.
    """

    def edit_logits(self, logits: Tensor, changes: LogitEdits) -> Tensor:
        """Add biases, forbid the tokens missing in the bitmask, and penalize, in place. Logits that
        no change affects may be of a narrower type.

        Returns:
            [n] int64, the most probable token of each row: the first NaN, or else the first
            maximum.
        """
        ...

    def choose(self, logits: Tensor, slots: Tensor, columns: Tensor, token_ids: Tensor) -> Tensor:
        """Return the most probable token of each row, like `edit_logits`, and write it to
        `token_ids`.

        Args:
            logits: of any floating type.
            slots: [n] int64, a row of `token_ids` each.
            columns: [n] int64.
            token_ids: int32 [slots, columns], each row contiguous.

        Returns:
            [n] int64: the token, or the negative ~token if its logit is NaN or +inf.
        """
        ...

    def to_weights(self, logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
        """Return weights [n, vocab] of logits with row maxima `peaks` [n] at `temperatures` [n]."""
        ...

    def filter_top_k_top_p(
        self, weights: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the smallest weight that top-k and then top-p keep of the weights from `lowest`
        on.

        Tokens that tie with the last kept token are kept too, so the order of equal values has no
        effect.

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
        """Draw one token per row, [n] int64, by inverse CDF over the weights from `lowest` [n] on.

        The random number is `uniform(seeds, positions)`; a token of weight zero is never drawn.
        """
        ...

    def score(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of each row's sum of exponentials, [n] float32, and the rank of its
        token in `token_ids`, from 1, [n] int64.
        """
        ...


def for_device(device: torch.device) -> SamplingOps:
    """Return the fastest operations that run on `device`."""
    if device.type == "cuda" and find_spec("triton"):
        from servd.worker.sample.ops import triton

        return triton
    return reference if device.type != "cpu" or kernels.library() is None else native
