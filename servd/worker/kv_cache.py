"""KV cache: how many blocks fit, and their tensors."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from servd.config import Config
from servd.errors import NotEnoughMemory
from servd.hf import ModelSpec
from servd.worker.attention._base import Backend

log = logging.getLogger("servd.worker")

GIB = 2**30


def bytes_per_block(backend: Backend[Any], num_layers: int) -> int:
    """Keys and values of one block over all layers, on this rank."""
    return num_layers * torch.Size(backend.kv_cache_shape(1)).numel() * backend.spec.dtype.itemsize


def count_blocks(config: Config, block_bytes: int, memory: int, weights_bytes: int) -> int:
    """Blocks to allocate in `memory` bytes: not more than all slots at full length can use.

    Raises:
        NotEnoughMemory: not even one request of max_model_len fits.
    """
    max_model_len, max_num_seqs = config.model.max_model_len, config.scheduler.max_num_seqs
    assert max_model_len is not None and max_num_seqs is not None, "config must be resolved"
    block_size = config.cache.block_size
    per_request = -(-max_model_len // block_size)
    num_blocks = min(max(memory, 0) // block_bytes, max_num_seqs * per_request)
    numbers = (
        f"weights {weights_bytes / GIB:.2f} GiB, KV cache {num_blocks} blocks of {block_size} tokens "
        f"({num_blocks * block_bytes / GIB:.2f} GiB, {num_blocks * block_size} tokens)"
    )
    if num_blocks < per_request:
        needed = per_request * block_bytes
        shorter = f"lower --max-model-len to {num_blocks * block_size} or " if num_blocks else ""
        raise NotEnoughMemory(
            f"{max(memory, 0) / GIB:.2f} GiB for the KV cache do not hold one request of {max_model_len} tokens, "
            f"which takes {needed / GIB:.2f} GiB ({numbers}): {shorter}raise --kv-cache-memory to {needed}"
        )
    log.info("%s: %.1f requests of %d tokens", numbers, num_blocks / per_request, max_model_len)
    return num_blocks


def allocate(backend: Backend[Any], spec: ModelSpec, num_blocks: int) -> list[torch.Tensor]:
    """The cache of each layer. Zeros, because what a mask hides is still multiplied by 0 and must be finite."""
    shape, dtype, device = backend.kv_cache_shape(num_blocks), backend.spec.dtype, backend.spec.device
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
    # torch.zeros would write every page now: seconds of start-up, and memory that may never be used. NumPy's
    # zeros come from calloc, whose pages the system gives when they are first written.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return [torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape) for _ in range(spec.num_layers)]
