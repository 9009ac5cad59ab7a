"""Matrix: a weight for matrix products; QuantMethod: its storage and multiplication."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.layers import packed
from servd.worker.layers.cuda_matrix import Fp8Matrix, Storage, TiledMatrix
from servd.worker.layers.quantized import AnyTensor, Quantized, QuantizedMatrix, stack
from servd.worker.layers.weight import Copy, Weight
from servd.worker.layers.weight_stack import WeightStack
from servd.worker.ops import target

log = logging.getLogger("servd.worker")

# `QuantizedMatrix` moves about 40 bytes for a weight at each use; 16 bits are 2.
SLOW = (
    "there is no CUDA kernel, and the 16-bit form does not fit or --widen-weights is never: about "
    "20 times slower than 16 bit"
)
PACKABLE = (torch.float32, torch.bfloat16, torch.float16)


class QuantMethod(Protocol):
    """The storage and multiplication of a matrix [out, in]."""

    nbytes: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ matrix.T + bias, [n, out], for x [n, in]."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """Return the rows `index`, int64 [n], in any float type; `Matrix.rows` converts them."""
        ...


class MakeQuantMethod(NamedTuple):
    """Makes the quant method of a loaded matrix: the fastest on the device, or a quantized one.

    Args:
        dense: returns the quant method of an ordinary matrix, or None to leave it as it is.
        x_dtype: type that x may be rounded to.
        table: like dense, for embeddings and heads; None: use dense.
        importance: importance matrix: checkpoint name -> float32 [in], passed to `dense`.
        widening: --widen-weights; "never" also if the device has too little memory.
    """

    dense: Callable[..., QuantMethod | None]
    x_dtype: torch.dtype = torch.float32
    table: Callable[[Tensor], QuantMethod | None] | None = None
    importance: Mapping[str, Tensor] = MappingProxyType({})
    widening: str = "auto"

    def of(self, name: str, weight: Weight) -> Self:
        """Return a copy with the importance of the tensor `name`. Raises ValueError if the
        importance has another shape.
        """
        if (importance := self.importance.get(name)) is None:
            return self
        if (size := weight.part_shapes[0][-1]) != len(importance):
            raise ValueError(
                f"{size} columns, but the importance matrix has {len(importance)}: it is for "
                "another model"
            )
        if weight.shard_dim == 1:
            share = weight.share(importance[None])
            assert isinstance(share, Tensor)
            importance = share[0]
        return self._replace(dense=partial(self.dense, importance=importance))


class Dense:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class Stacked:
    """Matrices with different quant methods, stacked by rows: q, k and v of different types."""

    def __init__(self, methods: Sequence[QuantMethod], num_rows: Sequence[int]) -> None:
        self.methods = methods
        self.num_rows = num_rows
        self.nbytes = sum(method.nbytes for method in methods)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self.methods) if bias is None else bias.split(self.num_rows)
        parts = zip(self.methods, biases, strict=True)
        return torch.cat([method.multiply(x, b) for method, b in parts], dim=1)

    def rows(self, index: Tensor) -> Tensor:
        """Raise NotImplementedError: vocabulary tables are never stacked."""
        raise NotImplementedError


class Matrix(Weight):
    """A weight that is loaded as an ordinary tensor; `process_weights` gives it a quant method.
    Parts that are quantized in the checkpoint stay quantized.
    """

    quant_method: QuantMethod | None = None
    # The order here of the checkpoint's rows, over all ranks; None: the checkpoint's order.
    row_order: Tensor | None = None
    # The memory that it shares with matrices of other experts, and its number there.
    place: tuple[WeightStack, int] | None = None
    use: float = 1.0  # the share of tokens that it multiplies

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_dtype = self.dtype  # `load` and quant methods may store another type
        self.quantized: dict[int, Quantized] = {}  # by part; moved to the quant method later

    def first_memory(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor without memory, which quantized parts never need. A CPU's memory costs
        nothing before something is written to it.
        """
        is_late = target.runs_triton(torch.get_default_device())
        return torch.empty(()).expand(shape) if is_late else torch.empty(shape)

    def take_memory(self) -> None:
        """Allocate the memory of the ordinary matrix, unless it is there."""
        if not self.has_memory:
            self.data = torch.empty(self.shape, dtype=self.dtype, device=self.device)

    @property
    def has_memory(self) -> bool:
        return 0 not in self.data.stride()

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory for a tensor of this matrix: in its stack, if it has one."""
        if self.place is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        stack, number = self.place
        return stack.part(name, number, shape, dtype, self.device)

    @property
    def num_weights(self) -> int:
        """Return the elements over all ranks, however they are stored."""
        return sum(map(math.prod, self.part_shapes))

    @property
    def num_bytes(self) -> int:
        return self.nbytes if self.quant_method is None else self.quant_method.nbytes

    def load(self, tensor: AnyTensor, part: int | None = None, copy: Copy = Tensor.copy_) -> None:
        """Load a tensor. 16-bit weights keep their type if the device can multiply them. A whole
        matrix is not copied from the mapped file, because `process_weights` packs it.
        """
        if self.quant_method is not None:
            raise ValueError("come twice")
        if isinstance(tensor, Tensor) and target.runs_native(self.device):
            is_first = len(self.missing) + len(self.quantized) == len(self.part_shapes)
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

    def _load_share(self, share: AnyTensor, part: int, copy: Copy) -> None:
        if isinstance(share, Tensor):
            self.take_memory()
            super()._load_share(share, part, copy)
            return
        if part not in self.missing:
            raise ValueError("come twice")
        rows = self.rows_of(part)
        self.quantized[part] = share.padded(rows.stop - rows.start)
        self.missing.discard(part)

    def process_weights(self, make: MakeQuantMethod) -> None:
        method = self._stack(make) if self.quantized else make.dense(self.data)
        self.quantized = {}
        if self.place is not None and isinstance(method, Fp8Matrix):
            method = quant_method_of(method.quantized, self.dtype)
        if isinstance(method, Dense):
            self._keep(method.weight)
        elif method is not None:
            if self.place is not None and isinstance(method, TiledMatrix):
                with suppress(ValueError):  # another expert has another format
                    method.move(self.allocate)
            self.quant_method = method
            self.data = self.data.new_empty(0)
        elif self.place is not None:
            self._keep(self.data)
        elif self.device.type == "cpu":
            self.data = self.data.to(self.compute_dtype, copy=True)  # releases the mapped file

    def _keep(self, weight: Tensor) -> None:
        if self.place is not None:
            self.data = self.allocate("weight", weight.shape, weight.dtype)
        if self.has_memory:
            self.data[: len(weight)] = weight  # a table may have more rows
        else:
            self.data = weight

    def widen(self) -> None:
        """Replace the quant method, if there is one, by the ordinary matrix."""
        if self.quant_method is not None:
            size = self.part_shapes[0][1]
            size = self.parallel.share(size) if self.shard_dim == 1 else size
            identity = torch.eye(size, dtype=self.compute_dtype, device=self.device)
            numbers = self.quant_method.multiply(identity, None).T
            self.data = self.allocate("weight", numbers.shape, self.compute_dtype).copy_(numbers)
            self.quant_method = None

    def _stack(self, make: MakeQuantMethod) -> QuantMethod:
        def kind(part: int) -> tuple[object, ...]:
            return self.quantized[part].kind if part in self.quantized else ()

        methods: list[QuantMethod] = []
        rows: list[int] = []
        for _, together in groupby(range(len(self.part_shapes)), kind):
            parts = list(together)
            first = self.rows_of(parts[0])
            last = self.rows_of(parts[-1])
            rows.append(last.stop - first.start)
            if parts[0] in self.quantized:
                # Pop the parts, so that each is freed once it is stacked.
                quantized = stack([self.quantized.pop(part) for part in parts])
                multiplies_fp8 = self.place is None and make.widening != "always"
                if multiplies_fp8 and Fp8Matrix.supports(quantized):
                    log_product(quantized, "products of 8-bit floats, activations rounded by token")
                    methods.append(Fp8Matrix(quantized.codes, quantized.scale.float()))
                    continue
                widening = make.widening
                is_packable = quantized.columns is None and Storage.of(quantized) is not None
                if self.place is not None and not is_packable:
                    widening = "always"  # experts have no third way
                dtype = self.data.dtype
                methods.append(quant_method_of(quantized, dtype, make.x_dtype, widening))
            else:
                dense = self.data[first.start : last.stop]
                kept = make.dense(dense)
                methods.append(kept or Dense(dense.to(self.compute_dtype, copy=True)))
        if len(methods) == 1:
            return methods[0]
        widened = [method.weight for method in methods if isinstance(method, Dense)]
        if len(widened) == len(methods):
            return Dense(torch.cat(widened))
        parts = [method for method in methods if isinstance(method, packed.Packed)]
        return packed.Stacked(parts) if len(parts) == len(methods) else Stacked(methods, rows)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ self.T + bias, [n, out], for x [n, in]."""
        if self.quant_method is None:
            return F.linear(x, self, bias)
        return self.quant_method.multiply(x, bias)

    def rows(self, index: Tensor) -> Tensor:  # int64 [n] -> [n, in]
        if self.quant_method is None:
            return F.embedding(index, self)
        return self.quant_method.rows(index).to(self.compute_dtype)


def quant_method_of(
    quantized: Quantized,
    dtype: torch.dtype,
    x_dtype: torch.dtype = torch.float32,
    widening: str = "auto",
) -> QuantMethod:
    """Return the fastest quant method for quantized weights on their device.

    `dtype`: the model's type, for unquantized parts; others: as in `MakeQuantMethod`.
    """
    if target.runs_native(quantized.codes.device):
        return packed.GroupedMatrix(quantized, x_dtype)
    if not target.runs_triton(quantized.codes.device):
        return QuantizedMatrix(quantized, dtype)
    storage = Storage.of(quantized)
    if widening != "always" and storage is not None:
        log_product(quantized, "servd's kernel for packed weights")
        return TiledMatrix(quantized, storage)
    if widening != "never":
        log_product(quantized, f"dequantized to {str(dtype)[6:]}")
        return Dense(quantized.widened(dtype))
    log_product(quantized, SLOW, logging.WARNING)
    return QuantizedMatrix(quantized, dtype)


def log_product(quantized: Quantized, product: str, level: int = logging.INFO) -> None:
    table = "int8" if quantized.table is None else "4 bits"
    codes = "fp8" if quantized.codes.dtype.is_floating_point else table
    size = "rows" if quantized.scale.shape[1] == 1 else str(quantized.group_size)
    _log_once(f"weights of {codes} in groups of {size}: {product}", level)


@functools.cache
def _log_once(text: str, level: int) -> None:
    log.log(level, text)
