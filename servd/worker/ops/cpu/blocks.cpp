// Unpacks blocks of GGUF files into codes, scales and offsets.
//
// A weight is code * scale + offset, and its code may be an index into a table: see
// ../../quantization/gguf.py. ggml-common.h of ggml defines the layouts.

#include <type_traits>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Adds numbers of BITS bits to codes, shifted left by `shift`. Each RUN bytes have RUN numbers in their
// lowest bits, the next RUN numbers in the bits above, and so on.
template <int BITS, int RUN, int BYTES>
void add_bits(const uint8_t* from, int shift, uint8_t* codes) {
    for (int run = 0; run < BYTES; run += RUN)
        for (int bit = 0; bit < 8; bit += BITS)
            for (int i = 0; i < RUN; i++)
                *codes++ |= (from[run + i] >> bit & ((1 << BITS) - 1)) << shift;
}

// Adds the fifth bits of 32 numbers: the bit of number i is bit i of the 4 bytes.
void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

void subtract(int number, int count, uint8_t* codes) {
    for (int i = 0; i < count; i++) codes[i] = uint8_t(codes[i] - number);
}

Float16 half_at(const uint8_t* from) {
    Float16 half;
    memcpy(&half, from, sizeof half);
    return half;
}

// The types of blocks: SIZE codes in BYTES bytes, and GROUPS scales and offsets. Scales and offsets of int8
// are multiplied by a factor of the block. `unpack` adds to codes that are 0.

struct Q4_0 {
    using Scale = Float16;
    static constexpr bool HAS_OFFSET = false;
    static constexpr int SIZE = 32, BYTES = 18, GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale*) {
        *scale = half_at(block);
        add_bits<4, 16, 16>(block + 2, 0, codes);
    }
};

struct Q4_1 {
    using Scale = Float16;
    static constexpr bool HAS_OFFSET = true;
    static constexpr int SIZE = 32, BYTES = 20, GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale* offset) {
        *scale = half_at(block), *offset = half_at(block + 2);
        add_bits<4, 16, 16>(block + 4, 0, codes);
    }
};

struct Q5_0 {
    using Scale = Float16;
    static constexpr bool HAS_OFFSET = false;
    static constexpr int SIZE = 32, BYTES = 22, GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale*) {
        *scale = half_at(block);
        add_bits<4, 16, 16>(block + 6, 0, codes);
        add_fifth_bits(block + 2, codes);
        subtract(16, SIZE, codes);
    }
};

struct Q5_1 {
    using Scale = Float16;
    static constexpr bool HAS_OFFSET = true;
    static constexpr int SIZE = 32, BYTES = 24, GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale* offset) {
        *scale = half_at(block), *offset = half_at(block + 2);
        add_bits<4, 16, 16>(block + 8, 0, codes);
        add_fifth_bits(block + 4, codes);
    }
};

struct Q8_0 {
    using Scale = Float16;
    static constexpr bool HAS_OFFSET = false;
    static constexpr int SIZE = 32, BYTES = 34, GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale*) {
        *scale = half_at(block);
        std::copy_n(block + 2, SIZE, codes);
    }
};

// Types with factors have two at the byte FACTORS: the factor of scales, and the factor of offsets, which
// are subtracted.

struct Q2_K {
    using Scale = int8_t;
    static constexpr bool HAS_OFFSET = true;
    static constexpr int SIZE = 256, BYTES = 84, GROUPS = 16, FACTORS = 80;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale* offset) {
        for (int group = 0; group < GROUPS; group++) {
            scale[group] = int8_t(block[group] & 15);
            offset[group] = int8_t(block[group] >> 4);
        }
        add_bits<2, 32, 64>(block + 16, 0, codes);
    }
};

struct Q3_K {
    using Scale = int8_t;
    static constexpr bool HAS_OFFSET = false;
    static constexpr int SIZE = 256, BYTES = 110, GROUPS = 16, FACTORS = 108;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale*) {
        uint8_t numbers[GROUPS] = {};
        add_bits<4, 8, 8>(block + 96, 0, numbers);
        add_bits<2, 4, 4>(block + 104, 4, numbers);
        for (int group = 0; group < GROUPS; group++) scale[group] = int8_t(numbers[group] - 32);
        add_bits<2, 32, 64>(block + 32, 0, codes);
        add_bits<1, 32, 32>(block, 2, codes);
    }
};

// Scales and offsets of Q4_K and Q5_K: 8 each, of 6 bits, in 12 bytes.
void unpack_scales(const uint8_t* bytes, int8_t* scale, int8_t* offset) {
    const uint8_t *first = bytes, *second = bytes + 4, *rest = bytes + 8;
    for (int i = 0; i < 4; i++) {
        scale[i] = int8_t(first[i] & 63);
        scale[i + 4] = int8_t((rest[i] & 15) | (first[i] >> 2 & 48));
        offset[i] = int8_t(second[i] & 63);
        offset[i + 4] = int8_t(rest[i] >> 4 | (second[i] >> 2 & 48));
    }
}

struct Q4_K {
    using Scale = int8_t;
    static constexpr bool HAS_OFFSET = true;
    static constexpr int SIZE = 256, BYTES = 144, GROUPS = 8, FACTORS = 0;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale* offset) {
        unpack_scales(block + 4, scale, offset);
        add_bits<4, 32, 128>(block + 16, 0, codes);
    }
};

struct Q5_K {
    using Scale = int8_t;
    static constexpr bool HAS_OFFSET = true;
    static constexpr int SIZE = 256, BYTES = 176, GROUPS = 8, FACTORS = 0;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale* offset) {
        unpack_scales(block + 4, scale, offset);
        add_bits<4, 32, 128>(block + 48, 0, codes);
        add_bits<1, 32, 32>(block + 16, 4, codes);
    }
};

struct Q6_K {
    using Scale = int8_t;
    static constexpr bool HAS_OFFSET = false;
    static constexpr int SIZE = 256, BYTES = 210, GROUPS = 16, FACTORS = 208;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale*) {
        memcpy(scale, block + 192, GROUPS);
        add_bits<4, 64, 128>(block, 0, codes);
        add_bits<2, 32, 64>(block + 128, 4, codes);
        subtract(32, SIZE, codes);
    }
};

struct MXFP4 {  // its table has twice the values
    using Scale = float;
    static constexpr bool HAS_OFFSET = false;
    static constexpr int SIZE = 32, BYTES = 17, GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* codes, Scale* scale, Scale*) {
        const uint32_t exponent = block[0];  // of 2, plus 128
        const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23;
        memcpy(scale, &bits, sizeof bits);
        add_bits<4, 16, 16>(block + 1, 0, codes);
    }
};

// Calls `call` with a block of the type that has this number in GGUF.
template <typename Call>
void with_block(int number, const Call& call) {
    switch (number) {
    case 2: return call(Q4_0{});
    case 3: return call(Q4_1{});
    case 6: return call(Q5_0{});
    case 7: return call(Q5_1{});
    case 8: return call(Q8_0{});
    case 10: return call(Q2_K{});
    case 11: return call(Q3_K{});
    case 12: return call(Q4_K{});
    case 13: return call(Q5_K{});
    case 14: return call(Q6_K{});
    case 20: return call(Q4_0{});  // IQ4_NL: with another table
    case 39: return call(MXFP4{});
    }
}

}  // namespace

namespace kernels {

// Unpacks blocks of a type into codes [rows, num_blocks * size], a byte each, and into scales and offsets
// [rows, num_blocks * groups]; offsets may be null. A block has `size` weights in `bytes`. Factors have an
// entry for the scales of each block, then one for its offsets if there are any.
void unpack_blocks(int type, const void* blocks, int64_t rows, int64_t num_blocks, int64_t bytes,
                   int64_t size, int64_t groups, int code_type, void* codes, int scale_type,
                   void* scale, void* offset, void* factors) {
    with_block(type, [&](auto block) {
        using Block = decltype(block);
        using Scale = typename Block::Scale;
        check_at_most("bytes of a block", Block::BYTES, bytes);
        check_at_most("weights of a block", Block::SIZE, size);
        check_at_most("groups of a block", Block::GROUPS, groups);
        constexpr bool HAS_FACTORS = std::is_same_v<Scale, int8_t>;
        constexpr Type FLOAT_TYPE = std::is_same_v<Scale, float> ? FLOAT32 : FLOAT16;
        if (scale_type != (HAS_FACTORS ? INT8 : FLOAT_TYPE) || (HAS_FACTORS && !factors) ||
            (Block::HAS_OFFSET && !offset))
            throw std::out_of_range("scales are of another type, or offsets or factors are missing");
        parallel_for(rows, 8, [&](int64_t row) {
            for (int64_t i = row * num_blocks; i < (row + 1) * num_blocks; i++) {
                uint8_t* const to = (uint8_t*)codes + i * Block::SIZE;
                std::fill_n(to, Block::SIZE, 0);
                Scale* const offsets = offset ? (Scale*)offset + i * Block::GROUPS : nullptr;
                const uint8_t* const block = (const uint8_t*)blocks + i * Block::BYTES;
                Block::unpack(block, to, (Scale*)scale + i * Block::GROUPS, offsets);
                if constexpr (HAS_FACTORS) {
                    Float16* const of_block = (Float16*)factors + i * (1 + Block::HAS_OFFSET);
                    of_block[0] = half_at(block + Block::FACTORS);
                    if (!Block::HAS_OFFSET) continue;
                    of_block[1].bits = half_at(block + Block::FACTORS + 2).bits ^ 0x8000;
                }
            }
        });
    });
}

}  // namespace kernels
