"""Which matrices keep 8 bits where others have 4: those whose errors cost most for their size.

Errors of a matrix move its outputs, and so what the model predicts: by half the mean square of an
output's gradient times that of its error, to second order (Fisher's information, for tokens drawn
from the model's own predictions), as if errors of different tokens had nothing to do with each
other. Errors are those that GPTQ is expected to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from servd.worker.calibration import gptq
from servd.worker.calibration.walk import Model

WIDE = 8  # bits


@dataclass
class Together:
    """Matrices that multiply the same."""

    names: list[str] = field(default_factory=list)
    cost: float = 0.0  # of their errors: nats for each token
    size: int = 0  # numbers


@dataclass(eq=False)
class Chooser:
    model: Model  # as it was
    bits: int  # of most of the matrices
    group_size: int  # columns that share a scale
    is_symmetric: bool  # see `gptq.Codes`
    # Tells of a layer's name and matrix whether it becomes smaller at all.
    tensor_of: Callable[[str, Tensor], str | None]

    def __post_init__(self) -> None:
        self.bits_each = gptq.bits_each(self.bits, self.group_size, self.is_symmetric)

    def choose(
        self, batches: Sequence[Tensor], mean_bits: float, progress: Callable[[float], None]
    ) -> set[str]:
        """Names of layers, so that a number of all matrices has at most `mean_bits` on average.
        Those that multiply the same go together: other engines make one matrix of them.

        Args:
            batches: token ids [n, size] each.
            mean_bits: with scales.
            progress: called with how far it is, 0 to 1.
        """
        found = self._look(batches, progress)
        more = gptq.bits_each(WIDE, self.group_size, True) - self.bits_each  # of a number
        room = (mean_bits - self.bits_each) * sum(each.size for each in found)
        chosen: set[str] = set()
        for each in sorted(found, key=lambda each: -each.cost / each.size):
            if more * each.size <= room:
                room -= more * each.size
                chosen.update(each.names)
        return chosen

    def _look(self, batches: Sequence[Tensor], progress: Callable[[float], None]) -> list[Together]:
        gradients = self.model.gradients(torch.cat([*batches]))
        num_tokens = sum(batch.numel() for batch in batches)
        found: list[Together] = []
        last: Tensor | None = None

        def look(name: str, weight: Tensor, moments: Tensor, _: Tensor) -> Tensor:
            nonlocal last
            if self.tensor_of(name, weight) is not None:
                if last is not moments:
                    last = moments
                    found.append(Together())
                errors = gptq.expected_errors(weight, moments.sum(0), self.bits, self.group_size)
                found[-1].names.append(name)
                found[-1].cost += float(gradients[name] @ errors) / num_tokens / 2
                found[-1].size += weight.numel()
            return weight

        self.model.exchange(batches, look, progress)
        return found
