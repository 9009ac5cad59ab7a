// Divides loops over threads.
//
// A loop of OpenMP ends when every thread has arrived. If another process occupies a thread's processor,
// the other threads wait for it at every kernel: with one busy processor of two, steps took ten times as
// long. Here a loop ends when its parts are done, and running threads take over the parts of waiting ones.

#pragma once

#include <cstdint>

using Part = void (*)(const void* body, int64_t begin, int64_t end);

void run_parts(int64_t count, int64_t size, Part part, const void* body);

// Calls body(i) for every i of [0, count), in any order and in parallel; a thread takes `size` neighbours
// at once. The body must not throw, because other threads still run.
template <typename Body>
void parallel_for(int64_t count, int64_t size, const Body& body) {
    const Part part = [](const void* at, int64_t begin, int64_t end) noexcept {
        for (int64_t i = begin; i < end; i++) (*static_cast<const Body*>(at))(i);
    };
    run_parts(count, size, part, &body);
}
