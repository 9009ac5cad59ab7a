// Checks of a kernel's indices, once per call and before the kernel writes anything.
//
// They throw std::out_of_range, which servd_run (graph.cpp) passes to Python as an IndexError.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

inline void check_at_most(const char* name, int64_t value, int64_t limit) {
    if (value > limit)
        throw std::out_of_range(std::string(name) + " is " + std::to_string(value) +
                                ", at most " + std::to_string(limit) + " are there");
}

// ids[begin:end] must all be in [low, limit).
template <typename T>
void check_ids(const char* name, const T* ids, int64_t begin, int64_t end, int64_t limit,
               int64_t low = 0) {
    bool outside = false;  // no branch in the loop, so that the compiler vectorizes it
    for (int64_t i = begin; i < end; i++) outside |= ids[i] < low || ids[i] >= limit;
    for (int64_t i = begin; outside && i < end; i++)
        if (ids[i] < low || ids[i] >= limit)
            throw std::out_of_range(std::string(name) + "[" + std::to_string(i) + "] is " +
                                    std::to_string(ids[i]) + ", not in [" + std::to_string(low) +
                                    ", " + std::to_string(limit) + ")");
}
