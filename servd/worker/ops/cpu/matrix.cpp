// Matrix products over packed weights, in the manner of BLIS.
//
// y [rows, n] = x [rows, k] @ w.T + bias. The weights w [n, k] are packed in panels of NR outputs. panels.h
// has the micro-kernel of float32, which multiplies a panel with a tile of x; terms.h explains the
// micro-kernels of fewer bits.
//
// Weights of 4 and 8 bits may be in groups along k, with a scale and an offset for each group of an output.
// Scales and offsets are packed like weights, [n / NR][k / group][NR]. Products use exactly the weights
// that the format states.

#include <atomic>
#include <memory>
#include <new>

#include "checks.h"
#include "kernels.h"
#include "panels.h"
#include "threads.h"
#include "tiles.h"

namespace {

// Tiles in a chunk: the tiles stay in the second-level cache while the panels pass.
constexpr int64_t MAX_TILES = 8, MIN_TILES = 2, CHUNK_BYTES = 5 << 18;

// A matrix, and the rows of y that it makes.
template <typename Matrix>
struct Product {
    Matrix matrix;
    const float* scale;  // [n], or null
    int64_t first_row, rows;
};

// The tasks of a product, and the number of the first.
struct Tasks {
    int64_t first, num_tiles, num_chunks;
};

// y [rows, n]: row r is row `index[r]` of x, or row r if index is null, times its product's matrix. All
// matrices have the same shape and type. One parallel loop computes all products.
template <typename Matrix>
void multiply_each(const Product<Matrix>* products, int64_t num_products, const float* x,
                   const int32_t* index, int64_t rows, int64_t k, const float* bias, float* y,
                   int64_t y_stride, int64_t n) {
    using X = typename Matrix::X;
    constexpr int64_t MR = Matrix::MR, MAX_KC = Matrix::MAX_KC, KC_UNIT = Matrix::KC_UNIT;
    const int64_t num_panels = (n + NR - 1) / NR;
    const int64_t num_k_blocks = std::max<int64_t>(1, (k + MAX_KC - 1) / MAX_KC);  // k = 0: bias
    const int64_t max_kc =  // the last block may be smaller
        ((k + num_k_blocks - 1) / num_k_blocks + KC_UNIT - 1) / KC_UNIT * KC_UNIT;
    const auto row_of_x = [=](int64_t row) { return x + (index ? index[row] : row) * k; };
    const int64_t x_stride = products[0].matrix.x_stride();
    std::unique_ptr<X[]> copy;  // [num_k_blocks][rows][x_stride]
    if (rows > 1 || !std::is_same_v<X, float>) {
        copy.reset(new X[num_k_blocks * rows * x_stride]);
        // Numbers that a thread copies at once; rounding takes longer than copying.
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
    // If all k of a chunk do not fit in the cache, all chunks finish a block of k before the next.
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
                // A single tile prefetches its own weights; several tiles share the next panel's.
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

const float* row_scale_of(const PackedWeight& weight) {
    return weight.group_size ? nullptr : (const float*)weight.scale;
}

// The products of experts; `matrix_of` makes a Matrix of a PackedWeight.
template <typename MatrixOf>
void multiply_experts(const float* x, const int32_t* index, int64_t x_rows, const int32_t* starts,
                      const PackedExperts& experts, float* y, int64_t rows, MatrixOf matrix_of) {
    using Matrix = decltype(matrix_of(experts.at(0)));
    const int64_t num_experts = experts.num_experts, n = experts.n;
    if (index) check_ids("index", index, 0, rows, x_rows);
    check_ids("starts", starts, 0, num_experts + 1, rows + 1);
    std::unique_ptr<Product<Matrix>[]> products(new Product<Matrix>[num_experts]);
    int64_t number = 0;
    for (int64_t i = 0; i < num_experts; i++)
        if (const int64_t count = starts[i + 1] - starts[i]; count > 0) {
            const PackedWeight weight = experts.at(i);
            products[number++] = {matrix_of(weight), row_scale_of(weight), starts[i], count};
        }
    if (number > 0)
        multiply_each(&products[0], number, x, index, rows, experts.k, nullptr, y, n, n);
}

// Packs a panel of up to NR rows, square by square, so that the cache lines of source and target stay in
// the cache for any strides.
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

// Packs codes [rows, k] of a byte each in pairs: a byte has the codes of outputs i and i + WIDTH of a
// panel. NEXT neighbours along k are side by side.
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

// Packs codes [n, k] from -32 to 31. For each 4 neighbours along k, the low 4 bits of the codes come
// first, in pairs. Then a byte has the high 2 bits of four codes: of outputs i, i + WIDTH / 2, i + WIDTH
// and i + 3 * WIDTH / 2.
void pack_sixes(const int8_t* codes, int64_t n, int64_t k, uint8_t* packed) {
    const int64_t size = NR * padded(k, 4) * 6 / 8;
    parallel_for((n + NR - 1) / NR, 1, [&](int64_t panel) {
        uint8_t* to = packed + panel * size;
        std::fill_n(to, size, 0);
        const auto read = [&](int64_t row, int64_t i) {
            uint32_t word = 0;
            if (row < n) memcpy(&word, codes + row * k + i, std::min<int64_t>(4, k - i));
            return word ^ 0x20202020;  // adds 32, in 6 bits
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

// The groups of a weight. Throws std::out_of_range if it has none that the kernels can read.
Groups groups_of(const PackedWeight& weight) {
    const bool has_factors = weight.factors != nullptr;
    if (has_factors != (weight.scale_type == INT8) ||
        (has_factors && FACTOR_SIZE % weight.group_size != 0))
        throw std::out_of_range("factors are for scales of int8 in groups that divide " +
                                std::to_string(FACTOR_SIZE));
    return {weight.table, weight.scale_type, weight.scale, weight.offset,
            (const Float16*)weight.factors, weight.group_size};
}

template <typename W>
void gather_grouped(const PackedWeight& weight, const Groups& groups, const int64_t* index,
                    int64_t count, float* out) {
    const int64_t k = weight.k;
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < k; i++) {
            const int64_t group = place_of(index[row], i / groups.size, groups.number(k), 1);
            const float value = value_at<W>(weight.packed, groups.table, index[row], i, k,
                                            neighbours<W>(weight.terms));
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
void gather_plain(const PackedWeight& weight, const int64_t* index, int64_t count, float* out) {
    const float* const scale = row_scale_of(weight);
    const int64_t k = weight.k;
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < k; i++)
            out[row * k + i] =
                (scale ? scale[index[row]] : 1.0f) *
                value_at<W>(weight.packed, nullptr, index[row], i, k, neighbours<W>(weight.terms));
}

// `parallel_for` with a body that takes memory. Without it, the other parts end, then this throws.
template <typename Body>
void parallel_with_memory(int64_t count, const Body& body) {
    std::atomic<bool> is_short{false};
    parallel_for(count, 1, [&](int64_t i) {
        try {
            body(i);
        } catch (const std::bad_alloc&) {
            is_short = true;
        }
    });
    if (is_short) throw std::bad_alloc();
}

constexpr int64_t PACKED_BYTES = 1 << 25;  // of the heads that are computed at once, or of one head
constexpr int64_t SCORE_BYTES = 1 << 18;  // of some queries: they stay in the second-level cache
constexpr int64_t MIN_QUERIES = 16, MAX_QUERIES = 128;

// Turns scores [n] into weights e^(score - max), and returns their sum.
float exponentiate(float* scores, int64_t n) {
    const int64_t full = n / WIDTH * WIDTH;
    const int rest = int(n - full);
    Vec maxima = splat(-INFINITY), sums{};
    for (int64_t j = 0; j < full; j += WIDTH)
        maxima = load(scores + j) > maxima ? load(scores + j) : maxima;
    float max = rest ? *std::max_element(scores + full, scores + n) : -INFINITY;
    for (int i = 0; i < WIDTH; i++) max = std::max(max, maxima[i]);
    for (int64_t j = 0; j < full; j += WIDTH) {
        const Vec weight = exp_of(load(scores + j) - max);
        store(scores + j, weight);
        sums += weight;
    }
    store_up_to(scores + full, exp_of(load_up_to(scores + full, rest) - max), rest);
    return sum(sums + load_up_to(scores + full, rest));
}

// `attend_all` with keys and values of type W. Those of a head are packed like weights: scores are the
// product of queries and keys, and the results the product of the scores' weights and the values.
template <typename W>
void attend_packed(const float* q, const float* k, const float* v, int64_t sequences, int64_t n,
                   int64_t num_heads, int64_t head_dim, float scale, float* out) {
    const int next = neighbours<W>(1);
    const auto size_of = [=](int64_t rows, int64_t columns) {
        return (rows + NR - 1) / NR * NR * padded(columns, next);
    };
    const int64_t key_size = size_of(n, head_dim), value_size = size_of(head_dim, n);
    const int64_t head_size = key_size + value_size, stride = num_heads * head_dim;
    const int64_t heads = sequences * num_heads;
    const int64_t at_once =
        std::clamp<int64_t>(PACKED_BYTES / int64_t(head_size * sizeof(W)), 1, heads);
    // Where the token of a head of a sequence is in q, k, v and out.
    const auto place = [=](int64_t head, int64_t token) {
        return (head / num_heads * n + token) * stride + head % num_heads * head_dim;
    };
    const int64_t many =
        std::clamp<int64_t>(SCORE_BYTES / int64_t(n * sizeof(float)), MIN_QUERIES, MAX_QUERIES);
    const int64_t chunks = (n + many - 1) / many;
    std::unique_ptr<W[]> packed(new W[at_once * head_size]);
    const auto pack_head = [&](int64_t head, W* keys) {
        std::unique_ptr<W[]> rounded(new W[n * head_dim]);
        const auto narrow_head = [&](const float* from) {
            for (int64_t token = 0; token < n; token++)
                for (int64_t d = 0; d < head_dim; d++)
                    narrow(from[place(head, token) + d], &rounded[token * head_dim + d]);
            return rounded.get();
        };
        pack_panels(narrow_head(k), head_dim, 1, n, head_dim, 1, keys);
        pack_panels(narrow_head(v), 1, head_dim, head_dim, n, 1, keys + key_size);
    };
    const auto attend_chunk = [&](int64_t head, int64_t chunk, const W* keys, auto matrix_of) {
        const int64_t first = chunk * many, begin = place(head, first);
        const int64_t count = std::min(many, n - first);
        std::unique_ptr<float[]> scores(new float[count * n]);
        std::unique_ptr<float[]> queries(new float[count * head_dim]);
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < head_dim; d++)
                queries[i * head_dim + d] = q[begin + i * stride + d] * scale;
        multiply(queries.get(), count, matrix_of(keys, head_dim), nullptr, nullptr, scores.get(), n,
                 n);
        float sums[MAX_QUERIES];
        for (int64_t i = 0; i < count; i++) sums[i] = exponentiate(&scores[i * n], n);
        multiply(scores.get(), count, matrix_of(keys + key_size, n), nullptr, nullptr, out + begin,
                 stride, head_dim);
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < head_dim; d++) out[begin + i * stride + d] /= sums[i];
    };
    with_matrix<W>(1, [&](auto matrix_of) {
        for (int64_t begin = 0; begin < heads; begin += at_once) {
            const int64_t num = std::min(at_once, heads - begin);
            parallel_with_memory(
                num, [&](int64_t i) { pack_head(begin + i, &packed[i * head_size]); });
            parallel_with_memory(num * chunks, [&](int64_t task) {
                const int64_t i = task / chunks;
                attend_chunk(begin + i, task % chunks, &packed[i * head_size], matrix_of);
            });
        }
    });
}

// Calls `call` with a function that makes the Matrix of a PackedWeight of this one's type.
template <typename Call>
void with_matrix_of(const PackedWeight& weight, const Call& call) {
    if (weight.group_size == 0)
        return with_type(weight.type, [&](auto* p) {
            with_matrix<std::remove_pointer_t<decltype(p)>>(weight.terms, [&](auto matrix_of) {
                call([&](const PackedWeight& w) { return matrix_of(w.packed, w.k); });
            });
        });
    groups_of(weight);  // checks them
    with_group_type(weight.type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        with_grouped<W>(weight.terms, weight.table, [&](auto matrix_of) {
            call([&](const PackedWeight& w) { return matrix_of(w.packed, w.k, groups_of(w)); });
        });
    });
}

}  // namespace

extern "C" {
// Returns how many numbers a packed matrix [n, k] has; see `pack`.
int64_t servd_packed_size(int type, int terms, int64_t n, int64_t k) {
    const int64_t rows = (n + NR - 1) / NR * NR;
    if (type == INT4) return rows * padded(k, neighbours<Int4>(terms)) / 2;
    int64_t size = 0;
#if defined(HAS_SIXES)
    if (type == INT6) return rows * padded(k, 4) * 6 / 8;
#else
    if (type == INT6) return 0;  // these kernels cannot multiply them
#endif
    with_type(type, [&](auto* p) {
        size = rows * padded(k, neighbours<std::remove_pointer_t<decltype(p)>>(terms));
    });
    return size;
}
}

namespace kernels {

// Packs weight [n, k] of any strides in panels of NR rows. Codes of 4 and 6 bits take a byte each and
// must be contiguous. `terms`: the terms of the x that the weight will multiply; 0: x is float32, or
// the weight contains scales.
void pack(int type, int terms, const void* weight, int64_t row_stride, int64_t column_stride,
          int64_t n, int64_t k, void* packed) {
    if (type == INT4) return pack_pairs((const uint8_t*)weight, n, k, terms, (uint8_t*)packed);
    if (type == INT6) return pack_sixes((const int8_t*)weight, n, k, (uint8_t*)packed);
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        pack_panels((const W*)weight, row_stride, column_stride, n, k, terms, (W*)packed);
    });
}

// y [rows, n] = x [rows, k] @ weight.T + bias; bias [n] may be null.
void matmul(const float* x, int64_t rows, PackedWeight weight, const float* bias, float* y,
            int64_t y_stride) {
    with_matrix_of(weight, [&](auto matrix_of) {
        multiply(x, rows, matrix_of(weight), row_scale_of(weight), bias, y, y_stride, weight.n);
    });
}

// y [rows, n]: row r of y is row index[r] of x [x_rows, k], or row r if index is null, times the
// matrix of its expert. Expert e has the rows from starts[e] to starts[e + 1].
void matmul_experts(const float* x, int64_t x_rows, const int32_t* index, const int32_t* starts,
                    PackedExperts experts, float* y, int64_t rows) {
    if (experts.num_experts == 0) return;
    with_matrix_of(experts.at(0), [&](auto matrix_of) {
        multiply_experts(x, index, x_rows, starts, experts, y, rows, matrix_of);
    });
}

// Attention of tokens that see each other, all n of a sequence: q, k, v and out [sequences, n, num_heads,
// head_dim]. `type`: that of the numbers that may be multiplied where that is faster, BFLOAT16 or not.
void attend_all(int type, const float* q, const float* k, const float* v, int64_t sequences,
                int64_t n, int64_t num_heads, int64_t head_dim, float scale, float* out) {
    if (n == 0) return;
    const bool is_narrow = type == BFLOAT16 && neighbours<BFloat16>(1) > 1;
    const auto attend = is_narrow ? attend_packed<BFloat16> : attend_packed<float>;
    attend(q, k, v, sequences, n, num_heads, head_dim, scale, out);
}

// out [count, k]: rows `index` [count] of the weight.
void gather_rows(PackedWeight weight, const int64_t* index, int64_t count, float* out) {
    check_ids("index", index, 0, count, weight.n);
    if (weight.group_size == 0)
        return with_type(weight.type, [&](auto* p) {
            gather_plain<std::remove_pointer_t<decltype(p)>>(weight, index, count, out);
        });
    const Groups groups = groups_of(weight);
    with_group_type(weight.type, [&](auto* p) {
        gather_grouped<std::remove_pointer_t<decltype(p)>>(weight, groups, index, count, out);
    });
}

}  // namespace kernels
