"""The inputs of a decode step, computed from its slots in one kernel."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops import _decode_rows
from servd.worker.ops._decode_rows import SlotTensors

TOKENS = tl.constexpr(1024)  # tokens at a time
FIRST_CHANGE = tl.constexpr(_decode_rows.TABLE_ROW)
FIRST_FOUND = tl.constexpr(_decode_rows.NEXT_COLUMN)


def begin_decode(step: Tensor, seq_lens: Tensor, state: SlotTensors, block_size: int) -> None:
    token_ids, _, tables = state
    assert step.is_contiguous() and token_ids.stride(1) == tables.stride(1) == 1
    if num_tokens := step.shape[1]:
        tensors = step, seq_lens, *state
        sizes = num_tokens, token_ids.stride(0), tables.stride(0), block_size
        begin_decode_kernel[(1,)](*tensors, *sizes, num_warps=8)


@triton.jit(do_not_specialize=["num_tokens"])
def begin_decode_kernel(
    step_ptr,
    seq_lens_ptr,
    token_ids_ptr,
    num_computed_ptr,
    tables_ptr,
    num_tokens,
    token_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """Run as one program: all new blocks are in the tables before any block is read."""
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        valid = token < num_tokens
        row_ptr = step_ptr + FIRST_CHANGE * num_tokens + token
        row = tl.load(row_ptr, mask=valid, other=0)
        column = tl.load(row_ptr + num_tokens, mask=valid, other=0)
        block = tl.load(row_ptr + 2 * num_tokens, mask=valid, other=0)
        tl.store(tables_ptr + row * table_stride + column, block.to(tl.int32), mask=valid)
    tl.debug_barrier()  # threads read what other threads wrote
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        valid = token < num_tokens
        slot_ptr = step_ptr + token
        slot = tl.load(slot_ptr, mask=valid, other=0)
        column = tl.load(slot_ptr + num_tokens, mask=valid, other=0)
        is_next = valid & (column < 0)
        column = tl.load(num_computed_ptr + slot, mask=is_next, other=0) + tl.where(
            is_next, 0, column
        )
        tl.store(num_computed_ptr + slot, column + 1, mask=is_next)
        token_id = tl.load(token_ids_ptr + slot * token_stride + column, mask=valid, other=0)
        at = tables_ptr + slot * table_stride + column // BLOCK_SIZE
        block = tl.load(at, mask=valid, other=0).to(tl.int64)
        tl.store(slot_ptr + num_tokens, column, mask=valid)
        found_ptr = slot_ptr + FIRST_FOUND * num_tokens
        tl.store(found_ptr, column + 1, mask=valid)
        tl.store(found_ptr + num_tokens, tl.maximum(token_id, 0).to(tl.int64), mask=valid)
        kv_slot = block * BLOCK_SIZE + column % BLOCK_SIZE
        tl.store(found_ptr + 2 * num_tokens, kv_slot, mask=valid)
        tl.store(seq_lens_ptr + token, (column + 1).to(tl.int32), mask=valid)
