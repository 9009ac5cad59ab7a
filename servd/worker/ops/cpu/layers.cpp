// Embedding, rotary positions, norms with the residual, activations and gates.

#include <memory>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

enum Function { GELU_TANH = 0, SILU = 1, RELU = 2, GELU = 3, QUICK_GELU = 4 };

inline Vec apply(int function, Vec x) {
    switch (function) {
    case GELU_TANH:  // 0.5 (1 + tanh y) is sigmoid(2 y)
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case SILU: return x * sigmoid(x);
    case RELU: return at_least(x, 0.0f);
    case QUICK_GELU: return x * sigmoid(1.702f * x);
    default: {
        // x times half of erfc(-x / sqrt 2), within 1.5e-7 (Abramowitz and Stegun 7.1.26).
        const Vec size = select(x < 0.0f, -x, x);
        const Vec t = 1.0f / (1.0f + 0.231641888f * size);
        Vec p = splat(0.5307027145f);
        p = p * t - 0.7265760135f;
        p = p * t + 0.7107068705f;
        p = p * t - 0.142248368f;
        p = p * t + 0.127414796f;
        const Vec tail = p * t * exp_of(-0.5f * x * x);
        return x * select(x < 0.0f, tail, 1.0f - tail);
    }
    }
}

template <bool CENTERED>
void norm_rows(const float* x, int64_t per_stride, int64_t stride, int64_t row_stride,
               const float* residual, const float* weight, const float* bias, float eps, float* out, float* sums,
               int64_t rows, int64_t size) {
    const int64_t full = size / WIDTH * WIDTH;
    const int rest = int(size - full);
    parallel_for(rows, 1 + 16384 / size, [&](int64_t row) {
        const float* from = x + row / per_stride * stride + row % per_stride * row_stride;
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
        for (int64_t i = 0; i < full; i += WIDTH)
            squares += (load(from + i) - mean) * (load(from + i) - mean);
        float total = sum(squares);
        for (int64_t i = full; i < size; i++) total += (from[i] - mean) * (from[i] - mean);
        const float factor = 1.0f / sqrtf(total / float(size) + eps);
        float* to = out + row * size;
        for (int64_t i = 0; i < full; i += WIDTH) {
            const Vec y = (load(from + i) - mean) * factor * load(weight + i);
            store(to + i, bias ? y + load(bias + i) : y);
        }
        for (int64_t i = full; i < size; i++)
            to[i] = (from[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
    });
}

// Returns 1 or -1, pseudo-randomly.
inline float sign_of(int64_t i) {
    uint32_t bits = uint32_t(i) * 0x9e3779b1u;
    bits = (bits ^ bits >> 15) * 0x85ebca6bu;
    return bits >> 31 ? -1.0f : 1.0f;
}

// Multiplies x [2^n] by signs and applies Hadamard's transform, or inverts both. `other` is a buffer of the
// same length. Each of the n steps interleaves the sums and differences of x's halves.
void transform(float* x, float* other, int64_t size, bool is_inverse) {
    const float factor = 1 / sqrtf(float(size));
    for (int64_t i = 0; !is_inverse && i < size; i++) x[i] *= factor * sign_of(i);
    float *now = x, *next = other;
    for (int64_t done = 1; done < size; done *= 2, std::swap(now, next)) {
        const float* __restrict from = now;
        float* __restrict to = next;
        for (int64_t i = 0; i < size / 2; i++) {
            const float a = from[i], b = from[i + size / 2];
            to[2 * i] = a + b, to[2 * i + 1] = a - b;
        }
    }
    if (now != x) std::copy_n(now, size, x);
    for (int64_t i = 0; is_inverse && i < size; i++) x[i] *= factor * sign_of(i);
}

}  // namespace

namespace kernels {

// Copies the rows `index` [count] of a table [num_rows, size].
void embed(const float* table, int64_t num_rows, int64_t size, const int64_t* index, int64_t count,
           float* out) {
    check_ids("index", index, 0, count, num_rows);
    for (int64_t i = 0; i < count; i++)
        memcpy(out + i * size, table + index[i] * size, size * 4);
}

// Computes cos and sin of every position times every frequency, [count, size] each.
void rotation(const int64_t* positions, int64_t count, const float* inv_freq, int64_t size,
              float magnitude, float* cos, float* sin) {
    parallel_for(count * size, 1024, [&](int64_t i) {
        const float angle = float(positions[i / size]) * inv_freq[i % size];
        cos[i] = cosf(angle) * magnitude;
        sin[i] = sinf(angle) * magnitude;
    });
}

// Computes the layer norm if `centered`, else the RMS norm, of x + residual, and writes x + residual to
// `sums`. residual and bias may be null. Of x [rows, size], `per_stride` rows are `row_stride` apart;
// the next ones begin `stride` after the first of them.
void norm(int centered, const float* x, int64_t per_stride, int64_t stride, int64_t row_stride,
          const float* residual, const float* weight, const float* bias, float eps, float* out, float* sums, int64_t rows,
          int64_t size) {
    const auto run = centered ? norm_rows<true> : norm_rows<false>;
    run(x, per_stride, stride, row_stride, residual, weight, bias, eps, out, sums, rows, size);
}

// Computes x [count] times the factor, plus the residual if it is not null.
void scale(const float* x, float factor, const float* residual, int64_t count, float* out) {
    parallel_for((count + WIDTH - 1) / WIDTH, 2048, [&](int64_t i) {
        const int left = int(std::min<int64_t>(WIDTH, count - i * WIDTH));
        const Vec scaled = load_up_to(x + i * WIDTH, left) * factor;
        store_up_to(out + i * WIDTH,
                    residual ? scaled + load_up_to(residual + i * WIDTH, left) : scaled, left);
    });
}

// Rotates the rows of x [rows, size], so that outliers spread over all elements. Dot products of two
// rotated rows are unchanged. The first 2^n numbers are transformed, then the last 2^n.
void spread(const float* x, int64_t rows, int64_t size, int is_inverse, float* out) {
    int64_t part = 1;
    while (2 * part <= size) part *= 2;
    parallel_for(rows, 1 + 4096 / (size + 1), [&](int64_t row) {
        // A small buffer per thread: a buffer for all rows would take new pages in every call.
        const std::unique_ptr<float[]> scratch(new float[part]);
        float *const to = out + row * size, *const other = scratch.get();
        std::copy_n(x + row * size, size, to);
        const bool has_last = part < size;
        if (has_last && is_inverse) transform(to + size - part, other, part, true);
        transform(to, other, part, is_inverse);
        if (has_last && !is_inverse) transform(to + size - part, other, part, false);
    });
}

// Applies the function to x [rows, size]. If gated, rows have 2 * size numbers, and the function of the
// first half is multiplied by the second half.
void activate(const float* x, int64_t rows, int64_t size, int function, int gated, float* out) {
    const int64_t stride = gated ? 2 * size : size, full = size / WIDTH * WIDTH;
    const int rest = int(size - full);
    parallel_for(rows, 1 + 8192 / size, [&](int64_t row) {
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
    });
}

}  // namespace kernels
