// Norms with the residual, activations and gates.

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

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

// Rows of x are contiguous, `per_stride` of them behind one another, and the next ones `stride` further on.
template <bool CENTERED>
void norm(const float* x, int64_t per_stride, int64_t stride, const float* residual, const float* weight, const float* bias,
          float eps, float* out, float* sums, int64_t rows, int64_t size) {
    const int64_t full = size / WIDTH * WIDTH;
    const int rest = int(size - full);
    parallel_for(rows, 1 + 16384 / size, [&](int64_t row) {
        const float* from = x + row / per_stride * stride + row % per_stride * size;
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
    });
}

// function of x [rows, size], times the numbers `size` further on where rows are 2 * size wide (gated).
void activate_rows(const float* x, int64_t rows, int64_t size, int function, bool gated, float* out) {
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

}  // namespace

extern "C" {

void servd_norm(int centered, const float* x, int64_t per_stride, int64_t stride, const float* residual, const float* weight,
                const float* bias, float eps, float* out, float* sums, int64_t rows, int64_t size) {
    (centered ? norm<true> : norm<false>)(x, per_stride, stride, residual, weight, bias, eps, out, sums, rows, size);
}

// Rows `index` of a table.
void servd_take(const float* table, int64_t size, const int64_t* index, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) memcpy(out + i * size, table + index[i] * size, size * 4);
}

// cos and sin of every position times every frequency, [count, size] each.
void servd_rotation(const int64_t* positions, int64_t count, const float* inv_freq, int64_t size, float magnitude, float* cos,
                    float* sin) {
    parallel_for(count * size, 1024, [&](int64_t i) {
        const float angle = float(positions[i / size]) * inv_freq[i % size];
        cos[i] = cosf(angle) * magnitude;
        sin[i] = sinf(angle) * magnitude;
    });
}

void servd_activate(const float* x, int64_t rows, int64_t size, int function, int gated, float* out) {
    activate_rows(x, rows, size, function, gated != 0, out);
}

}  // extern "C"
