// Products of weights without groups by AMX, VNNI, `vdpbf16ps`, `vpmaddwd`, `sdot`, `smmla` and `bfmmla`.
//
// Sums have the same order for any number of rows, so a row gets the same bits alone and in a batch. Sums
// of int8 are exact, and therefore equal for all of these instructions.

#pragma once

#include <numeric>

#include "amx.h"
#include "checks.h"
#include "dots.h"
#include "terms.h"

namespace {

#if defined(HAS_DOTS)
#if defined(__AMX_BF16__)
using Unit = Tiles;
#else
using Unit = Dots;
#endif

// The interface of these products to the loop over tiles (matrix.cpp).
template <typename W>
struct Tiled {
    using X = TermOf<W>;
    using Task = Unit::Task;
    static constexpr int MR = Unit::MR;
    // A panel's block, 32 KiB, stays in the first-level cache for all tiles of a chunk. A sum of this many
    // products of int8 is exact in float32.
    static constexpr int64_t MAX_KC = TERM_BYTES / sizeof(X), KC_UNIT = LINE / sizeof(W);
    static constexpr int64_t ROW_BYTES = NR * sizeof(W);
    static constexpr int64_t NEXT = TERM_STRIDE / sizeof(X);  // from a term to the next one

    const W* packed;
    int64_t k;
    int terms;

    struct Cursor {
        const W* row;
    };
    Cursor at(int64_t panel, int64_t start) const {
        return {packed + (panel * padded(k, neighbours<W>(terms)) + start) * NR};
    }
    int64_t x_stride() const { return terms * NEXT; }
    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return Unit::first_row(tile, tiles, rows);
    }
    void copy(const float* from, int64_t kc, X* to) const;
    void multiply(Task& task, const X* x, int rows, Cursor weights, int64_t kc,
                  const OutputTile& out, Prefetch ahead) const;
};

#if defined(HAS_BFLOAT16_DOTS)
// ---- bfloat16: one term has an error of up to 2^-8 of x, two terms of 2^-17. Three terms are exact:
// they have 8 bits each, and float32 has 24.

template <>
void Tiled<BFloat16>::copy(const float* from, int64_t kc, BFloat16* to) const {
#if defined(__ARM_FEATURE_MATMUL_INT8)  // one term
    for (int64_t i = 0; i < padded(kc, 4); i += WIDTH)
        vst1_bf16((bfloat16_t*)to + i, vcvt_bf16_f32((float32x4_t)load_block(from, i, kc)));
#else
    for (int64_t i = 0; i < padded(kc, 2); i += WIDTH) {
        __m512 rest = load_block(from, i, kc);
        for (int term = 0; term < terms; term++) {
            const __m256i bits = (__m256i)_mm512_cvtneps_pbh(rest);
            _mm256_storeu_si256((__m256i*)(to + term * NEXT + i), bits);
            const __m512 rounded = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
            // The first term of infinity is infinity, and its other terms are 0.
            const __mmask16 same = _mm512_cmp_ps_mask(rest, rounded, _CMP_EQ_OQ);
            rest = _mm512_maskz_sub_ps(__mmask16(~same), rest, rounded);
        }
    }
#endif
}

template <>
void Tiled<BFloat16>::multiply(Task& task, const BFloat16* x, int rows, Cursor weights, int64_t kc,
                               const OutputTile& out, Prefetch ahead) const {
    alignas(64) float edge[MR * NR];  // units store whole tiles only
    const bool is_whole = out.columns == NR;
    float* const y = is_whole ? out.y : edge;
    const int64_t stride = is_whole ? out.stride : NR;
    for (int row = 0; !is_whole && !out.is_first_k && row < rows; row++)
        std::copy_n(out.y + row * out.stride, out.columns, y + row * stride);
    const Terms row_terms{(const char*)x, terms * TERM_STRIDE, TERM_STRIDE, terms};
    Unit::add(task, rows, row_terms, weights.row, kc, y, stride, out.is_first_k, ahead);
    for (int row = 0; !is_whole && row < rows; row++)
        std::copy_n(y + row * stride, out.columns, out.y + row * out.stride);
    if (out.is_last_k && (out.scale || out.bias)) epilogue(out, rows);
}

#endif

// ---- int8

template <>
void Tiled<int8_t>::copy(const float* from, int64_t kc, X* to) const {
    const float scale = to_terms(from, kc, padded(kc, 4), terms, to, TERM_STRIDE);
    memcpy(to + MAX_KC, &scale, sizeof scale);
    for (int term = 0; Unit::IS_UNSIGNED && term < terms; term++, to += NEXT) {
        const int32_t begin = -Bytes::shift * std::accumulate(to, to + kc, 0);
        memcpy((char*)(to + MAX_KC) + sizeof scale, &begin, sizeof begin);
    }
}

// One function for any number of rows, like `epilogue`.
__attribute__((noinline)) void add_sums(const int32_t* sums, float scale, bool is_first, float* y,
                                        int columns) {
    for (int half = 0; half < 2; half++) {
        const int count = columns - half * WIDTH;
        const IntVec sum = *(const IntVec*)(sums + half * WIDTH);
        const Vec before = is_first ? Vec{} : load_up_to(y + half * WIDTH, count);
        const Vec product = to_floats(sum) * scale;
        store_up_to(y + half * WIDTH, before + product, count);
    }
}

template <>
void Tiled<int8_t>::multiply(Task& task, const X* x, int rows, Cursor weights, int64_t kc,
                             const OutputTile& out, Prefetch ahead) const {
    alignas(64) int32_t sums[MR * NR];
    const auto [max_rows, at_once] = Unit::pass_of(rows, terms);
    for (int first = 0; first < rows; first += max_rows) {
        const int count = std::min(max_rows, rows - first);
        const X* const part = x + first * x_stride();
        float unit = 1;
        for (int term = 0; term < terms; term++, unit /= FINER) {
            const char* from = (const char*)part + term * TERM_STRIDE;
            const Terms row_terms{from, at_once == 1 ? x_stride() : TERM_STRIDE, 0, 1};
            if (term % at_once == 0)
                Unit::add(task, count * at_once, row_terms, weights.row, kc, sums, NR, true, ahead);
            ahead.step = 0;
            for (int row = 0; row < count; row++)
                add_sums(sums + (row * at_once + term % at_once) * NR,
                         scale_of(part + row * x_stride()) * unit, out.is_first_k && term == 0,
                         out.y + (first + row) * out.stride, out.columns);
        }
    }
    if (out.is_last_k && (out.scale || out.bias)) epilogue(out, rows);
}
#endif

// Calls `call` with a function that makes the Matrix of packed weights [n, k] and x in these terms.
template <typename W, typename Call>
void with_matrix(int terms, const Call& call) {
#if defined(HAS_DOTS)
    if constexpr (neighbours<W>(1) > 1)
        if (neighbours<W>(terms) > 1)
            return call([=](const void* packed, int64_t k) {
                return Tiled<W>{(const W*)packed, k, terms};
            });
#endif
    call([](const void* packed, int64_t k) { return Plain<W>{{}, (const W*)packed, k}; });
}

// The same for weights in groups.
template <typename W, typename Call>
void with_grouped(int terms, const float* table, const Call& call) {
    const auto with = [&](auto* p) {
        using Matrix = std::remove_pointer_t<decltype(p)>;
        call([](const void* packed, int64_t k, const Groups& groups) {
            Matrix matrix{};
            matrix.packed = (const uint8_t*)packed, matrix.k = k, matrix.groups = groups;
            return matrix;
        });
    };
#if defined(HAS_DOTS)
    if constexpr (neighbours<W>(1) > 1) {
        const auto with_dots = [&](auto* weights) {
            using Weights = std::remove_pointer_t<decltype(weights)>;
            if constexpr (!std::is_same_v<W, Int6>)
                if (terms != 1) return with((GroupedDots<W, 3, Weights>*)nullptr);
            with((GroupedDots<W, 1, Weights>*)nullptr);
        };
        if (neighbours<W>(terms) > 1) return with_weights<W>(table, with_dots);
    }
#endif
    if constexpr (std::is_same_v<W, Int6>)
        throw std::out_of_range("weights of 6 bits have no products in these kernels");
    else
        with((Grouped<W>*)nullptr);
}

}  // namespace
