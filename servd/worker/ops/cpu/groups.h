// Weights of 4 and 8 bits in groups along k: value * scale + offset, as float32.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

struct Int4 { uint8_t bits; };  // two share a byte, see pack_pairs
struct Int6 { uint8_t bits; };  // see pack_sixes
struct Float8 { uint8_t bits; };  // e4m3; NaN must not occur

template <typename W>
constexpr int BITS = std::is_same_v<W, Int4> ? 4 : std::is_same_v<W, Int6> ? 6 : 8;
// Factor on values: 8-bit floats are read as 16-bit floats that are 256 times smaller.
template <typename W>
constexpr float UNIT = std::is_same_v<W, Float8> ? 256.0f : 1.0f;

constexpr int64_t FACTOR_SIZE = 256;  // weights of a row that share a factor

struct Groups {
    const float* table;  // [16], the values of 4-bit codes
    int type;  // of scale and offset: FLOAT32, BFLOAT16, FLOAT16, or INT8, times a factor
    const void *scale, *offset;  // offset may be null
    // Factors of INT8 scales, each followed by the factor of the offsets if there are any; or null.
    const Float16* factors;
    int64_t size;  // weights of a group; the last group of a row may be smaller

    int64_t number(int64_t k) const { return (k + size - 1) / size; }
    int64_t number_of_factors(int64_t k) const {
        return (k + FACTOR_SIZE - 1) / FACTOR_SIZE * (offset ? 2 : 1);
    }
};

inline Vec load_as(int type, const void* p, int64_t index) {
    switch (type) {
    case FLOAT32: return load((const float*)p + index);
    case BFLOAT16: return load((const BFloat16*)p + index);
    case INT8: return load((const int8_t*)p + index);
    default: return load((const Float16*)p + index);
    }
}

inline Float16 halve(Float8 x) {
    return {uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)};
}
inline float widen(Float8 x) { return widen(halve(x)) * UNIT<Float8>; }
inline Vec load(const Float8* p) {
#if defined(__AVX512F__)
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    const __m256i size = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
    return (Vec)_mm512_cvtph_ps(_mm256_or_si256(sign, size));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    const __m128i size = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
    return (Vec)_mm256_cvtph_ps(_mm_or_si128(sign, size));
#elif defined(__aarch64__)
    uint32_t bytes;
    memcpy(&bytes, p, 4);
    const uint16x4_t x = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
    const uint16x4_t sign = vshl_n_u16(vand_u16(x, vdup_n_u16(0x80)), 8);
    const uint16x4_t size = vshl_n_u16(vand_u16(x, vdup_n_u16(0x7f)), 7);
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(sign, size)));
#else
    Vec x;
    for (int i = 0; i < WIDTH; i++) x[i] = widen(halve(p[i]));
    return x;
#endif
}

// The values of 4-bit codes, in registers if an instruction can choose from 16 values.
#if defined(__AVX512F__)
typedef __m512 Table;
inline Table load_table(const float* p) { return p ? _mm512_loadu_ps(p) : _mm512_setzero_ps(); }
#elif defined(__AVX2__)
struct Table { __m256 low, high; };
inline Table load_table(const float* p) {
    return p ? Table{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)} : Table{};
}
inline Vec choose(const Table& table, __m256i code) {  // bits above the fourth are ignored
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
    return (Vec)_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code),
                                 _mm256_permutevar8x32_ps(table.high, code), is_high);
}
#else
typedef const float* Table;
inline Table load_table(const float* p) { return p; }
#endif

// Loads WIDTH bytes: the low halves become the first vector, the high halves the second.
inline void load_pairs(const uint8_t* p, const Table& table, Vec& low, Vec& high) {
#if defined(__AVX512F__)
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    low = (Vec)_mm512_permutexvar_ps(codes, table);  // which ignores bits above the fourth
    high = (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
#elif defined(__AVX2__)
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    low = choose(table, codes);
    high = choose(table, _mm256_srli_epi32(codes, 4));
#else
    for (int i = 0; i < WIDTH; i++) low[i] = table[p[i] & 15], high[i] = table[p[i] >> 4];
#endif
}

// Calls `call` with a null pointer to the type.
template <typename Call>
void with_group_type(int type, Call call) {
    switch (type) {
    case INT4: return call((Int4*)nullptr);
    case INT6: return call((Int6*)nullptr);
    case FLOAT8: return call((Float8*)nullptr);
    default: return call((int8_t*)nullptr);
    }
}

}  // namespace
