// Completes the inputs of a decode step. servd/worker/ops/_decode_rows.py lists the rows of `step`.

#include <algorithm>

#include "checks.h"
#include "kernels.h"

namespace {

enum Number { SLOT, COLUMN, PLACE, TABLE_ROW, TABLE_COLUMN, BLOCK, NEXT_COLUMN, TOKEN_ID, KV_SLOT };

}  // namespace

namespace kernels {

// step [9, num_tokens]; seq_lens [num_tokens]; token_ids [num_slots, num_columns]; num_computed
// [num_slots]; tables [num_rows, num_blocks].
void begin_decode(int64_t* step, int64_t num_tokens, int32_t* seq_lens, const int32_t* token_ids,
                  int64_t num_slots, int64_t num_columns, int64_t* num_computed, int32_t* tables,
                  int64_t num_rows, int64_t num_blocks, int64_t block_size) {
    const auto numbers = [&](Number number) { return step + number * num_tokens; };
    const int64_t *slots = numbers(SLOT), *rows = numbers(TABLE_ROW), *blocks = numbers(BLOCK),
                  *table_columns = numbers(TABLE_COLUMN);
    int64_t *columns = numbers(COLUMN), *next = numbers(NEXT_COLUMN), *ids = numbers(TOKEN_ID),
            *kv_slots = numbers(KV_SLOT);
    check_ids("slots", slots, 0, num_tokens, num_slots);
    check_ids("rows of the block tables", rows, 0, num_tokens, num_rows);
    check_ids("columns of the block tables", table_columns, 0, num_tokens, num_blocks);
    // Check the columns before writing anything: `next` only holds them meanwhile.
    for (int64_t i = 0; i < num_tokens; i++)
        next[i] = columns[i] < 0 ? num_computed[slots[i]] : columns[i];
    check_ids("columns", next, 0, num_tokens, std::min(num_columns, num_blocks * block_size));
    for (int64_t i = 0; i < num_tokens; i++)
        tables[rows[i] * num_blocks + table_columns[i]] = int32_t(blocks[i]);
    for (int64_t i = 0; i < num_tokens; i++) {
        const int64_t slot = slots[i], column = next[i];
        if (columns[i] < 0) num_computed[slot] = column + 1;
        columns[i] = column;
        next[i] = column + 1;
        seq_lens[i] = int32_t(column + 1);
        ids[i] = std::max(token_ids[slot * num_columns + column], 0);
        const int64_t block = tables[slot * num_blocks + column / block_size];
        kv_slots[i] = block * block_size + column % block_size;
    }
}

}  // namespace kernels
