// Matrix products over packed weights, in the manner of BLIS.
//
// y [rows, n] = x [rows, k] @ w.T + bias. The weights w [n, k] are packed in panels of NR outputs,
// [n / NR][k][NR], so that the microkernel reads them once, in order, and multiplies each vector
// of them with the MR rows of a tile of x. The tiles are copied, with rows X_STRIDE apart: at their
// own distance, they fall on the same lines of the cache where k is a multiple of 1024. Weights of
// 16 and 8 bits are widened whenever they are read: turning a panel's kc rows into float32 once,
// for all tiles, was slower by up to a quarter, because they are larger then.
//
// Weights of 4 and 8 bits may be in groups along k, with a scale and an offset for each group of an
// output: those are packed as weights are, [n / NR][k / group][NR], and the weights that products
// see are exactly those that the format states.

#include <memory>

#include "checks.h"
#include "groups.h"
#include "kernels.h"
#include "threads.h"

namespace {

// With two vectors of NR, the rows of a tile fill the registers but a few.
constexpr int MR = WIDTH == 16 ? 14 : WIDTH == 8 ? 6 : 4;
constexpr int NR = 2 * WIDTH;
// Depth of a block of k: a tile, a panel and the next panel of it stay in the second-level cache.
constexpr int64_t MAX_KC = 768;
// A chunk's tiles: their kc columns stay in the second-level cache for one panel after another.
constexpr int64_t MC_TILES = 8;
constexpr int64_t LINE = 64;  // bytes in a cache line
// In bytes; the processor's own prefetching ends with the page, and lost a quarter.
constexpr int64_t PREFETCH_DISTANCE = 4096;
constexpr int64_t X_STRIDE = MAX_KC + 16;

// Where outputs are written, and what is done with them at the end of k.
struct OutputTile {
    float* y;
    int64_t stride;
    int columns;  // up to NR
    const float *scale, *bias;  // one for each column, or null
    bool is_first_k, is_last_k;  // whether this is the first or last block of k
};

// Weights that are needed after these are prefetched while the processor computes: the first tile
// of a panel would wait for them, and the others leave the memory idle. The tiles of a panel share
// this evenly. The addresses may lie past the end of all weights, which does no harm.
struct Prefetch {
    const char* line;
    int64_t step;  // bytes for each vector of weights that is used: up to two lines
};

// Scale and bias of a tile. One function for all numbers of rows: compilers join a product and a
// sum into one rounding in one place and not in another.
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

// Weights as they are. A cursor reads a panel from a row on; one row of it are NR weights.
template <typename W>
struct Plain {
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
    Cursor at(int64_t panel, int64_t start) const { return {packed + (panel * k + start) * NR}; }
};

// value * scale + offset, where the value is of a table for 4 bits.
template <typename W>
struct Grouped {
    static constexpr int64_t ROW_BYTES = NR * BITS<W> / 8;
    const uint8_t* packed;
    int64_t k;
    Groups groups;

    struct Cursor {
        const uint8_t* row;
        const Groups& groups;
        int64_t panel_groups, start;  // where the panel's scales begin; the first row
        Table table;
        Vec scale[2], offset[2];

        // The scales for row i; returns the end of their group.
        int64_t enter_group(int64_t i, int64_t end) {
            const int64_t group = (start + i) / groups.size;
            for (int half = 0; half < 2; half++) {
                const int64_t column = (panel_groups + group) * NR + half * WIDTH;
                scale[half] = load_as(groups.type, groups.scale, column) * UNIT<W>;
                offset[half] = groups.offset ? load_as(groups.type, groups.offset, column) : Vec{};
            }
            return std::min(end, (group + 1) * groups.size - start);
        }
        void read(Vec& w0, Vec& w1) {
            if constexpr (std::is_same_v<W, Int4>) load_pairs(row, table, w0, w1);
            else w0 = load((const W*)row), w1 = load((const W*)row + WIDTH);
            w0 = w0 * scale[0] + offset[0], w1 = w1 * scale[1] + offset[1];
            row += ROW_BYTES;
        }
    };
    Cursor at(int64_t panel, int64_t start) const {
        return {packed + (panel * k + start) * ROW_BYTES, groups, panel * groups.number(k), start,
                load_table(groups.table), {}, {}};
    }
};

template <int ROWS, typename Cursor>
void microkernel(const float* x, Cursor weights, int64_t kc, const OutputTile& out,
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
                const Vec a = splat(x[row * X_STRIDE + i]);
                acc[row][0] += a * w0;
                acc[row][1] += a * w1;
            }
        }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            store_up_to(at(row, half), acc[row][half], count(half));
    if (out.is_last_k && (out.scale || out.bias)) epilogue(out, ROWS);
}

// The microkernel for a number of rows up to ROWS.
template <int ROWS, typename Cursor>
void microkernel_for(int rows, const float* x, const Cursor& weights, int64_t kc,
                     const OutputTile& out, Prefetch ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) microkernel<ROWS>(x, weights, kc, out, ahead);
        else microkernel_for<ROWS - 1>(rows, x, weights, kc, out, ahead);
    }
}

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
    const int64_t num_panels = (n + NR - 1) / NR;
    const int64_t num_k_blocks = std::max<int64_t>(1, (k + MAX_KC - 1) / MAX_KC);  // k = 0: bias
    const int64_t max_kc = (k + num_k_blocks - 1) / num_k_blocks;  // the last block may have less
    const auto row_of_x = [=](int64_t row) { return x + (index ? index[row] : row) * k; };
    std::unique_ptr<float[]> copy;  // [num_k_blocks][rows][X_STRIDE]
    if (rows > 1) {
        copy.reset(new float[num_k_blocks * rows * X_STRIDE]);
        parallel_for(rows, std::max<int64_t>(1, 32768 / (k + 1)), [&](int64_t row) {
            for (int64_t block = 0; block < num_k_blocks; block++)
                std::copy_n(row_of_x(row) + block * max_kc, std::min(max_kc, k - block * max_kc),
                            &copy[(block * rows + row) * X_STRIDE]);
        });
    }
    std::unique_ptr<Tasks[]> tasks(new Tasks[num_products]);
    int64_t num_tasks = 0, most_chunks = 1;
    for (int64_t i = 0; i < num_products; i++) {
        const int64_t tiles = (products[i].rows + MR - 1) / MR;
        const int64_t chunks = (tiles + MC_TILES - 1) / MC_TILES;
        tasks[i] = {num_tasks, tiles, chunks};
        num_tasks += chunks * num_panels;
        most_chunks = std::max(most_chunks, chunks);
    }
    // All k of a chunk is too large for the cache: if there are several chunks, all of them do a
    // block of k before the next block.
    const int64_t together = most_chunks == 1 ? num_k_blocks : 1;
    for (int64_t first = 0; first < num_k_blocks; first += together)
        parallel_for(num_tasks, 1, [&](int64_t task) {
            const int64_t number =
                std::upper_bound(&tasks[0], &tasks[num_products], task,
                                 [](int64_t t, const Tasks& of) { return t < of.first; }) -
                &tasks[1];
            const auto [first_task, num_tiles, num_chunks] = tasks[number];
            const Product<Matrix>& product = products[number];
            const auto first_row = [&, tiles = num_tiles](int64_t tile) {  // nearly equal
                return product.rows * tile / tiles;
            };
            const int64_t chunk = (task - first_task) / num_panels;
            const int64_t panel = (task - first_task) % num_panels, column = panel * NR;
            const int64_t first_tile = num_tiles * chunk / num_chunks;
            const int64_t last_tile = num_tiles * (chunk + 1) / num_chunks;
            for (int64_t block = first; block < first + together; block++) {
                const int64_t start = block * max_kc, kc = std::min(max_kc, k - start);
                const float* from = rows > 1 ? &copy[(block * rows + product.first_row) * X_STRIDE]
                                             : row_of_x(0) + start;
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
                    microkernel_for<MR>(height, from + row * X_STRIDE, weights, kc, out,
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

template <typename W>
void pack_panels(const W* weight, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k,
                 W* packed) {
    const int64_t num_panels = (n + NR - 1) / NR;
    parallel_for(num_panels, 1, [&](int64_t panel) {
        W* to = packed + panel * k * NR;
        std::fill_n(to, k * NR, W{});
        const int columns = int(std::min<int64_t>(NR, n - panel * NR));
        const W* from = weight + panel * NR * row_stride;
        for (int64_t i = 0; i < k; i++)
            for (int column = 0; column < columns; column++)
                to[i * NR + column] = from[column * row_stride + i * column_stride];
    });
}

// Codes [n, k] of a byte each to pairs: a byte has those of columns i and i + WIDTH of a panel.
void pack_pairs(const uint8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
    parallel_for((n + NR - 1) / NR, 1, [&](int64_t panel) {
        uint8_t* to = packed + panel * k * WIDTH;
        const auto code = [&](int64_t row, int64_t i) { return row < n ? codes[row * k + i] : 0; };
        for (int64_t i = 0; i < k; i++)
            for (int64_t row = panel * NR; row < panel * NR + WIDTH; row++)
                *to++ = uint8_t(code(row, i) | code(row + WIDTH, i) << 4);
    });
}

template <typename W>
void gather(const Grouped<W>& matrix, const int64_t* index, int64_t count, float* out) {
    const int64_t k = matrix.k;
    for (int64_t i = 0; i < count; i++) {
        const int64_t panel = index[i] / NR, column = index[i] % NR;
        auto weights = matrix.at(panel, 0);
        for (int64_t j = 0; j < k;)
            for (const int64_t end = weights.enter_group(j, k); j < end; j++) {
                Vec w[2];
                weights.read(w[0], w[1]);
                out[i * k + j] = w[column / WIDTH][column % WIDTH];
            }
    }
}

template <typename W>
void gather(const W* packed, const float* scale, int64_t k, const int64_t* index, int64_t count,
            float* out) {
    for (int64_t i = 0; i < count; i++) {
        const W* from = packed + index[i] / NR * NR * k + index[i] % NR;
        const float s = scale ? scale[index[i]] : 1.0f;
        for (int64_t j = 0; j < k; j++) out[i * k + j] = widen(from[j * NR]) * s;
    }
}

}  // namespace

extern "C" {
extern const int servd_panel_size = NR;  // rows of packed weights are padded to it
}

namespace kernels {

// weight [n, k] of any strides to packed [ceil(n / NR)][k][NR]. Codes of 4 bits have a byte each,
// and no strides.
void pack(int type, const void* weight, int64_t row_stride, int64_t column_stride, int64_t n,
          int64_t k, void* packed) {
    if (type == INT4) return pack_pairs((const uint8_t*)weight, n, k, (uint8_t*)packed);
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        pack_panels((const W*)weight, row_stride, column_stride, n, k, (W*)packed);
    });
}

// y [rows, n] = x [rows, k] @ weight.T * scale + bias; scale and bias [n] may be null.
void matmul(int type, const float* x, int64_t rows, int64_t k, const void* packed,
            const float* scale, const float* bias, float* y, int64_t y_stride, int64_t n) {
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        multiply(x, rows, Plain<W>{(const W*)packed, k}, scale, bias, y, y_stride, n);
    });
}

// The same of weights in groups: value * scale + offset. Scales, and offsets if not null, are of
// `scale_type` and packed; `table` [16] has the values of 4 bits.
void matmul_grouped(int type, const float* x, int64_t rows, int64_t k, const void* packed,
                    const float* table, int scale_type, const void* scale, const void* offset,
                    int64_t group_size, const float* bias, float* y, int64_t y_stride, int64_t n) {
    with_group_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        const Groups groups{table, scale_type, scale, offset, group_size};
        multiply(x, rows, Grouped<W>{(const uint8_t*)packed, k, groups}, nullptr, bias, y,
                 y_stride, n);
    });
}

// Row r of y [rows, n] is row index[r] of x [x_rows, k], or row r if index is null, times the
// matrix of the expert whose rows, from starts[expert] to starts[expert + 1], it is among. Tables
// [num_experts] have the matrices, packed, and their scales; that of scales may be null.
void matmul_experts(int type, const float* x, int64_t x_rows, int64_t k, const int32_t* index,
                    const int32_t* starts, int64_t num_experts, const void* const* packed,
                    const float* const* scales, float* y, int64_t rows, int64_t n) {
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        multiply_experts(x, index, x_rows, starts, num_experts, scales, y, rows, k, n,
                         [=](int64_t i) { return Plain<W>{(const W*)packed[i], k}; });
    });
}

// The same of weights in groups; the table of offsets may be null.
void matmul_experts_grouped(int type, const float* x, int64_t x_rows, int64_t k,
                            const int32_t* index, const int32_t* starts, int64_t num_experts,
                            const void* const* packed, const float* table, int scale_type,
                            const void* const* scales, const void* const* offsets,
                            int64_t group_size, float* y, int64_t rows, int64_t n) {
    with_group_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        multiply_experts(x, index, x_rows, starts, num_experts, nullptr, y, rows, k, n,
                         [=](int64_t i) {
                             const Groups groups{table, scale_type, scales[i],
                                                 offsets ? offsets[i] : nullptr, group_size};
                             return Grouped<W>{(const uint8_t*)packed[i], k, groups};
                         });
    });
}

// Rows `index` [count] of weight [n, k] * scale.
void gather_rows(int type, const void* packed, const float* scale, int64_t n, int64_t k,
                 const int64_t* index, int64_t count, float* out) {
    check_ids("index", index, 0, count, n);
    with_type(type, [&](auto* p) { gather((decltype(p))packed, scale, k, index, count, out); });
}

// The same of weights in groups.
void gather_grouped(int type, const void* packed, const float* table, int scale_type,
                    const void* scale, const void* offset, int64_t group_size, int64_t n,
                    int64_t k, const int64_t* index, int64_t count, float* out) {
    check_ids("index", index, 0, count, n);
    with_group_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        const Groups groups{table, scale_type, scale, offset, group_size};
        gather(Grouped<W>{(const uint8_t*)packed, k, groups}, index, count, out);
    });
}

}  // namespace kernels
