"""top-k and top-p without a sort: bisection by the bits of weights, which have the same order."""
# pyright: reportMissingParameterType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.sample.fixed_point import WEIGHT_ONE


def bits_of(number: float) -> int:
    return struct.unpack("<i", struct.pack("<f", number))[0]


BLOCK = tl.constexpr(4096)
CAPACITY = tl.constexpr(2048)  # weights that are kept in registers when so few are left to choose
ONE = tl.constexpr(bits_of(WEIGHT_ONE))
UNIT = tl.constexpr(bits_of(1.0))


@triton.jit
def load_bits(row_ptr, start, vocab):
    """Return the bits of BLOCK weights of a row from `start` on; 0 after the row's end."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + token, mask=token < vocab, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def mass_of(bits):
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def measure(row_ptr, vocab, low):
    """Return number and mass of the weights of a row whose bits are above `low`: one pass."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        bits = load_bits(row_ptr, start, vocab)
        is_above = bits > low
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, mass_of(bits), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def collect(row_ptr, vocab, low, high, found_ptr):
    """Write the bits of a row that are in (low, high], in one pass. Return their number."""
    num_found = tl.zeros([], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        bits = load_bits(row_ptr, start, vocab)
        is_inside = ((bits > low) & (bits <= high)).to(tl.int32)
        tl.store(
            found_ptr + num_found + tl.cumsum(is_inside, axis=0) - 1, bits, mask=is_inside != 0
        )
        num_found += tl.sum(is_inside, axis=0)
    tl.debug_barrier()  # threads read what other threads wrote
    return num_found


@triton.jit
def search(row_ptr, vocab, low, low_count, low_mass, limit, found_ptr, BY_COUNT: tl.constexpr):
    """Return the smallest bits from `low` on such that the weights above them have less than the
    limit; and the count and mass of these weights.

    The answer is always in (low, high]. The row is read until few weights are in this interval;
    then these weights are collected.
    """
    high = tl.full([], ONE, dtype=tl.int32)  # no weight is above
    high_count = tl.zeros([], dtype=tl.int32)
    high_mass = tl.zeros([], dtype=tl.int64)
    if (low_count if BY_COUNT else low_mass).to(tl.float64) < limit:
        high = low
        high_count = low_count
        high_mass = low_mass
    while (high - low > 1) & (low_count - high_count > CAPACITY):
        middle = low + (high - low) // 2
        count, mass = measure(row_ptr, vocab, middle)
        if (count if BY_COUNT else mass).to(tl.float64) < limit:
            high = middle
            high_count = count
            high_mass = mass
        else:
            low = middle
            low_count = count
    if high - low > 1:
        num_found = collect(row_ptr, vocab, low, high, found_ptr)
        at = tl.arange(0, CAPACITY)
        bits = tl.load(found_ptr + at, mask=at < num_found, other=0)
        masses = mass_of(bits)
        # above all that were collected
        more_count = high_count
        more_mass = high_mass
        while high - low > 1:
            middle = low + (high - low) // 2
            is_above = bits > middle
            count = more_count + tl.sum(is_above.to(tl.int32), axis=0)
            mass = more_mass + tl.sum(tl.where(is_above, masses, 0), axis=0)
            if (count if BY_COUNT else mass).to(tl.float64) < limit:
                high = middle
                high_count = count
                high_mass = mass
            else:
                low = middle
    return high, high_count, high_mass


@triton.jit
def top_k_top_p_kernel(weights_ptr, lowest_ptr, top_k_ptr, top_p_ptr, found_ptr, out_ptr, vocab):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = weights_ptr + row * vocab
    found_ptr = found_ptr + row * CAPACITY
    lowest = tl.load(lowest_ptr + row)
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    result = lowest
    if (k > 0) | (p < 1.0):
        low = tl.maximum(lowest.to(tl.int32, bitcast=True) - 1, 0)
        if k <= 0:
            low = tl.maximum(low, UNIT - 1)  # smaller weights have no mass
        count, mass = measure(row_ptr, vocab, low)
        total = mass
        if k > 0:
            kth, count, mass = search(
                row_ptr, vocab, low, count, mass, k.to(tl.float64), found_ptr, True
            )
            # Of the weights equal to the k-th, count those that make k; none if there are fewer.
            total = mass + tl.where(kth > low, (k - count) * mass_of(kth), 0)
            low = kth
        limit = p * total.to(tl.float64)
        smallest, count, mass = search(row_ptr, vocab, low, count, mass, limit, found_ptr, False)
        result = tl.maximum(lowest, smallest.to(tl.float32, bitcast=True))
    tl.store(out_ptr + row, result)


def filter_top_k_top_p(weights: Tensor, lowest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    num_rows, vocab = weights.shape
    candidates = torch.empty(num_rows, CAPACITY.value, dtype=torch.int32, device=weights.device)
    out = torch.empty_like(lowest)
    top_k_top_p_kernel[(num_rows,)](
        weights, lowest, top_k, top_p, candidates, out, vocab, num_warps=16
    )
    return out
