"""Attention of a tile: lines of queries over keys and values in the blocks of one row.

A line is a (token, head) pair of the row. A tile has query heads that share a kv head, so that keys
and values are read once for all of them. Heads are padded to a power of two in registers, not in
memory. Offsets into the cache are int64, because the cache can have more than 2**31 numbers.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def lines_of(first_head, first_query, query_len, GROUP: tl.constexpr, LINES: tl.constexpr):
    """Return query token, head, and validity of each line of a tile, [LINES] each."""
    line = tl.arange(0, LINES)
    query = first_query + line // GROUP
    valid = (line < LINES // GROUP * GROUP) & (query < query_len)
    return query, first_head + line % GROUP, valid


@triton.jit
def numbers_of(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the numbers of a head, [PADDED], and whether the head has them: below SIZE. A mask of
    constants costs nothing.
    """
    number = tl.arange(0, PADDED)
    return number, tl.full([PADDED], True, tl.int1) if SIZE == PADDED else number < SIZE


@triton.jit
def load_queries(ptr, valid, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return queries at `ptr` [LINES]: [LINES, PADDED], zeros for invalid lines and padding."""
    number, is_real = numbers_of(SIZE, PADDED)
    mask = valid[:, None] & is_real[None, :]
    return tl.load(ptr[:, None] + number[None, :], mask=mask, other=0.0)


@triton.jit
def store_lines(ptr, at, valid, lines, SIZE: tl.constexpr):
    """Write `lines` [LINES, PADDED] to the heads with numbers `at` [LINES]."""
    number, is_real = numbers_of(SIZE, lines.shape[1])
    to = ptr + at.to(tl.int64)[:, None] * SIZE + number[None, :]
    tl.store(to, lines.to(ptr.dtype.element_ty), mask=valid[:, None] & is_real[None, :])


@triton.jit
def without_sink(lse, sinks_ptr, head):
    """Return the keys' share of the softmax weight; the sinks of the heads have the rest."""
    share = tl.full(lse.shape, 1.0, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        share = 1.0 / (1.0 + tl.exp2(sink - lse))
    return share


class Keys(NamedTuple):
    """The keys and values of a row for one kv head, in the blocks of a table. From `tail_begin` on,
    the last TAIL are in the slots at `tail_ptr`. No line sees a key before `first`. A key has
    KEY_SIZE numbers. Without `value_ptr`, its last VALUE_SIZE are the value.

    Make it in the call that needs it: Triton turns the constants of a variable into tensors.
    """

    key_ptr: tl.tensor
    value_ptr: tl.tensor | None
    table_ptr: tl.tensor
    tail_ptr: tl.tensor | None
    tail_begin: tl.tensor
    first: tl.tensor
    KV_HEADS: tl.constexpr
    KEY_SIZE: tl.constexpr
    VALUE_SIZE: tl.constexpr
    BLOCK_SIZE: tl.constexpr
    TAIL: tl.constexpr


@triton.jit
def attend(
    q,
    q_rope,
    position,
    keys,
    begin,
    all_see,
    end,
    scale,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Compute a one-pass softmax (arXiv:1805.02867) of q [LINES, HEAD_DIM] over the keys from
    `begin`, a multiple of TILE_KEYS, to `end`. All lines see the keys before `all_see`. `q_rope`
    [LINES, ROPE_DIM] has the queries' numbers for those that keys have before the value, or is
    None. Returns the mean of the values [LINES, HEAD_DIM] and, to merge results, the logarithm
    (base 2) of the sum of exponentials [LINES]. A line that sees no key has 0 and -inf.
    """
    highest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    softmax = (highest, tl.zeros_like(highest), tl.zeros(q.shape, tl.float32))
    queries = (q, q_rope, position)
    masked_from = begin
    if WINDOW is None:
        all_see = tl.minimum(all_see, end)
        if keys.TAIL > 0:
            all_see = tl.minimum(all_see, keys.tail_begin)
        masked_from = tl.maximum(all_see // TILE_KEYS * TILE_KEYS, begin)
        softmax = _continue_softmax(
            queries, softmax, keys, begin, masked_from, scale, False, None, TILE_KEYS, SOFT_CAP
        )
    highest, total, result = _continue_softmax(
        queries, softmax, keys, masked_from, end, scale, True, WINDOW, TILE_KEYS, SOFT_CAP
    )
    total = tl.where(total > 0.0, total, 1.0)
    return result / total[:, None], highest + tl.log2(total)


@triton.jit
def _continue_softmax(
    queries,
    softmax,
    keys,
    begin,
    end,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Continue the softmax (highest score, sum and result of each line) over more keys. Unless
    MASKED, all lines see all these keys, and none is in the tail.
    """
    q, q_rope, position = queries
    highest, total, result = softmax
    dim, is_real = numbers_of(keys.VALUE_SIZE, q.shape[1])
    for tile in range(begin, end, TILE_KEYS):
        key = tile + tl.arange(0, TILE_KEYS)
        # Keys that no line sees are not loaded: they may be infinite, and 0 * infinity is not 0.
        visible = tl.full([TILE_KEYS], True, tl.int1)
        if MASKED:
            visible = (key >= keys.first) & (key < end)
        block = tl.load(keys.table_ptr + key // keys.BLOCK_SIZE, mask=visible, other=0)
        slot = block.to(tl.int64) * keys.BLOCK_SIZE + key % keys.BLOCK_SIZE
        if MASKED and keys.TAIL > 0:
            in_tail = visible & (key >= keys.tail_begin)
            slot = tl.load(keys.tail_ptr + key - keys.tail_begin, mask=in_tail, other=slot)
        at = slot * (keys.KV_HEADS * keys.KEY_SIZE)
        mask = visible[:, None] & is_real[None, :]
        if keys.value_ptr is None:
            ROPE_SIZE: tl.constexpr = keys.KEY_SIZE - keys.VALUE_SIZE
            number, is_rope = numbers_of(ROPE_SIZE, q_rope.shape[1])
            k_rope = tl.load(
                keys.key_ptr + at[None, :] + number[:, None],
                mask=visible[None, :] & is_rope[:, None],
                other=0.0,
            ).to(q.dtype)
            v_at = keys.key_ptr + ROPE_SIZE + at[:, None] + dim[None, :]
            v = tl.load(v_at, mask=mask, other=0.0).to(q.dtype)
            scores = tl.dot(q_rope, k_rope, input_precision="ieee")
            scores = tl.dot(q, tl.trans(v), scores, input_precision="ieee") * scale
        else:
            k_at = keys.key_ptr + at[None, :] + dim[:, None]
            v_at = keys.value_ptr + at[:, None] + dim[None, :]
            k_mask = visible[None, :] & is_real[:, None]
            k = tl.load(k_at, mask=k_mask, other=0.0).to(q.dtype)
            v = tl.load(v_at, mask=mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFT_CAP is not None:  # tanh(x) is 2 * sigmoid(2 * x) - 1
            scores = SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)
        if MASKED:
            is_visible = visible[None, :] & (key[None, :] <= position[:, None])
            if WINDOW is not None:
                is_visible &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(is_visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # -inf - -inf is not a number.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        result = tl.dot(weights.to(q.dtype), v, result * decay[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, result
