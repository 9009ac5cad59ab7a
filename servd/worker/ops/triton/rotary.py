"""Norms of heads and rotation fused with the cache write: q, k and v pass memory once."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops.reference import Rotation
from servd.worker.ops.triton.attend import numbers_of

TILE = 4096  # numbers per program, whatever head_dim is; not measured yet


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    rotation: Rotation | None,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotate q and k by their positions, and store k and v at their slots, in one kernel. Returns
    the rotated queries, contiguous; or q itself if unchanged.

    Args:
        q: [num_tokens, num_heads, head_dim]. It is copied if heads are not contiguous. Tokens may
            be strided, as in slices of qkv.
        k: [num_tokens, num_kv_heads, head_dim].
        v: like k; None: k holds the values.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of any floating type; numbers
            beyond the range of float8_e4m3fn are clamped. [1, ...] without v.
        slot_mapping: int64 [num_tokens]: block * block_size + offset; negative: the token is not
            stored.
        rotation: cos and sin, [num_tokens, pairs] each, for the first 2 * pairs numbers of heads;
            or None.
        norms: weights [head_dim] of q's and k's RMSNorm before the rotation, and eps; or None.
    """
    num_tokens, num_heads, head_dim = q.shape
    if q.stride(1) != head_dim:
        q = q.flatten(1).view(q.shape)
    parts = [x for x in (q, k, v) if x is not None]
    assert all(x.stride()[1:] == (head_dim, 1) for x in parts) and kv_cache.is_contiguous()
    cos, sin = rotation or (None, None)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    is_same = rotation is None and norms is None
    turned = q if is_same else torch.empty_like(q, memory_format=torch.contiguous_format)
    half = triton.next_power_of_2(head_dim // 2)
    rows = max(TILE // (2 * half), 1)
    # Axis 1 is the tensor: 0 keys, 1 values, 2 queries.
    grid = (triton.cdiv(num_tokens * num_heads, rows), 2 if is_same else 3)
    num_pairs = head_dim // 2 if cos is None else cos.shape[1]
    tensors = q, k, v, turned, kv_cache[0], kv_cache[-1], slot_mapping, cos, sin, q_weight, k_weight
    strides = q.stride(0), k.stride(0), parts[-1].stride(0)
    sizes = num_heads, k.shape[1], head_dim, num_pairs, half, rows
    rotate_and_store_kernel[grid](*tensors, num_tokens, *strides, eps, *sizes)
    return turned


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_and_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    turned_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Run one program per ROWS heads of q, k or v, counted through all tokens."""
    tensor = tl.program_id(1)
    # Pointers of two types cannot be one variable: the cache may be narrower than k and v.
    if tensor == 2:
        token, head = _heads(HEADS, ROWS)
        q_at = q_ptr + token * q_stride + head * HEAD_DIM
        q_to = turned_ptr + (token * HEADS + head) * HEAD_DIM
        exists = token < num_tokens
        _turn(q_at, q_to, cos_ptr, sin_ptr, q_weight_ptr, eps, token, exists, HEAD_DIM, PAIRS, HALF)
    else:
        token, head = _heads(KV_HEADS, ROWS)
        slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        to = (slot * KV_HEADS + head) * HEAD_DIM
        valid = slot >= 0
        if tensor == 0:
            k_at = k_ptr + token * k_stride + head * HEAD_DIM
            k_to = key_ptr + to
            _turn(
                k_at, k_to, cos_ptr, sin_ptr, k_weight_ptr, eps, token, valid, HEAD_DIM, PAIRS, HALF
            )
        elif v_ptr is not None:
            v_at = v_ptr + token * v_stride + head * HEAD_DIM
            v_to = value_ptr + to
            _turn(v_at, v_to, None, None, None, eps, token, valid, HEAD_DIM, PAIRS, HALF)


@triton.jit
def _heads(HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return token and head of each row of this program; [ROWS, 1] each."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    return row // HEADS, row % HEADS


@triton.jit
def _turn(
    from_ptr,
    to_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    eps,
    token,
    valid,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Copy heads at `from_ptr` [ROWS, 1] to `to_ptr`, normed, with pairs (i, i + PAIRS) rotated.
    The numbers behind the pairs are pairs, too, that are not rotated.
    """
    pair, is_real = numbers_of(HEAD_DIM // 2, HALF)
    pair = pair[None, :]
    mask = valid & is_real[None, :]
    first_at = pair
    second_at = HEAD_DIM // 2 + pair
    if cos_ptr is not None and PAIRS < HEAD_DIM // 2:
        first_at = tl.where(pair < PAIRS, pair, PAIRS + pair)
        second_at = tl.where(pair < PAIRS, PAIRS + pair, HEAD_DIM // 2 + pair)
        if PAIRS % 8 == 0 and HEAD_DIM % 16 == 0:  # else, each number would be an access
            first_at = tl.max_contiguous(tl.multiple_of(first_at, (1, 8)), (1, 8))
            second_at = tl.max_contiguous(tl.multiple_of(second_at, (1, 8)), (1, 8))
    first = tl.load(from_ptr + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + second_at, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        square = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        factor = 1.0 / tl.sqrt(square / HEAD_DIM + eps)
        is_weight = is_real[None, :]
        first *= factor * tl.load(weight_ptr + first_at, mask=is_weight).to(tl.float32)
        second *= factor * tl.load(weight_ptr + second_at, mask=is_weight).to(tl.float32)
    if cos_ptr is not None:
        mask_of_pair = valid & (pair < PAIRS) if PAIRS < HALF else mask
        at = token * PAIRS + pair
        cos = tl.load(cos_ptr + at, mask=mask_of_pair, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=mask_of_pair, other=0.0).to(tl.float32)
        first, second = first * cos - second * sin, second * cos + first * sin
    if to_ptr.dtype.element_ty == tl.float8e4nv:
        first = tl.clamp(first, -448.0, 448.0)
        second = tl.clamp(second, -448.0, 448.0)
    tl.store(to_ptr + first_at, first.to(to_ptr.dtype.element_ty), mask=mask)
    tl.store(to_ptr + second_at, second.to(to_ptr.dtype.element_ty), mask=mask)
