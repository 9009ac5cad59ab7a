// Products with adapters: y += (x A) B, where A and B are the small matrices of each row's adapter.

#include <vector>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int TILE = 4;     // rows of one adapter, which share the loads of its numbers
constexpr int COLUMNS = 4;  // vectors of the result that stay in registers
constexpr int64_t CHUNK = 256;  // columns of y in a task

// The last rows of a tile may repeat a row. A row is computed in the same way in any tile.
struct Tile {
    int64_t slot;
    int64_t rows[TILE];
    int count;
};

struct Chunk {
    int64_t part, begin, end;  // columns of y, in one part
};

std::vector<Tile> tiles_of(const int64_t* adapter_slots, int64_t rows, const int64_t* ranks,
                           int64_t num_adapter_slots, int64_t parts) {
    std::vector<int64_t> open(num_adapter_slots, -1);  // each slot's tile that is not full yet
    std::vector<Tile> tiles;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = adapter_slots[row];
        if (slot < 0) continue;
        const int64_t* const slot_ranks = ranks + slot * parts;
        if (std::all_of(slot_ranks, slot_ranks + parts, [](int64_t rank) { return rank == 0; })) continue;
        if (open[slot] < 0 || tiles[open[slot]].count == TILE) {
            open[slot] = int64_t(tiles.size());
            tiles.push_back({slot, {row, row, row, row}, 0});
        }
        Tile& tile = tiles[open[slot]];
        std::fill(tile.rows + tile.count++, tile.rows + TILE, row);
    }
    return tiles;
}

template <typename T>
inline Vec load_part(const T* p, int64_t count) {
    if (count >= WIDTH) return load(p);
    float values[WIDTH] = {};
    for (int64_t i = 0; i < count; i++) values[i] = widen(p[i]);
    return load(values);
}

// Writes x A from column `first` on to h [TILE, width], for the rows of a tile.
template <typename T, int COUNT>
void shrink(const Tile& tile, const float* x, int64_t k, const T* a, int64_t width, int64_t first,
            float* h) {
    Vec total[TILE][COUNT] = {};
    for (int64_t i = 0; i < k; i++) {
        Vec from[COUNT];
        for (int c = 0; c < COUNT; c++) from[c] = load(a + i * width + first + c * WIDTH);
        for (int r = 0; r < TILE; r++)
            for (int c = 0; c < COUNT; c++) total[r][c] += x[tile.rows[r] * k + i] * from[c];
    }
    for (int r = 0; r < TILE; r++)
        for (int c = 0; c < COUNT; c++) store(h + r * width + first + c * WIDTH, total[r][c]);
}

template <typename T>
void shrink_some(int64_t count, const Tile& tile, const float* x, int64_t k, const T* a,
                 int64_t width, int64_t first, float* h) {
    switch (count) {
    case 1: return shrink<T, 1>(tile, x, k, a, width, first, h);
    case 2: return shrink<T, 2>(tile, x, k, a, width, first, h);
    case 3: return shrink<T, 3>(tile, x, k, a, width, first, h);
    default: return shrink<T, COLUMNS>(tile, x, k, a, width, first, h);
    }
}

template <typename T>
void expand(const Tile& tile, const Chunk& chunk, const float* h, int64_t width, int64_t rank,
            const T* b, int64_t n, float* y) {
    for (int64_t o = chunk.begin; o < chunk.end; o += WIDTH) {
        const int64_t count = chunk.end - o;
        Vec total[TILE] = {};
        for (int64_t j = 0; j < rank; j++) {
            const Vec from = load_part(b + j * n + o, count);
            for (int r = 0; r < TILE; r++) total[r] += h[r * width + j] * from;
        }
        for (int r = 0; r < tile.count; r++) {
            float* const to = y + tile.rows[r] * n + o;
            store_up_to(to, load_up_to(to, int(count)) + total[r], int(count));
        }
    }
}

template <typename T>
void add_low_rank(const float* x, int64_t rows, int64_t k, const T* a, int64_t width, const T* b,
                  int64_t max_rank, const int64_t* ranks, const int64_t* part_ends,
                  int64_t num_adapter_slots, int64_t parts, const int64_t* adapter_slots, float* y, int64_t n) {
    const std::vector<Tile> tiles = tiles_of(adapter_slots, rows, ranks, num_adapter_slots, parts);
    if (tiles.empty()) return;
    std::vector<Chunk> chunks;
    for (int64_t part = 0, begin = 0; part < parts; begin = part_ends[part++])
        for (; begin < part_ends[part]; begin += CHUNK)
            chunks.push_back({part, begin, std::min(begin + CHUNK, part_ends[part])});
    std::vector<float> hidden(tiles.size() * TILE * width);
    const int64_t vectors = width / WIDTH, groups = (vectors + COLUMNS - 1) / COLUMNS;
    parallel_for(int64_t(tiles.size()) * groups, 1, [&](int64_t task) {
        const Tile& tile = tiles[task / groups];
        const int64_t first = task % groups * COLUMNS;
        shrink_some(std::min<int64_t>(vectors - first, COLUMNS), tile, x, k,
                    a + tile.slot * k * width, width, first * WIDTH,
                    hidden.data() + task / groups * TILE * width);
    });
    const int64_t num_chunks = int64_t(chunks.size());
    parallel_for(int64_t(tiles.size()) * num_chunks, 1, [&](int64_t task) {
        const Tile& tile = tiles[task / num_chunks];
        const Chunk& chunk = chunks[task % num_chunks];
        const float* h = hidden.data() + task / num_chunks * TILE * width + chunk.part * max_rank;
        expand(tile, chunk, h, width, ranks[tile.slot * parts + chunk.part],
               b + tile.slot * max_rank * n, n, y);
    });
}

}  // namespace

namespace kernels {

// Adds the product of x [rows, k] and its adapter to each row of y [rows, n]. A slot's a [k, width] has
// `max_rank` columns for each part of the outputs, and its b [max_rank, n] has the other factor.
// ranks [num_adapter_slots, parts] has the number of columns in use. A row without an adapter has slot -1.
void add_low_rank(int type, const float* x, int64_t rows, int64_t k, const void* a, int64_t width,
                  const void* b, int64_t max_rank, const int64_t* ranks, const int64_t* part_ends,
                  int64_t num_adapter_slots, int64_t parts, const int64_t* adapter_slots, float* y, int64_t n) {
    check_ids("slot", adapter_slots, 0, rows, num_adapter_slots, -1);
    check_at_most("part_ends", part_ends[parts - 1], n);
    check_at_most("max_rank", max_rank * parts, width);
    with_type(type, [&](auto* null) {
        using T = std::remove_pointer_t<decltype(null)>;
        ::add_low_rank(x, rows, k, static_cast<const T*>(a), width, static_cast<const T*>(b),
                       max_rank, ranks, part_ends, num_adapter_slots, parts, adapter_slots, y, n);
    });
}

}  // namespace kernels
