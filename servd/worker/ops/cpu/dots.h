// Dot products by AVX-512, AVX2 and NEON. Each 32 bits of a vector add four products of int8 (VNNI,
// `sdot`), or two products of bfloat16 or of 16-bit numbers (`vpmaddwd`). That is four or two times as
// many products as in float32; `smmla` and `bfmmla` add twice as many again.
//
// VNNI multiplies unsigned by signed bytes. Weights are the unsigned factor, shifted so that none is
// negative; each sum starts at -shift * sum(x) to undo that. `sdot` and `vpmaddwd` multiply signed numbers.

#pragma once

#include "terms.h"

#if defined(HAS_DOTS)

#include <numeric>

namespace {

// The weights of a panel's two halves for K neighbours along k, in SIZE bytes.
#if defined(__AVX512VNNI__)
typedef __m512i Codes;
inline Codes repeat_codes(int32_t neighbours) { return _mm512_set1_epi32(neighbours); }

struct Vnni {
    using X = int8_t;
    static constexpr int K = 4;
    static IntVec add(IntVec sum, __m512i w, __m512i x) {
        return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, w, x);
    }
};

struct Bytes : Vnni {
    static constexpr int64_t SIZE = K * NR;
    static constexpr int shift = 128;
    const __m512i sign = _mm512_set1_epi8(-128);

    explicit Bytes(const float* = nullptr) {}
    void read(const char* from, __m512i& w0, __m512i& w1) const {
        w0 = _mm512_xor_si512(_mm512_loadu_si512(from), sign);
        w1 = _mm512_xor_si512(_mm512_loadu_si512(from + SIZE / 2), sign);
    }
};

// Codes of 4 bits that choose from a table of whole numbers.
struct Nibbles : Vnni {
    static constexpr int64_t SIZE = K * NR / 2;
    int shift;
    __m512i values, mask = _mm512_set1_epi8(15);

    explicit Nibbles(const float* table) {
        const __m512i numbers = _mm512_cvtps_epi32(_mm512_loadu_ps(table));
        shift = -_mm512_reduce_min_epi32(numbers);
        values = _mm512_broadcast_i32x4(
            _mm512_cvtepi32_epi8(_mm512_add_epi32(numbers, _mm512_set1_epi32(shift))));
    }
    void read(const char* from, __m512i& w0, __m512i& w1) const {
        const __m512i pairs = _mm512_loadu_si512(from);
        w0 = _mm512_shuffle_epi8(values, _mm512_and_si512(pairs, mask));
        w1 = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask));
    }
};

// Codes of 6 bits: the low 4 bits as in Nibbles, then the high 2 bits of four codes in each byte.
struct Sixes : Vnni {
    static constexpr int64_t SIZE = K * NR * 6 / 8;
    static constexpr int shift = 32;
    const __m512i low = _mm512_set1_epi8(15), all = _mm512_set1_epi8(63);
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi32(4), _mm256_set1_epi32(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(2), 1);

    explicit Sixes(const float* = nullptr) {}
    void read(const char* from, __m512i& w0, __m512i& w1) const {
        constexpr int CHOICE = 0xca;  // bits of the second operand where the first is 1, else of the third
        const __m512i pairs = _mm512_loadu_si512(from);
        const __m512i high =
            _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(from + K * WIDTH)));
        w0 = _mm512_ternarylogic_epi32(low, pairs, _mm512_sllv_epi32(high, left), CHOICE);
        w1 = _mm512_ternarylogic_epi32(low, _mm512_srli_epi16(pairs, 4),
                                       _mm512_srlv_epi32(high, right), CHOICE);
        w0 = _mm512_and_si512(w0, all), w1 = _mm512_and_si512(w1, all);
    }
};

#elif defined(__AVX2__)
typedef __m256i Codes;
inline Codes repeat_codes(int32_t neighbours) { return _mm256_set1_epi32(neighbours); }
inline Codes load_codes(const char* from) { return _mm256_loadu_si256((const __m256i*)from); }

// Chooses from 16 bytes: w0 by the low halves of 32 bytes, w1 by their high halves.
inline void choose_codes(Codes values, Codes pairs, Codes& w0, Codes& w1) {
    const Codes mask = _mm256_set1_epi8(15);
    w0 = _mm256_shuffle_epi8(values, _mm256_and_si256(pairs, mask));
    w1 = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask));
}
inline Codes load_values(const float* table, int shift) {
    int8_t numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = int8_t(int(table[i]) + shift);
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)numbers));
}
// Joins the low 4 bits of codes with their high 2 bits, which follow in 16 bytes.
inline void join_codes(const char* from, Codes& w0, Codes& w1) {
    const Codes low = _mm256_set1_epi8(15), above = _mm256_set1_epi8(48);
    const Codes left = _mm256_setr_epi32(4, 4, 4, 4, 2, 2, 2, 2);
    const Codes right = _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2);
    const Codes pairs = load_codes(from);
    const Codes high =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(from + 4 * WIDTH)));
    w0 = _mm256_or_si256(_mm256_and_si256(pairs, low),
                         _mm256_and_si256(_mm256_sllv_epi32(high, left), above));
    w1 = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(pairs, 4), low),
                         _mm256_and_si256(_mm256_srlv_epi32(high, right), above));
}
inline int least_of(const float* table) { return int(*std::min_element(table, table + 16)); }

#if defined(__AVXVNNI__)
struct Vnni {
    using X = int8_t;
    static constexpr int K = 4;
    static IntVec add(IntVec sum, Codes w, Codes x) {
        return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, w, x);
    }
};

struct Bytes : Vnni {
    static constexpr int64_t SIZE = K * NR;
    static constexpr int shift = 128;
    const Codes sign = _mm256_set1_epi8(-128);

    explicit Bytes(const float* = nullptr) {}
    void read(const char* from, Codes& w0, Codes& w1) const {
        w0 = _mm256_xor_si256(load_codes(from), sign);
        w1 = _mm256_xor_si256(load_codes(from + SIZE / 2), sign);
    }
};

struct Nibbles : Vnni {
    static constexpr int64_t SIZE = K * NR / 2;
    int shift;
    Codes values;

    explicit Nibbles(const float* table)
        : shift(-least_of(table)), values(load_values(table, shift)) {}
    void read(const char* from, Codes& w0, Codes& w1) const {
        choose_codes(values, load_codes(from), w0, w1);
    }
};

struct Sixes : Vnni {
    static constexpr int64_t SIZE = K * NR * 6 / 8;
    static constexpr int shift = 32;

    explicit Sixes(const float* = nullptr) {}
    void read(const char* from, Codes& w0, Codes& w1) const { join_codes(from, w0, w1); }
};
#else
// `vpmaddwd` multiplies 16-bit numbers. Weights are widened when they are read, x when it is rounded.
struct Bytes {
    using X = int16_t;
    static constexpr int K = 2, shift = 0;
    static constexpr int64_t SIZE = K * NR;

    explicit Bytes(const float* = nullptr) {}
    static IntVec add(IntVec sum, Codes w, Codes x) {
        return sum + (IntVec)_mm256_madd_epi16(w, x);
    }
    void read(const char* from, Codes& w0, Codes& w1) const {
        w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
        w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(from + SIZE / 2)));
    }
};

inline IntVec add_pairs(IntVec sum, Codes pairs) {
    return sum + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// Codes of 4 bits that choose from a table of whole numbers. `vpmaddubsw` multiplies unsigned by signed
// bytes, and adds two products in 16 bits, which must not overflow. If the numbers have a narrow range,
// they are shifted so that none is negative, and the products with FEW bytes of x fit in 16 bits.
// Otherwise x takes the sign of the weights, and two products are at most 2 * 128 * 127.
template <bool IS_NARROW>
struct NibblesOf {
    using X = int8_t;
    static constexpr int K = 4, FEW = 32, RANGE = 32767 / (FEW / 2 * 127);
    static constexpr int64_t SIZE = K * NR / 2;
    int shift;
    Codes values;

    explicit NibblesOf(const float* table)
        : shift(IS_NARROW ? -least_of(table) : 0), values(load_values(table, shift)) {}
    static bool fits(const float* table) {
        return *std::max_element(table, table + 16) - least_of(table) <= RANGE;
    }
    static IntVec add(IntVec sum, Codes w, Codes x) {
        return add_pairs(sum,
                         _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
    }
    void read(const char* from, Codes& w0, Codes& w1) const {
        choose_codes(values, load_codes(from), w0, w1);
    }
};
using Nibbles = NibblesOf<true>;
using WideNibbles = NibblesOf<false>;

struct Sixes {
    using X = int8_t;
    static constexpr int K = 4, FEW = 8, shift = 32;
    static constexpr int64_t SIZE = K * NR * 6 / 8;
    static_assert(FEW / 2 * 127 * 63 <= 32767);

    explicit Sixes(const float* = nullptr) {}
    void read(const char* from, Codes& w0, Codes& w1) const { join_codes(from, w0, w1); }
};
#endif

#else
inline int8x16_t load_values(const float* table) {
    int8_t numbers[16];
    for (int i = 0; i < 16; i++) numbers[i] = int8_t(table[i]);
    return vld1q_s8(numbers);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// 8 bytes of each of 4 outputs. An instruction multiplies 8 bytes of 2 outputs with 8 bytes of 2 rows of x.
struct Codes { int8x16_t pair[2]; };

struct Smmla {
    using X = int8_t;
    using Sum = int32x4_t;
    static constexpr int K = 8, shift = 0;
    static Sum add(Sum sum, int8x16_t x, int8x16_t w) { return vmmlaq_s32(sum, x, w); }
};

struct Bytes : Smmla {
    static constexpr int64_t SIZE = K * NR;

    explicit Bytes(const float* = nullptr) {}
    void read(const char* from, Codes& w0, Codes& w1) const {
        const int8_t* const p = (const int8_t*)from;
        w0 = {vld1q_s8(p), vld1q_s8(p + 16)}, w1 = {vld1q_s8(p + 32), vld1q_s8(p + 48)};
    }
};

// Codes of 4 bits that choose from a table of whole numbers.
struct Nibbles : Smmla {
    static constexpr int64_t SIZE = K * NR / 2;
    int8x16_t values;

    explicit Nibbles(const float* table) : values(load_values(table)) {}
    void read(const char* from, Codes& w0, Codes& w1) const {
        for (int i = 0; i < 2; i++) {
            const uint8x16_t pairs = vld1q_u8((const uint8_t*)from + 16 * i);
            w0.pair[i] = vqtbl1q_s8(values, vandq_u8(pairs, vdupq_n_u8(15)));
            w1.pair[i] = vqtbl1q_s8(values, vshrq_n_u8(pairs, 4));
        }
    }
};

struct BFloat16s : Bytes {
    using Sum = float32x4_t;
    static constexpr int K = 4;
    static Sum add(Sum sum, int8x16_t x, int8x16_t w) {
        return vbfmmlaq_f32(sum, vreinterpretq_bf16_s8(x), vreinterpretq_bf16_s8(w));
    }
};
#else
typedef int8x16_t Codes;
inline Codes repeat_codes(int32_t neighbours) {
    return vreinterpretq_s8_s32(vdupq_n_s32(neighbours));
}

struct Sdot {
    using X = int8_t;
    static constexpr int K = 4, shift = 0;
    // Not an IntVec, which GCC would copy before each sum.
    static int32x4_t add(int32x4_t sum, Codes w, Codes x) { return vdotq_s32(sum, w, x); }
};

struct Bytes : Sdot {
    static constexpr int64_t SIZE = K * NR;

    explicit Bytes(const float* = nullptr) {}
    void read(const char* from, Codes& w0, Codes& w1) const {
        w0 = vld1q_s8((const int8_t*)from), w1 = vld1q_s8((const int8_t*)from + SIZE / 2);
    }
};

// Codes of 4 bits that choose from a table of whole numbers.
struct Nibbles : Sdot {
    static constexpr int64_t SIZE = K * NR / 2;
    Codes values;

    explicit Nibbles(const float* table) : values(load_values(table)) {}
    void read(const char* from, Codes& w0, Codes& w1) const {
        const uint8x16_t pairs = vld1q_u8((const uint8_t*)from);
        w0 = vqtbl1q_s8(values, vandq_u8(pairs, vdupq_n_u8(15)));
        w1 = vqtbl1q_s8(values, vshrq_n_u8(pairs, 4));
    }
};
#endif
#endif

#if defined(__AVX512BF16__)
struct BFloat16s {
    static constexpr int K = 2;
    static constexpr int64_t SIZE = 2 * K * NR;
    static IntVec add(IntVec sum, __m512i w, __m512i x) {
        return (IntVec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
    }
    void read(const char* from, __m512i& w0, __m512i& w1) const {
        w0 = _mm512_loadu_si512(from), w1 = _mm512_loadu_si512(from + SIZE / 2);
    }
};
#endif

// Adds the products of weights and ROWS rows of x, STRIDE bytes apart, to the sums of both halves.
#if defined(__ARM_FEATURE_MATMUL_INT8)
// Turns a0 a1 a2 a3, b0 b1 b2 b3 into a0 a1 b0 b1, a2 a3 b2 b3, and back.
template <typename From, typename To>
inline void swap_pairs(const From& a, const From& b, To& first, To& second) {
    const int64x2_t pairs_of_a = (int64x2_t)a, pairs_of_b = (int64x2_t)b;
    first = (To)vzip1q_s64(pairs_of_a, pairs_of_b), second = (To)vzip2q_s64(pairs_of_a, pairs_of_b);
}

template <int ROWS, int64_t STRIDE, typename Weights>
inline void add_dots(IntVec (&sums)[ROWS][2], const void* x, int64_t bytes, const Weights& weights,
                     const char*& from, Prefetch& ahead) {
    const int64_t to_prefetch = Weights::K * ahead.step;
    const auto second = [](int row) { return std::min(row + 1, ROWS - 1); };  // the same row if there is no second
    typename Weights::Sum totals[(ROWS + 1) / 2][2][2];  // two rows by two outputs, of both halves
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row += 2)
        for (int half = 0; half < 2; half++)
            swap_pairs(sums[row][half], sums[second(row)][half], totals[row / 2][half][0],
                       totals[row / 2][half][1]);
    for (int64_t i = 0; i < bytes; i += 8, from += Weights::SIZE) {
        __builtin_prefetch(ahead.line, 0, 2);
        ahead.line += to_prefetch;
        Codes w0, w1;
        weights.read(from, w0, w1);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row += 2) {
            const int8_t* const p = (const int8_t*)x + i;
            const int8x16_t a =
                vcombine_s8(vld1_s8(p + row * STRIDE), vld1_s8(p + second(row) * STRIDE));
            auto& of_rows = totals[row / 2];
            for (int pair = 0; pair < 2; pair++) {
                of_rows[0][pair] = Weights::add(of_rows[0][pair], a, w0.pair[pair]);
                of_rows[1][pair] = Weights::add(of_rows[1][pair], a, w1.pair[pair]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row += 2)
        for (int half = 0; half < 2; half++)
            swap_pairs(totals[row / 2][half][0], totals[row / 2][half][1], sums[row][half],
                       sums[second(row)][half]);
}
#else
template <int ROWS, int64_t STRIDE, typename Weights>
inline void add_dots(IntVec (&sums)[ROWS][2], const void* x, int64_t bytes, const Weights& weights,
                     const char*& from, Prefetch& ahead) {
    const int64_t to_prefetch = Weights::K * ahead.step;
    using Sum = decltype(Weights::add(IntVec{}, Codes{}, Codes{}));
    Sum totals[ROWS][2];  // local: GCC may leave arguments in memory
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
        totals[row][0] = (Sum)sums[row][0], totals[row][1] = (Sum)sums[row][1];
    for (int64_t i = 0; i < bytes; i += 4, from += Weights::SIZE) {
        __builtin_prefetch(ahead.line, 0, 2);
        if (Weights::SIZE > LINE) __builtin_prefetch(ahead.line + LINE, 0, 2);
        ahead.line += to_prefetch;
        Codes w0, w1;
        weights.read(from, w0, w1);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            int32_t neighbours;
            memcpy(&neighbours, (const char*)x + row * STRIDE + i, 4);
            const Codes a = repeat_codes(neighbours);
            totals[row][0] = Weights::add(totals[row][0], w0, a);
            totals[row][1] = Weights::add(totals[row][1], w1, a);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
        sums[row][0] = (IntVec)totals[row][0], sums[row][1] = (IntVec)totals[row][1];
}
#endif

#if defined(ADDS_IN_16_BITS)
// The same for numbers so small that the products of FEW bytes of x fit in 16 bits.
template <int ROWS, int64_t STRIDE, typename Weights>
inline void add_few_dots(IntVec (&sums)[ROWS][2], const void* x, int64_t bytes,
                         const Weights& weights, const char*& from, Prefetch& ahead) {
    const int64_t to_prefetch = Weights::K * ahead.step;
    for (int64_t i = 0; i < bytes;) {
        Codes few[ROWS][2];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) few[row][0] = few[row][1] = Codes{};
        for (const int64_t end = std::min<int64_t>(i + Weights::FEW, bytes); i < end; i += 4) {
            __builtin_prefetch(ahead.line, 0, 2);
            ahead.line += to_prefetch;
            Codes w0, w1;
            weights.read(from, w0, w1);
            from += Weights::SIZE;
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                int32_t neighbours;
                memcpy(&neighbours, (const char*)x + row * STRIDE + i, 4);
                const Codes a = repeat_codes(neighbours);
                Codes sum0 = _mm256_add_epi16(few[row][0], _mm256_maddubs_epi16(w0, a));
                Codes sum1 = _mm256_add_epi16(few[row][1], _mm256_maddubs_epi16(w1, a));
                // Before the next row: GCC would compute all products first, and spill them to memory.
                asm volatile("" : "+x"(sum0), "+x"(sum1));
                few[row][0] = sum0, few[row][1] = sum1;
            }
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            sums[row][0] = add_pairs(sums[row][0], few[row][0]);
            sums[row][1] = add_pairs(sums[row][1], few[row][1]);
        }
    }
}
template <int ROWS, int64_t STRIDE>
inline void add_dots(IntVec (&sums)[ROWS][2], const void* x, int64_t bytes, const Nibbles& weights,
                     const char*& from, Prefetch& ahead) {
    add_few_dots<ROWS, STRIDE>(sums, x, bytes, weights, from, ahead);
}
template <int ROWS, int64_t STRIDE>
inline void add_dots(IntVec (&sums)[ROWS][2], const void* x, int64_t bytes, const Sixes& weights,
                     const char*& from, Prefetch& ahead) {
    add_few_dots<ROWS, STRIDE>(sums, x, bytes, weights, from, ahead);
}
#endif

// The unit of `Tiled` that multiplies by dot products.
struct Dots {
    struct Task {};
    // Each row has two sums; together they take all registers but a few.
    static constexpr int MR = WIDTH == 8 ? 6 : 12;
    static constexpr bool IS_UNSIGNED = Bytes::shift != 0;

    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return first_row_of(tile, tiles, rows);
    }
    static Pass pass_of(int rows, int terms) { return {std::min(rows, MR / terms), terms}; }

    template <typename W>
    static void add(Task&, int rows, const Terms& terms, const W* w, int64_t kc, void* y,
                    int64_t y_stride, bool is_first, Prefetch ahead) {
        const int64_t bytes = kc * sizeof(TermOf<W>);
        with_constant<MR>(rows, [&](auto number) {
            add_rows<number.value>(terms.x, w, bytes, (int32_t*)y, y_stride, is_first, ahead);
        });
    }

  private:
    template <int ROWS, typename W>
    static void add_rows(const char* x, const W* w, int64_t bytes, int32_t* y, int64_t y_stride,
                         bool is_first, Prefetch ahead) {
        IntVec sums[ROWS][2];
        const auto at = [&](int row, int half) { return y + row * y_stride + half * WIDTH; };
        const char* from = (const char*)w;
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++)
                sums[row][half] = is_first ? IntVec{} : *(const IntVec*)at(row, half);
#if defined(HAS_BFLOAT16_DOTS)
        if constexpr (std::is_same_v<W, BFloat16>)
            add_dots<ROWS, TERM_STRIDE>(sums, x, bytes, BFloat16s(), from, ahead);
#endif
        if constexpr (std::is_same_v<W, int8_t>) {
            for (int row = 0; row < ROWS; row++)
                sums[row][0] = sums[row][1] =
                    (IS_UNSIGNED ? begin_of(x + row * TERM_STRIDE) : 0) - IntVec{};
            add_dots<ROWS, TERM_STRIDE>(sums, x, bytes, Bytes(), from, ahead);
        }
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) *(IntVec*)at(row, half) = sums[row][half];
    }
};

// Weights in groups. A run is a part of a group along k. The sum of a run is multiplied by the group's
// scale and by the scale of x in this run: short runs make one term of x more exact.
template <typename W, int TERMS, typename Weights>
struct GroupedDots {
    using X = int8_t;
    struct Task {};
    static constexpr int MR = 6 / TERMS;  // sums in float32 take registers, too
    static constexpr int64_t MAX_KC = MAX_TERM, SHORTEST = 16, SHORT = 32, LONG = 128;
    static constexpr int64_t KC_UNIT = LONG;
    static constexpr int64_t ROW_BYTES = NR * BITS<W> / 8;
    // A term is followed by the start values of its runs' sums. A row ends with the sums of x in its runs,
    // for offsets, and with its scales.
    static constexpr int64_t RUNS = MAX_KC / SHORTEST;
    struct Term {
        typename Weights::X x[MAX_KC];
        int32_t begin[RUNS];
        float total[RUNS], scale[RUNS];
        float fill[LINE / 4];  // so that terms do not share cache lines
    };

    const uint8_t* packed;
    int64_t k;
    Groups groups;

    struct Cursor {
        const char* row;
        int64_t panel, start;
    };
    Cursor at(int64_t panel, int64_t start) const {
        const int64_t before = panel * padded(k, Weights::K) + start;
        return {(const char*)packed + before * ROW_BYTES, panel, start};
    }
    int64_t x_stride() const { return TERMS * sizeof(Term); }
    int64_t run() const {
        const auto divides = [&](int64_t size) { return groups.size % size == 0 || groups.size >= k; };
        if (!divides(SHORT)) return SHORTEST;
        return TERMS == 1 || !divides(LONG) ? SHORT : LONG;
    }
    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return first_row_of(tile, tiles, rows);
    }

    void copy(const float* from, int64_t kc, int8_t* to) const {
        Term* const terms = (Term*)to;
        const int shift = Weights(groups.table).shift;
        constexpr int STEP = std::max(WIDTH, Weights::K);  // x is padded to a multiple with zeros
        for (int64_t i = 0, number = 0; i < kc; i += run(), number++) {
            const int64_t count = std::min(run(), kc - i), end = (count + STEP - 1) / STEP * STEP;
            const float scale = to_terms(from + i, count, end, TERMS, terms->x + i, sizeof(Term));
            float total = 0, unit = scale;
            for (int term = 0; term < TERMS; term++, unit /= FINER) {
                const auto* x = terms[term].x;
                const int sum = std::accumulate(x + i, x + i + count, 0);
                terms[term].begin[number] = -shift * sum;
                total += unit * sum;
            }
            terms->total[number] = total, terms->scale[number] = scale;
        }
    }

    void multiply(Task&, const int8_t* x, int rows, Cursor weights, int64_t kc,
                  const OutputTile& out, Prefetch ahead) const {
        with_constant<MR>(rows, [&](auto number) {
            multiply_rows<number.value>((const Term*)x, weights, kc, out, ahead);
        });
    }

  private:
    template <int ROWS>
    __attribute__((noinline)) void multiply_rows(const Term* x, Cursor weights, int64_t kc, const OutputTile& out,
                       Prefetch ahead) const {
        const Weights values(groups.table);
        const int64_t run = this->run();
        Scales of(groups, weights.panel, k);
        const uint32_t size = uint32_t(std::min(groups.size, k));  // 32 bits, because each run divides by it
        const char* from = weights.row;
        Vec acc[ROWS][2] = {};
        for (int64_t i = 0, number = 0; i < kc; i += run, number++) {
            const uint32_t position = uint32_t(weights.start + i);
            of.read(position / size, position, i == 0);
            IntVec sums[ROWS * TERMS][2];
#pragma GCC unroll 16
            for (int row = 0; row < ROWS * TERMS; row++)
                sums[row][0] = sums[row][1] = x[row].begin[number] - IntVec{};
            constexpr int64_t X_SIZE = sizeof(typename Weights::X);
            const int64_t bytes = std::min(run, kc - i) * X_SIZE;
            add_dots<ROWS * TERMS, sizeof(Term)>(sums, x->x + i, bytes, values, from, ahead);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) {
                    Vec sum = to_floats(sums[row * TERMS + TERMS - 1][half]);
                    for (int term = TERMS - 2; term >= 0; term--)
                        sum = multiply_add(sum, splat(1 / FINER),
                                           to_floats(sums[row * TERMS + term][half]));
                    const Term& of_row = x[row * TERMS];
                    sum = sum * of_row.scale[number];
                    acc[row][half] = multiply_add(sum, of.scale[half], acc[row][half]);
                    const Vec total = splat(of_row.total[number]);
                    acc[row][half] = multiply_add(total, of.offset[half], acc[row][half]);
                }
        }
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) {
                const int count = out.columns - half * WIDTH;
                float* const y = out.y + row * out.stride + half * WIDTH;
                const Vec before = out.is_first_k ? Vec{} : load_up_to(y, count);
                store_up_to(y, acc[row][half] + before, count);
            }
        if (out.is_last_k && out.bias) epilogue(out, ROWS);
    }
};

// Calls `call` with a null pointer to the reader of packed weights of type W.
template <typename W, typename Call>
void with_weights(const float* table, const Call& call) {
    if constexpr (std::is_same_v<W, Int4>) {
#if defined(ADDS_IN_16_BITS)
        if (!Nibbles::fits(table)) return call((WideNibbles*)nullptr);
#endif
        call((Nibbles*)nullptr);
#if defined(HAS_SIXES)
    } else if constexpr (std::is_same_v<W, Int6>) {
        call((Sixes*)nullptr);
#endif
    } else {
        call((Bytes*)nullptr);
    }
}

}  // namespace

#endif
