// Attention over the paged KV cache, in place, and the rotation and writing of new keys and values.
//
// The cache of a layer is keys [blocks, kv_heads, head_dim, block_size], then values [blocks, kv_heads,
// block_size, head_dim]. A vector of keys holds one dimension of neighbouring tokens, so scores need no
// sums across a vector. In int8, each head of a block is followed by a float per token, its scale. If
// values are a part of the keys, the cache has only keys, [blocks, kv_heads, block_size, head_dim].
//
// As in FlashAttention, a tile of queries reads a tile of keys at a time, with an online softmax.
// As in FlashDecoding, a long context is split, and the partial results are merged.

#include <memory>
#include <type_traits>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int TILE_KEYS = 256;
constexpr int MAX_TILE_QUERIES = 8;  // they share the reading of a key
constexpr int64_t SPLIT_KEYS = 1024;  // in any batch, so that a request gets the same bits
// The splits of a row with fewer tiles are divided over the threads. With more tiles, the partial results
// of all splits would take too much memory.
constexpr int64_t MIN_TILES = 64;
constexpr int MAX_HEAD_DIM = 256, MAX_VALUE_DIM = 512;  // the latter where keys have the values
constexpr int MIN_BLOCK_SIZE = 16;
constexpr int MAX_TAIL = 64;
constexpr float SMALLEST_SCALE = 1e-12f;

struct Attention {
    const float* q;  // [num_tokens, num_heads, head_dim]
    int64_t q_stride;
    const void* keys;
    const void* values;  // or null: they are the last numbers of the keys
    int64_t num_heads, kv_heads, head_dim, value_dim, block_size, window, max_blocks;
    bool causal;
    const int32_t* block_tables;  // [num_rows, max_blocks]
    const int64_t* tails;  // [num_rows, tail_size]
    int64_t tail_size;
    float scale, soft_cap;  // a cap of 0 is none
    const float* sinks;  // [num_heads], or null
    const int64_t* bidirectional;  // [num_rows], or null: whether the tokens of a row see each other

    // Returns the first key that a query sees, if it sees the keys before `key_end`.
    int64_t key_begin(int64_t key_end) const {
        return window > 0 ? std::max<int64_t>(0, key_end - window) : 0;
    }

    // Returns the end of the keys that the query at a position of a row's sequence sees.
    int64_t key_end(int64_t row, int64_t position, int64_t seq_len) const {
        if (bidirectional && bidirectional[row]) return seq_len;
        if (causal) return position + 1;
        return window > 0 ? std::min(position + window, seq_len) : seq_len;
    }
    // Of the head at a place: token * num_heads + head.
    float sink_of(int64_t place) const { return sinks ? sinks[place % num_heads] : -INFINITY; }
};

// Queries of one sequence that share a kv head, and their softmax over the keys read so far.
struct QueryTile {
    int count;
    const float* q[MAX_TILE_QUERIES];
    int64_t key_begin[MAX_TILE_QUERIES], key_end[MAX_TILE_QUERIES];  // what each may see
    float max[MAX_TILE_QUERIES], sum[MAX_TILE_QUERIES];  // max score; sum of e^(score - max)
    alignas(64) float acc[MAX_TILE_QUERIES][MAX_VALUE_DIM];  // values times e^(score - max)
    int64_t tail_begin;   // keys from here on are not in the blocks of the block table,
    const int64_t* tail;  // but in these slots of the cache
};

// Prefetches the memory that is read next. A head of a block is only a page or two, and the processor's
// own prefetching stops at the end of a page, which cost a tenth of the attention of a batch. The address
// may lie beyond the end of the cache, which does no harm.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// Two vectors of keys, which may lie in different blocks.
template <typename C>
struct KeyVectors {
    const C *first, *second;
};

// Values of one block, side by side in memory.
template <typename C>
struct ValueSpan {
    const C* values;
    int begin, size;  // tokens, as indices in the tile of keys
    const C* next;    // to prefetch
};

// Computes the scores of ROWS queries, from `from` on, with two vectors of keys.
template <int ROWS, typename C>
inline void compute_scores(const Attention& a, const QueryTile& tile, int from, KeyVectors<C> keys,
                           KeyVectors<C> next, float (*scores)[TILE_KEYS], int at) {
    Vec acc[ROWS][2] = {};
    for (int64_t d = 0; d < a.head_dim; d++) {
        const Vec k0 = load(keys.first + d * a.block_size);
        const Vec k1 = load(keys.second + d * a.block_size);
        prefetch(next.first + d * a.block_size);
        prefetch(next.second + d * a.block_size);
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

// Returns the sum of a vector, by halves.
inline float sum_halves(Vec x) {
    float numbers[WIDTH];
    store(numbers, x);
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) numbers[i] += numbers[i + half];
    return numbers[0];
}

// Computes the scores of ROWS queries, from `from` on, with two keys, each contiguous.
template <int ROWS, typename C>
inline void compute_dots(const Attention& a, const QueryTile& tile, int from, KeyVectors<C> keys,
                         float (*scores)[TILE_KEYS], int at) {
    Vec acc[ROWS][2] = {};
    for (int64_t d = 0; d < a.head_dim; d += WIDTH) {
        const Vec k0 = load(keys.first + d), k1 = load(keys.second + d);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const Vec q = load(tile.q[from + row] + d);
            acc[row][0] += q * k0;
            acc[row][1] += q * k1;
        }
    }
    for (int row = 0; row < ROWS; row++) {
        scores[from + row][at] = sum_halves(acc[row][0]) * a.scale;
        scores[from + row][at + 1] = sum_halves(acc[row][1]) * a.scale;
    }
}

// Adds weights times values to the sums of ROWS queries: to VECTORS vectors from dimension d on.
template <int ROWS, int VECTORS, typename C>
inline void accumulate_dims(const Attention& a, QueryTile& tile, int from, int64_t d,
                            const ValueSpan<C>* spans, int num_spans,
                            const float (*weights)[TILE_KEYS]) {
    Vec acc[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) acc[row][i] = load(&tile.acc[from + row][d + i * WIDTH]);
    for (const ValueSpan<C>* span = spans; span < spans + num_spans; span++)
        for (int j = 0; j < span->size; j++) {
            const C* value = span->values + j * a.head_dim + d;
            Vec v[VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) {
                v[i] = load(value + i * WIDTH);
                prefetch(span->next + (value - span->values) + i * WIDTH);
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const Vec w = splat(weights[from + row][span->begin + j]);
#pragma GCC unroll 4
                for (int i = 0; i < VECTORS; i++) acc[row][i] += w * v[i];
            }
        }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) store(&tile.acc[from + row][d + i * WIDTH], acc[row][i]);
}

template <int ROWS, typename C>
void accumulate_values(const Attention& a, QueryTile& tile, int from, const ValueSpan<C>* spans,
                       int num_spans, const float (*weights)[TILE_KEYS]) {
    constexpr int VECTORS = ROWS == 1 ? 4 : 2;
    int64_t d = 0;
    for (; d + VECTORS * WIDTH <= a.value_dim; d += VECTORS * WIDTH)
        accumulate_dims<ROWS, VECTORS>(a, tile, from, d, spans, num_spans, weights);
    for (; d < a.value_dim; d += WIDTH)
        accumulate_dims<ROWS, 1>(a, tile, from, d, spans, num_spans, weights);
}

// Whether a cache of this type has a scale for each token and head.
template <typename C>
constexpr bool HAS_SCALES = std::is_same_v<C, int8_t>;

// Numbers of the type in a token's keys or values of a head.
template <typename C>
constexpr int64_t size_with_scale(int64_t head_dim) {
    return head_dim + (HAS_SCALES<C> ? sizeof(float) : 0);
}

// Calls body(count, first row) with as many rows as the registers hold, then with the remaining rows, a few
// at a time: a single row would wait for each sum before its next term.
template <typename Body>
inline void for_rows(int count, Body body) {
    constexpr int MANY = WIDTH == 16 ? 8 : 4;
    int row = 0;
    const auto take = [&](auto rows) {
        if (row + rows.value > count) return false;
        body(rows, row);
        row += rows.value;
        return true;
    };
    while (take(std::integral_constant<int, MANY>{})) {}
    if (MANY > 4) take(std::integral_constant<int, 4>{});
    if (!take(std::integral_constant<int, 3>{})) take(std::integral_constant<int, 2>{});
    if (row < count) take(std::integral_constant<int, 1>{});
}

void multiply(float* x, const float* factors, int count) {
    for (int j = 0; j < count; j += WIDTH) store(x + j, load(x + j) * load(factors + j));
}

// cap * tanh(score / cap)
void cap_scores(float* scores, int count, float cap) {
    for (int j = 0; j < count; j += WIDTH)  // tanh(x) is 2 * sigmoid(2 * x) - 1
        store(scores + j, (sigmoid(load(scores + j) * (2.0f / cap)) * 2.0f - 1.0f) * cap);
}

// Turns a query's scores with the keys [start, start + count) into weights e^(score - max). If the maximum
// rises, the sums so far are rescaled.
void online_softmax(QueryTile& tile, int row, float* scores, int64_t start, int count,
                    int64_t value_dim) {
    const int64_t low = std::max<int64_t>(tile.key_begin[row] - start, 0);
    const int64_t high = std::min<int64_t>(tile.key_end[row] - start, count);
    const int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    for (int j = 0; j < std::min<int64_t>(low, padded); j++) scores[j] = -INFINITY;
    for (int64_t j = std::max<int64_t>(high, 0); j < padded; j++) scores[j] = -INFINITY;
    Vec maxima = splat(-INFINITY);
    for (int j = 0; j < padded; j += WIDTH)
        maxima = select(load(scores + j) > maxima, load(scores + j), maxima);
    float max = tile.max[row];
    for (int i = 0; i < WIDTH; i++) max = std::max(max, maxima[i]);
    if (max == -INFINITY) {  // the query sees none of these keys
        for (int j = 0; j < padded; j++) scores[j] = 0;
        return;
    }
    const float rescale = expf(tile.max[row] - max);
    Vec sums{};
    for (int j = 0; j < padded; j += WIDTH) {
        const Vec weight = exp_of(load(scores + j) - max);
        store(scores + j, weight);
        sums += weight;
    }
    tile.sum[row] = tile.sum[row] * rescale + sum(sums);
    tile.max[row] = max;
    if (rescale != 1.0f)
        for (int64_t d = 0; d < value_dim; d += WIDTH)
            store(&tile.acc[row][d], load(&tile.acc[row][d]) * rescale);
}

// Adds the keys and values [begin, end) to the softmax of the queries of a tile.
template <typename C>
void attend_keys(const Attention& a, QueryTile& tile, const int32_t* block_table, int64_t kv_head,
                 int64_t begin, int64_t end) {
    alignas(64) float scores[MAX_TILE_QUERIES][TILE_KEYS];
    alignas(64) float key_scales[TILE_KEYS], value_scales[TILE_KEYS];
    ValueSpan<C> spans[TILE_KEYS / MIN_BLOCK_SIZE + 1 + MAX_TAIL];
    const int64_t head_size = size_with_scale<C>(a.head_dim) * a.block_size;
    const auto head_in = [&](const void* cache, int64_t block) {
        return static_cast<const C*>(cache) + (block * a.kv_heads + kv_head) * head_size;
    };
    const auto head_of = [&](const void* cache, int64_t key) {  // in the key's block
        return head_in(cache, block_table[key / a.block_size]);
    };
    const void* const value_cache = a.values ? a.values : a.keys;
    for (int64_t start = begin, stop; start < end; start = stop) {
        stop = std::min((start / TILE_KEYS + 1) * TILE_KEYS, end);
        const int count = int(stop - start);
        // The first key of the tail.
        const int tail = int(std::clamp<int64_t>(tile.tail_begin - start, 0, count));
        const auto slot_of = [&](int j) { return tile.tail[start + j - tile.tail_begin]; };
        int num_spans = 0;
        for (int j = 0; j < count; num_spans++) {
            // Not 0: blocks do not fill a tile.
            const int64_t offset = (j < tail ? start + j : slot_of(j)) % a.block_size;
            const int size = j < tail ? int(std::min<int64_t>(a.block_size - offset, tail - j)) : 1;
            const int64_t block = j < tail ? block_table[(start + j) / a.block_size]
                                           : slot_of(j) / a.block_size;
            const C* values =
                head_in(value_cache, block) + (offset + 1) * a.head_dim - a.value_dim;
            spans[num_spans] = {values, j, size, nullptr};
            if constexpr (HAS_SCALES<C>) {
                const int64_t at = a.head_dim * a.block_size + offset * sizeof(float);
                memcpy(key_scales + j, head_in(a.keys, block) + at, size * sizeof(float));
                memcpy(value_scales + j, head_in(value_cache, block) + at, size * sizeof(float));
            }
            if (num_spans > 0) spans[num_spans - 1].next = values;
            j += size;
        }
        // After the last values, prefetch the keys of the next tile, or of the next head, whose task is
        // often the next.
        const bool is_last = stop == end, has_next_head = kv_head + 1 < a.kv_heads;
        spans[num_spans - 1].next = head_of(a.keys, is_last ? begin : stop) +
                                    (is_last && has_next_head ? head_size : 0);
        const auto key_at = [&](int j) {
            return head_of(a.keys, start + j) + (start + j) % a.block_size;
        };
        const auto keys_at = [&](int j) -> KeyVectors<C> {  // the same key twice if there is no second
            return {key_at(j), key_at(j + WIDTH < count ? j + WIDTH : j)};
        };
        const auto whole_key_at = [&](int j) {
            const int64_t offset = (j < tail ? start + j : slot_of(j)) % a.block_size;
            return (j < tail ? head_of(a.keys, start + j) : head_in(a.keys, slot_of(j) / a.block_size)) +
                   offset * a.head_dim;
        };
        for (int j = 0; j < count && !a.values; j += 2) {
            const KeyVectors<C> both{whole_key_at(j), whole_key_at(std::min(j + 1, count - 1))};
            for_rows(tile.count, [&](auto rows, int row) {
                compute_dots<rows.value>(a, tile, row, both, scores, j);
            });
        }
        KeyVectors<C> keys = keys_at(0);
        for (int j = 0; j < count && a.values; j += 2 * WIDTH) {
            const KeyVectors<C> values{spans[0].values, spans[std::min(1, num_spans - 1)].values};
            const KeyVectors<C> next = j + 2 * WIDTH < count ? keys_at(j + 2 * WIDTH) : values;
            for_rows(tile.count, [&](auto rows, int row) {
                compute_scores<rows.value>(a, tile, row, keys, next, scores, j);
            });
            keys = next;
        }
        for (int j = tail; j < count && a.values; j++) {  // once more, with the vector of the key
            alignas(64) float found[MAX_TILE_QUERIES][TILE_KEYS];
            const int64_t offset = slot_of(j) % a.block_size;
            const C* key = head_in(a.keys, slot_of(j) / a.block_size) + offset / WIDTH * WIDTH;
            for_rows(tile.count, [&](auto rows, int row) {
                compute_scores<rows.value, C>(a, tile, row, {key, key}, {key, key}, found, 0);
            });
            for (int row = 0; row < tile.count; row++) scores[row][j] = found[row][offset % WIDTH];
        }
        for (int row = 0; row < tile.count; row++) {
            if constexpr (HAS_SCALES<C>) multiply(scores[row], key_scales, count);
            if (a.soft_cap > 0) cap_scores(scores[row], count, a.soft_cap);
            online_softmax(tile, row, scores[row], start, count, a.value_dim);
            if constexpr (HAS_SCALES<C>) multiply(scores[row], value_scales, count);
        }
        for_rows(tile.count, [&](auto rows, int row) {
            accumulate_values<rows.value>(a, tile, row, spans, num_spans, scores);
        });
    }
}

// A unit of work: a tile of queries of one sequence and one kv head, for some of its splits.
struct Task {
    int32_t row, kv_head, query, split, num_splits;
};

// Merges the partial results of a query's splits, [splits][value_dim + 2]: acc, max and sum of each. A sink
// is the score of one more key, whose value is zero; -INFINITY means no sink.
void merge_partials(const float* partials, int64_t num_splits, int64_t value_dim, float sink,
                    float* out) {
    const int64_t partial_size = value_dim + 2;
    float max = sink;
    for (int64_t split = 0; split < num_splits; split++)
        max = std::max(max, partials[split * partial_size + value_dim]);
    memset(out, 0, value_dim * 4);
    float sum = expf(sink - max);
    for (int64_t split = 0; split < num_splits; split++, partials += partial_size) {
        const float factor = expf(partials[value_dim] - max);
        if (factor == 0) continue;  // the query saw none of its keys
        sum += partials[value_dim + 1] * factor;
        for (int64_t d = 0; d < value_dim; d += WIDTH)
            store(out + d, load(out + d) + load(partials + d) * factor);
    }
    for (int64_t d = 0; d < value_dim; d += WIDTH) store(out + d, load(out + d) / sum);
}

// Computes the splits of a task. The tile's queries and the keys that they see are set already.
// partial_of(query, split) is the place of a partial result.
template <typename C, typename PartialOf>
void attend_splits(const Attention& a, QueryTile& tile, const int32_t* block_table,
                   const Task& task, PartialOf partial_of) {
    const int64_t first_key = *std::min_element(tile.key_begin, tile.key_begin + tile.count);
    const int64_t last_key = *std::max_element(tile.key_end, tile.key_end + tile.count);
    for (int64_t split = task.split; split < task.split + task.num_splits; split++) {
        for (int i = 0; i < tile.count; i++) {
            tile.max[i] = -INFINITY;
            tile.sum[i] = 0;
            memset(tile.acc[i], 0, a.value_dim * 4);
        }
        // Tiles end at multiples of TILE_KEYS and begin with a vector, so a key has the same tile and lane
        // for every query of the sequence. Blocks before a window are not read.
        const int64_t begin =
            std::max(split * SPLIT_KEYS, first_key / MIN_BLOCK_SIZE * MIN_BLOCK_SIZE);
        const int64_t end = std::min((split + 1) * SPLIT_KEYS, last_key);
        if (begin < end) attend_keys<C>(a, tile, block_table, task.kv_head, begin, end);
        for (int i = 0; i < tile.count; i++) {
            float* partial = partial_of(i, split);
            memcpy(partial, tile.acc[i], a.value_dim * 4);
            partial[a.value_dim] = tile.max[i];
            partial[a.value_dim + 1] = tile.sum[i];
        }
    }
}

template <typename C>
void attend_batch(const Attention& a, const int64_t* query_lens, const int64_t* seq_lens,
                  int64_t num_rows, float* out) {
    const int64_t group = a.num_heads / a.kv_heads;  // query heads that share a kv head
    const int64_t tile_size =
        group >= MAX_TILE_QUERIES ? MAX_TILE_QUERIES : MAX_TILE_QUERIES / group * group;
    const int64_t partial_size = a.value_dim + 2;
    // Splits are counted from the beginning of a sequence.
    const auto splits_of = [&](int64_t row) {
        return (seq_lens[row] + SPLIT_KEYS - 1) / SPLIT_KEYS;
    };
    const auto tiles_of = [&](int64_t row) {
        return (query_lens[row] * group + tile_size - 1) / tile_size;
    };
    const auto is_divided = [&](int64_t row) {  // each split is a task
        return splits_of(row) > 1 && a.kv_heads * tiles_of(row) < MIN_TILES;
    };
    int64_t num_tasks = 0, num_partials = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        num_tasks += a.kv_heads * tiles_of(row) * (is_divided(row) ? splits_of(row) : 1);
        if (is_divided(row)) num_partials += query_lens[row] * a.num_heads * splits_of(row);
    }
    std::unique_ptr<Task[]> tasks(new Task[num_tasks]);
    // The first token and the first shared partial result of each row.
    std::unique_ptr<int64_t[]> tokens(new int64_t[num_rows]), partials(new int64_t[num_rows]);
    int64_t num_filled = 0, token = 0, partial = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        tokens[row] = token;
        partials[row] = partial;
        token += query_lens[row];
        if (is_divided(row)) partial += query_lens[row] * a.num_heads * splits_of(row);
        const int64_t num_splits = is_divided(row) ? 1 : splits_of(row);
        for (int64_t head = 0; head < a.kv_heads; head++)
            for (int64_t query = 0; query < query_lens[row] * group; query += tile_size)
                for (int64_t split = 0; split < splits_of(row); split += num_splits)
                    tasks[num_filled++] = {int32_t(row), int32_t(head), int32_t(query),
                                           int32_t(split), int32_t(num_splits)};
    }
    std::unique_ptr<float[]> shared(new float[num_partials * partial_size]);

    parallel_for(num_tasks, std::max<int64_t>(1, num_tasks / 64), [&](int64_t t) {
        QueryTile tile;
        const Task& task = tasks[t];
        const int64_t row = task.row, num_splits = splits_of(row);
        const bool shares = is_divided(row);
        std::unique_ptr<float[]> own(
            new float[shares ? 0 : num_splits * MAX_TILE_QUERIES * partial_size]);
        const int64_t num_computed = seq_lens[row] - query_lens[row];
        tile.count = int(std::min(tile_size, query_lens[row] * group - task.query));
        tile.tail_begin = seq_lens[row] - a.tail_size;
        tile.tail = a.tails + row * a.tail_size;
        int64_t places[MAX_TILE_QUERIES];  // where a query lies: token * num_heads + head
        for (int i = 0; i < tile.count; i++) {
            const int64_t position = (task.query + i) / group;
            const int64_t head = task.kv_head * group + (task.query + i) % group;
            places[i] = (tokens[row] + position) * a.num_heads + head;
            tile.q[i] = a.q + (tokens[row] + position) * a.q_stride + head * a.head_dim;
            tile.key_end[i] = a.key_end(row, num_computed + position, seq_lens[row]);
            tile.key_begin[i] = a.key_begin(num_computed + position + 1);
        }
        const int64_t first_place = tokens[row] * a.num_heads;
        const auto partial_of = [&](int i, int64_t split) {
            if (!shares) return own.get() + (i * num_splits + split) * partial_size;
            const int64_t of_row = (places[i] - first_place) * num_splits + split;
            return shared.get() + (partials[row] + of_row) * partial_size;
        };
        attend_splits<C>(a, tile, a.block_tables + row * a.max_blocks, task, partial_of);
        for (int i = 0; i < tile.count && !shares; i++)
            merge_partials(partial_of(i, 0), num_splits, a.value_dim, a.sink_of(places[i]),
                           out + places[i] * a.value_dim);
    });
    parallel_for(num_partials > 0 ? num_rows : 0, 1, [&](int64_t row) {
        const int64_t num_queries = is_divided(row) ? query_lens[row] * a.num_heads : 0;
        for (int64_t query = 0; query < num_queries; query++)
            merge_partials(shared.get() + (partials[row] + query * splits_of(row)) * partial_size,
                           splits_of(row), a.value_dim, a.sink_of(query),
                           out + (tokens[row] * a.num_heads + query) * a.value_dim);
    });
}

// Writes the numbers of a head to every `stride`-th place from `to` on.
template <typename C>
inline void write_head(const float* from, int64_t size, C* to, int64_t stride, float*) {
    for (int64_t d = 0; d < size; d++) narrow(from[d], to + d * stride);
}

// The same as int8 with a scale, which is NaN if a number is not finite.
inline void write_head(const float* from, int64_t size, int8_t* to, int64_t stride, float* scale) {
    Vec largest{}, poison{};
    for (int64_t d = 0; d < size; d += WIDTH) {
        const Vec x = load(from + d), positive = (Vec)((IntVec)x & 0x7fffffff);
        largest = select(positive > largest, positive, largest);
        poison += x * 0.0f;  // 0, or NaN
    }
    float most = 0;
    for (int i = 0; i < WIDTH; i++) most = std::max(most, largest[i]);
    const float step = std::max(most / 127, SMALLEST_SCALE);
    *scale = step + sum(poison);
    const bool is_finite = *scale == step;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    for (int64_t d = 0; d < size; d += WIDTH) {
        const Vec code = (load(from + d) / step + shift) - shift;
        for (int i = 0; i < WIDTH; i++) to[(d + i) * stride] = is_finite ? int8_t(code[i]) : 0;
    }
}

// Rotates the pairs (i, i + pairs) of a head; the other numbers stay as they are.
inline void rotate_head(const float* from, int64_t size, const float* cos, const float* sin,
                        int64_t pairs, float* to) {
    for (int64_t d = 0; d < pairs; d++) {
        to[d] = from[d] * cos[d] - from[d + pairs] * sin[d];
        to[d + pairs] = from[d + pairs] * cos[d] + from[d] * sin[d];
    }
    for (int64_t d = 2 * pairs; d < size; d++) to[d] = from[d];
}

// Rotates queries (into q_out) and keys, and writes keys and values to the cache.
template <typename C>
void write_tokens(const float* q, int64_t q_stride, const float* k, int64_t k_stride,
                  const float* v, int64_t v_stride, float* q_out, const float* cos,
                  const float* sin, int64_t pairs, C* keys, C* values, const int64_t* slot_mapping,
                  int64_t num_tokens, int64_t num_heads, int64_t kv_heads, int64_t head_dim,
                  int64_t block_size) {
    const int64_t head_size = size_with_scale<C>(head_dim) * block_size;
    parallel_for(num_tokens, 1, [&](int64_t token) {
        const float *const c = cos + token * pairs, *const s = sin + token * pairs;
        for (int64_t head = 0; cos && head < num_heads; head++)
            rotate_head(q + token * q_stride + head * head_dim, head_dim, c, s, pairs,
                        q_out + (token * num_heads + head) * head_dim);
        const int64_t block = slot_mapping[token] / block_size;
        const int64_t offset = slot_mapping[token] % block_size;
        for (int64_t head = 0; head < kv_heads; head++) {
            const float* from = k + token * k_stride + head * head_dim;
            alignas(64) float turned[MAX_HEAD_DIM];
            C* const key_head = keys + (block * kv_heads + head) * head_size;
            C* const value_head = values + (block * kv_heads + head) * head_size;
            C* const key = key_head + offset;
            const auto scale_in = [&](C* of_head) -> float* {
                if constexpr (!HAS_SCALES<C>) return nullptr;
                return reinterpret_cast<float*>(of_head + head_dim * block_size) + offset;
            };
            // Each number of a key goes to another cache line, which is not in the cache. Prefetch the next
            // head's lines meanwhile.
            for (int64_t d = 0; d < head_dim && head + 1 < kv_heads; d++)
                __builtin_prefetch(key + head_size + d * block_size, 1);
            rotate_head(from, head_dim, c, s, pairs, turned);
            write_head(turned, head_dim, key, block_size, scale_in(key_head));
            write_head(v + token * v_stride + head * head_dim, head_dim,
                       value_head + offset * head_dim, 1, scale_in(value_head));
        }
    });
}

// Calls `call` with a null pointer to the type of a cache.
template <typename Call>
void with_cache_type(int type, Call call) {
    switch (type) {
    case FLOAT32: return call((float*)nullptr);
    case BFLOAT16: return call((BFloat16*)nullptr);
    case INT8: return call((int8_t*)nullptr);
    default: return call((Float16*)nullptr);
    }
}

}  // namespace

namespace kernels {

// Rotates queries and keys, and writes keys and values to the cache. cos and sin [num_tokens, pairs] are
// null in a model without rotary positions; then `pairs` is 0, and queries stay where they are.
void write_kv(int type, const float* q, int64_t q_stride, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride, float* q_out, const float* cos, const float* sin,
              int64_t pairs, void* keys, void* values, int64_t num_blocks,
              const int64_t* slot_mapping, int64_t num_tokens, int64_t num_heads, int64_t kv_heads,
              int64_t head_dim, int64_t block_size) {
    check_at_most("pairs", 2 * pairs, head_dim);
    check_ids("slot_mapping", slot_mapping, 0, num_tokens, num_blocks * block_size);
    with_cache_type(type, [&](auto* p) {
        write_tokens(q, q_stride, k, k_stride, v, v_stride, q_out, cos, sin, pairs,
                     (decltype(p))keys, (decltype(p))values, slot_mapping, num_tokens, num_heads, kv_heads, head_dim,
                     block_size);
    });
}

// Row r computes the last query_lens[r] of its seq_lens[r] tokens; q has the tokens of row after row. A
// query sees the keys up to its own position, and later keys too if not `causal`. With a window > 0, it
// sees at most window - 1 keys on either side. The last tail_size tokens of a row are in the slots
// tails[row] of the cache, not in the blocks of its block table; slots before its first token may have
// any number. A soft cap of 0 means no cap; sinks [num_heads] may be null. If values are null, they are
// the last value_dim numbers of the keys; otherwise value_dim is head_dim. bidirectional [num_rows] may be
// null: queries of rows with another number than 0 see all later keys of the row, too.
void attend(int type, const float* q, int64_t q_stride, int64_t num_tokens, const void* keys,
            const void* values, int64_t num_blocks, const int32_t* block_tables,
            int64_t max_blocks, const int64_t* query_lens, const int64_t* seq_lens,
            int64_t num_rows, int64_t num_heads, int64_t kv_heads, int64_t head_dim,
            int64_t value_dim, int64_t block_size, int64_t window, int causal,
            const int64_t* tails, int64_t tail_size, float scale, float soft_cap,
            const float* sinks, const int64_t* bidirectional, float* out) {
    const Attention a{q,         q_stride,   keys,        values,       num_heads, kv_heads,
                      head_dim,  value_dim,  block_size,  window,       max_blocks, causal != 0,
                      block_tables, tails,   tail_size,   scale,        soft_cap,  sinks,
                      bidirectional};
    check_at_most("tail_size", tail_size, MAX_TAIL);
    check_at_most("value_dim", value_dim, MAX_VALUE_DIM);
    check_ids("tails", tails, 0, num_rows * tail_size, num_blocks * block_size);
    int64_t num_queries = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        check_ids("seq_lens", seq_lens, row, row + 1, max_blocks * block_size + 1, 1);
        check_ids("query_lens", query_lens, row, row + 1, seq_lens[row] + 1, 1);
        num_queries += query_lens[row];
        const int64_t first_block = a.key_begin(seq_lens[row] - query_lens[row] + 1) / block_size;
        const int64_t end_block = (seq_lens[row] + block_size - 1) / block_size;
        check_ids("block_tables", block_tables, row * max_blocks + first_block,
                  row * max_blocks + end_block, num_blocks);
    }
    check_at_most("query_lens.sum()", num_queries, num_tokens);
    with_cache_type(type, [&](auto* p) {
        using C = std::remove_pointer_t<decltype(p)>;
        attend_batch<C>(a, query_lens, seq_lens, num_rows, out);
    });
}

}  // namespace kernels
