// The micro-kernel of float32: a tile of x [MR rows] times a panel of weights [NR outputs].
//
// Weights are packed as [n / NR][k][NR]. The micro-kernel reads them once, in order, and multiplies each
// vector with the rows of the tile. It widens weights of 16 and 8 bits whenever it reads them. Widening
// a panel once for all tiles was up to a quarter slower, because float32 takes more memory.

#pragma once

#include "groups.h"

namespace {

constexpr int NR = 2 * WIDTH;
constexpr int64_t LINE = 64;  // bytes in a cache line
// In bytes. The processor's own prefetching stops at the end of a page, which cost a quarter. An EPYC is
// fastest with 4 KiB. A Xeon with AMX is up to a tenth faster with 16 KiB, also with the other libraries
// below, which run almost only on Intel's CPUs.
#if defined(__AMX_BF16__) || defined(__AVXVNNI__) || \
    (defined(__AVX512F__) && !defined(__AVX512BF16__))
constexpr int64_t PREFETCH_DISTANCE = 16384;
#else
constexpr int64_t PREFETCH_DISTANCE = 4096;
#endif

// A tile of outputs: where to write it, and its scale and bias, which are applied after the last k.
struct OutputTile {
    float* y;
    int64_t stride;
    int columns;  // up to NR
    const float *scale, *bias;  // one for each column, or null
    bool is_first_k, is_last_k;  // whether this is the first or last block of k
};

// The next weights, which a tile prefetches while it computes. Without it, the first tile of a panel
// waits for memory and the other tiles leave the memory idle. The tiles of a panel share the work evenly.
// The addresses may lie beyond the end of the weights, which does no harm.
struct Prefetch {
    const char* line;
    int64_t step;  // bytes to prefetch for each vector of weights: up to two lines
};

// Applies scale and bias to a tile. One function for any number of rows: otherwise compilers would fuse
// product and sum in some copies only, and results would differ in the last bit.
__attribute__((noinline)) void epilogue(const OutputTile& out, int rows) {
    for (int half = 0; half < 2; half++) {
        const int count = std::min(WIDTH, out.columns - half * WIDTH), column = half * WIDTH;
        const Vec scale = out.scale ? load_up_to(out.scale + column, count) : splat(1.0f);
        const Vec bias = out.bias ? load_up_to(out.bias + column, count) : Vec{};
        for (int row = 0; row < rows; row++) {
            float* y = out.y + row * out.stride + column;
            store_up_to(y, load_up_to(y, count) * scale + bias, count);
        }
    }
}

// The interface of products in float32 to the loop over tiles (matrix.cpp).
struct Float {
    using X = float;
    struct Task {};  // a thread's state during a task
    // A tile has two vectors per row, and takes all registers but a few.
#if defined(__aarch64__)
    static constexpr int MR = 12;
#else
    static constexpr int MR = WIDTH == 16 ? 14 : WIDTH == 8 ? 6 : 4;
#endif
    // Depth of a block of k, so that a tile, its panel and the next panel stay in the second-level cache.
    static constexpr int64_t MAX_KC = 768, KC_UNIT = 1;
    // Distance of rows in copied tiles. In x itself, rows share cache lines if k is a multiple of 1024.
    static constexpr int64_t X_STRIDE = MAX_KC + 16;

    int64_t x_stride() const { return X_STRIDE; }
    void copy(const float* from, int64_t kc, float* to) const { std::copy_n(from, kc, to); }
    // Returns the first row of a tile. Tiles have nearly the same height.
    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return rows * tile / tiles;
    }
};

template <int ROWS, typename Cursor>
__attribute__((noinline)) void microkernel(const float* x, Cursor weights, int64_t kc, const OutputTile& out,
                 Prefetch ahead) {
    Vec acc[ROWS][2];
    const auto count = [&](int half) { return std::min(WIDTH, out.columns - half * WIDTH); };
    const auto at = [&](int row, int half) { return out.y + row * out.stride + half * WIDTH; };
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            acc[row][half] = out.is_first_k ? Vec{} : load_up_to(at(row, half), count(half));
    for (int64_t i = 0; i < kc;)
        for (const int64_t end = weights.enter_group(i, kc); i < end; i++) {
            __builtin_prefetch(ahead.line, 0, 2);
            if (ahead.step > LINE) __builtin_prefetch(ahead.line + LINE, 0, 2);
            ahead.line += ahead.step;
            Vec w0, w1;
            weights.read(w0, w1);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const Vec a = splat(x[row * Float::X_STRIDE + i]);
                acc[row][0] += a * w0;
                acc[row][1] += a * w1;
            }
        }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            store_up_to(at(row, half), acc[row][half], count(half));
    if (out.is_last_k && (out.scale || out.bias)) epilogue(out, ROWS);
}

// Calls `call` with a number, up to MOST, as a constant.
template <int MOST, typename Call>
void with_constant(int number, const Call& call) {
    if constexpr (MOST > 0) {
        if (number == MOST) call(std::integral_constant<int, MOST>{});
        else with_constant<MOST - 1>(number, call);
    }
}

// Weights without groups. A cursor reads a panel row by row, NR weights each.
template <typename W>
struct Plain : Float {
    static constexpr int64_t ROW_BYTES = NR * sizeof(W);
    const W* packed;
    int64_t k;

    struct Cursor {
        const W* row;
        int64_t enter_group(int64_t, int64_t end) { return end; }
        void read(Vec& w0, Vec& w1) {
            w0 = load(row), w1 = load(row + WIDTH);
            row += NR;
        }
    };
    void multiply(Task&, const float* x, int rows, Cursor weights, int64_t kc,
                  const OutputTile& out, Prefetch ahead) const {
        with_constant<MR>(rows, [&](auto number) {
            microkernel<number.value>(x, weights, kc, out, ahead);
        });
    }
    Cursor at(int64_t panel, int64_t start) const { return {packed + (panel * k + start) * NR}; }
};

// Reads the scales and offsets of a panel group by group, for its two halves.
struct Scales {
    const Groups& groups;
    int64_t groups_before, factors_before;  // in the panels before this one
    Vec scale[2], offset[2], factor[2], offset_factor[2];

    Scales(const Groups& groups, int64_t panel, int64_t k)
        : groups(groups),
          groups_before(panel * groups.number(k)),
          factors_before(panel * groups.number_of_factors(k)) {}

    // Reads the scales of a group. `i`: index of a weight of the group; `is_first`: whether this is the
    // first call.
    void read(int64_t group, int64_t i, bool is_first) {
        if (groups.factors && (is_first || i % FACTOR_SIZE == 0)) read_factors(i / FACTOR_SIZE);
        for (int half = 0; half < 2; half++) {
            const int64_t column = (groups_before + group) * NR + half * WIDTH;
            scale[half] = load_as(groups.type, groups.scale, column);
            offset[half] = groups.offset ? load_as(groups.type, groups.offset, column) : Vec{};
            if (!groups.factors) continue;
            scale[half] *= factor[half];
            offset[half] *= offset_factor[half];
        }
    }

  private:
    void read_factors(int64_t number) {
        const int64_t row = factors_before + number * (groups.offset ? 2 : 1);
        const Float16* const from = groups.factors + row * NR;
        for (int half = 0; half < 2; half++) {
            factor[half] = load(from + half * WIDTH);
            offset_factor[half] = groups.offset ? load(from + NR + half * WIDTH) : Vec{};
        }
    }
};

// Weights in groups: value * scale + offset. Codes of 4 bits choose their value from a table.
template <typename W>
struct Grouped : Float {
    static constexpr int64_t ROW_BYTES = NR * BITS<W> / 8;
    const uint8_t* packed;
    int64_t k;
    Groups groups;

    struct Cursor {
        const uint8_t* row;
        int64_t start;  // the first row
        Table table;
        Scales of;

        // Reads the scales for row i, and returns the end of their group.
        int64_t enter_group(int64_t i, int64_t end) {
            const int64_t size = of.groups.size, group = (start + i) / size;
            of.read(group, start + i, i == 0);
            of.scale[0] *= UNIT<W>, of.scale[1] *= UNIT<W>;
            return std::min(end, (group + 1) * size - start);
        }
        void read(Vec& w0, Vec& w1) {
            if constexpr (std::is_same_v<W, Int4>) load_pairs(row, table, w0, w1);
            else w0 = load((const W*)row), w1 = load((const W*)row + WIDTH);
            w0 = w0 * of.scale[0] + of.offset[0], w1 = w1 * of.scale[1] + of.offset[1];
            row += ROW_BYTES;
        }
    };
    void multiply(Task&, const float* x, int rows, Cursor weights, int64_t kc,
                  const OutputTile& out, Prefetch ahead) const {
        with_constant<MR>(rows, [&](auto number) {
            microkernel<number.value>(x, weights, kc, out, ahead);
        });
    }
    Cursor at(int64_t panel, int64_t start) const {
        return {packed + (panel * k + start) * ROW_BYTES, start, load_table(groups.table),
                Scales(groups, panel, k)};
    }
};

}  // namespace
