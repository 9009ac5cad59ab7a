"""BlockStore: ranks share slots, and blocks come back as they were."""

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from servd.messages.engine import BlockSwaps
from servd.worker.device.parallel import Parallel
from servd.worker.kv import block_store
from servd.worker.kv.block_store import BlockStore

NUM_BLOCKS = 5
NUM_SLOTS = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(4, 2, 6), (1, 3, 1), (2, 32)])  # a block's
@pytest.mark.parametrize("swap", [BlockStore.swap_blocks, BlockStore.swap_staged])
def test_each_rank_gets_its_own_part_of_a_block_back(monkeypatch, dtype, shape, swap):
    monkeypatch.setattr(block_store, "STAGED_BYTES", 1)  # one block at a time

    def bits(cache: torch.Tensor) -> torch.Tensor:
        return cache.view(torch.uint8)

    caches = [  # two ranks with two layers each
        [torch.randn(2, NUM_BLOCKS, *shape).to(dtype) for _ in range(2)] for _ in range(2)
    ]
    bytes_per_block = sum(bits(cache[:, 0]).numel() for cache in caches[0])
    memory = os.memfd_create("test")
    os.ftruncate(memory, NUM_SLOTS * 2 * bytes_per_block)
    path = f"/proc/self/fd/{memory}"
    stores = [
        BlockStore(path, rank_caches, Parallel(rank, 2)) for rank, rank_caches in enumerate(caches)
    ]
    before = [[cache.clone() for cache in rank_caches] for rank_caches in caches]
    swaps = BlockSwaps(path, [(2, 0), (0, 4)], [(3, 0), (1, 2)])
    for store in stores:
        swap(store, swaps)
    os.close(memory)
    for ours, theirs in zip(caches, before, strict=True):
        for cache, old in zip(ours, theirs, strict=True):
            assert torch.equal(bits(cache), bits(old[:, [1, 1, 2, 3, 3]]))


def test_blocks_are_swapped_out_before_others_are_swapped_in():
    cache = torch.arange(2 * NUM_BLOCKS * 8.0).view(2, NUM_BLOCKS, 8)
    memory = os.memfd_create("test")
    os.ftruncate(memory, cache[:, 0].numel() * 4)  # one slot
    store = BlockStore(f"/proc/self/fd/{memory}", [cache], Parallel())
    old = cache.clone()
    for block in (0, 2):
        store.swap_blocks(BlockSwaps("", [(0, block + 1)], [(block, 0)]))
    os.close(memory)
    assert torch.equal(cache, old[:, [0, 0, 2, 2, 4]])


def test_copies_of_many_blocks_take_turns_in_the_same_memory(monkeypatch):
    """Memory that copies still read cannot be allocated again, and the host runs ahead of them."""
    monkeypatch.setattr(block_store, "STAGED_BYTES", 1)
    turns: list[int] = []  # 0: the kernels wait for the copies
    staged: list[torch.Tensor] = []

    class Store(BlockStore):
        def finish(self) -> None:
            turns.append(0)

        def _beside(self, memory: torch.Tensor) -> AbstractContextManager[None]:
            turns.append(1)
            staged.append(memory)  # kept, as by copies
            return nullcontext()

    memory = os.memfd_create("test")
    os.ftruncate(memory, NUM_SLOTS * 2 * 8 * 4)
    cache = torch.zeros(2, NUM_BLOCKS, 8)
    store = Store(f"/proc/self/fd/{memory}", [cache], Parallel())
    pairs = [(number, number) for number in range(NUM_SLOTS)]
    store.swap_staged(BlockSwaps("", pairs, pairs))
    os.close(memory)
    assert len({rows.untyped_storage().data_ptr() for rows in staged}) == 1
    assert turns == [0, 1] * NUM_SLOTS + [1, 0] * NUM_SLOTS


@pytest.mark.parametrize("num_columns", [7, 40])
@pytest.mark.parametrize("has_cache", [True, False])
def test_checkpoints_of_each_rank_come_back_from_several_slots(num_columns, has_cache):
    cache_bytes = 2 * 8 * 4  # a block of a layer
    slot_bytes = cache_bytes if has_cache else num_columns * 4
    num_parts = -(-num_columns * 4 // slot_bytes)
    memory = os.memfd_create("test")
    os.ftruncate(memory, 2 * num_parts * 2 * slot_bytes)
    stores = []
    checkpoints = [torch.randn(3, num_columns) for _ in range(2)]
    for rank in range(2):
        caches = [torch.randn(2, NUM_BLOCKS, 8)] if has_cache else []
        path = f"/proc/self/fd/{memory}"
        stores.append(BlockStore(path, caches, Parallel(rank, 2), checkpoints[rank]))
    before = [states.clone() for states in checkpoints]
    slots = list(reversed(range(num_parts)))
    out = BlockSwaps("", states_to_swap_out=[(1, slots)])
    no_part = BlockSwaps("", states_to_swap_out=[(2, [-1] * num_parts)])
    for store in stores:
        store.swap_blocks(out)
        store.swap_blocks(no_part)
        store.swap_blocks(BlockSwaps("", states_to_swap_in=[(slots, 0)]))
    os.close(memory)
    for states, old in zip(checkpoints, before, strict=True):
        assert torch.equal(states, old[[1, 1, 2]])
