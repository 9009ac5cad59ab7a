"""Attention of a mixed batch over the paged KV cache: one file per backend, with a class `Backend`.

tests/worker/attention runs the contract over all files.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from servd import plugins
from servd.errors import ConfigError
from servd.worker.attention import _int8
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.rotary import Rotation, rotate

log = logging.getLogger("servd.worker")

Norms = tuple[RMSNorm, RMSNorm]
"""Of each head of queries and keys, with the same epsilon."""


class StepMetadata(Protocol):
    """What a backend knows of a step; the same in all layers."""

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [num_tokens]: block * block_size + offset."""
        ...


Metadata = TypeVar("Metadata", bound=StepMetadata)


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a model on one rank, equal in all layers; for other windows see
    `Backend.with_window`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    # A token sees itself and the sliding_window - 1 tokens before, or to either side.
    sliding_window: int | None
    dtype: torch.dtype  # queries, keys and values
    kv_dtype: torch.dtype  # the cache
    device: torch.device
    exact_seq_lens: bool = True  # see AttentionBatch.seq_lens
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    has_sinks: bool = False  # see Backend.attend
    # False: a token sees those after it too; all tokens of a row are computed in one step.
    is_causal: bool = True
    batch_invariant: bool = False  # see Backend.is_batch_invariant; where it costs something
    # Values are the last so many numbers of the keys, of which there is one head; None: they are
    # stored beside them and as long.
    value_dim: int | None = None

    @property
    def num_stored(self) -> int:
        """Tensors of a layer's cache: keys and values, or keys that have the values."""
        return 2 if self.value_dim is None else 1


@dataclass(frozen=True)
class AttentionBatch:
    """One step, as a backend sees it. Row r computes the last query_lens[r] of its seq_lens[r]
    tokens.
    """

    query_lens: np.ndarray  # int64 [num_rows], at least 1; see has_exact_query_lens
    # int64 [num_rows], with the tokens of this step. Only a bound in a captured step, see Backend,
    # and without `exact_seq_lens`: then the device alone knows how many drafts were kept.
    seq_lens: np.ndarray
    query_start_loc: Tensor  # int32 [num_rows + 1], first token of each row, on the device
    seq_lens_device: Tensor  # int32 [num_rows]
    # int32 [num_rows, max_blocks], on the device; entries past the length are any block.
    block_tables: Tensor
    slot_mapping: Tensor  # int64 [num_tokens]: block * block_size + offset, on the device
    # int64 [num_rows, n], on the device: in a step where tokens may be drafts of a tree, the slots
    # of the last n tokens that each row sees; any before its first one. Others are where
    # block_tables say.
    tails: Tensor | None = None
    # False: query_lens are bounds; a row may have fewer tokens, or none, and some tokens no row.
    has_exact_query_lens: bool = True
    # int64 [num_rows], on the device: slots of the requests; None in steps that are recorded.
    slots: Tensor | None = None
    # The same step for further groups of layers, whose keys and values lie elsewhere; see
    # `WorkerReady.kv_windows`.
    others: Sequence[AttentionBatch] = ()


class Backend(ABC, Generic[Metadata]):
    """Attention over a KV cache in blocks. `Metadata` is what a step needs in all layers, built
    once.

    A backend with `supports_graphs` can be captured: `build_metadata`, `write` and `attend` run
    once, and their kernels again for other steps with as many tokens. So they take lengths, block
    tables and slots from the batch's device tensors, whose contents change; the host's lengths are
    good for the size of a grid or a buffer only: `seq_lens` are max_model_len in every row; and the
    device is not waited for. There are two kinds: decode steps, where every query_len is 1 and rows
    of padding have length 1 and a block of their own; and steps without `has_exact_query_lens`,
    where rows of padding have no tokens, and tokens of padding no row: they are written to that
    block, and what `attend` returns for them is anything.
    """

    supports_graphs: ClassVar[bool] = False
    supports_tails: ClassVar[bool] = False  # see AttentionBatch.tails
    # Tokens before a window's first that it reads, though without weight, so that their blocks have
    # to stay; 0: none but in the same block. None: any.
    num_read_before: ClassVar[int | None] = None
    is_batch_invariant: bool = False  # a token has the same bits whatever is beside it
    supports_batch_invariance: ClassVar[bool] = False  # see AttentionSpec.batch_invariant
    supports_soft_cap: ClassVar[bool] = False  # and sinks
    supports_bidirectional: ClassVar[bool] = False  # see AttentionSpec.is_causal
    fuses_norms = False  # whether `fused_write` takes them
    supports_values_in_keys: ClassVar[bool] = False  # see AttentionSpec.value_dim
    # Types of device on which "auto" may choose it, and its turn there: the lowest is asked first.
    auto_order: ClassVar[Mapping[str, int]] = {}

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.fused_write = fused_write(spec)
        self.fuses_norms = self.fused_write is not None
        self.other_windows: dict[int | None, Self] = {}

    def with_window(self, sliding_window: int | None) -> Self:
        """For layers of the model that see so many tokens, whose caches have the same shape."""
        if sliding_window == self.spec.sliding_window:
            return self
        if sliding_window not in self.other_windows:
            spec = replace(self.spec, sliding_window=sliding_window)
            self.other_windows[sliding_window] = type(self)(spec)
        return self.other_windows[sliding_window]

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None if the backend can run this here, otherwise the reason why not."""

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache: keys and values, or keys alone; then blocks."""
        spec = self.spec
        size = _int8.row_size(spec.kv_dtype, spec.head_dim)
        return (spec.num_stored, num_blocks, spec.block_size, spec.num_kv_heads, size)

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """Index tensors and masks of a step."""

    def write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        kv_cache: Tensor,
        metadata: Metadata,
        rotation: Rotation | None,
        norms: Norms | None = None,
    ) -> Tensor:
        """Norm queries and keys, turn them by their positions, and store keys and values at their
        slots.

        Numbers beyond the range of a cache of float8_e4m3fn become its largest; for int8 see
        `_int8`.

        Args:
            q: [num_tokens, num_heads, head_dim].
            k: [num_tokens, num_kv_heads, head_dim].
            v: like k; None: see AttentionSpec.value_dim.
            kv_cache: this layer's, see `kv_cache_shape`.
            metadata: this step's.
            rotation: None for a model without rotary positions.
            norms: of the heads of q and k; None: there are none.

        Returns:
            The queries to attend with, like q.
        """
        is_partial = rotation is not None and 2 * rotation[0].shape[-1] < q.shape[-1]
        fused: list[Any] = []
        if norms is not None and self.fuses_norms and not is_partial:
            fused = [(norms[0].weight, norms[1].weight, norms[0].eps)]
        elif norms is not None:
            q, k = norms[0](q), norms[1](k)
        if rotation is not None and is_partial:
            q, k, rotation = rotate(q, rotation), rotate(k, rotation), None
        if self.fused_write is not None:
            return self.fused_write(q, k, v, kv_cache, metadata.slot_mapping, rotation, *fused)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        for stored, x in zip(kv_cache, (k, v), strict=False):
            assert x is not None, "the cache has a place for values"
            if kv_cache.dtype == torch.float8_e4m3fn:
                largest = torch.finfo(kv_cache.dtype).max
                x = x.clamp(-largest, largest)
            if kv_cache.dtype == torch.int8:
                x = _int8.pack(x)
            stored.view(-1, *x.shape[1:])[metadata.slot_mapping] = x.to(kv_cache.dtype)
        return q

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values of a layer from slots to slots, int64 [n] each."""
        cache = kv_cache.flatten(1, 2)
        cache[:, targets] = cache[:, sources]

    @abstractmethod
    def attend(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Attention of the step's tokens over the cache, which has their own keys and values
        already.

        Args:
            q: [num_tokens, num_heads, head_dim], as `write` returned it.
            kv_cache: this layer's.
            metadata: this step's.
            scale: factor on the scores.
            sinks: [num_heads], scores of one more key each, whose value is zero; only with
                `supports_soft_cap`.

        Returns:
            [num_tokens, num_heads, head_dim], or value_dim in its place; contiguous.
        """


def fused_write(spec: AttentionSpec) -> Callable[..., Tensor] | None:
    """`rotate_and_store` of ops/triton, which reads and writes every number once; None where it
    cannot run.
    """
    if (
        spec.device.type != "cuda"
        or spec.head_dim & (spec.head_dim - 1)
        or spec.value_dim is not None
        or find_spec("triton") is None
    ):
        return None
    from servd.worker.ops.triton.rotary import rotate_and_store

    return rotate_and_store


def auto_backends(device_type: str) -> list[str]:
    """Names of the backends that "auto" asks on such a device, in order."""
    classes = {name: plugins.load(__name__, name, "Backend") for name in plugins.names(__name__)}
    names = [name for name in classes if device_type in classes[name].auto_order]
    return sorted(names, key=lambda name: classes[name].auto_order[device_type])


def make_backend(name: str, spec: AttentionSpec) -> tuple[str, Backend[Any]]:
    """The backend called `name`, or for "auto" the first that supports `spec`, with its name.

    Raises:
        ConfigError: no such backend, or it cannot run here; with its reason.
    """
    is_narrow = spec.device.type == "cpu" and spec.kv_dtype.itemsize == 1
    if is_narrow and spec.value_dim is not None:
        log.warning(
            "--kv-cache-dtype: 8 bits are slow on a CPU where the model has its values in its "
            "keys, as no kernel reads them: bfloat16 is not, and takes half of what float32 does"
        )
    elif is_narrow and spec.kv_dtype == torch.float8_e4m3fn:
        log.warning(
            "--kv-cache-dtype fp8 is for GPUs; on a CPU it is slow, as no kernel reads it: int8 "
            "takes nearly as little memory"
        )
    for candidate in auto_backends(spec.device.type) if name == "auto" else (name,):
        backend = plugins.load(__name__, candidate, "Backend")
        reason = backend.supports(spec)
        if (spec.soft_cap or spec.has_sinks) and not backend.supports_soft_cap:
            reason = "the model caps its scores or has attention sinks, which it does not compute"
        if not (spec.is_causal or backend.supports_bidirectional):
            reason = "an encoder's tokens see those after them: only native and torch_sdpa do that"
        if spec.value_dim is not None and not backend.supports_values_in_keys:
            reason = "the model has its values in its keys, where it does not read them"
        if reason is None:
            return candidate, backend(spec)
        if name != "auto":
            raise ConfigError(f"--attention-backend {name}: {reason}")
        log.info("not attention backend %s: %s", candidate, reason)
    raise AssertionError("torch_sdpa supports everything")
