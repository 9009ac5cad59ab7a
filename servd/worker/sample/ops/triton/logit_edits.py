"""Biases, bitmask, penalties and argmax in one pass over the logits."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.sample.logit_edits import IN_PROMPT, LogitEdits

BLOCK = 4096
ENTRIES = 256
LAST = 2**31 - 1


# Another stride, such as that of a single row of a padded vocabulary, is no other kernel.
@triton.jit(do_not_specialize=["row_stride"])
def edit_logits_kernel(
    logits_ptr,
    starts_ptr,
    ids_ptr,
    biases_ptr,
    words_ptr,
    mask_rows_ptr,
    slots_ptr,
    counts_ptr,
    factors_ptr,
    best_ptr,
    vocab,
    row_stride,
    words,
    COUNT_BITS: tl.constexpr,
    LAST: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Edit BLOCK tokens of a row per program; find the best. `slots` < 0: without penalties."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    valid = token < vocab
    logit_at = logits_ptr + row * row_stride + token
    if starts_ptr is not None:
        end = tl.load(starts_ptr + row + 1)
        for first in range(tl.load(starts_ptr + row), end, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            token_ids = tl.load(ids_ptr + entry, mask=entry < end, other=-1)
            is_here = (token_ids >= block * BLOCK) & (token_ids < (block + 1) * BLOCK)
            named_at = logits_ptr + row * row_stride + token_ids
            bias = tl.load(biases_ptr + entry, mask=is_here, other=0.0)
            tl.store(named_at, tl.load(named_at, mask=is_here, other=0.0) + bias, mask=is_here)
        tl.debug_barrier()  # other threads of this program load what was stored
    x = tl.load(logit_at, mask=valid, other=float("-inf")).to(tl.float32)
    is_edited = valid
    if words_ptr is not None:
        mask = tl.load(mask_rows_ptr + row)
        is_edited = token < tl.where(mask >= 0, vocab, 0)
        word = tl.load(words_ptr + mask * words + token // 32, mask=is_edited, other=-1)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    if slots_ptr is not None:
        is_edited = valid
        slot = tl.load(slots_ptr + row)
        uses = slot >= 0
        repetition = tl.load(factors_ptr + slot * 3, mask=uses, other=1.0)
        frequency = tl.load(factors_ptr + slot * 3 + 1, mask=uses, other=0.0)
        presence = tl.load(factors_ptr + slot * 3 + 2, mask=uses, other=0.0)
        num_counted = tl.where(uses, vocab, 0)
        count = tl.load(counts_ptr + slot * vocab + token, mask=token < num_counted, other=0)
        factor = tl.where(x > 0, 1.0 / repetition, repetition)
        num_outputs = (count & COUNT_BITS).to(tl.float32)
        x = x * tl.where(count == 0, 1.0, factor) - frequency * num_outputs
        x -= tl.where(num_outputs > 0, presence, 0.0)
    if slots_ptr is not None or words_ptr is not None:
        tl.store(logit_at, x.to(logits_ptr.dtype.element_ty), mask=is_edited)
    # An integer in the order of (logit, -token): NaN is greatest, the two zeros are equal.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(x != x, LAST, bits ^ ((bits >> 31) & LAST))
    best = (key.to(tl.int64) << 32) | (LAST - token).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + block, tl.max(best, axis=0))


def edit_logits(logits: Tensor, changes: LogitEdits) -> Tensor:
    return LAST - (best_of_blocks(logits, changes).amax(dim=-1) & 0xFFFFFFFF)


def choose(logits: Tensor, slots: Tensor, columns: Tensor, token_ids: Tensor) -> Tensor:
    best = best_of_blocks(logits, LogitEdits())
    (num_rows, num_blocks) = best.shape
    chosen = torch.empty_like(slots)
    tensors = best, slots, columns, token_ids, chosen
    sizes = num_blocks, token_ids.stride(0), LAST, triton.next_power_of_2(num_blocks)
    choose_kernel[(num_rows,)](*tensors, *sizes, num_warps=1)
    return chosen


@triton.jit
def choose_kernel(
    best_ptr,
    slots_ptr,
    columns_ptr,
    token_ids_ptr,
    chosen_ptr,
    num_blocks,
    token_stride,
    LAST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    block_best = tl.load(
        best_ptr + row * num_blocks + block, mask=block < num_blocks, other=-(2**63)
    )
    best = tl.max(block_best, axis=0)
    token = LAST - (best & 0xFFFFFFFF)
    at = tl.load(slots_ptr + row) * token_stride + tl.load(columns_ptr + row)
    tl.store(token_ids_ptr + at, token.to(tl.int32))
    # Infinity's key; the keys of NaN are above.
    tl.store(chosen_ptr + row, tl.where((best >> 32) >= 0x7F800000, -1 - token, token))


def best_of_blocks(logits: Tensor, changes: LogitEdits) -> Tensor:
    """Return integers, int64 [n, blocks], each the block's maximum in the order (logit, -token)."""
    num_rows, vocab = logits.shape
    biased = changes.biased
    penalized = changes.penalized
    biases = None, None, None
    masks = None, None
    penalties = None, None, None
    num_words = 0
    if biased is not None:
        biases = biased.starts, biased.token_ids, biased.biases
    if changes.bitmasks is not None:
        masks = changes.bitmasks
        num_words = masks.words.shape[1]
    if penalized is not None:
        penalties = penalized.slot_of_each(num_rows), penalized.counts, penalized.factors
    best = torch.empty(num_rows, triton.cdiv(vocab, BLOCK), dtype=torch.int64, device=logits.device)
    sizes = vocab, logits.stride(0), num_words
    constants = IN_PROMPT - 1, LAST, ENTRIES, BLOCK
    edit_logits_kernel[best.shape](
        logits, *biases, *masks, *penalties, best, *sizes, *constants, num_warps=8
    )
    return best
