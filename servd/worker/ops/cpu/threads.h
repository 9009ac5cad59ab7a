// Divides loops over threads.
//
// A loop of OpenMP ends when every thread has arrived. A thread that waits for its processor,
// because another program or servd's own API process is using it, then holds up the others at every
// kernel: with one busy neighbour on one of two processors, steps took ten times as long. Here a
// loop ends when its parts are done, and threads that run take the parts of those that do not.

#pragma once

#include <atomic>
#include <cstdint>
#include <new>

using Part = void (*)(const void* body, int64_t begin, int64_t end);

void run_parts(int64_t count, int64_t size, Part part, const void* body);

// Calls body(i) for every i of [0, count), in any order and several at once; `size` neighbours are
// done in one go. It may throw std::bad_alloc only, which is thrown again when all threads are done.
template <typename Body>
void parallel_for(int64_t count, int64_t size, const Body& body) {
    struct Loop {
        const Body& body;
        mutable std::atomic<bool> out_of_memory{false};
    } loop{body};
    const Part part = [](const void* at, int64_t begin, int64_t end) noexcept {
        const Loop& loop = *static_cast<const Loop*>(at);
        try {
            for (int64_t i = begin; i < end; i++) loop.body(i);
        } catch (const std::bad_alloc&) {
            loop.out_of_memory = true;
        }
    };
    run_parts(count, size, part, &loop);
    if (loop.out_of_memory) throw std::bad_alloc();
}
