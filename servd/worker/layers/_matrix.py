"""A weight that activations are multiplied with, and the forms that it can take once loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.layers.weight import Copy, Weight
from servd.worker.ops import native

PACKABLE = (torch.float32, torch.bfloat16, torch.float16)


class Form(Protocol):
    """How a matrix [out, in] is kept and multiplied."""

    nbytes: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[n, in] -> x @ matrix.T + bias, [n, out]."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """int64 [n] -> the matrix's rows, [n, in], in the type that the model computes in."""
        ...


class Matrix(Weight):
    """As loaded, an ordinary tensor; `reform` exchanges it for a form that is faster or smaller."""

    form: Form | None = None

    @property
    def num_bytes(self) -> int:
        """In memory, on this rank."""
        return self.nbytes if self.form is None else self.form.nbytes

    def load(self, tensor: Tensor, part: int | None = None, copy: Copy = Tensor.copy_) -> None:
        """See `Weight.load`. 16 bits of the checkpoint stay if products can be made of them, and a
        whole matrix is only looked at where it lies, mapped, until `reform` packs it.
        """
        if native.library() and self.device.type == "cpu":
            is_first = len(self.missing) == len(self.part_shapes)
            if is_first and self.data.dtype == torch.float32 and tensor.dtype in PACKABLE:
                whole = tensor.t() if self.transposed else tensor
                if whole.shape == self.shape and self.parallel.size == 1 and not self.is_meta:
                    self.data = whole
                    self.missing.clear()
                    return
                self.data = torch.empty(self.shape, dtype=tensor.dtype)
            elif tensor.dtype != self.data.dtype:
                self.data = self.data.float()  # parts of several types: the widest
        super().load(tensor, part, copy)

    def reform(self, make: Callable[[Tensor], Form | None]) -> None:
        """Keep the matrix in the form that `make` gives it; None leaves it."""
        form = make(self.data)
        if form is not None:
            self.form, self.data = form, torch.empty(0)
        elif self.device.type == "cpu":
            self.data = self.data.clone()  # no longer the file's

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[n, in] -> x @ self.T + bias, [n, out]."""
        return F.linear(x, self, bias) if self.form is None else self.form.multiply(x, bias)

    def rows(self, index: Tensor) -> Tensor:
        """int64 [n] -> [n, in]."""
        return F.embedding(index, self) if self.form is None else self.form.rows(index)
