"""Muon: momentum made orthogonal, for matrices (https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Coefficients, as published, of the polynomial that takes singular values in (0, 1] to about 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Muon with the step size of AdamW (https://arxiv.org/abs/2502.16982, 2.2).

    Over all matrices of one shape at once, and in a type of choice: torch.optim.Muon computes in
    bfloat16, which takes as long as the rest of the step on a CPU without units for it.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        learning_rate: float = 1e-3,
        weight_decay: float = 0.05,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrices, {"lr": learning_rate, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the matrices that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes[matrix.shape].append(matrix)
            for shape, matrices in shapes.items():
                directions = torch.stack([self._direction(matrix) for matrix in matrices])
                steps = orthogonal(directions.to(self.dtype))
                for matrix, step in zip(matrices, steps, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(step, alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

    def _direction(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        assert matrix.grad is not None
        state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(state["momentum"], MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """[number, rows, columns], the nearest matrices with singular values of about 1 (Newton-Schulz
    iteration).
    """
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
