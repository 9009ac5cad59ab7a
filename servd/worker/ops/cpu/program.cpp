// A program: calls of kernels as data, recorded once and made again as often as wanted, with the same arguments.

#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace {

// A word of a program holds a number or an address; a float is in its lower half.
template <typename T>
T as(int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_same_v<T, float>) {
        float number;
        memcpy(&number, &word, sizeof number);
        return number;
    } else {
        return static_cast<T>(word);
    }
}

template <typename... T, size_t... INDEX>
void call(void (*function)(T...), const int64_t* words, std::index_sequence<INDEX...>) {
    function(as<T>(words[INDEX])...);
}

// Calls `function` if the first word is its address.
template <typename... T>
bool calls(void (*function)(T...), const int64_t* words) {
    if (as<void (*)(T...)>(words[0]) != function) return false;
    call(function, words + 1, std::index_sequence_for<T...>{});
    return true;
}

}  // namespace

// words [count][stride]: the address of a function above, and its arguments.
extern "C" void servd_run(const int64_t* words, int64_t count, int64_t stride) {
    for (; count > 0; count--, words += stride)
        if (!(calls(servd_multiply, words) || calls(servd_norm, words) || calls(servd_write, words) ||
              calls(servd_attend, words) || calls(servd_activate, words) || calls(servd_rows, words) ||
              calls(servd_take, words) || calls(servd_rotation, words)))
            abort();  // a new kernel that is missing here
}
