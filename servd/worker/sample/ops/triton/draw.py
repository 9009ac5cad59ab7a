"""The draw: finds the block of the random number by sums of blocks, then the token in it."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(4096)


@triton.jit
def masses_of(weights_ptr, row, block, vocab, lowest):
    token = block * BLOCK + tl.arange(0, BLOCK)
    weights = tl.load(weights_ptr + row * vocab + token, mask=token < vocab, other=0.0)
    return tl.where(weights >= lowest, weights, 0.0).to(tl.int64)


@triton.jit
def splitmix64(state, index):
    z = state + (index + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def block_masses_kernel(weights_ptr, lowest_ptr, masses_ptr, vocab):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    masses = masses_of(weights_ptr, row, block, vocab, tl.load(lowest_ptr + row))
    tl.store(masses_ptr + row * tl.num_programs(1) + block, tl.sum(masses, axis=0))


@triton.jit
def draw_kernel(
    weights_ptr,
    lowest_ptr,
    masses_ptr,
    seeds_ptr,
    positions_ptr,
    out_ptr,
    vocab,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """Draw a token of one row per program. BLOCKS >= num_blocks."""
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row).to(tl.uint64, bitcast=True)
    bits = splitmix64(splitmix64(seed, 0), position) >> 11
    random = bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    block = tl.arange(0, BLOCKS)
    masses = tl.load(masses_ptr + row * num_blocks + block, mask=block < num_blocks, other=0)
    target = (random * tl.sum(masses, axis=0).to(tl.float64)).to(tl.int64)
    chosen = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, num_blocks - 1)
    before = tl.sum(tl.where(block < chosen, masses, 0), axis=0)
    inside = masses_of(weights_ptr, row, chosen, vocab, tl.load(lowest_ptr + row))
    token = chosen * BLOCK + tl.sum(
        (before + tl.cumsum(inside, axis=0) <= target).to(tl.int32), axis=0
    )
    tl.store(out_ptr + row, tl.minimum(token, vocab - 1).to(tl.int64))


def draw(weights: Tensor, lowest: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    num_rows, vocab = weights.shape
    num_blocks = triton.cdiv(vocab, BLOCK.value)
    masses = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=weights.device)
    block_masses_kernel[(num_rows, num_blocks)](weights, lowest, masses, vocab, num_warps=8)
    out = torch.empty(num_rows, dtype=torch.int64, device=weights.device)
    tensors = weights, lowest, masses, seeds, positions, out
    sizes = vocab, num_blocks, triton.next_power_of_2(num_blocks)
    draw_kernel[(num_rows,)](*tensors, *sizes, num_warps=8)
    return out
