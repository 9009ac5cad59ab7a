// Routes tokens to experts, and adds the experts' results. matrix.cpp has the products.
//
// Each pair of a token and one of its experts has a *place*. Places are sorted by expert, so the places of
// an expert are the rows of one product.

#include <memory>
#include <vector>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace kernels {

// Chooses the experts of each token from logits [rows, num_experts]. Writes to `tokens` the token of each
// place [rows * top_k], to `starts` the first place of each expert and the end [num_experts + 1], and to
// `places` and `weights` those of each token [rows, top_k], by falling score. Scores and weights are
// probabilities; with a bias [num_experts], weights are sigmoids, and scores are weights plus bias. With
// `renormalize`, weights are divided by their sum.
void route(const float* logits, const float* bias, int64_t rows, int64_t num_experts, int64_t top_k,
           int renormalize, int32_t* tokens, int32_t* starts, int32_t* places, float* weights) {
    check_at_most("top_k", top_k, num_experts);
    std::vector<float> scores(bias ? rows * num_experts : 0);
    const auto sigmoid_of = [](float x) { return 1.0f / (1.0f + expf(-x)); };
    parallel_for(rows, 1 + 4096 / num_experts, [&](int64_t row) {
        const float* const from = logits + row * num_experts;
        float* const biased = scores.data() + row * num_experts;
        for (int64_t expert = 0; bias && expert < num_experts; expert++)
            biased[expert] = sigmoid_of(from[expert]) + bias[expert];
        const float* const score = bias ? biased : from;
        int32_t* chosen = places + row * top_k;  // experts at first
        float* weight = weights + row * top_k;
        float total = 0, sum = 0;
        for (int64_t i = 0; i < top_k; i++) {
            int32_t best = -1;
            for (int32_t expert = 0; expert < num_experts; expert++)
                if ((best < 0 || score[expert] > score[best]) &&
                    std::find(chosen, chosen + i, expert) == chosen + i)
                    best = expert;
            chosen[i] = best;
        }
        const float highest = from[chosen[0]];
        for (int64_t expert = 0; !bias && expert < num_experts; expert++)
            total += expf(from[expert] - highest);
        for (int64_t i = 0; i < top_k; i++) {
            const float x = from[chosen[i]];
            sum += weight[i] = bias ? sigmoid_of(x) : expf(x - highest);
        }
        const float divisor = renormalize ? sum : bias ? 1.0f : total;
        for (int64_t i = 0; i < top_k; i++) weight[i] /= divisor;
    });
    std::fill_n(starts, num_experts + 1, 0);
    for (int64_t pair = 0; pair < rows * top_k; pair++) starts[places[pair] + 1]++;
    for (int64_t expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
    std::unique_ptr<int32_t[]> next(new int32_t[num_experts]);
    std::copy_n(starts, num_experts, next.get());
    for (int64_t pair = 0; pair < rows * top_k; pair++) {
        const int32_t place = next[places[pair]]++;
        tokens[place] = int32_t(pair / top_k);
        places[pair] = place;
    }
}

// Writes to out [rows, size] the weighted sum of each token's rows of y [num_pairs, size].
void combine(const float* y, int64_t num_pairs, const int32_t* places, const float* weights,
             int64_t rows, int64_t top_k, int64_t size, float* out) {
    check_ids("places", places, 0, rows * top_k, num_pairs);
    parallel_for(rows, 1 + 16384 / (top_k * size + 1), [&](int64_t row) {
        for (int64_t d = 0; d < size; d += WIDTH) {
            const int count = int(std::min<int64_t>(WIDTH, size - d));
            Vec total{};
            for (int64_t i = row * top_k; i < (row + 1) * top_k; i++)
                total += load_up_to(y + places[i] * size + d, count) * weights[i];
            store_up_to(out + row * size + d, total, count);
        }
    });
}

}  // namespace kernels
