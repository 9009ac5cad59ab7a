// The table of kernels, and graphs: calls of kernels as data.
//
// Python reads names and parameters from the table and checks each call against them (../native.py).
// A call from Python is a graph of one call. ../../runner/cpu_graph_runner.py records longer graphs
// and runs them many times.

#include <array>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <tuple>
#include <type_traits>

#include "checks.h"
#include "kernels.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

struct Kernel {
    const char* name;
    const char* types;  // a letter for each argument
    const char* parameters;  // their names, and what an address must point to
    const int64_t* (*call)(const int64_t* words);  // returns the end of the arguments
};

enum Status { DONE = 0, BAD_INDEX = 1, OUT_OF_MEMORY = 2 };

// Numbers have the letters of Python's struct module. An address has the capital letter of its
// elements: V if they depend on another argument, A if they are addresses too.
template <typename T>
constexpr char letter_of() {
    if constexpr (std::is_pointer_v<T>) {
        using Element = std::remove_cv_t<std::remove_pointer_t<T>>;
        if constexpr (std::is_pointer_v<Element>) return 'A';
        if constexpr (std::is_void_v<Element>) return 'V';
        if constexpr (std::is_same_v<Element, double>) return 'D';
        if constexpr (std::is_same_v<Element, int32_t>) return 'I';
        if constexpr (std::is_same_v<Element, int64_t>) return 'Q';
        if constexpr (std::is_same_v<Element, float>) return 'F';
    } else {
        static_assert(std::is_same_v<T, float> || std::is_same_v<T, int> ||
                      std::is_same_v<T, int64_t>);
        return std::is_same_v<T, float> ? 'f' : std::is_same_v<T, int> ? 'i' : 'q';
    }
}

// How a parameter of type T is read from words. An argument takes a word, and lies at its beginning.
template <typename T>
struct Parameter {
    static constexpr std::array<char, 1> TYPES = {letter_of<T>()};

    static T read(const int64_t*& words) {
        T argument;
        memcpy(&argument, words++, sizeof argument);
        return argument;
    }
};

// A struct takes a word for each of its members.
template <typename T, typename... Members>
struct Struct {
    static constexpr std::array<char, sizeof...(Members)> TYPES = {letter_of<Members>()...};

    static T read(const int64_t*& words) {
        return T{Parameter<Members>::read(words)...};  // braces: from left to right
    }
};

using Address = const void*;
using Table = const void* const*;
template <>
struct Parameter<PackedWeight>
    : Struct<PackedWeight, int, int, Address, const float*, int, Address, Address, Address,
             int64_t, int64_t, int64_t> {};
template <>
struct Parameter<PackedExperts>
    : Struct<PackedExperts, int, int, int64_t, Table, const float*, int, Table, Table, Table,
             int64_t, int64_t, int64_t> {};
using Numbers = const int64_t*;
template <>
struct Parameter<StateRows>
    : Struct<StateRows, float*, int64_t, int64_t, Numbers, Numbers, Numbers, int64_t, float*,
             int64_t, int64_t, Numbers, int64_t> {};

template <auto FUNCTION>
struct Adapter;

template <typename... T, void (*FUNCTION)(T...)>
struct Adapter<FUNCTION> {
    static constexpr auto join_types() {
        std::array<char, (Parameter<T>::TYPES.size() + ... + 1)> types{};
        size_t end = 0;
        const auto append = [&](const auto& letters) {
            for (const char letter : letters) types[end++] = letter;
        };
        (append(Parameter<T>::TYPES), ...);
        return types;
    }
    static constexpr auto TYPES = join_types();

    static const int64_t* call(const int64_t* words) {
        std::apply(FUNCTION, std::tuple<T...>{Parameter<T>::read(words)...});
        return words;
    }
};

}  // namespace

// The members of a PackedWeight.
#define WEIGHT \
    "type, terms, packed<type>[packed_size(type, terms, n, k)], table?[16], scale_type, " \
    "scale?<scale_type>[packed_size(scale_type, 0, n, -(-k // group_size)) if group_size else n], " \
    "offset?<scale_type>[packed_size(scale_type, 0, n, -(-k // group_size))], " \
    "factors?<2>[packed_size(2, 0, n, -(-k // 256) * (1 + (offset is not None)))], " \
    "group_size, n, k"

// The members of StateRows, with states of `size` numbers.
#define STATE_ROWS(size) \
    "states{(num_slots - 1) * state_stride + " size "}, num_slots, state_stride, slots[num_rows], " \
    "query_lens[num_rows], seq_lens[num_rows], num_rows, " \
    "checkpoints?{(num_checkpoints - 1) * checkpoint_stride + " size "}, num_checkpoints, " \
    "checkpoint_stride, saves[2 * num_saves], num_saves"

#define KERNEL(name, parameters) \
    {#name, Adapter<kernels::name>::TYPES.data(), parameters, Adapter<kernels::name>::call}

extern "C" {

// The parameters of each kernel, in its order. An address states the elements there: [number] if
// they must be contiguous, {number} up to the last element that is used otherwise. It also has the
// <type> of the elements if the kernel does not state it, ? if it may be null, and ?other if it may be
// null only where another parameter is. `Library.encode` in ../native.py checks each call against them.
extern const Kernel servd_kernel_table[] = {
    KERNEL(set_threads, "number"),
    KERNEL(pack,
           "type, terms, weight<type>{n * k and (n - 1) * row_stride + (k - 1) * column_stride + 1}, "
           "row_stride, column_stride, n, k, packed<type>[packed_size(type, terms, n, k)]"),
    KERNEL(matmul, "x[rows * k], rows, " WEIGHT ", bias?[n], y{(rows - 1) * y_stride + n}, y_stride"),
    KERNEL(matmul_experts,
           "x[x_rows * k], x_rows, index?[rows], starts[num_experts + 1], type, terms, num_experts, "
           "packed[num_experts], table?[16], scale_type, scales?[num_experts], "
           "offsets?[num_experts], factors?[num_experts], group_size, n, k, y[rows * n], rows"),
    KERNEL(attend_all,
           "type, q[sequences * n * num_heads * head_dim], k[sequences * n * num_heads * head_dim], "
           "v[sequences * n * num_heads * head_dim], sequences, n, num_heads, head_dim, scale, "
           "out[sequences * n * num_heads * head_dim]"),
    KERNEL(gather_rows, WEIGHT ", index[count], count, out[count * k]"),
    KERNEL(round_rows, "x[rows * size], rows, size, codes<3>[rows * size], scale[rows]"),
    KERNEL(round_groups,
           "x[rows * size], rows, size, importance?[size], codes<4>[rows * size], "
           "scale<1>[rows * -(-size // 32)], offset<1>[rows * -(-size // 32)]"),
    KERNEL(unpack_blocks,
           "type, blocks<4>[rows * num_blocks * bytes], rows, num_blocks, bytes, size, groups, "
           "code_type, codes<code_type>[rows * num_blocks * size], scale_type, "
           "scale<scale_type>[rows * num_blocks * groups], "
           "offset?<scale_type>[rows * num_blocks * groups], "
           "factors?<2>[rows * num_blocks * (1 + (offset is not None))]"),
    KERNEL(add_low_rank,
           "type, x[rows * k], rows, k, a<type>[num_adapter_slots * k * width], width, "
           "b<type>[num_adapter_slots * max_rank * n], max_rank, ranks[num_adapter_slots * parts], "
           "part_ends[parts], num_adapter_slots, parts, adapter_slots[rows], y[rows * n], n"),
    KERNEL(write_kv,
           "type, q{(num_tokens - 1) * q_stride + num_heads * head_dim}, q_stride, "
           "k{(num_tokens - 1) * k_stride + kv_heads * head_dim}, k_stride, "
           "v{(num_tokens - 1) * v_stride + kv_heads * head_dim}, v_stride, "
           "q_out?cos[num_tokens * num_heads * head_dim], cos?[num_tokens * pairs], "
           "sin?cos[num_tokens * pairs], pairs, "
           "keys<type>[num_blocks * kv_heads * block_size * row_size(type, head_dim)], "
           "values<type>[num_blocks * kv_heads * block_size * row_size(type, head_dim)], "
           "num_blocks, slot_mapping[num_tokens], num_tokens, num_heads, kv_heads, head_dim, "
           "block_size"),
    KERNEL(attend,
           "type, q{(num_tokens - 1) * q_stride + num_heads * head_dim}, q_stride, num_tokens, "
           "keys<type>[num_blocks * kv_heads * block_size * row_size(type, head_dim)], "
           "values?<type>[num_blocks * kv_heads * block_size * row_size(type, value_dim)], "
           "num_blocks, block_tables[num_rows * max_blocks], max_blocks, query_lens[num_rows], "
           "seq_lens[num_rows], num_rows, num_heads, kv_heads, head_dim, value_dim, block_size, "
           "window, causal, tails?[num_rows * tail_size], tail_size, scale, soft_cap, "
           "sinks?[num_heads], bidirectional?[num_rows], "
           "out[num_tokens * num_heads * value_dim]"),
    KERNEL(embed, "table[num_rows * size], num_rows, size, index[count], count, out[count * size]"),
    KERNEL(rotation,
           "positions[count], count, inv_freq[size], size, magnitude, cos[count * size], "
           "sin[count * size]"),
    KERNEL(norm,
           "centered, x{(rows // per_stride - 1) * stride + (per_stride - 1) * row_stride + size}, "
           "per_stride, stride, row_stride, residual?[rows * size], weight[size], bias?[size], eps, out[rows * size], "
           "sums?residual[rows * size], rows, size"),
    KERNEL(scale, "x[count], factor, residual?[count], count, out[count]"),
    KERNEL(spread, "x[rows * size], rows, size, is_inverse, out[rows * size]"),
    KERNEL(activate, "x[rows * size * (1 + gated)], rows, size, function, gated, out[rows * size]"),
    KERNEL(route,
           "logits[rows * num_experts], bias?[num_experts], rows, num_experts, top_k, renormalize, "
           "tokens[rows * top_k], starts[num_experts + 1], places[rows * top_k], "
           "weights[rows * top_k]"),
    KERNEL(combine,
           "y[num_pairs * size], num_pairs, places[rows * top_k], weights[rows * top_k], rows, "
           "top_k, size, out[rows * size]"),
    KERNEL(convolve,
           "x{(num_tokens - 1) * x_stride + channels}, x_stride, num_tokens, channels, "
           "weight[size * channels], size, bias?[channels], silu, "
           "before?{(num_tokens - 1) * before_stride + channels}, before_stride, "
           "after?{(num_tokens - 1) * after_stride + channels}, after_stride, "
           STATE_ROWS("(size - 1) * channels") ", out[num_tokens * channels]"),
    KERNEL(linear_scan,
           "q{(num_tokens - 1) * q_stride + groups * key_dim}, q_stride, "
           "k{(num_tokens - 1) * k_stride + groups * key_dim}, k_stride, "
           "v{(num_tokens - 1) * v_stride + heads * value_dim}, v_stride, "
           "a{(num_tokens - 1) * a_stride + heads}, a_stride, dt_bias[heads], A[heads], "
           "b?{(num_tokens - 1) * b_stride + heads}, b_stride, D?[heads], min_dt, max_dt, "
           "num_tokens, heads, groups, key_dim, value_dim, "
           STATE_ROWS("heads * key_dim * value_dim") ", out[num_tokens * heads * value_dim]"),
    KERNEL(gated_norm,
           "x{(rows // x_per_stride - 1) * x_stride + (x_per_stride - 1) * x_row_stride + size}, "
           "x_per_stride, x_stride, x_row_stride, "
           "gate{(rows // per_stride - 1) * stride + (per_stride - 1) * row_stride + size}, "
           "per_stride, stride, row_stride, weight[weight_rows * size], weight_rows, eps, "
           "gates_first, rows, size, out[rows * size]"),
    KERNEL(multiply_sigmoid,
           "x[rows * size], "
           "gate{(rows // per_stride - 1) * stride + (per_stride - 1) * row_stride + gate_size}, "
           "per_stride, stride, row_stride, gate_size, rows, size, out[rows * size]"),
    KERNEL(edit_logits,
           "logits{(rows - 1) * stride + vocab}, stride, bitmask?[bitmask_rows * words], "
           "bitmask_rows, words, slots?[rows], num_slots, counts?slots[num_slots * vocab], "
           "factors?slots[num_slots * 3], rows, vocab, best[rows]"),
    KERNEL(choose,
           "logits{(rows - 1) * stride + vocab}, stride, rows, vocab, slots[rows], columns[rows], "
           "token_ids[num_slots * num_columns], num_slots, num_columns, chosen[rows]"),
    KERNEL(to_weights,
           "logits{(rows - 1) * stride + vocab}, stride, peaks[rows], temperatures[rows], rows, "
           "vocab, weights[rows * vocab]"),
    KERNEL(filter_top_k_top_p,
           "weights[rows * vocab], lowest[rows], top_k[rows], top_p[rows], rows, vocab, "
           "limits[rows]"),
    KERNEL(draw,
           "weights[rows * vocab], lowest[rows], seeds[rows], positions[rows], rows, vocab, "
           "token_ids[rows]"),
    KERNEL(score,
           "logits{(rows - 1) * stride + vocab}, stride, token_ids[rows], rows, vocab, "
           "log_totals[rows], ranks[rows]"),
    KERNEL(begin_decode,
           "step[9 * num_tokens], num_tokens, seq_lens[num_tokens], "
           "token_ids[num_slots * num_columns], num_slots, num_columns, num_computed[num_slots], "
           "tables[num_rows * num_blocks], num_rows, num_blocks, block_size"),
};
extern const int servd_num_kernels = std::size(servd_kernel_table);
#if defined(SERVD_STATE)
extern const char servd_state[] = "servd_state_" SERVD_STATE;  // what it was compiled from
#endif

// Whether this CPU and the system have what the kernels need beyond the vectors of their instruction
// set. Linux gives tiles to a process that asks for them.
int servd_is_usable() {
#if defined(__AMX_BF16__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#elif defined(__AVX512BF16__)  // Intel's are slower at it than at float32
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_is("amd");
#elif defined(__AVX512VNNI__)
    return __builtin_cpu_supports("avx512vnni");
#elif defined(__AVXVNNI__)
    return __builtin_cpu_supports("avxvnni");
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)  // every Mac with an Arm CPU has it
    constexpr unsigned long HAS_ASIMDDP = 1 << 20;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    constexpr unsigned long NEEDED = 1 << 13 | 1 << 14;  // I8MM and BF16
#else
    constexpr unsigned long NEEDED = 0;
#endif
    return (getauxval(AT_HWCAP) & HAS_ASIMDDP) && (getauxval(AT_HWCAP2) & NEEDED) == NEEDED;
#else
    return true;
#endif
}

// Runs a graph: for each call the kernel's number in the table, and its arguments.
//
// Returns a Status. After a failure, what follows the call has not run, and `message` [size] names
// the kernel, and an index and its limit.
int servd_run(const int64_t* graph, int64_t num_words, char* message, int64_t size) {
    const int64_t* const end = graph + num_words;
    while (graph < end) {
        const Kernel& kernel = servd_kernel_table[*graph];
        try {
            graph = kernel.call(graph + 1);
        } catch (const std::out_of_range& error) {
            snprintf(message, size, "%s: %s", kernel.name, error.what());
            return BAD_INDEX;
        } catch (const std::bad_alloc&) {
            snprintf(message, size, "%s: no memory for intermediate results", kernel.name);
            return OUT_OF_MEMORY;
        }
    }
    return DONE;
}

}  // extern "C"
