"""WeightStack: the memory of the same matrix of several experts."""

from collections.abc import Sequence

import torch
from torch import Tensor


class WeightStack:
    """Tensors [count, ...] by name. A matrix is a slice of each, so that one kernel finds all
    matrices by their numbers, and the allocator has one tensor to place instead of `count`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors: dict[str, Tensor] = {}

    def part(
        self, name: str, number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return uninitialized memory of matrix `number` in the tensor `name`, which is allocated
        for all matrices when the first of them needs it. Raises ValueError if the matrices differ.
        """
        whole = self.tensors.get(name)
        if whole is None:
            whole = torch.empty(self.count, *shape, dtype=dtype, device=device)
            self.tensors[name] = whole
        if whole.shape[1:] != tuple(shape) or whole.dtype != dtype:
            raise ValueError(
                f"{name} {list(shape)} of {dtype}, and another expert has "
                f"{list(whole.shape[1:])} of {whole.dtype}"
            )
        return whole[number]
