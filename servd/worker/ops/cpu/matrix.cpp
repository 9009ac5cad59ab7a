// Matrix products over packed weights, in the manner of BLIS.
//
// y [rows, n] = x [rows, k] @ w.T + bias. The weights w [n, k] are packed in panels of NR outputs;
// panels.h has the micro-kernel that multiplies a panel with a tile of x in float32; terms.h says
// what those of fewer bits have in common.
//
// Weights of 4 and 8 bits may be in groups along k, with a scale and an offset for each group of an
// output: those are packed as weights are, [n / NR][k / group][NR], and the weights that products
// see are exactly those that the format states.

#include <memory>

#include "checks.h"
#include "kernels.h"
#include "panels.h"
#include "threads.h"
#include "tiles.h"

namespace {

// A chunk's tiles: their columns stay in the second-level cache for one panel after another.
constexpr int64_t MAX_TILES = 8, MIN_TILES = 2, CHUNK_BYTES = 5 << 18;

// A matrix, and the rows of y that are products with it.
template <typename Matrix>
struct Product {
    Matrix matrix;
    const float* scale;  // one for each output, or null
    int64_t first_row, rows;
};

// The tasks of a product, and where they begin among all of them.
struct Tasks {
    int64_t first, num_tiles, num_chunks;
};

// Row r of y [rows, n] is row `index[r]` of x, or row r if index is null, times its product's
// matrix. All matrices are of the same shape and type. One loop over the parts of all of them.
template <typename Matrix>
void multiply_each(const Product<Matrix>* products, int64_t num_products, const float* x,
                   const int32_t* index, int64_t rows, int64_t k, const float* bias, float* y,
                   int64_t y_stride, int64_t n) {
    using X = typename Matrix::X;
    constexpr int64_t MR = Matrix::MR, MAX_KC = Matrix::MAX_KC, KC_UNIT = Matrix::KC_UNIT;
    const int64_t num_panels = (n + NR - 1) / NR;
    const int64_t num_k_blocks = std::max<int64_t>(1, (k + MAX_KC - 1) / MAX_KC);  // k = 0: bias
    const int64_t max_kc =  // the last block may have less
        ((k + num_k_blocks - 1) / num_k_blocks + KC_UNIT - 1) / KC_UNIT * KC_UNIT;
    const auto row_of_x = [=](int64_t row) { return x + (index ? index[row] : row) * k; };
    const int64_t x_stride = products[0].matrix.x_stride();
    std::unique_ptr<X[]> copy;  // [num_k_blocks][rows][x_stride]
    if (rows > 1 || !std::is_same_v<X, float>) {
        copy.reset(new X[num_k_blocks * rows * x_stride]);
        // Numbers that a thread copies in one go; rounding them takes longer.
        constexpr int64_t MANY = std::is_same_v<X, float> ? 32768 : 8192;
        parallel_for(rows, std::max<int64_t>(1, MANY / (k + 1)), [&](int64_t row) {
            for (int64_t block = 0; block < num_k_blocks; block++)
                products[0].matrix.copy(row_of_x(row) + block * max_kc,
                                        std::min(max_kc, k - block * max_kc),
                                        &copy[(block * rows + row) * x_stride]);
        });
    }
    std::unique_ptr<Tasks[]> tasks(new Tasks[num_products]);
    int64_t num_tasks = 0, most_chunks = 1;
    const int64_t fitting = CHUNK_BYTES / int64_t(MR * num_k_blocks * x_stride * sizeof(X));
    const int64_t max_tiles = fitting < MIN_TILES ? MAX_TILES : std::min(fitting, MAX_TILES);
    for (int64_t i = 0; i < num_products; i++) {
        const int64_t tiles = (products[i].rows + MR - 1) / MR;
        const int64_t chunks = (tiles + max_tiles - 1) / max_tiles;
        tasks[i] = {num_tasks, tiles, chunks};
        num_tasks += chunks * num_panels;
        most_chunks = std::max(most_chunks, chunks);
    }
    // If all k of a chunk is too large for the cache, all chunks do a block of k before the next.
    const int64_t together = most_chunks == 1 || fitting >= MIN_TILES ? num_k_blocks : 1;
    for (int64_t first = 0; first < num_k_blocks; first += together)
        parallel_for(num_tasks, 1, [&](int64_t task) {
            const int64_t number =
                std::upper_bound(&tasks[0], &tasks[num_products], task,
                                 [](int64_t t, const Tasks& of) { return t < of.first; }) -
                &tasks[1];
            const auto [first_task, num_tiles, num_chunks] = tasks[number];
            const Product<Matrix>& product = products[number];
            const auto first_row = [&, tiles = num_tiles](int64_t tile) {
                return Matrix::first_row(tile, tiles, product.rows);
            };
            const int64_t chunk = (task - first_task) / num_panels;
            const int64_t panel = (task - first_task) % num_panels, column = panel * NR;
            const int64_t first_tile = num_tiles * chunk / num_chunks;
            const int64_t last_tile = num_tiles * (chunk + 1) / num_chunks;
            typename Matrix::Task state;
            for (int64_t block = first; block < first + together; block++) {
                const int64_t start = block * max_kc, kc = std::min(max_kc, k - start);
                const X* from = (const X*)(row_of_x(0) + start);
                if (copy) from = &copy[(block * rows + product.first_row) * x_stride];
                const auto weights = product.matrix.at(panel, start);
                constexpr int64_t ROW = Matrix::ROW_BYTES;
                const char* here = (const char*)weights.row;
                const bool is_last_here = block == first + together - 1;
                const char* next = is_last_here ? here + (k - start + first * max_kc) * ROW
                                                : here + kc * ROW;
                const bool has_next = !is_last_here || panel + 1 < num_panels;
                // A tile alone prefetches what it will need itself; several share what comes after.
                const auto ahead = [&, tiles = num_tiles](int64_t tile) -> Prefetch {
                    if (tiles == 1) return {here + PREFETCH_DISTANCE, ROW};
                    if (!has_next) return {(const char*)from, 0};
                    const int64_t count = last_tile - first_tile, step = (ROW + count - 1) / count;
                    return {next + (tile - first_tile) * kc * step, step};
                };
                for (int64_t tile = first_tile; tile < last_tile; tile++) {
                    const int64_t row = first_row(tile);
                    const int height = int(first_row(tile + 1) - row);
                    const OutputTile out{y + (product.first_row + row) * y_stride + column,
                                         y_stride,
                                         int(std::min<int64_t>(NR, n - column)),
                                         product.scale ? product.scale + column : nullptr,
                                         bias ? bias + column : nullptr,
                                         block == 0,
                                         block == num_k_blocks - 1};
                    product.matrix.multiply(state, from + row * x_stride, height, weights, kc, out,
                                            ahead(tile));
                }
            }
        });
}

template <typename Matrix>
void multiply(const float* x, int64_t rows, const Matrix& matrix, const float* scale,
              const float* bias, float* y, int64_t y_stride, int64_t n) {
    const Product<Matrix> product{matrix, scale, 0, rows};
    multiply_each(&product, 1, x, nullptr, rows, matrix.k, bias, y, y_stride, n);
}

// The products of experts; `matrix_of` gives the one of an expert.
template <typename MatrixOf>
void multiply_experts(const float* x, const int32_t* index, int64_t x_rows, const int32_t* starts,
                      int64_t num_experts, const float* const* scales, float* y, int64_t rows,
                      int64_t k, int64_t n, MatrixOf matrix_of) {
    using Matrix = decltype(matrix_of(0));
    if (index) check_ids("index", index, 0, rows, x_rows);
    check_ids("starts", starts, 0, num_experts + 1, rows + 1);
    std::unique_ptr<Product<Matrix>[]> products(new Product<Matrix>[num_experts]);
    int64_t number = 0;
    for (int64_t i = 0; i < num_experts; i++)
        if (const int64_t count = starts[i + 1] - starts[i]; count > 0)
            products[number++] = {matrix_of(i), scales ? scales[i] : nullptr, starts[i], count};
    if (number > 0)
        multiply_each(&products[0], number, x, index, rows, k, nullptr, y, n, n);
}

// A panel of up to NR rows, a square at a time: so lines of both stay in the cache, whatever the
// strides are.
template <int NEXT, typename W>
void pack_panel(const W* weight, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t k,
                W* packed) {
    constexpr int64_t SIDE = LINE / sizeof(W);
    if (rows < NR || padded(k, NEXT) > k) std::fill_n(packed, NR * padded(k, NEXT), W{});
    for (int64_t start = 0; start < k; start += SIDE)
        for (int64_t row = 0; row < rows; row++) {
            const W* const from = weight + row * row_stride;
            int64_t i = start;
            const int64_t end = std::min(k, start + SIDE);
            for (; NEXT > 1 && column_stride == 1 && i + NEXT <= end; i += NEXT)
                memcpy(packed + place_of(row, i, k, NEXT), from + i, NEXT * sizeof(W));
            for (; i < end; i++) packed[place_of(row, i, k, NEXT)] = from[i * column_stride];
        }
}

template <typename W>
void pack_panels(const W* weight, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k,
                 int terms, W* packed) {
    const int next = neighbours<W>(terms);
    const auto pack = next == 1   ? pack_panel<1, W>
                      : next == 2 ? pack_panel<2, W>
                      : next == 4 ? pack_panel<4, W>
                                  : pack_panel<8, W>;
    const int64_t size = NR * padded(k, next);
    parallel_for((n + NR - 1) / NR, 1, [&](int64_t panel) {
        pack(weight + panel * NR * row_stride, row_stride, column_stride,
             std::min<int64_t>(NR, n - panel * NR), k, packed + panel * size);
    });
}

// Codes [n, k] of a byte each to pairs: a byte has those of columns i and i + WIDTH of a panel.
// NEXT of them at a time are in order in both.
template <int NEXT>
void pack_pairs_of_panel(const uint8_t* codes, int64_t rows, int64_t k, uint8_t* packed) {
    using Word = std::conditional_t<NEXT == 8, uint64_t,
                                    std::conditional_t<NEXT == 4, uint32_t, uint8_t>>;
    const auto read = [&](int64_t row, int64_t i) {
        Word word = 0;
        const uint8_t* const from = codes + row * k + i;
        if (row < rows && i + NEXT <= k) memcpy(&word, from, NEXT);
        else if (row < rows) memcpy(&word, from, k - i);
        return word;
    };
    for (int64_t i = 0; i < k; i += NEXT)
        for (int64_t row = 0; row < WIDTH; row++) {
            const Word pairs = Word(read(row, i) | read(row + WIDTH, i) << 4);
            memcpy(packed + place_of(row, i, k, NEXT, WIDTH), &pairs, NEXT);
        }
}

void pack_pairs(const uint8_t* codes, int64_t n, int64_t k, int terms, uint8_t* packed) {
    const int next = neighbours<Int4>(terms);
    const auto pack = next == 1   ? pack_pairs_of_panel<1>
                      : next == 4 ? pack_pairs_of_panel<4>
                                  : pack_pairs_of_panel<8>;
    const int64_t size = WIDTH * padded(k, next);
    parallel_for((n + NR - 1) / NR, 1, [&](int64_t panel) {
        if (padded(k, next) > k) std::fill_n(packed + panel * size, size, 0);
        pack(codes + panel * NR * k, std::min<int64_t>(NR, n - panel * NR), k,
             packed + panel * size);
    });
}

// Codes [n, k] from -32 to 31: for each 4 neighbours of k, the low 4 bits of each code as pairs, and
// the others of 4 codes in a byte: of columns i, i + WIDTH / 2, i + WIDTH and i + 3 * WIDTH / 2.
void pack_sixes(const int8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
    const int64_t size = NR * padded(k, 4) * 6 / 8;
    parallel_for((n + NR - 1) / NR, 1, [&](int64_t panel) {
        uint8_t* to = packed + panel * size;
        std::fill_n(to, size, 0);
        const auto read = [&](int64_t row, int64_t i) {
            uint32_t word = 0;
            if (row < n) memcpy(&word, codes + row * k + i, std::min<int64_t>(4, k - i));
            return word ^ 0x20202020;  // 32 more, in 6 bits
        };
        for (int64_t i = 0; i < k; i += 4, to += 3 * NR)
            for (int64_t row = 0; row < WIDTH; row++) {
                const uint32_t a = read(panel * NR + row, i), b = read(panel * NR + WIDTH + row, i);
                const uint32_t low = (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4;
                memcpy(to + row * 4, &low, 4);
                uint32_t high;
                uint8_t* const at = to + 4 * WIDTH + row % (WIDTH / 2) * 4;
                memcpy(&high, at, 4);
                const int shift = row < WIDTH / 2 ? 0 : 2;
                high |= ((a >> 4 & 0x03030303) | (b >> 4 & 0x03030303) << 4) << shift;
                memcpy(at, &high, 4);
            }
    });
}

template <typename W>
float value_at(const void* packed, const float*, int64_t row, int64_t i, int64_t k, int next) {
    return widen(((const W*)packed)[place_of(row, i, k, next)]);
}
template <>
float value_at<Int4>(const void* packed, const float* table, int64_t row, int64_t i, int64_t k,
                     int next) {
    const int64_t column = row % NR, pair = row / NR * WIDTH + column % WIDTH;
    const uint8_t codes = ((const uint8_t*)packed)[place_of(pair, i, k, next, WIDTH)];
    return table[codes >> (column < WIDTH ? 0 : 4) & 15];
}

template <>
float value_at<Int6>(const void* packed, const float*, int64_t row, int64_t i, int64_t k, int) {
    const int64_t steps = row / NR * padded(k, 4) / 4 + i / 4, column = row % WIDTH;
    const uint8_t* const step = (const uint8_t*)packed + steps * 3 * NR;
    const int half = row % NR < WIDTH ? 0 : 4, shift = column < WIDTH / 2 ? 0 : 2;
    const int low = step[column * 4 + i % 4] >> half & 15;
    const int high = step[4 * WIDTH + column % (WIDTH / 2) * 4 + i % 4] >> (half + shift) & 3;
    return float(low + 16 * high - 32);
}

float as_float(int type, const void* p, int64_t index) {
    switch (type) {
    case FLOAT32: return ((const float*)p)[index];
    case BFLOAT16: return widen(((const BFloat16*)p)[index]);
    case INT8: return widen(((const int8_t*)p)[index]);
    default: return widen(((const Float16*)p)[index]);
    }
}

template <typename W>
void gather(const void* packed, int terms, const Groups& groups, int64_t k, const int64_t* index,
            int64_t count, float* out) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < k; i++) {
            const int64_t group = place_of(index[row], i / groups.size, groups.number(k), 1);
            const float value =
                value_at<W>(packed, groups.table, index[row], i, k, neighbours<W>(terms));
            float scale = as_float(groups.type, groups.scale, group);
            float offset = groups.offset ? as_float(groups.type, groups.offset, group) : 0;
            if (groups.factors) {
                const int64_t number = i / FACTOR_SIZE * (groups.offset ? 2 : 1);
                const Float16* const factor =
                    groups.factors + place_of(index[row], number, groups.number_of_factors(k), 1);
                scale *= widen(factor[0]);
                if (groups.offset) offset *= widen(factor[NR]);
            }
            out[row * k + i] = value * scale + offset;
        }
}

template <typename W>
void gather(const void* packed, int terms, const float* scale, int64_t k, const int64_t* index,
            int64_t count, float* out) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < k; i++)
            out[row * k + i] = (scale ? scale[index[row]] : 1.0f) *
                               value_at<W>(packed, nullptr, index[row], i, k, neighbours<W>(terms));
}

void check_factors(int scale_type, const void* factors, int64_t group_size) {
    const bool has_factors = factors != nullptr;
    if (has_factors != (scale_type == INT8) || (has_factors && FACTOR_SIZE % group_size != 0))
        throw std::out_of_range("factors are for scales of int8 in groups that divide " +
                                std::to_string(FACTOR_SIZE));
}

}  // namespace

extern "C" {
// Numbers of a matrix [n, k] when it is packed; see `pack`.
int64_t servd_packed_size(int type, int terms, int64_t n, int64_t k) {
    const int64_t rows = (n + NR - 1) / NR * NR;
    if (type == INT4) return rows * padded(k, neighbours<Int4>(terms)) / 2;
    int64_t size = 0;
#if defined(HAS_SIXES)
    if (type == INT6) return rows * padded(k, 4) * 6 / 8;
#else
    if (type == INT6) return 0;  // there is no product of them
#endif
    with_type(type, [&](auto* p) {
        size = rows * padded(k, neighbours<std::remove_pointer_t<decltype(p)>>(terms));
    });
    return size;
}
}

namespace kernels {

// weight [n, k] of any strides to packed panels of NR rows. Codes of 4 and 6 bits have a byte each,
// and no strides. `terms`: those of x that it will be multiplied with; 0: x is float32, or these are
// scales.
void pack(int type, int terms, const void* weight, int64_t row_stride, int64_t column_stride, int64_t n,
          int64_t k, void* packed) {
    if (type == INT4) return pack_pairs((const uint8_t*)weight, n, k, terms, (uint8_t*)packed);
    if (type == INT6) return pack_sixes((const int8_t*)weight, n, k, (uint8_t*)packed);
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        pack_panels((const W*)weight, row_stride, column_stride, n, k, terms, (W*)packed);
    });
}

// y [rows, n] = x [rows, k] @ weight.T * scale + bias; scale and bias [n] may be null.
// `terms`: as it was packed, see terms.h.
void matmul(int type, int terms, const float* x, int64_t rows, int64_t k, const void* packed,
            const float* scale, const float* bias, float* y, int64_t y_stride, int64_t n) {
    with_type(type, [&](auto* p) {
        with_matrix<std::remove_pointer_t<decltype(p)>>(terms, [&](auto matrix_of) {
            multiply(x, rows, matrix_of(packed, k), scale, bias, y, y_stride, n);
        });
    });
}

// The same of weights in groups: value * scale + offset. Scales, and offsets if not null, are of
// `scale_type` and packed; `table` [16] has the values of 4 bits. Scales and offsets of int8 are
// times the factors, packed, of each FACTOR_SIZE weights.
void matmul_grouped(int type, int terms, const float* x, int64_t rows, int64_t k,
                    const void* packed, const float* table, int scale_type, const void* scale,
                    const void* offset, const void* factors, int64_t group_size,
                    const float* bias, float* y, int64_t y_stride, int64_t n) {
    check_factors(scale_type, factors, group_size);
    with_group_type(type, [&](auto* p) {
        with_grouped<std::remove_pointer_t<decltype(p)>>(terms, table, [&](auto matrix_of) {
            const Groups groups{table, scale_type, scale, offset, (const Float16*)factors, group_size};
            multiply(x, rows, matrix_of(packed, k, groups), nullptr, bias, y, y_stride, n);
        });
    });
}

// Row r of y [rows, n] is row index[r] of x [x_rows, k], or row r if index is null, times the
// matrix of the expert whose rows, from starts[expert] to starts[expert + 1], it is among. Tables
// [num_experts] have the matrices, packed, and their scales; that of scales may be null.
void matmul_experts(int type, int terms, const float* x, int64_t x_rows, int64_t k,
                    const int32_t* index, const int32_t* starts, int64_t num_experts,
                    const void* const* packed, const float* const* scales, float* y, int64_t rows,
                    int64_t n) {
    with_type(type, [&](auto* p) {
        with_matrix<std::remove_pointer_t<decltype(p)>>(terms, [&](auto matrix_of) {
            multiply_experts(x, index, x_rows, starts, num_experts, scales, y, rows, k, n,
                             [&](int64_t i) { return matrix_of(packed[i], k); });
        });
    });
}

// The same of weights in groups; the tables of offsets and of factors may be null.
void matmul_experts_grouped(int type, int terms, const float* x, int64_t x_rows, int64_t k,
                            const int32_t* index, const int32_t* starts, int64_t num_experts,
                            const void* const* packed, const float* table, int scale_type,
                            const void* const* scales, const void* const* offsets,
                            const void* const* factors, int64_t group_size, float* y,
                            int64_t rows, int64_t n) {
    check_factors(scale_type, factors, group_size);
    with_group_type(type, [&](auto* p) {
        with_grouped<std::remove_pointer_t<decltype(p)>>(terms, table, [&](auto matrix_of) {
            multiply_experts(x, index, x_rows, starts, num_experts, nullptr, y, rows, k, n,
                             [&](int64_t i) {
                                 const Groups groups{table, scale_type, scales[i],
                                                     offsets ? offsets[i] : nullptr,
                                                     factors ? (const Float16*)factors[i] : nullptr,
                                                     group_size};
                                 return matrix_of(packed[i], k, groups);
                             });
        });
    });
}

// Rows `index` [count] of weight [n, k] * scale.
void gather_rows(int type, int terms, const void* packed, const float* scale, int64_t n, int64_t k,
                 const int64_t* index, int64_t count, float* out) {
    check_ids("index", index, 0, count, n);
    with_type(type, [&](auto* p) {
        gather<std::remove_pointer_t<decltype(p)>>(packed, terms, scale, k, index, count, out);
    });
}

// The same of weights in groups.
void gather_grouped(int type, int terms, const void* packed, const float* table, int scale_type,
                    const void* scale, const void* offset, const void* factors,
                    int64_t group_size, int64_t n, int64_t k, const int64_t* index, int64_t count,
                    float* out) {
    check_ids("index", index, 0, count, n);
    check_factors(scale_type, factors, group_size);
    const Groups groups{table, scale_type, scale, offset, (const Float16*)factors, group_size};
    with_group_type(type, [&](auto* p) {
        gather<std::remove_pointer_t<decltype(p)>>(packed, terms, groups, k, index, count, out);
    });
}

}  // namespace kernels
