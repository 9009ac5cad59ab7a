// Rounds weights in float32 to codes of 8 and 4 bits, for ../../quantization/int8.py and int4.py.

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int GROUP = 32;
constexpr int NUM_VECS = GROUP / WIDTH;
constexpr int NUM_FITS = 3;
constexpr float GRID_WIDTHS[] = {1.0f, 0.92f, 0.84f};  // relative to the group's numbers
constexpr float SMALLEST = 1e-12f;

// Rounds to nearest, ties to even, if |x| < 2^22.
inline Vec round_near(Vec x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23
    return (x + shift) - shift;
}

inline float largest(Vec x) {
    float result = x[0];
    for (int i = 1; i < WIDTH; i++) result = std::max(result, x[i]);
    return result;
}

// A group's numbers, and their weights in the error, which add up to 1.
struct Group {
    Vec x[NUM_VECS], share[NUM_VECS];

    // Numbers after `count` repeat the last one, with weight 0.
    Group(const float* from, const float* counts, int64_t count) {
        float numbers[GROUP], shares[GROUP];
        for (int i = 0; i < GROUP; i++) {
            const int64_t at = std::min<int64_t>(i, count - 1);
            numbers[i] = from[at];
            shares[i] = counts ? counts[at] : 1;
        }
        Vec sums{};
        for (int i = 0; i < NUM_VECS; i++) sums += load(shares + i * WIDTH);
        const float total = sum(sums);
        for (int i = 0; i < NUM_VECS; i++) {
            x[i] = load(numbers + i * WIDTH);
            share[i] = total > 0 ? load(shares + i * WIDTH) / total : splat(1.0f / GROUP);
        }
    }
};

// The 16 numbers offset + code * scale.
struct Grid {
    float scale, offset;

    Vec codes(Vec x) const {
        return round_near(at_least(at_most((x - offset) / scale, 15), 0));
    }
    float error(const Group& group) const {
        Vec total{};
        for (int i = 0; i < NUM_VECS; i++) {
            const Vec wrong = codes(group.x[i]) * scale + offset - group.x[i];
            total += wrong * wrong * group.share[i];
        }
        return sum(total);
    }
};

// Returns a grid with scale and offset rounded to bfloat16.
Grid narrowed(const Grid& grid) {
    BFloat16 scale, offset;
    narrow(grid.scale, &scale), narrow(grid.offset, &offset);
    return {widen(scale), widen(offset)};
}

// Returns a grid over `width` times the range of the numbers, fitted to them by least squares.
Grid fit(const Group& group, float width) {
    Vec high = group.x[0], low = -group.x[0], weighed{};
    for (int i = 0; i < NUM_VECS; i++) {
        high = select(group.x[i] > high, group.x[i], high);
        low = select(-group.x[i] > low, -group.x[i], low);
        weighed += group.x[i] * group.share[i];
    }
    const float mean = sum(weighed), least = -largest(low), range = largest(high) - least;
    if (!(range > 0)) return narrowed({SMALLEST, least});
    Grid grid{std::max(range * (width / 15), SMALLEST), least + range * ((1 - width) / 2)};
    for (int round = 0; round < NUM_FITS; round++) {
        Vec codes[NUM_VECS], total{};
        for (int i = 0; i < NUM_VECS; i++) {
            codes[i] = grid.codes(group.x[i]);
            total += codes[i] * group.share[i];
        }
        const float centre = sum(total);
        Vec with_x{}, with_codes{};
        for (int i = 0; i < NUM_VECS; i++) {
            const Vec code = codes[i] - centre;
            with_x += code * group.share[i] * group.x[i];
            with_codes += code * group.share[i] * code;
        }
        const float fitted = sum(with_x) / sum(with_codes);
        if (fitted > SMALLEST) grid.scale = fitted;  // else all codes are equal
        grid.offset = mean - grid.scale * centre;
    }
    return narrowed(grid);
}

}  // namespace

namespace kernels {

// Rounds the rows of x [rows, size] to 8-bit codes with a scale for each row: the largest |code| is 127.
void round_rows(const float* x, int64_t rows, int64_t size, void* codes, float* scale) {
    parallel_for(rows, 1 + 4096 / (size + 1), [&](int64_t row) {
        const float* const from = x + row * size;
        int8_t* const to = (int8_t*)codes + row * size;
        Vec most{}, zero{};
        for (int64_t i = 0; i < size; i += WIDTH) {
            const Vec number = load_up_to(from + i, int(std::min<int64_t>(size - i, WIDTH)));
            const Vec positive = (Vec)((IntVec)number & 0x7fffffff);
            most = select(positive > most, positive, most);
            zero += number * 0.0f;  // NaN of NaN and infinity
        }
        const float unit = std::max(largest(most), SMALLEST) / 127 + sum(zero);
        scale[row] = unit;
        for (int64_t i = 0; i < size; i += WIDTH) {
            const int count = int(std::min<int64_t>(size - i, WIDTH));
            const Vec number = round_near(load_up_to(from + i, count) / unit);
            const IntVec code = __builtin_convertvector(number, IntVec);
            for (int j = 0; j < count; j++) to[i + j] = int8_t(code[j]);
        }
    });
}

// Rounds groups of 32 numbers of the rows of x [rows, size] to 4-bit codes, a byte each, with scales and
// offsets in bfloat16 [rows, groups]. The last group may be smaller. `importance` [size] weights the
// errors of columns, and makes the search try more grids; it may be null.
void round_groups(const float* x, int64_t rows, int64_t size, const float* importance, void* codes,
                  void* scale, void* offset) {
    const int64_t num_groups = (size + GROUP - 1) / GROUP;
    parallel_for(rows, 1 + 4096 / (size + 1), [&](int64_t row) {
        for (int64_t i = 0; i < num_groups; i++) {
            const int64_t first = i * GROUP, count = std::min<int64_t>(size - first, GROUP);
            const Group group(x + row * size + first, importance ? importance + first : nullptr,
                              count);
            Grid best = fit(group, GRID_WIDTHS[0]);
            if (importance)
                for (const float width : GRID_WIDTHS) {
                    const Grid tried = fit(group, width);
                    if (tried.error(group) < best.error(group)) best = tried;
                }
            narrow(best.scale, (BFloat16*)scale + row * num_groups + i);
            narrow(best.offset, (BFloat16*)offset + row * num_groups + i);
            uint8_t* const to = (uint8_t*)codes + row * size + first;
            for (int part = 0; part < NUM_VECS; part++) {
                const IntVec code = __builtin_convertvector(best.codes(group.x[part]), IntVec);
                for (int j = 0; j < WIDTH && part * WIDTH + j < count; j++)
                    to[part * WIDTH + j] = uint8_t(code[j] & 15);
            }
        }
    });
}

}  // namespace kernels
