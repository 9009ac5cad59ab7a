"""Weight: a parameter that loads its rank's shard of checkpoint tensors; Loadable: its model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from servd.worker.device.parallel import Parallel
from servd.worker.layers.quantized import AnyTensor, Quantized

Copy = Callable[[Tensor, Tensor], object]
"""A function that copies a source to a target of the same shape."""


class Weight(nn.Parameter):
    """Uninitialised storage for one or more checkpoint tensors, stacked along dimension 0.

    A shard that reaches beyond the end of the tensor is padded with zeros.

    Args:
        shape: shape over all ranks.
        parallel: the ranks.
        shard_dim: dimension along which each rank keeps an equal slice of each part; or None.
        parts: rows of each of the stacked tensors, over all ranks; None: there is one tensor.
        copies: number of ranks that have the same shard, for each part; empty: one.
        transposed: whether the checkpoint has [in, out] where this has [out, in].
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(cls, torch.empty(0), requires_grad=False)

    def __init__(
        self,
        shape: Sequence[int],
        parallel: Parallel,
        *,
        shard_dim: int | None = None,
        parts: Sequence[int] | None = None,
        copies: Sequence[int] = (),
        transposed: bool = False,
    ) -> None:
        self.parallel = parallel
        # For each part.
        self.sharing = [parallel.sharing(count) for count in copies or [1] * len(parts or [0])]
        self.shard_dim = shard_dim
        self.part_shapes = [(rows, *shape[1:]) for rows in parts or shape[:1]]
        self.transposed = transposed
        self.missing = set(range(len(self.part_shapes)))  # parts not loaded yet
        local = list(shape)
        if shard_dim == 0:
            local[0] = sum(map(Parallel.share, self.sharing, parts or shape[:1]))
        elif shard_dim is not None:
            local[shard_dim] = parallel.share(shape[shard_dim])
        self.data = self.first_memory(local)

    def first_memory(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape)

    def load(self, tensor: AnyTensor, part: int | None = None, copy: Copy = Tensor.copy_) -> None:
        """Copy this rank's shard of `tensor`, which is part number `part`, or all parts if None. A
        quantized tensor is [out, in] regardless of `transposed`. Raises ValueError if the tensor
        has an unexpected shape, or the part is there already.
        """
        if self.transposed and isinstance(tensor, Tensor) and tensor.dim() == 2:
            tensor = tensor.t()
        rows = [shape[0] for shape in self.part_shapes]
        expected = (sum(rows), *self.part_shapes[0][1:]) if part is None else self.part_shapes[part]
        if tensor.shape != expected:
            raise ValueError(
                f"shape {list(tensor.shape)}, expected {list(expected)}: it is for another model"
            )
        if part is None:
            for index, piece in enumerate(tensor.split(rows)):
                self._load_share(self.share(piece, index), index, copy)
        else:
            self._load_share(self.share(tensor, part), part, copy)

    def share(self, tensor: AnyTensor, part: int = 0) -> AnyTensor:
        if self.shard_dim is None:
            return tensor
        total = tensor.shape[self.shard_dim]
        parallel = self.sharing[part]
        share = parallel.share(total)
        start = min(parallel.rank * share, total)
        return tensor.narrow(self.shard_dim, start, min(share, total - start))

    def rows_of(self, part: int) -> slice:
        rows = [
            parallel.share(shape[0]) if self.shard_dim == 0 else shape[0]
            for parallel, shape in zip(self.sharing, self.part_shapes[: part + 1], strict=False)
        ]
        return slice(sum(rows[:part]), sum(rows))

    def _load_share(self, share: AnyTensor, part: int, copy: Copy) -> None:
        if part not in self.missing:
            raise ValueError("come twice")
        if isinstance(share, Quantized):
            share = share.dequantize()
        target = self.data[self.rows_of(part)]
        if (dim := self.shard_dim) is not None:
            size = target.shape[dim]
            there = share.shape[dim]
            target.narrow(dim, there, size - there).zero_()
            target = target.narrow(dim, 0, there)
        copy(target, share)
        self.missing.discard(part)


class FloatWeight(Weight):
    """A weight in float32: 16 bits would round small values away, or choose other experts. `change`
    computes it from the checkpoint's.
    """

    def __init__(
        self,
        shape: Sequence[int],
        parallel: Parallel,
        *,
        shard_dim: int | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(shape, parallel, shard_dim=shard_dim)
        self.data = self.data.float()
        self.change = change

    def load(self, tensor: AnyTensor, part: int | None = None, copy: Copy = Tensor.copy_) -> None:
        assert isinstance(tensor, Tensor)
        tensor = tensor.float()
        super().load(tensor if self.change is None else self.change(tensor), part, copy)


class Loadable(Protocol):
    """The part of a model's interface that the loader uses."""

    packed: ClassVar[dict[str, tuple[str, int]]]
    ignored: ClassVar[tuple[str, ...]]
    # Prefix of all names but the head's; checkpoints of the bare model lack it.
    base_prefix: ClassVar[str]

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Return every parameter once; tied parameters under their first name."""
        ...

    def named_modules(self) -> Iterator[tuple[str, Any]]: ...
