// Products by AMX: an instruction multiplies a tile of 16 rows of x, 64 bytes each, with the weights of
// 16 outputs.
//
// An instruction takes as long for 1 row as for 16. With few rows, the kernel waits for memory, and VNNI
// keeps more loads in flight than tiles do. Up to Dots::MR rows of int8 therefore use VNNI, with the
// same sums.

#pragma once

#if defined(__AMX_BF16__)

#include <type_traits>

#include "dots.h"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a row

// The shape of a thread's tile registers. Setting the shape takes as long as a dozen products.
class TileConfig {
  public:
    ~TileConfig() { _tile_release(); }

    // Registers 0 and 1 are the outputs of the first 16 rows, and register 4 is their x. Registers 2, 3
    // and 5 are the same for the other rows. Registers 6 and 7 are weights.
    void set_rows(int rows) {
        if (rows == this->rows) return;
        this->rows = rows;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t num_rows[16] = {};
        } config;
        for (const int tile : {0, 1, 2, 3, 4, 5, 6, 7}) {
            const bool is_weights = tile >= 6, is_second = tile == 2 || tile == 3 || tile == 5;
            const int height = is_weights ? TILE_ROWS : is_second ? rows - TILE_ROWS : rows;
            config.num_rows[tile] = uint8_t(std::clamp(height, 0, TILE_ROWS));
            config.row_bytes[tile] = config.num_rows[tile] ? TILE_BYTES : 0;
        }
        // GCC 12 declares that _tile_loadconfig reads 8 bytes, and might not write the other bytes.
        asm volatile("ldtilecfg %0" ::"m"(config));
    }

  private:
    int rows = 0;
};

// Adds x times a block of a panel to y [rows, NR], float or int32. `bytes`: of a row of x, a multiple of
// TILE_BYTES. `IS_HIGH`: whether there are more than 16 rows.
template <typename W, bool IS_HIGH>
void add_products(const Terms& terms, const char* w, int64_t bytes, void* y, int64_t y_stride,
                  bool is_first, Prefetch ahead) {
    const int64_t y_bytes = y_stride * 4, w_bytes = NR * 4, half = TILE_BYTES;
    char *const top = (char*)y, *const below = top + TILE_ROWS * y_bytes;
    const int64_t to_prefetch = TILE_BYTES / sizeof(W) * ahead.step;
    // GCC does not know that the tile instructions read memory.
    asm volatile("" ::: "memory");
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (IS_HIGH) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, top, y_bytes);
        _tile_loadd(1, top + half, y_bytes);
        if (IS_HIGH) {
            _tile_loadd(2, below, y_bytes);
            _tile_loadd(3, below + half, y_bytes);
        }
    }
    for (int64_t i = 0; i < bytes; i += TILE_BYTES, w += TILE_ROWS * w_bytes) {
        for (int64_t line = 0; line < to_prefetch; line += LINE)
            __builtin_prefetch(ahead.line + line, 0, 2);
        ahead.line += to_prefetch;
        _tile_loadd(6, w, w_bytes);
        _tile_loadd(7, w + half, w_bytes);
        for (int term = 0; term < terms.count; term++) {
            const char* from = terms.x + term * terms.term_stride + i;
            _tile_loadd(4, from, terms.stride);
            if (IS_HIGH) _tile_loadd(5, from + TILE_ROWS * terms.stride, terms.stride);
            if constexpr (std::is_same_v<W, BFloat16>) {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (IS_HIGH) {
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            } else {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                if (IS_HIGH) {
                    _tile_dpbssd(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
            }
        }
    }
    _tile_stored(0, top, y_bytes);
    _tile_stored(1, top + half, y_bytes);
    if (IS_HIGH) {
        _tile_stored(2, below, y_bytes);
        _tile_stored(3, below + half, y_bytes);
    }
    asm volatile("" ::: "memory");
}

// The unit of `Tiled` that multiplies by tiles.
struct Tiles {
    using Task = TileConfig;
    static constexpr int MR = 2 * TILE_ROWS;
    static constexpr bool IS_UNSIGNED = Dots::IS_UNSIGNED;

    static int64_t first_row(int64_t tile, int64_t, int64_t rows) {
        return std::min(tile * MR, rows);
    }
    // The terms of a few rows are multiplied at once, as if each term were a row.
    static Pass pass_of(int rows, int terms) { return {rows, rows * terms <= MR ? terms : 1}; }

    template <typename W>
    static void add(TileConfig& config, int rows, const Terms& terms, const W* w, int64_t kc,
                    void* y, int64_t y_stride, bool is_first, Prefetch ahead) {
        // VNNI needs rows of one term, side by side. Only a single tile prefetches as many bytes as it
        // uses; weights that several tiles share are in the cache already.
        if constexpr (std::is_same_v<W, int8_t>) {
            const bool is_alone = ahead.step == NR * int64_t(sizeof(W));
            const bool is_dense = terms.stride == TERM_STRIDE;
            if (is_alone && is_dense && rows <= Dots::MR) {
                Dots::Task task;
                return Dots::add(task, rows, terms, w, kc, y, y_stride, is_first, ahead);
            }
        }
        const char* from = (const char*)w;
        const int64_t bytes = kc * sizeof(W);
        config.set_rows(rows);
        if (rows > TILE_ROWS)
            add_products<W, true>(terms, from, bytes, y, y_stride, is_first, ahead);
        else add_products<W, false>(terms, from, bytes, y, y_stride, is_first, ahead);
    }
};

}  // namespace

#endif
