// What the kernels share: vectors as wide as the machine's registers, numbers of 8 and 16 bits, and e^x.
// Kernels are compiled once per instruction set.
//
// Two rules hold everywhere:
// - Each number is computed by the same operations in the same order, whatever else is in the batch and
//   however threads divide the work. A request therefore gets the same bits alone and in a batch.
// - Weights and cache may have 8 or 16 bits; arithmetic is float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
#include <immintrin.h>
constexpr int WIDTH = 8;
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
constexpr int WIDTH = 4;
#endif

namespace {

typedef float Vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

// x - 0 instead of x + 0, which would turn -0 into 0 and cost an instruction.
inline Vec splat(float x) { return x - Vec{}; }
inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
inline float widen(Float16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
    __fp16 half;
    memcpy(&half, &x.bits, 2);
    return half;
#else  // by hand: not every C++ compiler has a type for it
    uint32_t bits = uint32_t(x.bits & 0x7fff) << 13;
    float result;
    memcpy(&result, &bits, 4);
    // The exponents differ by 112; subnormal numbers become normal.
    if ((x.bits & 0x7c00) == 0x7c00) result = bits & 0x7fffff ? NAN : INFINITY;
    else result *= 0x1p112f;
    return x.bits & 0x8000 ? -result : result;
#endif
}
inline float widen(int8_t x) { return float(x); }

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, Float16* to) {
#if defined(__F16C__)
    to->bits = _cvtss_sh(x, 0);
#elif defined(__aarch64__)
    const __fp16 half = __fp16(x);
    memcpy(&to->bits, &half, 2);
#else  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) to->bits = uint16_t(sign | 0x7e00);
    else if (size >= 0x477ff000) to->bits = uint16_t(sign | 0x7c00);  // 65520 and more
    else if (size >= 0x38800000)
        to->bits = uint16_t(sign | ((size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13));
    else {  // subnormal: adding 0.5 rounds at the right bit
        const float shifted = fabsf(x) + 0.5f;
        memcpy(&bits, &shifted, 4);
        to->bits = uint16_t(sign | (bits - 0x3f000000));
    }
#endif
}

template <typename T>
inline Vec widen_each(const T* p) {
    Vec x;
    for (int i = 0; i < WIDTH; i++) x[i] = widen(p[i]);
    return x;
}
inline Vec load(const BFloat16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__aarch64__)
    return (Vec)vshll_n_u16(vld1_u16((const uint16_t*)p), 16);
#else
    return widen_each(p);
#endif
}
inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
    return widen_each(p);
#endif
}
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__aarch64__)
    uint32_t bytes;
    memcpy(&bytes, p, 4);
    const int16x8_t numbers = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes)));
    return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(numbers)));
#else
    return widen_each(p);
#endif
}

inline Vec select(IntVec condition, Vec a, Vec b) {
    return (Vec)((condition & (IntVec)a) | (~condition & (IntVec)b));
}
inline Vec at_most(Vec x, float limit) { return select(x > limit, splat(limit), x); }  // NaN stays
inline Vec at_least(Vec x, float limit) { return select(x < limit, splat(limit), x); }

inline float sum(Vec x) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
}

// e^x within 2 units in the last place: 2^n times a polynomial on [-ln(2)/2, ln(2)/2]; 0 below
// -87.3, NaN of NaN.
inline Vec exp_of(Vec x) {
    const IntVec tiny = x < -87.3f;
    x = at_least(at_most(x, 88.7f), -87.3f);
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Vec n = (x * 1.44269504f + shift) - shift;
    const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
    return select(tiny, Vec{}, p * (Vec)exponent);
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp_of(-x)); }

// Loads and stores of the elements after the last full vector of a row.
#if defined(__AVX512F__)
inline Vec load_first(const float* p, int count) {
    return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
inline void store_first(float* p, Vec x, int count) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)x);
}
#else
inline Vec load_first(const float* p, int count) {
    float values[WIDTH] = {};
    memcpy(values, p, count * 4);
    return load(values);
}
inline void store_first(float* p, Vec x, int count) {
    float values[WIDTH];
    store(values, x);
    memcpy(p, values, count * 4);
}
#endif
inline Vec load_up_to(const float* p, int count) {
    return count >= WIDTH ? load(p) : count > 0 ? load_first(p, count) : Vec{};
}
inline void store_up_to(float* p, Vec x, int count) {
    if (count >= WIDTH) store(p, x);
    else if (count > 0) store_first(p, x, count);
}

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4, FLOAT8 = 5, INT6 = 6 };

// Calls `call` with a null pointer to the type.
template <typename Call>
void with_type(int type, Call call) {
    switch (type) {
    case FLOAT32: return call((float*)nullptr);
    case BFLOAT16: return call((BFloat16*)nullptr);
    case FLOAT16: return call((Float16*)nullptr);
    default: return call((int8_t*)nullptr);
    }
}

}  // namespace
