"""Attention: the attention layer of models, which calls the backend with its own KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.worker.attention import AttentionBackend, AttentionBatch, AttentionSpec, Norms
from servd.worker.layers.image_embeddings import ImageEmbeddings
from servd.worker.layers.rotary import Rotation
from servd.worker.layers.weight import Loadable
from servd.worker.ops._state_rows import StateMemory, StateRows


@dataclass(eq=False)
class ForwardContext:
    """The context of a step's forward pass, besides its inputs."""

    backend: AttentionBackend[Any]
    batch: AttentionBatch
    kv_caches: Sequence[Tensor]  # one per layer
    state_memory: StateMemory | None = None
    images: ImageEmbeddings | None = None

    def __post_init__(self) -> None:
        backend = self.backend  # not by `self`: a cycle of references would keep the batch
        batch = self.batch

        def of_layers(window: int | None, group: int) -> tuple[AttentionBackend[Any], Any]:
            chosen = backend.with_window(window)
            return chosen, chosen.build_metadata(batch.other_groups[group - 1] if group else batch)

        # (window, group) -> the backend of such layers, and its metadata of the step.
        self.of_layers = cache(of_layers)

    @cached_property
    def state_rows(self) -> StateRows:
        """The states of the step's rows, in the columns of all layers."""
        memory = self.state_memory
        batch = self.batch
        assert memory is not None and batch.slots is not None
        return StateRows(
            memory.live,
            batch.slots,
            torch.from_numpy(batch.query_lens),
            torch.from_numpy(batch.seq_lens),
            cache(lambda: batch.seq_lens_device == batch.query_start_loc.diff()),
            memory.checkpoints,
            memory.saves,
        )


class Attention(nn.Module):
    """Attention of layer number `layer` over the paged KV cache, causal or not.

    In a cache of float8_e4m3fn, keys and values are divided by `kv_scales`, which calibrated
    checkpoints have.

    Args:
        layer: number of its KV cache. Layers of an encoder share one, which is read only in the
            step that writes it; layers of different groups share one in different blocks (see
            kv_groups.py).
        num_heads: query heads on this rank.
        num_kv_heads: key and value heads on this rank.
        head_dim: size of a head.
        scale: factor on the scores.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before; None: all.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        is_causal: bool = True,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.group = 0
        self.query_shape = (-1, num_heads, head_dim)
        self.kv_shape = (-1, num_kv_heads, head_dim)
        self.scale = scale
        if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
            raise UnsupportedModel(f"a sliding_window of {sliding_window!r} tokens")
        self.sliding_window = sliding_window
        self.kv_scales = {"k": 1.0, "v": 1.0}
        self.shape = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "soft_cap": soft_cap,
            "has_sinks": has_sinks,
            "is_causal": is_causal,
            "value_dim": value_dim,
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        ctx: ForwardContext,
        rotation: Rotation | None = None,
        sinks: Tensor | None = None,
        norms: Norms | None = None,
    ) -> Tensor:
        """Return attention [num_tokens, heads * head_dim] for q of this shape, and k and v
        [num_tokens, kv_heads * head_dim]. If k holds the values: [num_tokens, heads * value_dim].
        """
        backend, metadata = ctx.of_layers(self.sliding_window, self.group)
        kv_cache = ctx.kv_caches[self.layer]
        q = q.view(self.query_shape)
        k = k.view(self.kv_shape)
        k_scale, v_scale = (
            self.kv_scales.values() if kv_cache.dtype == torch.float8_e4m3fn else (1.0, 1.0)
        )
        if norms is not None and k_scale != 1.0:  # keys are normalised before they are scaled
            q = norms[0](q)
            k = norms[1](k)
            norms = None
        k = k if k_scale == 1.0 else k / k_scale
        if v is None:
            v_scale = k_scale
        else:
            v = v.view(self.kv_shape)
            v = v if v_scale == 1.0 else v / v_scale
        q = backend.write(q, k, v, kv_cache, metadata, rotation, norms)
        out = backend.attend(q, kv_cache, metadata, self.scale * k_scale, sinks).flatten(1)
        return out if v_scale == 1.0 else out.mul_(v_scale)


def attention_layers(model: Loadable) -> list[Attention]:
    return [module for _, module in model.named_modules() if isinstance(module, Attention)]


def num_caches(model: Loadable) -> int:
    return len({layer.layer for layer in attention_layers(model)})


def spec_of(model: Loadable, **options: Any) -> AttentionSpec:
    """Return the attention that a backend must compute. `options`: its other fields. Raises
    UnsupportedModel if layers differ in more than their windows.
    """
    # Without attention, any shape will do.
    first, *other_layers = attention_layers(model) or [Attention(0, 1, 1, 16, 1.0)]
    for layer in other_layers:
        if layer.shape != first.shape:
            raise UnsupportedModel(
                f"layers with different attention are not supported: layer {first.layer} has "
                f"{first.shape}, layer {layer.layer} {layer.shape}"
            )
    return AttentionSpec(**first.shape, sliding_window=first.sliding_window, **options)
