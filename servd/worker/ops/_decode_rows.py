"""The rows of the buffer of DecodeInputs, which `ops.begin_decode` completes."""

from typing import NamedTuple

from torch import Tensor

# Rows of the buffer, each with a number per token. Given by the host: slot and column; the place in
# a draft tree; and new entries of the block tables (row, column, block), for any of the tokens.
SLOT, COLUMN, PLACE, TABLE_ROW, TABLE_COLUMN, BLOCK = range(6)
NUM_GIVEN = 6
# Computed by the kernel: the next column, the token id, the KV-cache slot.
NEXT_COLUMN, TOKEN_ID, KV_SLOT = range(6, 9)
NUM_NUMBERS = 9

# In place of a column: the slot's first token that is not computed; the kernel counts it as
# computed.
NOT_COMPUTED = -1


class SlotTensors(NamedTuple):
    """The tokens and blocks of all slots."""

    token_ids: Tensor  # int32 [slots, columns]; negative token ids count as 0
    num_computed: Tensor  # int64 [slots]
    tables: Tensor  # int32 [rows, blocks]; row i belongs to slot i
