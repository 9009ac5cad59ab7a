"""KV cache: how many blocks fit, and their tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servd.config import Config
from servd.errors import NotEnoughMemory
from servd.sizes import format_bytes
from servd.worker.attention import Backend
from servd.worker.layers.attention import num_caches
from servd.worker.model_loader import Loadable

log = logging.getLogger("servd.worker")


def bytes_per_block(backend: Backend[Any], model: Loadable) -> int:
    """Keys and values of one block over all layers, on this rank."""
    num_elements = torch.Size(backend.kv_cache_shape(1)).numel()
    return num_caches(model) * num_elements * backend.spec.kv_dtype.itemsize


def dtype_of(config: Config, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are stored as, in a model of type `dtype`."""
    return torch.float8_e4m3fn if config.cache.kv_cache_dtype == "fp8" else dtype


def blocks_per_request(config: Config) -> int:
    """Blocks that one request of max_model_len takes."""
    assert config.model.max_model_len is not None, "config must be resolved"
    return -(-config.model.max_model_len // config.cache.block_size)


def count_blocks(
    config: Config, block_bytes: int, memory: int, weights_bytes: int, remedies: Sequence[str]
) -> int:
    """Blocks to allocate in `memory` bytes: no more than all slots at full length can use.

    Args:
        config: resolved.
        block_bytes: size of one block on this rank.
        memory: that the cache may take.
        weights_bytes: for the messages.
        remedies: what else would make room for one request of max_model_len.

    Raises:
        NotEnoughMemory: not even one request of max_model_len fits, and the context may not be
            shortened.
    """
    max_model_len, max_num_seqs = config.model.max_model_len, config.scheduler.max_num_seqs
    assert max_model_len is not None and max_num_seqs is not None, "config must be resolved"
    block_size, per_request = config.cache.block_size, blocks_per_request(config)
    num_blocks = min(max(memory, 0) // block_bytes, max_num_seqs * per_request)
    numbers = (
        f"weights {format_bytes(weights_bytes)}, KV cache {num_blocks} blocks of {block_size} "
        f"tokens "
        f"({format_bytes(num_blocks * block_bytes)}, {num_blocks * block_size} tokens)"
    )
    if num_blocks < per_request:
        needed = format_bytes(per_request * block_bytes)
        if config.model.shorten_max_model_len and num_blocks:
            log.warning(
                "%s: the context is shortened from %d to %d tokens; for all of it, %s",
                numbers, max_model_len, num_blocks * block_size, _either(remedies),
            )  # fmt: skip
            return num_blocks
        shorter = [f"lower --max-model-len to {num_blocks * block_size}"] if num_blocks else []
        raise NotEnoughMemory(
            f"{format_bytes(max(memory, 0))} for the KV cache do not hold one request of "
            f"{max_model_len} tokens, "
            f"which takes {needed} ({numbers}): {_either([*shorter, *remedies])}"
        )
    log.info("%s: %.1f requests of %d tokens", numbers, num_blocks / per_request, max_model_len)
    return num_blocks


def _either(remedies: Sequence[str]) -> str:
    """E.g. "lower this, lower that or raise something"."""
    *others, last = remedies
    return f"{', '.join(others)} or {last}" if others else last


def allocate(backend: Backend[Any], model: Loadable, num_blocks: int) -> list[Tensor]:
    """The cache of each layer; zeros, because what a mask hides must be finite."""
    shape = backend.kv_cache_shape(num_blocks)
    dtype, device = backend.spec.kv_dtype, backend.spec.device
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_caches(model))]
    # torch.zeros would write every page now: seconds of start-up, and memory that may never be
    # used. NumPy's zeros come from calloc, whose pages the system gives when they are first
    # written; huge ones, where it can.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return [
        torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
        for _ in range(num_caches(model))
    ]
