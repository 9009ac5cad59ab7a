// Attention over the paged KV cache, in place, and the rotation and writing of new keys and values.
//
// The cache of a layer is keys [blocks, kv_heads, head_dim, block_size], then values [blocks, kv_heads, block_size, head_dim]:
// a vector of keys holds one dimension of neighbouring tokens, so that scores need no sums across a vector.

#include <memory>
#include <omp.h>

#include "vectors.h"

namespace {

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

}  // namespace

extern "C" {

int servd_vector() { return WIDTH; }

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

}  // extern "C"
