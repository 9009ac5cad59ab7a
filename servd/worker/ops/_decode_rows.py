"""The rows of the buffer of DecodeInputs, which `Ops.begin_decode` completes."""

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
