// Splits x, float32, into a sum of terms of bfloat16 or int8, for instructions that multiply and add
// several of them at once. Three terms are as exact as float32; one term rounds x.
//
// The instructions need neighbours along k side by side, so weights are packed for them and k is
// padded with zeros:
// - AMX, VNNI, `vdpbf16ps` and Arm's `sdot` need four bytes: [k / 2][NR][2] in bfloat16 and
//   [k / 4][NR][4] in int8. Weights of 4 bits are pairs of such bytes.
// - Arm's `smmla` and `bfmmla` need eight bytes.
// - AVX2 without VNNI multiplies int8 as 16-bit numbers: [k / 2][NR][2].

#pragma once

#include <type_traits>

#include "panels.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOTS
#elif defined(__AVX2__) && !defined(__AVX512F__)  // products of two bytes, without dots of four
#define HAS_DOTS
#define ADDS_IN_16_BITS
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_BFLOAT16_DOTS
#endif
#if defined(HAS_DOTS) && !defined(__aarch64__)
#define HAS_SIXES  // numbers of 6 bits, which multiply one term of x
#endif

namespace {

// Returns how many neighbours along k are side by side in packed weights of type W that multiply x in
// this many terms; 1: the weights multiply float32.
template <typename W>
constexpr int neighbours(int terms) {
#if defined(__AMX_BF16__)
    if (std::is_same_v<W, BFloat16>) return terms > 0 ? 2 : 1;
#elif defined(__AVX512BF16__)  // three terms are slower than float32
    if (std::is_same_v<W, BFloat16>) return terms == 1 ? 2 : 1;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    if (std::is_same_v<W, BFloat16>) return terms == 1 ? 4 : 1;
    if (std::is_same_v<W, int8_t> || std::is_same_v<W, Int4>) return terms > 0 ? 8 : 1;
#endif
#if defined(HAS_SIXES)
    if (std::is_same_v<W, Int6>) return 4;
#endif
#if defined(HAS_DOTS)
#if defined(ADDS_IN_16_BITS)  // bytes in three terms are slower than float32
    if (std::is_same_v<W, int8_t>) return terms == 1 ? 2 : 1;
#endif
    if (std::is_same_v<W, int8_t> || std::is_same_v<W, Int4>) return terms > 0 ? 4 : 1;
#endif
    return 1;
}

// Returns k of a packed matrix, with padding.
inline int64_t padded(int64_t k, int neighbours) {
    const int64_t unit = 16 * std::min(neighbours, 4);
    return neighbours == 1 ? k : (k + unit - 1) / unit * unit;
}

// Returns the index of weight [row, i] in a matrix [n, k] that is packed in panels of `width` rows.
inline int64_t place_of(int64_t row, int64_t i, int64_t k, int neighbours, int64_t width = NR) {
    const int64_t panel = row / width * width * padded(k, neighbours), column = row % width;
    return panel + (i / neighbours * width + column) * neighbours + i % neighbours;
}

#if defined(HAS_DOTS)
// Rows of x that one instruction multiplies.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t TOGETHER = 2;
#else
constexpr int64_t TOGETHER = 1;
#endif
// Returns the first row of a tile. Tiles have nearly the same height.
inline int64_t first_row_of(int64_t tile, int64_t tiles, int64_t rows) {
    return std::min(rows, (rows * tile / tiles + TOGETHER - 1) / TOGETHER * TOGETHER);
}

// Rows of x in terms. Rows are `stride` bytes apart, and the terms of a row `term_stride` bytes.
struct Terms {
    const char* x;
    int64_t stride, term_stride;
    int count;
};

// The rows, and the terms of each row, that one pass multiplies.
struct Pass {
    int rows, terms;
};

// The type of the terms that multiply weights of type W: 16 bits for bytes that are multiplied as such.
template <typename W>
using TermOf =
    std::conditional_t<std::is_same_v<W, int8_t> && neighbours<W>(1) == 2, int16_t, W>;

constexpr int64_t MAX_TERM = 1024;  // numbers of int8 in a block of k
constexpr int64_t TERM_BYTES = MAX_TERM * sizeof(TermOf<int8_t>);
// One cache line more, so that the rows of a tile do not share cache lines. For int8, that line holds
// the scale of the row's block and the start value of the term's sums.
constexpr int64_t TERM_STRIDE = TERM_BYTES + LINE;
inline float scale_of(const void* x) {
    float scale;
    memcpy(&scale, (const char*)x + TERM_BYTES, sizeof scale);
    return scale;
}
inline int32_t begin_of(const void* x) {
    int32_t begin;
    memcpy(&begin, (const char*)x + TERM_BYTES + sizeof(float), sizeof begin);
    return begin;
}
constexpr float FINER = 254;  // a term of int8 has units 254 times smaller than the term before

inline Vec load_block(const float* from, int64_t i, int64_t kc) {  // zeros after the end
    return load_up_to(from + i, int(std::clamp<int64_t>(kc - i, 0, WIDTH)));
}

// Rounds to nearest, ties to even. By an instruction: compilers would fuse an addition that rounds with
// the product before it.
inline IntVec round_each(Vec x) {
#if defined(__AVX512F__)
    return (IntVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (IntVec)_mm256_cvtps_epi32((__m256)x);
#else
    return (IntVec)vcvtnq_s32_f32((float32x4_t)x);
#endif
}

template <typename X>
inline void store_codes(X* to, IntVec codes) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8((__m512i)codes));
#elif defined(__AVX2__)
    const __m256i numbers = (__m256i)codes;
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(numbers),
                                          _mm256_extracti128_si256(numbers, 1));
    const __m128i bytes = _mm_packs_epi16(words, words);
    if (sizeof(X) == 1) _mm_storel_epi64((__m128i*)to, bytes);
    else _mm_storeu_si128((__m128i*)to, _mm_cvtepi8_epi16(bytes));
#else
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(vqmovn_s32((int32x4_t)codes), vdup_n_s16(0)));
    const uint32_t word = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    memcpy(to, &word, sizeof word);
#endif
}

// Returns x * y + z, rounded once.
inline Vec multiply_add(Vec x, Vec y, Vec z) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__)
    return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return (Vec)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#endif
}

inline Vec to_floats(IntVec x) { return __builtin_convertvector(x, Vec); }

// Writes x [kc] in terms of int8, with zeros up to `end`, and returns their scale: the largest |x| is
// 127 times the scale. Each term holds the rest that the terms before it leave. Three terms have an
// error of 2^-24 of the largest |x|.
template <typename X>
float to_terms(const float* from, int64_t kc, int64_t end, int terms, X* to, int64_t stride) {
    Vec largest{}, zero{};
    for (int64_t i = 0; i < end; i += WIDTH) {
        const Vec x = load_block(from, i, kc), positive = (Vec)((IntVec)x & 0x7fffffff);
        largest = select(positive > largest, positive, largest);
        zero += x * 0.0f;  // NaN of NaN and infinity
    }
    float size = 0;
    for (int i = 0; i < WIDTH; i++) size = std::max(size, largest[i]);
    const float scale = size / 127 + sum(zero);
    // Smaller numbers count as 0: the factor would be infinite.
    const float factor = size > 1e-36f ? 127 / size : 0;
    for (int64_t i = 0; i < end; i += WIDTH) {
        Vec rest = load_block(from, i, kc) * factor;
        for (int term = 0; term < terms; term++) {
            const IntVec rounded = round_each(rest);
            store_codes((X*)((char*)to + term * stride) + i, rounded);
            rest = (rest - to_floats(rounded)) * FINER;
        }
    }
    return scale;
}
#endif

}  // namespace
