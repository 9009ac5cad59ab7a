// The sampler's passes over the vocabulary. A thread computes a whole row, so a row's result does not
// depend on other rows.
//
// Weights are probabilities as integers (servd/worker/sample/fixed_point.py), stored in float32 and summed
// in int64. The bits of weights, as integers, have the same order as the weights. Top-k and top-p search
// their limit in these bits, without sorting.

#include <memory>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr float WEIGHT_ONE = 17592186044416.0f;  // 2^44
constexpr int32_t IN_PROMPT = 1 << 30;  // bit of a count: the token occurs in the prompt
constexpr int64_t BLOCK = 1024;  // tokens that are read at once, before a branch
constexpr int BIN_BITS = 20;  // weights of a bin differ only in this many low bits
constexpr int NUM_BINS = 1 << (31 - BIN_BITS);

inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline bool any(IntVec condition) {
    int32_t result = 0;
    for (int i = 0; i < WIDTH; i++) result |= condition[i];
    return result != 0;
}

void apply_bitmask(float* logits, const uint32_t* bitmask, int64_t vocab) {
    for (int64_t start = 0; start < vocab; start += 32) {
        const uint32_t allowed = bitmask[start / 32];
        if (allowed == 0xffffffffu) continue;
        const int64_t end = std::min(start + 32, vocab);
        for (int64_t i = start; i < end; i++)
            if (!((allowed >> (i - start)) & 1)) logits[i] = -INFINITY;
    }
}

// factors: repetition, frequency and presence penalty.
void apply_penalties(float* logits, const int32_t* counts, const float* factors, int64_t vocab) {
    const float repetition = factors[0], frequency = factors[1], presence = factors[2];
    const float inverse = 1.0f / repetition;
    for (int64_t i = 0; i < vocab; i++) {
        const float num_outputs = float(counts[i] & (IN_PROMPT - 1));
        const float factor = counts[i] == 0 ? 1.0f : logits[i] > 0 ? inverse : repetition;
        logits[i] =
            logits[i] * factor - frequency * num_outputs - (num_outputs > 0 ? presence : 0.0f);
    }
}

// Returns the index of the first NaN, or else of the first maximum.
int64_t argmax(const float* logits, int64_t vocab) {
    float best = -INFINITY;
    int64_t best_block = 0;
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        const int64_t end = std::min(start + BLOCK, vocab);
        const int64_t full = start + (end - start) / WIDTH * WIDTH;
        Vec maxima = splat(-INFINITY);
        IntVec is_nan{};
        for (int64_t i = start; i < full; i += WIDTH) {
            const Vec x = load(logits + i);
            maxima = select(x > maxima, x, maxima);
            is_nan |= x != x;
        }
        bool has_nan = any(is_nan);
        float max = -INFINITY;
        for (int i = 0; i < WIDTH; i++) max = std::max(max, maxima[i]);
        for (int64_t i = full; i < end; i++) {
            has_nan |= logits[i] != logits[i];
            if (logits[i] > max) max = logits[i];
        }
        if (has_nan) {
            for (int64_t i = start;; i++)
                if (logits[i] != logits[i]) return i;
        }
        if (max > best) best = max, best_block = start;
    }
    for (int64_t i = best_block;; i++)
        if (logits[i] == best) return i;
}

// Count and sum of the weights above some number.
struct Above {
    int64_t count = 0, mass = 0;
};

// Returns the smallest bits such that the weights above them stay below the limit, and writes count and
// sum of these weights to `above`.
//
// Bins count all weights. The search finds the bin with the answer, collects its weights in `found`, and
// halves them bit by bit.
template <typename Reaches>
int32_t search(const float* weights, float lowest, int64_t vocab, const Above* bins, int32_t* found,
               Above& above, Reaches reaches) {
    int bin = NUM_BINS - 1;
    for (; bin > 0; bin--) {
        const Above with_bin{above.count + bins[bin].count, above.mass + bins[bin].mass};
        if (reaches(with_bin)) break;
        above = with_bin;
    }
    const int32_t low = bin << BIN_BITS;
    int64_t num_found = 0;
    for (int64_t i = 0; i < vocab; i++) {
        const int32_t bits = bits_of(weights[i]);
        found[num_found] = bits;
        num_found += (bits >> BIN_BITS) == bin && weights[i] >= lowest;
    }
    int32_t answer = low;  // no weight of the bin is lower
    for (int32_t bit = 1 << (BIN_BITS - 1); bit > 0; bit >>= 1) {
        Above with_part = above;
        for (int64_t i = 0; i < num_found; i++) {
            float weight;
            memcpy(&weight, &found[i], 4);
            const bool is_above = found[i] > answer + bit - 1;
            with_part.count += is_above;
            with_part.mass += is_above ? int64_t(weight) : 0;
        }
        if (reaches(with_part)) answer += bit;
    }
    // `answer` is the greatest number such that the weights at or above it reach the limit: a weight, or the
    // low end of the bin.
    for (int64_t i = 0; i < num_found; i++) {
        float weight;
        memcpy(&weight, &found[i], 4);
        if (found[i] > answer) above.count++, above.mass += int64_t(weight);
    }
    return answer;
}

float filter_row(const float* weights, float lowest, int64_t k, double p, int64_t vocab,
                 int32_t* found) {
    if (k <= 0 && p >= 1) return lowest;
    std::unique_ptr<Above[]> bins(new Above[NUM_BINS]);
    Above all;
    for (int64_t i = 0; i < vocab; i++) {
        if (!(weights[i] >= lowest)) continue;
        Above& bin = bins[bits_of(weights[i]) >> BIN_BITS];
        bin.count++;
        bin.mass += int64_t(weights[i]);
    }
    for (int i = 0; i < NUM_BINS; i++) all.count += bins[i].count, all.mass += bins[i].mass;
    int32_t kth = 0;
    if (k > 0 && k < all.count) {
        Above above;
        kth = search(weights, lowest, vocab, bins.get(), found, above,
                     [=](Above a) { return a.count >= k; });
        float weight;
        memcpy(&weight, &kth, 4);
        // Of the weights that tie with the k-th, keep as many as make k.
        all.mass = above.mass + (k - above.count) * int64_t(weight);
    }
    const double limit = p * double(all.mass);
    Above above;
    const int32_t smallest = search(weights, lowest, vocab, bins.get(), found, above,
                                    [=](Above a) { return double(a.mass) >= limit; });
    const int32_t kept = std::max(kth, smallest);
    float result;
    memcpy(&result, &kept, 4);
    return std::max(result, lowest);
}

inline uint64_t splitmix64(uint64_t state, uint64_t index) {
    uint64_t z = state + (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

inline int64_t mass_between(const float* weights, float lowest, int64_t start, int64_t end) {
    int64_t mass = 0;
    for (int64_t i = start; i < end; i++) mass += int64_t(weights[i] >= lowest ? weights[i] : 0.0f);
    return mass;
}

int64_t draw_row(const float* weights, float lowest, int64_t seed, int64_t position,
                 int64_t vocab) {
    const int64_t num_blocks = (vocab + BLOCK - 1) / BLOCK;
    std::unique_ptr<int64_t[]> masses(new int64_t[num_blocks]);
    int64_t total = 0;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t end = std::min((block + 1) * BLOCK, vocab);
        total += masses[block] = mass_between(weights, lowest, block * BLOCK, end);
    }
    const uint64_t random = splitmix64(splitmix64(uint64_t(seed), 0), uint64_t(position));
    const double uniform = double(random >> 11) * 0x1p-53;
    int64_t left = int64_t(uniform * double(total));
    int64_t block = 0;
    while (block < num_blocks - 1 && masses[block] <= left) left -= masses[block++];
    int64_t token = block * BLOCK;
    for (; token < vocab - 1; token++) {
        const int64_t mass = mass_between(weights, lowest, token, token + 1);
        if (mass > left) break;
        left -= mass;
    }
    return token;
}

void score_row(const float* logits, int64_t token, int64_t vocab, float* log_total,
               int64_t* rank) {
    const int64_t full = vocab / WIDTH * WIDTH;
    const float its = logits[token];
    float max = -INFINITY;
    int64_t num_above = 0;
    for (int64_t i = 0; i < vocab; i++) {
        max = logits[i] > max ? logits[i] : max;
        num_above += logits[i] > its;
    }
    const float base = max == -INFINITY ? 0.0f : max;
    double total = 0;
    for (int64_t start = 0; start < full; start += BLOCK) {
        Vec sums{};
        for (int64_t i = start; i < std::min(start + BLOCK, full); i += WIDTH)
            sums += exp_of(load(logits + i) - base);
        total += sum(sums);
    }
    for (int64_t i = full; i < vocab; i++) total += exp_of(splat(logits[i] - base))[0];
    *log_total = base + float(log(total));
    *rank = num_above + 1;
}

}  // namespace

namespace kernels {

// Applies bitmask [rows, words] and penalties to the logits, if they are not null, and writes each row's
// argmax to `best`. slots [rows]: a row's index in counts [num_slots, vocab] and factors [num_slots, 3],
// or -1 for no penalties.
void edit_logits(float* logits, int64_t stride, const int32_t* bitmask, int64_t bitmask_rows, int64_t words,
           const int64_t* slots, int64_t num_slots, const int32_t* counts, const float* factors,
           int64_t rows, int64_t vocab, int64_t* best) {
    if (bitmask) check_at_most("rows of the bitmask", rows, bitmask_rows);
    if (bitmask) check_at_most("vocab of the bitmask", vocab, words * 32);
    if (slots) check_ids("slots", slots, 0, rows, num_slots, -1);
    parallel_for(rows, 1, [&](int64_t row) {
        float* x = logits + row * stride;
        if (bitmask) apply_bitmask(x, (const uint32_t*)bitmask + row * words, vocab);
        if (slots && slots[row] >= 0)
            apply_penalties(x, counts + slots[row] * vocab, factors + slots[row] * 3, vocab);
        best[row] = argmax(x, vocab);
    });
}

// Writes each row's argmax to chosen [rows] and to token_ids [num_slots, num_columns]; in `chosen`, all bits
// are inverted if the logit is NaN or infinite.
void choose(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* slots,
            const int64_t* columns, int32_t* token_ids, int64_t num_slots, int64_t num_columns,
            int64_t* chosen) {
    check_ids("slots", slots, 0, rows, num_slots);
    check_ids("columns", columns, 0, rows, num_columns);
    const int64_t grain = 1 + 16384 / vocab;  // a small vocabulary, as in tests, takes one thread
    parallel_for(rows, grain, [&](int64_t row) {
        const float* x = logits + row * stride;
        const int64_t best = argmax(x, vocab);
        token_ids[slots[row] * num_columns + columns[row]] = int32_t(best);
        chosen[row] = x[best] < INFINITY ? best : ~best;
    });
}

// Turns logits into weights [rows, vocab]; peaks and temperatures are [rows].
void to_weights(const float* logits, int64_t stride, const float* peaks, const float* temperatures,
                int64_t rows, int64_t vocab, float* weights) {
    const int64_t full = vocab / WIDTH * WIDTH;
    parallel_for(rows, 1, [&](int64_t row) {
        const float* x = logits + row * stride;
        float* to = weights + row * vocab;
        // At most 0 before the division, so that no temperature overflows it. NaN, which has no integer
        // value, is replaced.
        const auto weight_of = [&](Vec logit) {
            const Vec weight = exp_of((logit - peaks[row]) / temperatures[row]) * WEIGHT_ONE;
            return select(weight <= WEIGHT_ONE, weight, Vec{});
        };
        for (int64_t i = 0; i < full; i += WIDTH) store(to + i, weight_of(load(x + i)));
        const int rest = int(vocab - full);
        if (rest) store_first(to + full, weight_of(load_first(x + full, rest)), rest);
    });
}

// Writes limits [rows]: the lowest weight that top_k (0: all) and top_p keep, at least `lowest`.
void filter_top_k_top_p(const float* weights, const float* lowest, const int64_t* top_k, const double* top_p,
            int64_t rows, int64_t vocab, float* limits) {
    parallel_for(rows, 1, [&](int64_t row) {
        std::unique_ptr<int32_t[]> found(new int32_t[vocab + 1]);
        limits[row] = filter_row(weights + row * vocab, lowest[row], top_k[row], top_p[row], vocab,
                                 found.get());
    });
}

void draw(const float* weights, const float* lowest, const int64_t* seeds,
          const int64_t* positions, int64_t rows, int64_t vocab, int64_t* token_ids) {
    parallel_for(rows, 1, [&](int64_t row) {
        token_ids[row] =
            draw_row(weights + row * vocab, lowest[row], seeds[row], positions[row], vocab);
    });
}

// Writes log_totals [rows], the log of the sum of e^logit, and ranks [rows], each token's rank from 1.
void score(const float* logits, int64_t stride, const int64_t* token_ids, int64_t rows,
           int64_t vocab, float* log_totals, int64_t* ranks) {
    check_ids("token_ids", token_ids, 0, rows, vocab);
    parallel_for(rows, 1, [&](int64_t row) {
        score_row(logits + row * stride, token_ids[row], vocab, log_totals + row, ranks + row);
    });
}

}  // namespace kernels
