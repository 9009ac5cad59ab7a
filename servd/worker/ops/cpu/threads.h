// Divides loops over threads.
//
// A loop of OpenMP ends when every thread has arrived. A thread that waits for its processor,
// because another program or servd's own API process is using it, then holds up the others at every
// kernel: with one busy neighbour on one of two processors, steps took ten times as long. Here a
// loop ends when its parts are done, and threads that run take the parts of those that do not.

#pragma once

#include <cstdint>

using Part = void (*)(const void* body, int64_t begin, int64_t end);

void run_parts(int64_t count, int64_t size, Part part, const void* body);

// Calls body(i) for every i of [0, count), in any order and several at once; `size` neighbours are
// done in one go. Nothing may be thrown within it: other threads are still at work.
template <typename Body>
void parallel_for(int64_t count, int64_t size, const Body& body) {
    const Part part = [](const void* at, int64_t begin, int64_t end) noexcept {
        for (int64_t i = begin; i < end; i++) (*static_cast<const Body*>(at))(i);
    };
    run_parts(count, size, part, &body);
}
