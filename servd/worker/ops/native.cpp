// The arithmetic of a step on a CPU: matrix products over packed weights, attention over the paged KV cache, norms,
// activations. Called through ctypes (native.py), which states the arguments; compiled once per instruction set.
//
// Two rules hold everywhere:
// - A number is computed by the same operations in the same order whatever else is in the batch, and however the work is
//   divided over the threads, so that a request gets the same bits alone and among others.
// - Weights and cache may have 8 or 16 bits; arithmetic is float32, in vectors as wide as the machine's registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <omp.h>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int WIDTH = 16, TILE_ROWS = 14;  // 2 * 14 accumulators of the 32 registers
#elif defined(__AVX2__)
#include <immintrin.h>
constexpr int WIDTH = 8, TILE_ROWS = 6;  // of 16 registers
#else
constexpr int WIDTH = 4, TILE_ROWS = 4;
#endif

namespace {

typedef float Vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Vec splat(float x) { return x - Vec{}; }  // 0 would not leave -0 alone in a sum, and cost an instruction
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
inline float widen(Float16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    _Float16 half;
    memcpy(&half, &x.bits, 2);
    return float(half);
#endif
}
inline float widen(int8_t x) { return float(x); }

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, Float16* to) {
#if defined(__F16C__)
    to->bits = _cvtss_sh(x, 0);
#else
    _Float16 half = _Float16(x);
    memcpy(&to->bits, &half, 2);
#endif
}

inline Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    Vec x;
    for (int i = 0; i < WIDTH; i++) x[i] = widen(p[i]);
    return x;
#endif
}
inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Vec x;
    for (int i = 0; i < WIDTH; i++) x[i] = widen(p[i]);
    return x;
#endif
}
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Vec x;
    for (int i = 0; i < WIDTH; i++) x[i] = widen(p[i]);
    return x;
#endif
}

inline Vec select(IntVec condition, Vec a, Vec b) { return (Vec)((condition & (IntVec)a) | (~condition & (IntVec)b)); }
inline Vec at_most(Vec x, float limit) { return select(x < limit, x, splat(limit)); }
inline Vec at_least(Vec x, float limit) { return select(x > limit, x, splat(limit)); }

inline float sum(Vec x) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
}

// e^x within 2 units in the last place: 2^n times a polynomial on [-ln(2)/2, ln(2)/2]; 0 below -87.3.
inline Vec exp_of(Vec x) {
    const IntVec tiny = x < -87.3f;
    x = at_least(at_most(x, 88.7f), -87.3f);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Vec n = (x * 1.44269504f + shift) - shift;
    const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
    return select(tiny, Vec{}, p * (Vec)exponent);
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp_of(-x)); }

enum Function { GELU_TANH = 0, SILU = 1, RELU = 2, GELU = 3 };

inline Vec apply(int function, Vec x) {
    switch (function) {
    case GELU_TANH:  // 0.5 (1 + tanh y) is sigmoid(2 y)
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case SILU: return x * sigmoid(x);
    case RELU: return at_least(x, 0.0f);
    default:
        for (int i = 0; i < WIDTH; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        return x;
    }
}

// Elements that are left of a row when full vectors are done.
inline Vec load_first(const float* p, int count) {
    float values[WIDTH] = {};
    memcpy(values, p, count * 4);
    return load(values);
}
inline void store_first(float* p, Vec x, int count) {
    float values[WIDTH];
    store(values, x);
    memcpy(p, values, count * 4);
}
inline Vec load_up_to(const float* p, int count) {
    return count >= WIDTH ? load(p) : count > 0 ? load_first(p, count) : Vec{};
}
inline void store_up_to(float* p, Vec x, int count) {
    if (count >= WIDTH) store(p, x);
    else if (count > 0) store_first(p, x, count);
}

// ---- matrix products ----
//
// y [rows, n] = x [rows, k] @ w.T + bias. The weights w [n, k] are packed in panels of PANEL outputs: [n / PANEL][k][PANEL],
// so that the innermost loop reads them once, in order, and multiplies each vector of them with the rows of a tile of x.
// The tiles are copied, with rows STRIDE apart: at their own distance, they fall on the same lines of the cache where k is
// a multiple of 1024.

constexpr int PANEL = 2 * WIDTH;
constexpr int64_t DEPTH = 1024;  // of the k: pieces of a tile and of GROUP panels stay in the second-level cache
constexpr int64_t GROUP = 4;
constexpr int64_t STRIDE = DEPTH + 16;
constexpr int MIN_WIDENED_TILES = 4;  // with so many it pays to turn a piece of a panel into float32 once

// Where outputs are written, and what is done with them at the end of k.
struct Output {
    float* y;
    int64_t stride;
    int columns;  // up to PANEL
    const float *scale, *bias;  // of the columns, or null
    bool begins, ends;  // whether the piece of k is the first, the last one
};

template <int ROWS, typename W>
void multiply_tile(const float* x, const W* panel, int64_t depth, const Output& out) {
    Vec acc[ROWS][2];
    const auto count = [&](int half) { return std::min(WIDTH, out.columns - half * WIDTH); };
    const auto at = [&](int row, int half) { return out.y + row * out.stride + half * WIDTH; };
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            acc[row][half] = out.begins ? Vec{} : load_up_to(at(row, half), count(half));
    for (int64_t i = 0; i < depth; i++, panel += PANEL) {
        const Vec w0 = load(panel), w1 = load(panel + WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const Vec a = splat(x[row * STRIDE + i]);
            acc[row][0] += a * w0;
            acc[row][1] += a * w1;
        }
    }
    for (int half = 0; half < 2; half++) {
        const bool scaled = out.ends && out.scale, biased = out.ends && out.bias;
        const Vec scale = scaled ? load_up_to(out.scale + half * WIDTH, count(half)) : Vec{};
        const Vec bias = biased ? load_up_to(out.bias + half * WIDTH, count(half)) : Vec{};
        for (int row = 0; row < ROWS; row++) {
            Vec value = acc[row][half];
            if (scaled) value *= scale;
            if (biased) value += bias;
            store_up_to(at(row, half), value, count(half));
        }
    }
}

template <int ROWS, typename W>
void multiply_tile_of(int rows, const float* x, const W* panel, int64_t depth, const Output& out) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) multiply_tile<ROWS>(x, panel, depth, out);
        else multiply_tile_of<ROWS - 1>(rows, x, panel, depth, out);
    }
}

template <typename W>
void multiply(const float* x, int64_t rows, int64_t k, const W* packed, const float* scale, const float* bias, float* y,
              int64_t n) {
    const int64_t num_panels = (n + PANEL - 1) / PANEL, num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const auto first_row = [=](int64_t tile) { return rows * tile / num_tiles; };  // tiles of nearly equal height
    const bool widened = sizeof(W) < 4 && num_tiles >= MIN_WIDENED_TILES;
    const int64_t num_pieces = (k + DEPTH - 1) / DEPTH;
    std::unique_ptr<float[]> copy(rows > 1 ? new float[num_pieces * rows * STRIDE] : nullptr);  // [pieces][rows][STRIDE]
#pragma omp parallel
    {
        if (rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t piece = 0; piece < num_pieces; piece++)
                    memcpy(&copy[(piece * rows + row) * STRIDE], x + row * k + piece * DEPTH,
                           std::min(DEPTH, k - piece * DEPTH) * 4);
        }
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t first = num_panels * thread / threads, last = num_panels * (thread + 1) / threads;
        std::unique_ptr<float[]> buffer(widened ? new float[GROUP * DEPTH * PANEL] : nullptr);
        for (int64_t piece = 0; piece < num_pieces; piece++) {
            const int64_t start = piece * DEPTH, depth = std::min(DEPTH, k - start);
            const float* from = rows > 1 ? &copy[piece * rows * STRIDE] : x + start;
            const auto weights = [=](int64_t panel) { return packed + (panel * k + start) * PANEL; };
            for (int64_t group = first; group < last; group += GROUP) {
                const int64_t end = std::min(group + GROUP, last);
                for (int64_t panel = group; widened && panel < end; panel++)
                    for (int64_t i = 0; i < depth * PANEL; i += WIDTH)
                        store(&buffer[(panel - group) * DEPTH * PANEL + i], load(weights(panel) + i));
                for (int64_t tile = 0; tile < num_tiles; tile++) {
                    const int64_t row = first_row(tile);
                    const int height = int(first_row(tile + 1) - row);
                    for (int64_t panel = group; panel < end; panel++) {
                        const int64_t column = panel * PANEL;
                        const Output out{y + row * n + column, n, int(std::min<int64_t>(PANEL, n - column)),
                                         scale ? scale + column : nullptr, bias ? bias + column : nullptr,
                                         piece == 0, piece == num_pieces - 1};
                        const float* wide = &buffer[(panel - group) * DEPTH * PANEL];
                        if (widened) multiply_tile_of<TILE_ROWS>(height, from + row * STRIDE, wide, depth, out);
                        else multiply_tile_of<TILE_ROWS>(height, from + row * STRIDE, weights(panel), depth, out);
                    }
                }
            }
        }
    }
}

template <typename W>
void pack(const W* weight, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k, W* packed) {
    const int64_t num_panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < num_panels; panel++) {
        W* to = packed + panel * k * PANEL;
        memset((void*)to, 0, k * PANEL * sizeof(W));
        const int columns = int(std::min<int64_t>(PANEL, n - panel * PANEL));
        const W* from = weight + panel * PANEL * row_stride;
        for (int64_t i = 0; i < k; i++)
            for (int column = 0; column < columns; column++)
                to[i * PANEL + column] = from[column * row_stride + i * column_stride];
    }
}

template <typename W>
void rows_of(const W* packed, const float* scale, int64_t k, const int64_t* index, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) {
        const W* from = packed + index[i] / PANEL * PANEL * k + index[i] % PANEL;
        const float s = scale ? scale[index[i]] : 1.0f;
        for (int64_t j = 0; j < k; j++) out[i * k + j] = widen(from[j * PANEL]) * s;
    }
}

// ---- attention ----
//
// The cache of a layer is keys [blocks, kv_heads, head_dim, block_size], then values [blocks, kv_heads, block_size, head_dim]:
// a vector of keys holds one dimension of neighbouring tokens, so that scores need no sums across a vector.

constexpr int KEYS = 256;  // a piece of the context, scored and summed up before the next one
constexpr int64_t SPLIT_KEYS = 1024;  // a longer context is cut here, whatever the batch; the parts are joined in order
constexpr int MAX_TILE = 8;  // queries that share the reading of a key
constexpr int MAX_HEAD_DIM = 256;

struct Attention {
    const float* q;  // [num_tokens, num_heads, head_dim]
    int64_t q_stride;
    const void* keys;
    const void* values;
    int64_t num_heads, kv_heads, head_dim, block_size, window, max_blocks;
    const int32_t* block_tables;  // [num_rows, max_blocks]
    float scale;
};

// State of up to MAX_TILE queries over the keys seen so far.
struct Tile {
    int count;
    const float* q[MAX_TILE];
    int64_t first[MAX_TILE], last[MAX_TILE];  // keys that each may see: [first, last)
    float peak[MAX_TILE], total[MAX_TILE];
    alignas(64) float sums[MAX_TILE][MAX_HEAD_DIM];
};

template <int ROWS, typename C>
inline void score(const Attention& a, const Tile& tile, int from, const C* keys, float (*scores)[KEYS], int at) {
    Vec acc[ROWS] = {};
    for (int64_t d = 0; d < a.head_dim; d++) {
        const Vec k = load(keys + d * a.block_size);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) acc[row] += splat(tile.q[from + row][d]) * k;
    }
    for (int row = 0; row < ROWS; row++) store(&scores[from + row][at], acc[row] * a.scale);
}

template <int ROWS, typename C>
inline void gather(const Attention& a, Tile& tile, int from, const C* values, const float (*weights)[KEYS], int at, int count) {
    for (int64_t d = 0; d < a.head_dim; d += 2 * WIDTH) {
        const bool wide = d + WIDTH < a.head_dim;
        Vec acc[ROWS][2];
        for (int row = 0; row < ROWS; row++) {
            acc[row][0] = load(&tile.sums[from + row][d]);
            acc[row][1] = wide ? load(&tile.sums[from + row][d + WIDTH]) : Vec{};
        }
        for (int j = 0; j < count; j++) {
            const C* value = values + j * a.head_dim + d;
            const Vec v0 = load(value), v1 = wide ? load(value + WIDTH) : Vec{};
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const Vec w = splat(weights[from + row][at + j]);
                acc[row][0] += w * v0;
                acc[row][1] += w * v1;
            }
        }
        for (int row = 0; row < ROWS; row++) {
            store(&tile.sums[from + row][d], acc[row][0]);
            if (wide) store(&tile.sums[from + row][d + WIDTH], acc[row][1]);
        }
    }
}

template <typename C>
void attend_keys(const Attention& a, Tile& tile, const int32_t* blocks, int64_t kv_head, int64_t begin, int64_t end) {
    alignas(64) float scores[MAX_TILE][KEYS];
    const int64_t head_size = a.head_dim * a.block_size;
    const C* keys = static_cast<const C*>(a.keys) + kv_head * head_size;
    const C* values = static_cast<const C*>(a.values) + kv_head * head_size;
    for (int64_t start = begin; start < end; start += KEYS) {
        const int count = int(std::min<int64_t>(KEYS, end - start));
        for (int j = 0; j < count; j += WIDTH) {
            const int64_t key = start + j;
            const C* at = keys + blocks[key / a.block_size] * a.kv_heads * head_size + key % a.block_size;
            int row = 0;
            for (; row + 4 <= tile.count; row += 4) score<4>(a, tile, row, at, scores, j);
            for (; row < tile.count; row++) score<1>(a, tile, row, at, scores, j);
        }
        for (int row = 0; row < tile.count; row++) {
            float* s = scores[row];
            const int64_t low = std::max<int64_t>(tile.first[row] - start, 0), high = std::min<int64_t>(tile.last[row] - start, count);
            const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
            for (int j = 0; j < std::min<int64_t>(low, padded); j++) s[j] = -INFINITY;
            for (int64_t j = std::max<int64_t>(high, 0); j < padded; j++) s[j] = -INFINITY;
            Vec peaks = splat(-INFINITY);
            for (int j = 0; j < padded; j += WIDTH) peaks = select(load(s + j) > peaks, load(s + j), peaks);
            float peak = tile.peak[row];
            for (int i = 0; i < WIDTH; i++) peak = std::max(peak, peaks[i]);
            if (peak == -INFINITY) {  // no key of this piece is seen
                for (int j = 0; j < padded; j++) s[j] = 0;
                continue;
            }
            const float shrink = expf(tile.peak[row] - peak);
            Vec totals{};
            for (int j = 0; j < padded; j += WIDTH) {
                const Vec weight = exp_of(load(s + j) - peak);
                store(s + j, weight);
                totals += weight;
            }
            tile.total[row] = tile.total[row] * shrink + sum(totals);
            tile.peak[row] = peak;
            if (shrink != 1.0f)
                for (int64_t d = 0; d < a.head_dim; d += WIDTH) store(&tile.sums[row][d], load(&tile.sums[row][d]) * shrink);
        }
        for (int j = 0; j < count; j += int(a.block_size)) {
            const C* at = values + blocks[(start + j) / a.block_size] * a.kv_heads * head_size;
            const int size = std::min<int>(int(a.block_size), count - j);
            int row = 0;
            for (; row + 4 <= tile.count; row += 4) gather<4>(a, tile, row, at, scores, j, size);
            for (; row < tile.count; row++) gather<1>(a, tile, row, at, scores, j, size);
        }
    }
}

// One unit of work: a tile of queries of one sequence and one kv head, over one part of the context.
struct Task {
    int32_t row, kv_head, query, part;
};

template <typename C>
void attend(const Attention& a, const int64_t* query_lens, const int64_t* seq_lens, int64_t num_rows, float* out) {
    const int64_t group = a.num_heads / a.kv_heads;  // query heads that share a kv head
    const int64_t tile_size = group >= MAX_TILE ? MAX_TILE : MAX_TILE / group * group;
    // Cut where the sequence is cut, from its beginning.
    auto parts_of = [&](int64_t row) { return (seq_lens[row] + SPLIT_KEYS - 1) / SPLIT_KEYS; };
    auto tiles_in = [&](int64_t row) { return (query_lens[row] * group + tile_size - 1) / tile_size; };
    int64_t num_tasks = 0, num_states = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        num_tasks += a.kv_heads * tiles_in(row) * parts_of(row);
        if (parts_of(row) > 1) num_states += query_lens[row] * a.num_heads * parts_of(row);
    }
    std::unique_ptr<Task[]> tasks(new Task[num_tasks]);
    std::unique_ptr<int64_t[]> tokens(new int64_t[num_rows]), states(new int64_t[num_rows]);
    int64_t task = 0, token = 0, state = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        tokens[row] = token;
        states[row] = state;
        token += query_lens[row];
        const int64_t parts = parts_of(row);
        if (parts > 1) state += query_lens[row] * a.num_heads * parts;
        for (int64_t head = 0; head < a.kv_heads; head++)
            for (int64_t query = 0; query < query_lens[row] * group; query += tile_size)
                for (int64_t part = 0; part < parts; part++)
                    tasks[task++] = {int32_t(row), int32_t(head), int32_t(query), int32_t(part)};
    }
    const int64_t state_size = a.head_dim + 2;  // sums, peak, total
    std::unique_ptr<float[]> partial(new float[num_states * state_size]);

#pragma omp parallel
    {
        Tile tile;
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < num_tasks; t++) {
            const auto [row, kv_head, query, part] = tasks[t];
            const int64_t parts = parts_of(row), before = seq_lens[row] - query_lens[row];
            const int64_t last_query = std::min(query + tile_size, query_lens[row] * group);
            const int64_t begin = part * SPLIT_KEYS;
            int64_t first_key = INT64_MAX, last_key = 0;
            tile.count = int(last_query - query);
            for (int i = 0; i < tile.count; i++) {
                const int64_t position = (query + i) / group, head = kv_head * group + (query + i) % group;
                tile.q[i] = a.q + (tokens[row] + position) * a.q_stride + head * a.head_dim;
                tile.last[i] = before + position + 1;
                tile.first[i] = a.window > 0 ? std::max<int64_t>(0, tile.last[i] - a.window) : 0;
                tile.peak[i] = -INFINITY;
                tile.total[i] = 0;
                memset(tile.sums[i], 0, a.head_dim * 4);
                first_key = std::min(first_key, tile.first[i]);
                last_key = std::max(last_key, tile.last[i]);
            }
            // Pieces begin at multiples of KEYS, so that a key is in the same piece for every query of the sequence.
            const int64_t from = std::max(begin, first_key / KEYS * KEYS), to = std::min(begin + SPLIT_KEYS, last_key);
            if (from < to) attend_keys<C>(a, tile, a.block_tables + row * a.max_blocks, kv_head, from, to);
            for (int i = 0; i < tile.count; i++) {
                const int64_t position = (query + i) / group, head = kv_head * group + (query + i) % group;
                float* to_state = &partial[(states[row] + (position * a.num_heads + head) * parts + part) * state_size];
                float* to_out = out + ((tokens[row] + position) * a.num_heads + head) * a.head_dim;
                if (parts > 1) {
                    memcpy(to_state, tile.sums[i], a.head_dim * 4);
                    to_state[a.head_dim] = tile.peak[i];
                    to_state[a.head_dim + 1] = tile.total[i];
                } else {
                    const float factor = 1.0f / tile.total[i];
                    for (int64_t d = 0; d < a.head_dim; d += WIDTH) store(to_out + d, load(&tile.sums[i][d]) * factor);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t parts = parts_of(row);
            for (int64_t query = 0; parts > 1 && query < query_lens[row] * a.num_heads; query++) {
                const float* from = &partial[(states[row] + query * parts) * state_size];
                float* to_out = out + (tokens[row] * a.num_heads + query) * a.head_dim;
                float peak = -INFINITY, total = 0;
                for (int64_t part = 0; part < parts; part++) peak = std::max(peak, from[part * state_size + a.head_dim]);
                memset(to_out, 0, a.head_dim * 4);
                for (int64_t part = 0; part < parts; part++, from += state_size) {
                    const float factor = expf(from[a.head_dim] - peak);
                    if (factor == 0) continue;  // the part was not seen
                    total += from[a.head_dim + 1] * factor;
                    for (int64_t d = 0; d < a.head_dim; d += WIDTH) store(to_out + d, load(to_out + d) + load(from + d) * factor);
                }
                for (int64_t d = 0; d < a.head_dim; d += WIDTH) store(to_out + d, load(to_out + d) / total);
            }
        }
    }
}

// Rotates queries (into q_out) and keys, and writes keys and values to the cache.
template <typename C>
void write(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* q_out,
           const float* cos, const float* sin, C* keys, C* values, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
           int64_t kv_heads, int64_t head_dim, int64_t block_size) {
    const int64_t half = head_dim / 2, head_size = head_dim * block_size;
#pragma omp parallel for schedule(static) if (num_tokens > 1)
    for (int64_t token = 0; token < num_tokens; token++) {
        const float* c = cos ? cos + token * half : nullptr;
        const float* s = sin ? sin + token * half : nullptr;
        if (c)
            for (int64_t head = 0; head < num_heads; head++) {
                const float* from = q + token * q_stride + head * head_dim;
                float* to = q_out + (token * num_heads + head) * head_dim;
                for (int64_t d = 0; d < half; d++) {
                    to[d] = from[d] * c[d] - from[d + half] * s[d];
                    to[d + half] = from[d + half] * c[d] + from[d] * s[d];
                }
            }
        const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < kv_heads; head++) {
            const float* from = k + token * k_stride + head * head_dim;
            C* key = keys + (block * kv_heads + head) * head_size + offset;
            C* value = values + (block * kv_heads + head) * head_size + offset * head_dim;
            for (int64_t d = 0; d < half; d++) {
                const float first = c ? from[d] * c[d] - from[d + half] * s[d] : from[d];
                const float second = c ? from[d + half] * c[d] + from[d] * s[d] : from[d + half];
                narrow(first, key + d * block_size);
                narrow(second, key + (d + half) * block_size);
            }
            for (int64_t d = 0; d < head_dim; d++) narrow(v[token * v_stride + head * head_dim + d], value + d);
        }
    }
}

// ---- norms and activations ----

template <bool CENTERED>
void norm(const float* x, const float* residual, const float* weight, const float* bias, float eps, float* out, float* sums,
          int64_t rows, int64_t size) {
    const int64_t full = size / WIDTH * WIDTH;
    const int rest = int(size - full);
#pragma omp parallel for schedule(static) if (rows * size > 32768)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * size;
        if (residual) {
            float* to = sums + row * size;
            const float* r = residual + row * size;
            for (int64_t i = 0; i < full; i += WIDTH) store(to + i, load(from + i) + load(r + i));
            for (int64_t i = full; i < size; i++) to[i] = from[i] + r[i];
            from = to;
        }
        float mean = 0;
        if (CENTERED) {
            Vec total{};
            for (int64_t i = 0; i < full; i += WIDTH) total += load(from + i);
            if (rest) total += load_first(from + full, rest);
            mean = sum(total) / float(size);
        }
        Vec squares{};
        for (int64_t i = 0; i < full; i += WIDTH) squares += (load(from + i) - mean) * (load(from + i) - mean);
        float total = sum(squares);
        for (int64_t i = full; i < size; i++) total += (from[i] - mean) * (from[i] - mean);
        const float factor = 1.0f / sqrtf(total / float(size) + eps);
        float* to = out + row * size;
        for (int64_t i = 0; i < full; i += WIDTH) {
            const Vec y = (load(from + i) - mean) * factor * load(weight + i);
            store(to + i, bias ? y + load(bias + i) : y);
        }
        for (int64_t i = full; i < size; i++) to[i] = (from[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
    }
}

// function of x [rows, size], times the numbers `size` further on where rows are 2 * size wide (gated).
void activate_rows(const float* x, int64_t rows, int64_t size, int function, bool gated, float* out) {
    const int64_t stride = gated ? 2 * size : size, full = size / WIDTH * WIDTH;
    const int rest = int(size - full);
#pragma omp parallel for schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * stride;
        float* to = out + row * size;
        for (int64_t i = 0; i < full; i += WIDTH) {
            const Vec y = apply(function, load(from + i));
            store(to + i, gated ? y * load(from + size + i) : y);
        }
        if (rest) {
            const Vec y = apply(function, load_first(from + full, rest));
            store_first(to + full, gated ? y * load_first(from + size + full, rest) : y, rest);
        }
    }
}

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };

// Calls `call` with a null pointer of the type.
template <typename Call>
void with_type(int type, Call call) {
    switch (type) {
    case FLOAT32: return call((float*)nullptr);
    case BFLOAT16: return call((BFloat16*)nullptr);
    case FLOAT16: return call((Float16*)nullptr);
    default: return call((int8_t*)nullptr);
    }
}

}  // namespace

extern "C" {

int servd_panel() { return PANEL; }
int servd_vector() { return WIDTH; }

void servd_pack(int type, const void* weight, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k, void* packed) {
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        pack((const W*)weight, row_stride, column_stride, n, k, (W*)packed);
    });
}

void servd_multiply(int type, const float* x, int64_t rows, int64_t k, const void* packed, const float* scale,
                    const float* bias, float* y, int64_t n) {
    with_type(type, [&](auto* p) { multiply(x, rows, k, (decltype(p))packed, scale, bias, y, n); });
}

void servd_rows(int type, const void* packed, const float* scale, int64_t k, const int64_t* index, int64_t count, float* out) {
    with_type(type, [&](auto* p) { rows_of((decltype(p))packed, scale, k, index, count, out); });
}

void servd_write(int type, const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                 int64_t v_stride, float* q_out, const float* cos, const float* sin, void* keys, void* values,
                 const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t kv_heads, int64_t head_dim,
                 int64_t block_size) {
    auto call = [&](auto* p) {
        write(q, q_stride, k, k_stride, v, v_stride, q_out, cos, sin, (decltype(p))keys, (decltype(p))values, slots,
              num_tokens, num_heads, kv_heads, head_dim, block_size);
    };
    type == FLOAT32 ? call((float*)nullptr) : type == BFLOAT16 ? call((BFloat16*)nullptr) : call((Float16*)nullptr);
}

void servd_attend(int type, const float* q, int64_t q_stride, const void* keys, const void* values,
                  const int32_t* block_tables, int64_t max_blocks, const int64_t* query_lens, const int64_t* seq_lens,
                  int64_t num_rows, int64_t num_heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                  int64_t window, float scale, float* out) {
    const Attention a{q, q_stride, keys, values, num_heads, kv_heads, head_dim, block_size, window, max_blocks, block_tables, scale};
    with_type(type, [&](auto* p) { attend<std::remove_pointer_t<decltype(p)>>(a, query_lens, seq_lens, num_rows, out); });
}

void servd_norm(int centered, const float* x, const float* residual, const float* weight, const float* bias, float eps,
                float* out, float* sums, int64_t rows, int64_t size) {
    (centered ? norm<true> : norm<false>)(x, residual, weight, bias, eps, out, sums, rows, size);
}

void servd_activate(const float* x, int64_t rows, int64_t size, int function, int gated, float* out) {
    activate_rows(x, rows, size, function, gated != 0, out);
}

}  // extern "C"
