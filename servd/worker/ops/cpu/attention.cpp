// Attention over the paged KV cache, in place, and the rotation and writing of new keys and values.
//
// The cache of a layer is keys [blocks, kv_heads, head_dim, block_size], then values [blocks, kv_heads, block_size, head_dim]:
// a vector of keys holds one dimension of neighbouring tokens, so that scores need no sums across a vector.

#include <memory>
#include <type_traits>

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int KEYS = 256;  // a piece of the context, scored and summed up before the next one
constexpr int64_t SPLIT_KEYS = 1024;  // a longer context is cut here, whatever the batch; the parts are joined in order
constexpr int MAX_TILE = 8;  // queries that share the reading of a key
constexpr int64_t MIN_TILES = 64;  // a row with fewer has its parts divided over the threads; of more, they would fill memory
constexpr int MAX_HEAD_DIM = 256;
constexpr int MIN_BLOCK_SIZE = 16;

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

// What is read next is fetched from memory meanwhile: a head of a block is but a page or two, and the processor's own
// fetching ends with the page: a tenth of the attention of a batch. It may lie past the end of the cache, which does no harm.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 3); }

// Two vectors of keys, which may lie in different blocks.
template <typename C>
struct Pair {
    const C *first, *second;
};

// Values that follow one another in memory: of one block.
template <typename C>
struct Run {
    const C* values;
    int begin, size;  // in the piece
    const C* next;    // what is read after them
};

// Scores of some queries with a pair of keys.
template <int ROWS, typename C>
inline void score(const Attention& a, const Tile& tile, int from, Pair<C> keys, Pair<C> next, float (*scores)[KEYS], int at) {
    Vec acc[ROWS][2] = {};
    for (int64_t d = 0; d < a.head_dim; d++) {
        const Vec k0 = load(keys.first + d * a.block_size), k1 = load(keys.second + d * a.block_size);
        fetch(next.first + d * a.block_size);
        fetch(next.second + d * a.block_size);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const Vec q = splat(tile.q[from + row][d]);
            acc[row][0] += q * k0;
            acc[row][1] += q * k1;
        }
    }
    for (int row = 0; row < ROWS; row++) {
        store(&scores[from + row][at], acc[row][0] * a.scale);
        store(&scores[from + row][at + WIDTH], acc[row][1] * a.scale);
    }
}

// Adds the values of a piece, times their weights, to some vectors of the sums of some queries.
template <int ROWS, int VECTORS, typename C>
inline void gather(const Attention& a, Tile& tile, int from, int64_t d, const Run<C>* runs, int num_runs,
                   const float (*weights)[KEYS]) {
    Vec acc[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) acc[row][i] = load(&tile.sums[from + row][d + i * WIDTH]);
    for (const Run<C>* run = runs; run < runs + num_runs; run++)
        for (int j = 0; j < run->size; j++) {
            const C* value = run->values + j * a.head_dim + d;
            Vec v[VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                v[i] = load(value + i * WIDTH);
                fetch(run->next + (value - run->values) + i * WIDTH);
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const Vec w = splat(weights[from + row][run->begin + j]);
#pragma GCC unroll 4
                for (int i = 0; i < VECTORS; i++) acc[row][i] += w * v[i];
            }
        }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) store(&tile.sums[from + row][d + i * WIDTH], acc[row][i]);
}

template <int ROWS, typename C>
void gather_all(const Attention& a, Tile& tile, int from, const Run<C>* runs, int num_runs, const float (*weights)[KEYS]) {
    constexpr int VECTORS = ROWS == 1 ? 4 : 2;
    int64_t d = 0;
    for (; d + VECTORS * WIDTH <= a.head_dim; d += VECTORS * WIDTH)
        gather<ROWS, VECTORS>(a, tile, from, d, runs, num_runs, weights);
    for (; d < a.head_dim; d += WIDTH) gather<ROWS, 1>(a, tile, from, d, runs, num_runs, weights);
}

// Calls with (count, first row): as many rows at once as the registers hold, then one by one.
template <typename Body>
inline void for_rows(int count, Body body) {
    constexpr int MANY = WIDTH == 16 ? 8 : 4;
    int row = 0;
    for (; row + MANY <= count; row += MANY) body(std::integral_constant<int, MANY>{}, row);
    for (; row < count; row++) body(std::integral_constant<int, 1>{}, row);
}

// Turns the scores of a query with a piece of `count` keys into weights, and lets the sums so far shrink accordingly.
void weigh(Tile& tile, int row, float* scores, int64_t start, int count, int64_t head_dim) {
    const int64_t low = std::max<int64_t>(tile.first[row] - start, 0), high = std::min<int64_t>(tile.last[row] - start, count);
    const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    for (int j = 0; j < std::min<int64_t>(low, padded); j++) scores[j] = -INFINITY;
    for (int64_t j = std::max<int64_t>(high, 0); j < padded; j++) scores[j] = -INFINITY;
    Vec peaks = splat(-INFINITY);
    for (int j = 0; j < padded; j += WIDTH) peaks = select(load(scores + j) > peaks, load(scores + j), peaks);
    float peak = tile.peak[row];
    for (int i = 0; i < WIDTH; i++) peak = std::max(peak, peaks[i]);
    if (peak == -INFINITY) {  // no key of this piece is seen
        for (int j = 0; j < padded; j++) scores[j] = 0;
        return;
    }
    const float shrink = expf(tile.peak[row] - peak);
    Vec totals{};
    for (int j = 0; j < padded; j += WIDTH) {
        const Vec weight = exp_of(load(scores + j) - peak);
        store(scores + j, weight);
        totals += weight;
    }
    tile.total[row] = tile.total[row] * shrink + sum(totals);
    tile.peak[row] = peak;
    if (shrink != 1.0f)
        for (int64_t d = 0; d < head_dim; d += WIDTH) store(&tile.sums[row][d], load(&tile.sums[row][d]) * shrink);
}

template <typename C>
void attend_keys(const Attention& a, Tile& tile, const int32_t* blocks, int64_t kv_head, int64_t begin, int64_t end) {
    alignas(64) float scores[MAX_TILE][KEYS];
    Run<C> runs[KEYS / MIN_BLOCK_SIZE + 1];
    const int64_t head_size = a.head_dim * a.block_size;
    const auto head_of = [&](const void* cache, int64_t key) {  // of the key's block
        return static_cast<const C*>(cache) + (blocks[key / a.block_size] * a.kv_heads + kv_head) * head_size;
    };
    for (int64_t start = begin; start < end; start += KEYS) {
        const int count = int(std::min<int64_t>(KEYS, end - start));
        int num_runs = 0;
        for (int j = 0; j < count; num_runs++) {
            const int64_t offset = (start + j) % a.block_size;  // not 0 where blocks do not fill a piece
            const int size = int(std::min<int64_t>(a.block_size - offset, count - j));
            runs[num_runs] = {head_of(a.values, start + j) + offset * a.head_dim, j, size, nullptr};
            if (num_runs > 0) runs[num_runs - 1].next = runs[num_runs].values;
            j += size;
        }
        // After the last values: the next piece's keys, or those of the next head, whose task is often the next one.
        const bool is_last = start + count == end, has_next_head = kv_head + 1 < a.kv_heads;
        runs[num_runs - 1].next = head_of(a.keys, is_last ? begin : start + count) + (is_last && has_next_head ? head_size : 0);
        const auto key_at = [&](int j) { return head_of(a.keys, start + j) + (start + j) % a.block_size; };
        const auto keys_at = [&](int j) -> Pair<C> {  // the same twice where there is no second vector
            return {key_at(j), key_at(j + WIDTH < count ? j + WIDTH : j)};
        };
        Pair<C> keys = keys_at(0);
        for (int j = 0; j < count; j += 2 * WIDTH) {
            const Pair<C> next = j + 2 * WIDTH < count ? keys_at(j + 2 * WIDTH)
                                                       : Pair<C>{runs[0].values, runs[std::min(1, num_runs - 1)].values};
            for_rows(tile.count, [&](auto rows, int row) { score<rows.value>(a, tile, row, keys, next, scores, j); });
            keys = next;
        }
        for (int row = 0; row < tile.count; row++) weigh(tile, row, scores[row], start, count, a.head_dim);
        for_rows(tile.count, [&](auto rows, int row) { gather_all<rows.value>(a, tile, row, runs, num_runs, scores); });
    }
}

// One unit of work: a tile of queries of one sequence and one kv head, over some parts of the context.
struct Task {
    int32_t row, kv_head, query, part, num_parts;
};

// A query's sums over the parts of its context [parts][head_dim + 2] become its result.
void join(const float* states, int64_t parts, int64_t head_dim, float* out) {
    const int64_t state_size = head_dim + 2;
    float peak = -INFINITY, total = 0;
    for (int64_t part = 0; part < parts; part++) peak = std::max(peak, states[part * state_size + head_dim]);
    memset(out, 0, head_dim * 4);
    for (int64_t part = 0; part < parts; part++, states += state_size) {
        const float factor = expf(states[head_dim] - peak);
        if (factor == 0) continue;  // the part was not seen
        total += states[head_dim + 1] * factor;
        for (int64_t d = 0; d < head_dim; d += WIDTH) store(out + d, load(out + d) + load(states + d) * factor);
    }
    for (int64_t d = 0; d < head_dim; d += WIDTH) store(out + d, load(out + d) / total);
}

// Works on a tile whose queries and counts are set, and hands on sums, peak and total of each query and part.
template <typename C, typename StateOf>
void attend_parts(const Attention& a, Tile& tile, const int32_t* blocks, const Task& task, StateOf state_of) {
    const int64_t first_key = *std::min_element(tile.first, tile.first + tile.count);
    const int64_t last_key = *std::max_element(tile.last, tile.last + tile.count);
    for (int64_t part = task.part; part < task.part + task.num_parts; part++) {
        for (int i = 0; i < tile.count; i++) {
            tile.peak[i] = -INFINITY;
            tile.total[i] = 0;
            memset(tile.sums[i], 0, a.head_dim * 4);
        }
        // Pieces begin at multiples of KEYS, so that a key is in the same piece for every query of the sequence.
        const int64_t begin = part * SPLIT_KEYS;
        const int64_t from = std::max(begin, first_key / KEYS * KEYS), to = std::min(begin + SPLIT_KEYS, last_key);
        if (from < to) attend_keys<C>(a, tile, blocks, task.kv_head, from, to);
        for (int i = 0; i < tile.count; i++) {
            float* state = state_of(i, part);
            memcpy(state, tile.sums[i], a.head_dim * 4);
            state[a.head_dim] = tile.peak[i];
            state[a.head_dim + 1] = tile.total[i];
        }
    }
}

template <typename C>
void attend(const Attention& a, const int64_t* query_lens, const int64_t* seq_lens, int64_t num_rows, float* out) {
    const int64_t group = a.num_heads / a.kv_heads;  // query heads that share a kv head
    const int64_t tile_size = group >= MAX_TILE ? MAX_TILE : MAX_TILE / group * group;
    const int64_t state_size = a.head_dim + 2;  // sums, peak, total
    // Cut where the sequence is cut, from its beginning.
    auto parts_of = [&](int64_t row) { return (seq_lens[row] + SPLIT_KEYS - 1) / SPLIT_KEYS; };
    auto tiles_in = [&](int64_t row) { return (query_lens[row] * group + tile_size - 1) / tile_size; };
    auto is_split = [&](int64_t row) { return parts_of(row) > 1 && a.kv_heads * tiles_in(row) < MIN_TILES; };
    int64_t num_tasks = 0, num_states = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        num_tasks += a.kv_heads * tiles_in(row) * (is_split(row) ? parts_of(row) : 1);
        if (is_split(row)) num_states += query_lens[row] * a.num_heads * parts_of(row);
    }
    std::unique_ptr<Task[]> tasks(new Task[num_tasks]);
    std::unique_ptr<int64_t[]> tokens(new int64_t[num_rows]), states(new int64_t[num_rows]);
    int64_t task = 0, token = 0, state = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        tokens[row] = token;
        states[row] = state;
        token += query_lens[row];
        if (is_split(row)) state += query_lens[row] * a.num_heads * parts_of(row);
        const int64_t num_parts = is_split(row) ? 1 : parts_of(row);
        for (int64_t head = 0; head < a.kv_heads; head++)
            for (int64_t query = 0; query < query_lens[row] * group; query += tile_size)
                for (int64_t part = 0; part < parts_of(row); part += num_parts)
                    tasks[task++] = {int32_t(row), int32_t(head), int32_t(query), int32_t(part), int32_t(num_parts)};
    }
    std::unique_ptr<float[]> shared(new float[num_states * state_size]);

    parallel_for(num_tasks, std::max<int64_t>(1, num_tasks / 64), [&](int64_t t) {
        Tile tile;
        const Task& task = tasks[t];
        const int64_t row = task.row, parts = parts_of(row);
        std::unique_ptr<float[]> own(new float[is_split(row) ? 0 : parts * MAX_TILE * state_size]);
        const int64_t before = seq_lens[row] - query_lens[row];
        tile.count = int(std::min(tile_size, query_lens[row] * group - task.query));
        int64_t places[MAX_TILE];  // of the tile's queries in the step: token * num_heads + head
        for (int i = 0; i < tile.count; i++) {
            const int64_t position = (task.query + i) / group, head = task.kv_head * group + (task.query + i) % group;
            places[i] = (tokens[row] + position) * a.num_heads + head;
            tile.q[i] = a.q + (tokens[row] + position) * a.q_stride + head * a.head_dim;
            tile.last[i] = before + position + 1;
            tile.first[i] = a.window > 0 ? std::max<int64_t>(0, tile.last[i] - a.window) : 0;
        }
        const int64_t first_place = tokens[row] * a.num_heads;
        attend_parts<C>(a, tile, a.block_tables + row * a.max_blocks, task, [&](int i, int64_t part) {
            return is_split(row) ? shared.get() + (states[row] + (places[i] - first_place) * parts + part) * state_size
                                 : own.get() + (i * parts + part) * state_size;
        });
        for (int i = 0; i < tile.count && !is_split(row); i++)
            join(own.get() + i * parts * state_size, parts, a.head_dim, out + places[i] * a.head_dim);
    });
    parallel_for(num_states > 0 ? num_rows : 0, 1, [&](int64_t row) {
        for (int64_t query = 0; is_split(row) && query < query_lens[row] * a.num_heads; query++)
            join(shared.get() + (states[row] + query * parts_of(row)) * state_size, parts_of(row), a.head_dim,
                 out + (tokens[row] * a.num_heads + query) * a.head_dim);
    });
}

// Rotates queries (into q_out) and keys, and writes keys and values to the cache.
template <typename C>
void write(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* q_out,
           const float* cos, const float* sin, C* keys, C* values, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
           int64_t kv_heads, int64_t head_dim, int64_t block_size) {
    const int64_t half = head_dim / 2, head_size = head_dim * block_size;
    parallel_for(num_tokens, 1, [&](int64_t token) {
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
            // Each number of a key goes to another line, none of them in the cache: the next head's are fetched meanwhile.
            for (int64_t d = 0; d < head_dim && head + 1 < kv_heads; d++)
                __builtin_prefetch(key + head_size + d * block_size, 1);
            for (int64_t d = 0; d < half; d++) {
                const float first = c ? from[d] * c[d] - from[d + half] * s[d] : from[d];
                const float second = c ? from[d + half] * c[d] + from[d] * s[d] : from[d + half];
                narrow(first, key + d * block_size);
                narrow(second, key + (d + half) * block_size);
            }
            for (int64_t d = 0; d < head_dim; d++) narrow(v[token * v_stride + head * head_dim + d], value + d);
        }
    });
}

// Calls `call` with a null pointer of the type of a cache.
template <typename Call>
void with_cache_type(int type, Call call) {
    type == FLOAT32 ? call((float*)nullptr) : type == BFLOAT16 ? call((BFloat16*)nullptr) : call((Float16*)nullptr);
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
    with_cache_type(type, call);
}

void servd_attend(int type, const float* q, int64_t q_stride, const void* keys, const void* values,
                  const int32_t* block_tables, int64_t max_blocks, const int64_t* query_lens, const int64_t* seq_lens,
                  int64_t num_rows, int64_t num_heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                  int64_t window, float scale, float* out) {
    const Attention a{q, q_stride, keys, values, num_heads, kv_heads, head_dim, block_size, window, max_blocks, block_tables, scale};
    with_cache_type(type, [&](auto* p) { attend<std::remove_pointer_t<decltype(p)>>(a, query_lens, seq_lens, num_rows, out); });
}

}  // extern "C"
