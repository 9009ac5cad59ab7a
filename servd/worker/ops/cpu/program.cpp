// The table of kernels, and programs: calls of kernels as data.
//
// Python reads names and parameters from the table (../native.py), so that a kernel is stated
// once. Every call from there is a program, mostly of one call; the longer ones are recorded
// (../../program_runner.py) and run as often as wanted.

#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>
#include <utility>

#include "checks.h"
#include "kernels.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct Kernel {
    const char* name;
    const char* parameters;  // a letter each
    const int64_t* (*call)(const int64_t* arguments);  // returns their end
};

enum Status { DONE = 0, BAD_INDEX = 1, OUT_OF_MEMORY = 2 };

// As in Python's struct module.
template <typename T>
constexpr char letter_of() {
    if (std::is_pointer_v<T>) return 'P';
    if (std::is_same_v<T, float>) return 'f';
    static_assert(std::is_pointer_v<T> || std::is_same_v<T, float> || std::is_same_v<T, int> ||
                  std::is_same_v<T, int64_t>);
    return std::is_same_v<T, int> ? 'i' : 'q';
}

// An argument takes a word, and lies at its beginning.
template <typename T>
T read(const int64_t& word) {
    T argument;
    memcpy(&argument, &word, sizeof argument);
    return argument;
}

template <auto FUNCTION>
struct Adapter;

template <typename... T, void (*FUNCTION)(T...)>
struct Adapter<FUNCTION> {
    static constexpr char parameters[] = {letter_of<T>()..., '\0'};

    static const int64_t* call(const int64_t* arguments) {
        call(arguments, std::index_sequence_for<T...>{});
        return arguments + sizeof...(T);
    }

    template <size_t... INDEX>
    static void call(const int64_t* arguments, std::index_sequence<INDEX...>) {
        FUNCTION(read<T>(arguments[INDEX])...);
    }
};

}  // namespace

#define KERNEL(name) {#name, Adapter<kernels::name>::parameters, Adapter<kernels::name>::call}

extern "C" {

extern const Kernel servd_kernels[] = {
    KERNEL(set_threads), KERNEL(pack),       KERNEL(matmul),     KERNEL(gather_rows),
    KERNEL(write_kv),    KERNEL(attend),     KERNEL(embed),      KERNEL(rotation),
    KERNEL(norm),        KERNEL(activate),   KERNEL(shift),      KERNEL(to_weights),
    KERNEL(narrow),      KERNEL(draw),       KERNEL(score),      KERNEL(matmul_grouped),
    KERNEL(gather_grouped), KERNEL(matmul_experts), KERNEL(matmul_experts_grouped),
    KERNEL(route),       KERNEL(combine),    KERNEL(add_low_rank), KERNEL(scale),
    KERNEL(spread),      KERNEL(begin_decode), KERNEL(choose),
};
extern const int servd_num_kernels = std::size(servd_kernels);

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
#else
    return true;
#endif
}

// Runs a program: for each call the kernel's number in the table, and its arguments.
//
// Returns a Status. After a failure, what follows the call has not run, and `message` [size] names
// the kernel, and an index and its limit.
int servd_run(const int64_t* program, int64_t num_words, char* message, int64_t size) {
    const int64_t* const end = program + num_words;
    while (program < end) {
        const Kernel& kernel = servd_kernels[*program];
        try {
            program = kernel.call(program + 1);
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
