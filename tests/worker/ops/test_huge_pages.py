"""Tensors in blocks of huge pages."""

import gc
import weakref

import torch

from servd.worker.ops._huge_pages import ALIGNMENT, BLOCK, PAGE, HugePages


def test_tensors_share_a_block_and_keep_apart():
    pages = HugePages()
    tensors = [pages.empty(size, torch.float32).fill_(size) for size in (1, 17, 1000, 3)]
    tensors.append(pages.empty(5, torch.int8).fill_(5))
    assert [set(tensor.tolist()) for tensor in tensors] == [{1}, {17}, {1000}, {3}, {5}]
    starts = [tensor.data_ptr() for tensor in tensors]
    assert starts[0] % PAGE == 0
    assert starts == sorted(starts) and starts[-1] < starts[0] + PAGE
    assert all(start % ALIGNMENT == 0 for start in starts)


def test_one_larger_than_a_block_has_its_own():
    pages = HugePages()
    large = pages.empty(BLOCK + 1, torch.uint8)
    large[-1] = 7
    assert large.data_ptr() % PAGE == 0
    assert large[-1] == 7


def test_a_block_is_freed_with_its_last_tensor():
    pages = HugePages()
    first, second = (pages.empty(8, torch.float32) for _ in range(2))
    assert pages.block is not None
    block: weakref.ref = pages.block
    del first
    gc.collect()
    assert block() is not None
    del second
    gc.collect()
    assert block() is None
    assert pages.empty(8, torch.float32).fill_(1).sum() == 8


def test_nothing_needs_no_memory():
    assert HugePages().empty(0, torch.float32).shape == (0,)
