"""The KV cache's tensors, and the number of blocks that fit."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servd.base.errors import NotEnoughMemory
from servd.base.sizes import format_bytes
from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.worker.attention import AttentionBackend
from servd.worker.layers.attention import num_caches
from servd.worker.layers.weight import Loadable

log = logging.getLogger("servd.worker")


def bytes_per_block(backend: AttentionBackend[Any], model: Loadable) -> int:
    """Return the bytes of one block's keys and values in all layers, on this rank."""
    num_elements = torch.Size(backend.kv_cache_shape(1)).numel()
    return num_caches(model) * num_elements * backend.spec.kv_dtype.itemsize


def dtype_of(config: Config) -> torch.dtype:
    name = config.cache.kv_cache_dtype
    return torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)


def count_blocks(
    config: Config,
    layout: KVLayout,
    block_bytes: int,
    memory: int,
    weights_bytes: int,
    more_memory: Callable[[int], list[str]],
) -> int:
    """Return the number of blocks to allocate in `memory` bytes: at most what all slots at full
    length can use. Raises NotEnoughMemory: one request of max_model_len does not fit, and the
    context must not be shortened. `block_bytes`: size of a block on this rank; `memory`: bytes that
    the cache may take; `more_memory`: changes of options that would free that many bytes.
    """
    max_model_len = config.model.max_model_len
    max_num_seqs = config.scheduler.max_num_seqs
    assert max_model_len is not None and max_num_seqs is not None, "config must be resolved"
    block_size = layout.block_size
    per_request = layout.blocks(max_model_len)
    if not block_bytes:  # no layer here has attention: blocks only count tokens
        return max_num_seqs * per_request
    needed = per_request * block_bytes
    hints = more_memory(needed - memory) or [f"raise --kv-cache-memory to {format_bytes(needed)}"]
    num_blocks = min(max(memory, 0) // block_bytes, max_num_seqs * per_request)
    num_tokens = layout.num_tokens(num_blocks, max_model_len)
    numbers = (
        f"weights {format_bytes(weights_bytes)}, KV cache {num_blocks} blocks of {block_size} "
        f"tokens ({format_bytes(num_blocks * block_bytes)}, {num_tokens} tokens)"
    )
    if num_blocks < per_request:
        longest = layout.max_tokens(num_blocks, max_model_len)
        if config.model.shorten_max_model_len and longest:
            log.warning(
                "%s: shortening the context from %d to %d tokens; to keep all of it, %s",
                numbers,
                max_model_len,
                longest,
                _either(hints),
            )
            return num_blocks
        shorter = [f"lower --max-model-len to {longest}"] if longest else []
        raise NotEnoughMemory(
            f"{format_bytes(max(memory, 0))} for the KV cache are too little for one request of "
            f"{max_model_len} tokens, which takes {format_bytes(needed)} ({numbers}): "
            f"{_either([*shorter, *hints])}"
        )
    log.info("%s: %.1f requests of %d tokens", numbers, num_blocks / per_request, max_model_len)
    return num_blocks


def _either(hints: Sequence[str]) -> str:
    """Join hints: "lower this, lower that or raise something"."""
    *first_hints, last = hints
    return f"{', '.join(first_hints)} or {last}" if first_hints else last


def allocate(backend: AttentionBackend[Any], model: Loadable, num_blocks: int) -> list[Tensor]:
    """Return the cache of each layer, filled with zeros: masked values must be finite, too."""
    shape = backend.kv_cache_shape(num_blocks)
    dtype = backend.spec.kv_dtype
    device = backend.spec.device
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_caches(model))]
    # torch.zeros would write every page now, which takes seconds, and memory that may never be
    # used. NumPy's zeros come from calloc, whose pages are committed when they are first written.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return [
        torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
        for _ in range(num_caches(model))
    ]
