"""Attention of a mixed batch over the paged KV cache: one file per backend."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.worker.attention import _int8
from servd.worker.ops import target
from servd.worker.ops._attention_batch import AttentionBatch
from servd.worker.ops.reference import Rotation, rotate

log = logging.getLogger("servd.worker")


class HeadNorm(Protocol):
    """An RMSNorm of attention heads."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor: ...


Norms = tuple[HeadNorm, HeadNorm]
"""Norms of query heads and key heads, with the same epsilon."""


class StepMetadata(Protocol):
    """A backend's metadata of a step, the same for all layers."""

    @property
    def slot_mapping(self) -> Tensor:
        """KV-cache slots of the tokens, int64 [num_tokens]: block * block_size + offset."""
        ...


Metadata = TypeVar("Metadata", bound=StepMetadata)


@dataclass(frozen=True)
class AttentionSpec:
    """A model's attention on one rank. Only windows differ by layer: see `with_window`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    # A token sees itself and the sliding_window - 1 tokens before it; not causal: on either side.
    sliding_window: int | None
    dtype: torch.dtype  # queries, keys and values
    kv_dtype: torch.dtype  # the cache
    device: torch.device
    exact_seq_lens: bool = True  # see AttentionBatch.seq_lens
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    has_sinks: bool = False  # see AttentionBackend.attend
    # False: tokens see later ones, too, and all tokens of a row are computed in one step.
    is_causal: bool = True
    batch_invariant: bool = False  # asks for `is_batch_invariant` where it has a cost
    # Latent attention (MLA): values are the last value_dim elements of the one head of keys; None:
    # values are stored separately, and have head_dim.
    value_dim: int | None = None


class AttentionBackend(ABC, Generic[Metadata]):
    """Attention over a paged KV cache. `Metadata` is built once per step, for all layers.

    A backend with `supports_graphs` can be captured in a CUDA graph: `build_metadata`, `write` and
    `attend` run once, and their kernels run again for other steps with as many tokens. They must
    therefore read lengths, block tables and slots from the batch's device tensors, whose contents
    change. They may use the host's lengths only for sizes of grids and buffers (in a capture, every
    row's length is max_model_len), and never wait for the device. There are two kinds of steps. In
    decode steps, every query_len is 1; padding rows have length 1 and a block of their own. In
    steps without `has_exact_query_lens`, padding rows are empty, and padding tokens belong to no
    row: they are written to the padding block, and `attend` may return anything for them.
    """

    supports_graphs: ClassVar[bool] = False
    supports_tails: ClassVar[bool] = False  # see AttentionBatch.tails
    # Tokens before a window that kernels read, with weight zero, so that their blocks must not be
    # freed; 0: only those in the first block of the window; None: any.
    num_read_before: ClassVar[int | None] = None
    is_batch_invariant: bool = False  # results for a token do not depend on the rest of the step
    supports_batch_invariance: ClassVar[bool] = False  # see AttentionSpec.batch_invariant
    supports_soft_cap: ClassVar[bool] = False  # also stands for sinks
    supports_bidirectional: ClassVar[bool] = False  # see AttentionSpec.is_causal
    supports_bidirectional_rows: ClassVar[bool] = False  # see AttentionBatch.bidirectional
    fuses_norms = False  # whether `fused_write` takes norms
    rotates_parts = False  # whether `fused_write` takes rotations of a part of heads
    supports_values_in_keys: ClassVar[bool] = False  # see AttentionSpec.value_dim
    # Device type -> place in the order in which "auto" tries backends there, lowest first.
    auto_order: ClassVar[Mapping[str, int]] = {}

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.fused_write = fused_write(spec)
        self.fuses_norms = self.rotates_parts = self.fused_write is not None
        self.other_windows: dict[int | None, Self] = {}

    def with_window(self, sliding_window: int | None) -> Self:
        """Return the same backend for layers with another sliding window."""
        if sliding_window == self.spec.sliding_window:
            return self
        if sliding_window not in self.other_windows:
            spec = replace(self.spec, sliding_window=sliding_window)
            self.other_windows[sliding_window] = type(self)(spec)
        return self.other_windows[sliding_window]

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot run this attention here; None if it can."""

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache: [keys and values, num_blocks, ...]."""
        spec = self.spec
        size = _int8.row_size(spec.kv_dtype, spec.head_dim)
        num_stored = 2 if spec.value_dim is None else 1  # keys contain the values
        return (num_stored, num_blocks, spec.block_size, spec.num_kv_heads, size)

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """Return the index tensors and masks of a step."""

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
        """Apply norms and rotary positions to queries and keys, and store keys and values.

        In a cache of float8_e4m3fn, values out of range are clamped; for int8 see `_int8`.

        Args:
            q: [num_tokens, num_heads, head_dim].
            k: [num_tokens, num_kv_heads, head_dim].
            v: like k; None: see AttentionSpec.value_dim.
            kv_cache: this layer's cache, see `kv_cache_shape`.
            metadata: this step's metadata.
            rotation: None for a model without rotary positions.
            norms: those of the heads of q and k; None without norms.

        Returns:
            The queries for `attend`, like q.
        """
        fused: list[Any] = []
        if norms is not None and self.fuses_norms:
            fused = [(norms[0].weight, norms[1].weight, norms[0].eps)]
        elif norms is not None:
            q = norms[0](q)
            k = norms[1](k)
        is_partial = rotation is not None and 2 * rotation[0].shape[-1] < q.shape[-1]
        if rotation is not None and is_partial and not self.rotates_parts:
            q = rotate(q, rotation)
            k = rotate(k, rotation)
            rotation = None
        if self.fused_write is not None:
            return self.fused_write(q, k, v, kv_cache, metadata.slot_mapping, rotation, *fused)
        if rotation is not None:
            q = rotate(q, rotation)
            k = rotate(k, rotation)
        for stored, x in zip(kv_cache, (k, v), strict=False):
            assert x is not None, "a cache that stores values needs v"
            if kv_cache.dtype == torch.float8_e4m3fn:
                largest = torch.finfo(kv_cache.dtype).max
                x = x.clamp(-largest, largest)
            if kv_cache.dtype == torch.int8:
                x = _int8.pack(x)
            stored.view(-1, *x.shape[1:])[metadata.slot_mapping] = x.to(kv_cache.dtype)
        return q

    def move(self, kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values of a layer between KV-cache slots, int64 [n] each."""
        cache = kv_cache.flatten(1, 2)
        cache[:, targets] = cache[:, sources]

    @abstractmethod
    def attend(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Return attention of the step's tokens over the cache, after `write` has stored their keys
        and values.

        Args:
            q: [num_tokens, num_heads, head_dim], as returned by `write`.
            kv_cache: this layer's cache.
            metadata: this step's metadata.
            scale: factor on the scores.
            sinks: [num_heads], the score of an additional key per head, of value zero; only with
                `supports_soft_cap`.

        Returns:
            [num_tokens, num_heads, head_dim or value_dim], contiguous.
        """


def fused_write(spec: AttentionSpec) -> Callable[..., Tensor] | None:
    """Return `rotate_and_store` of ops/triton, a `write` in one pass; None if it cannot run."""
    if not target.runs_triton(spec.device) or spec.head_dim % 2:
        return None
    from servd.worker.ops.triton.rotary import rotate_and_store

    return rotate_and_store


def auto_backends(device_type: str) -> list[str]:
    """Return the names of the backends that "auto" tries on this device type, in order."""
    classes = {
        name: plugins.load_class(__name__, name, AttentionBackend)
        for name in plugins.names(__name__)
    }
    names = [name for name in classes if device_type in classes[name].auto_order]
    return sorted(names, key=lambda name: classes[name].auto_order[device_type])


def make_backend(name: str, spec: AttentionSpec) -> tuple[str, AttentionBackend[Any]]:
    """Return a backend's name and the backend: `name`, or for "auto" the first that fits.

    Raises ConfigError, with the reason, if the backend does not exist or cannot run here.
    """
    is_narrow = spec.device.type == "cpu" and spec.kv_dtype.itemsize == 1
    if is_narrow and spec.value_dim is not None:
        log.warning(
            "--kv-cache-dtype: on a CPU, 8 bits are slow for a model that has its values in "
            "its keys, because no kernel reads them: use bfloat16"
        )
    elif is_narrow and spec.kv_dtype == torch.float8_e4m3fn:
        log.warning(
            "--kv-cache-dtype fp8 is slow on a CPU, because no kernel reads it: use int8, "
            "which takes about the same memory"
        )
    for candidate in auto_backends(spec.device.type) if name == "auto" else (name,):
        backend = plugins.load_class(__name__, candidate, AttentionBackend)
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
        log.info("attention backend %s cannot run here: %s", candidate, reason)
    raise AssertionError("torch_sdpa supports everything")
