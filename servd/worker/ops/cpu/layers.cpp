// Norms with the residual, activations and gates.

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

}  // namespace

extern "C" {

void servd_norm(int centered, const float* x, const float* residual, const float* weight, const float* bias, float eps,
                float* out, float* sums, int64_t rows, int64_t size) {
    (centered ? norm<true> : norm<false>)(x, residual, weight, bias, eps, out, sums, rows, size);
}

void servd_activate(const float* x, int64_t rows, int64_t size, int function, int gated, float* out) {
    activate_rows(x, rows, size, function, gated != 0, out);
}

}  // extern "C"
