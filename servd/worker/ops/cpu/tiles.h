// The micro-kernels of AMX: bfloat16 with sums in float32, and int8 with sums in int32.
//
// A tile register has 16 rows of 64 bytes. One instruction multiplies 16 rows of x, 64 bytes of k
// each, with 16 outputs' weights. It wants what is in four bytes of k side by side: a panel is
// [k / 2][NR][2] in bfloat16 and [k / 4][NR][4] in int8, and k is padded with zeros. The instruction
// takes as long for 1 row as for 16, and even so 1 row waits for the memory only: every number of
// rows goes through it, in the same order of sums, so that a row has the same bits alone and among
// others.
//
// x is float32. It is made a sum of terms of the weights' type, whose products are added: as many as
// make it exact, or fewer where less is asked for.

#pragma once

#include <type_traits>

#include "panels.h"

namespace {

// Numbers of neighbouring k that are side by side in weights of this type.
#if defined(__AMX_BF16__)
template <typename W>
constexpr int NEIGHBOURS = std::is_same_v<W, BFloat16> ? 2 : std::is_same_v<W, int8_t> ? 4 : 1;
#else
template <typename W>
constexpr int NEIGHBOURS = 1;
#endif
constexpr int TILE_ROWS = 16;

// k of a packed matrix.
inline int64_t padded(int64_t k, int neighbours) {
    const int64_t unit = TILE_ROWS * neighbours;
    return neighbours == 1 ? k : (k + unit - 1) / unit * unit;
}

// Where weight [row, i] of a matrix [n, k] is when it is packed.
inline int64_t place_of(int64_t row, int64_t i, int64_t k, int neighbours) {
    const int64_t panel = row / NR * NR * padded(k, neighbours), column = row % NR;
    return panel + (i / neighbours * NR + column) * neighbours + i % neighbours;
}

#if defined(__AMX_BF16__)
constexpr int TILE_BYTES = 64;  // of a row

// The shape of a thread's tile registers. Setting it takes as long as a dozen products.
class TileConfig {
  public:
    ~TileConfig() { _tile_release(); }

    // Registers 0 and 1 are outputs of 16 rows and 4 their x; 2, 3 and 5 those of the rows after.
    void set_rows(int rows) {
        if (rows == this->rows) return;
        this->rows = rows;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t num_rows[16] = {};
        } config;
        for (const int tile : {0, 1, 2, 3, 4, 5, 6, 7}) {
            const bool is_weights = tile >= 6, is_second = tile == 2 || tile == 3 || tile == 5;
            const int height = is_weights ? TILE_ROWS : is_second ? rows - TILE_ROWS : rows;
            config.num_rows[tile] = uint8_t(std::clamp(height, 0, TILE_ROWS));
            config.row_bytes[tile] = config.num_rows[tile] ? TILE_BYTES : 0;
        }
        // _tile_loadconfig of GCC 12 says that it reads 8 bytes; the others could be left unwritten.
        asm volatile("ldtilecfg %0" ::"m"(config));
    }

  private:
    int rows = 0;
};

// Rows of x in terms: each `stride` bytes after the one before, its terms `term_stride` apart.
struct Terms {
    const char* x;
    int64_t stride, term_stride;
    int count;
};

// y [rows, NR], float or int32, plus x times a block of a panel; `bytes` of a row of x are as many
// as tiles have. `IS_HIGH`: more than 16 rows.
template <typename W, bool IS_HIGH>
void add_products(const Terms& terms, const char* w, int64_t bytes, void* y, int64_t y_stride,
                  bool is_first, Prefetch ahead) {
    const int64_t y_bytes = y_stride * 4, w_bytes = NR * 4, half = TILE_BYTES;
    char *const top = (char*)y, *const below = top + TILE_ROWS * y_bytes;
    const int64_t to_prefetch = TILE_ROWS * NEIGHBOURS<W> * ahead.step;
    // The instructions are statements of their own, and GCC does not know that they read memory.
    asm volatile("" ::: "memory");
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (IS_HIGH) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, top, y_bytes);
        _tile_loadd(1, top + half, y_bytes);
        if (IS_HIGH) {
            _tile_loadd(2, below, y_bytes);
            _tile_loadd(3, below + half, y_bytes);
        }
    }
    for (int64_t i = 0; i < bytes; i += TILE_BYTES, w += TILE_ROWS * w_bytes) {
        for (int64_t line = 0; line < to_prefetch; line += LINE)
            __builtin_prefetch(ahead.line + line, 0, 2);
        ahead.line += to_prefetch;
        _tile_loadd(6, w, w_bytes);
        _tile_loadd(7, w + half, w_bytes);
        for (int term = 0; term < terms.count; term++) {
            const char* from = terms.x + term * terms.term_stride + i;
            _tile_loadd(4, from, terms.stride);
            if (IS_HIGH) _tile_loadd(5, from + TILE_ROWS * terms.stride, terms.stride);
            if constexpr (std::is_same_v<W, BFloat16>) {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (IS_HIGH) {
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            } else {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                if (IS_HIGH) {
                    _tile_dpbssd(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
            }
        }
    }
    _tile_stored(0, top, y_bytes);
    _tile_stored(1, top + half, y_bytes);
    if (IS_HIGH) {
        _tile_stored(2, below, y_bytes);
        _tile_stored(3, below + half, y_bytes);
    }
    asm volatile("" ::: "memory");
}

// What the loop over tiles (matrix.cpp) knows of a product by tiles of this type.
template <typename W>
struct Tiled {
    using X = W;
    using Task = TileConfig;
    static constexpr int MR = 2 * TILE_ROWS;
    // A panel's block, 32 KiB, stays in the first-level cache while the tiles of a chunk go by; the
    // sum of so many products of int8 is exact in float32, too.
    static constexpr int64_t MAX_KC = 1024 / sizeof(W), KC_UNIT = TILE_BYTES / sizeof(W);
    static constexpr int64_t ROW_BYTES = NR * sizeof(W);

    const W* packed;
    int64_t k;
    int terms;

    struct Cursor {
        const W* row;
    };
    Cursor at(int64_t panel, int64_t start) const {
        return {packed + (panel * padded(k, NEIGHBOURS<W>) + start) * NR};
    }
    // A line more for each term, so that the rows of a tile are not on the same lines of the cache.
    // With int8, the first of them begins with the scale of the row's block.
    static constexpr int64_t TERM_STRIDE = MAX_KC + KC_UNIT;
    int64_t x_stride() const { return terms * TERM_STRIDE; }
    static float scale_of(const W* x) {
        float scale;
        memcpy(&scale, x + MAX_KC, sizeof scale);
        return scale;
    }
    static int64_t first_row(int64_t tile, int64_t, int64_t rows) {
        return std::min(tile * MR, rows);
    }
    static __m512 load_block(const float* from, int64_t i, int64_t kc) {  // 0 beyond its end
        const int64_t count = std::clamp<int64_t>(kc - i, 0, WIDTH);
        return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from + i);
    }
    void copy(const float* from, int64_t kc, W* to) const;
    void multiply(TileConfig& config, const W* x, int rows, Cursor weights, int64_t kc,
                  const OutputTile& out, Prefetch ahead) const;

    void add(int rows, const W* x, int64_t stride, int count, Cursor weights, int64_t kc, void* y,
             int64_t y_stride, bool is_first, Prefetch ahead) const {
        const Terms given{(const char*)x, int64_t(stride * sizeof(W)),
                          int64_t(TERM_STRIDE * sizeof(W)), count};
        const char* w = (const char*)weights.row;
        const int64_t bytes = kc * sizeof(W);
        if (rows > TILE_ROWS) add_products<W, true>(given, w, bytes, y, y_stride, is_first, ahead);
        else add_products<W, false>(given, w, bytes, y, y_stride, is_first, ahead);
    }
};

// ---- bfloat16: one term has an error of up to 2^-8 of x, two of 2^-17. Three have none: float32 has
// 24 bits, and they 8 each.

template <>
void Tiled<BFloat16>::copy(const float* from, int64_t kc, BFloat16* to) const {
    for (int64_t i = 0; i < padded(kc, NEIGHBOURS<BFloat16>); i += WIDTH) {
        __m512 rest = load_block(from, i, kc);
        for (int term = 0; term < terms; term++) {
            const __m256i bits = (__m256i)_mm512_cvtneps_pbh(rest);
            _mm256_storeu_si256((__m256i*)(to + term * TERM_STRIDE + i), bits);
            const __m512 rounded = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
            // Of infinity, infinity is the first term and the others are 0.
            const __mmask16 same = _mm512_cmp_ps_mask(rest, rounded, _CMP_EQ_OQ);
            rest = _mm512_maskz_sub_ps(__mmask16(~same), rest, rounded);
        }
    }
}

template <>
void Tiled<BFloat16>::multiply(TileConfig& config, const BFloat16* x, int rows, Cursor weights,
                               int64_t kc, const OutputTile& out, Prefetch ahead) const {
    config.set_rows(rows);
    alignas(64) float edge[MR * NR];  // tiles are stored whole
    const bool is_whole = out.columns == NR;
    float* const y = is_whole ? out.y : edge;
    const int64_t stride = is_whole ? out.stride : NR;
    for (int row = 0; !is_whole && !out.is_first_k && row < rows; row++)
        std::copy_n(out.y + row * out.stride, out.columns, y + row * stride);
    add(rows, x, x_stride(), terms, weights, kc, y, stride, out.is_first_k, ahead);
    for (int row = 0; !is_whole && row < rows; row++)
        std::copy_n(y + row * stride, out.columns, out.y + row * out.stride);
    if (out.is_last_k && (out.scale || out.bias)) epilogue(out, rows);
}

// ---- int8: x over the scale of a row's block, which makes the largest 127. Each term is what the
// ones before leave, 254 times as large; three have an error of 2^-24 of the largest.

constexpr float FINER = 254;

template <>
void Tiled<int8_t>::copy(const float* from, int64_t kc, int8_t* to) const {
    const int64_t end = padded(kc, NEIGHBOURS<int8_t>);
    __m512 largest = _mm512_setzero_ps(), zero = largest;
    for (int64_t i = 0; i < end; i += WIDTH) {
        const __m512 x = load_block(from, i, kc);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        zero = _mm512_fmadd_ps(x, _mm512_setzero_ps(), zero);  // NaN of NaN and infinity
    }
    const float size = _mm512_reduce_max_ps(largest), scale = size / 127 + sum((Vec)zero);
    // What is smaller counts as 0: the factor would be infinite.
    const __m512 factor = _mm512_set1_ps(size > 1e-36f ? 127 / size : 0);
    for (int64_t i = 0; i < end; i += WIDTH) {
        __m512 rest = _mm512_mul_ps(load_block(from, i, kc), factor);
        for (int term = 0; term < terms; term++) {
            const __m512i rounded = _mm512_cvtps_epi32(rest);
            const __m128i codes = _mm512_cvtsepi32_epi8(rounded);
            _mm_storeu_si128((__m128i*)(to + term * TERM_STRIDE + i), codes);
            rest = _mm512_sub_ps(rest, _mm512_cvtepi32_ps(rounded));
            rest = _mm512_mul_ps(rest, _mm512_set1_ps(FINER));
        }
    }
    memcpy(to + MAX_KC, &scale, sizeof scale);
}

// One function for all numbers of rows, as `epilogue` is.
__attribute__((noinline)) void add_sums(const int32_t* sums, float scale, bool is_first, float* y,
                                        int columns) {
    for (int half = 0; half < 2; half++) {
        const int count = columns - half * WIDTH;
        const __m512i sum = _mm512_loadu_si512(sums + half * WIDTH);
        const Vec before = is_first ? Vec{} : load_up_to(y + half * WIDTH, count);
        const Vec product = (Vec)_mm512_cvtepi32_ps(sum) * scale;
        store_up_to(y + half * WIDTH, before + product, count);
    }
}

template <>
void Tiled<int8_t>::multiply(TileConfig& config, const int8_t* x, int rows, Cursor weights,
                             int64_t kc, const OutputTile& out, Prefetch ahead) const {
    alignas(64) int32_t sums[MR * NR];
    // The terms of few rows go through the tiles as rows of their own, all at once.
    const int at_once = rows * terms <= MR ? terms : 1;
    const int64_t stride = at_once == 1 ? x_stride() : TERM_STRIDE;
    config.set_rows(rows * at_once);
    float unit = 1;
    for (int term = 0; term < terms; term++, unit /= FINER) {
        const int8_t* from = x + term * TERM_STRIDE;
        if (term % at_once == 0)
            add(rows * at_once, from, stride, 1, weights, kc, sums, NR, true, ahead);
        ahead.step = 0;
        for (int row = 0; row < rows; row++)
            add_sums(sums + (row * at_once + term % at_once) * NR,
                     scale_of(x + row * x_stride()) * unit, out.is_first_k && term == 0,
                     out.y + row * out.stride, out.columns);
    }
    if (out.is_last_k && (out.scale || out.bias)) epilogue(out, rows);
}
#endif

// `terms` is for tiles only.
template <typename W>
auto matrix_of(const W* packed, int64_t k, int terms) {
#if defined(__AMX_BF16__)
    if constexpr (NEIGHBOURS<W> > 1) return Tiled<W>{packed, k, terms};
    else
#endif
        return Plain<W>{{}, packed, k};
}

}  // namespace
