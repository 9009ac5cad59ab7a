#include "threads.h"

#include "kernels.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr int MAX_THREADS = 256;
constexpr int64_t MAX_PARTS = 65535;
// Longer than the gaps between the kernels of a step, and much shorter than a step.
constexpr auto SPIN_TIME = std::chrono::microseconds(200);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until the condition holds, at max_threads for SPIN_TIME. Returns whether it holds.
template <typename Condition>
bool spin_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
        for (int i = 0; i < 32; i++, pause())
            if (condition()) return true;
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// The remaining parts of a thread's share: number of the loop (32 bits), first part and end (16 bits
// each). The number keeps a delayed thread from taking parts of a later loop.
struct alignas(64) Share {
    std::atomic<uint64_t> word{0};

    void set(uint32_t loop, uint64_t first, uint64_t end) {
        word = uint64_t(loop) << 32 | first << 16 | end;
    }

    // Takes a part: its own thread takes the first, other threads the last. Returns -1 if none remains.
    int64_t take(uint32_t loop, bool is_own) {
        uint64_t now = word.load(std::memory_order_acquire);
        for (;;) {
            const int64_t first = now >> 16 & 0xffff, end = now & 0xffff;
            if (uint32_t(now >> 32) != loop || first == end) return -1;
            const uint64_t next = is_own ? now + (1 << 16) : now - 1;
            if (word.compare_exchange_weak(now, next, std::memory_order_acq_rel))
                return is_own ? first : end - 1;
        }
    }
};

class Pool {
  public:
    void run(int64_t count, int64_t size, Part part, const void* body, int threads) {
        const int64_t parts = (count + size - 1) / size;
        this->count = count, this->size = size, this->part = part, this->body = body;
        this->threads = threads, remaining = parts;
        const uint32_t number = loop.load(std::memory_order_relaxed) + 1;
        for (int64_t i = 0; i < threads; i++)
            shares[i].set(number, parts * i / threads, parts * (i + 1) / threads);
        loop = number;
        start(threads - 1);
        if (sleeping > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
        work(0, number);
        const auto done = [&] { return remaining.load(std::memory_order_acquire) == 0; };
        if (!spin_until(done))
            while (!done()) sched_yield();  // a thread with a part was interrupted
    }

    std::atomic_flag busy = ATOMIC_FLAG_INIT;

  private:
    void work(int thread, uint32_t number) {
        // If the loop ends meanwhile, these values may belong to the next loop. Then no part remains to
        // take.
        const int64_t count = this->count.load(std::memory_order_relaxed);
        const int64_t size = this->size.load(std::memory_order_relaxed);
        const Part part = this->part.load(std::memory_order_relaxed);
        const void* body = this->body.load(std::memory_order_relaxed);
        const int threads = this->threads.load(std::memory_order_relaxed);
        for (int i = 0; i < threads && thread < threads; i++) {
            Share& share = shares[(thread + i) % threads];
            for (int64_t index; (index = share.take(number, i == 0)) >= 0;) {
                part(body, index * size, std::min((index + 1) * size, count));
                remaining.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    void start(int workers) {
        for (; started < std::min(workers, max_threads); started++) try {
                std::thread([this, thread = started + 1] { live(thread); }).detach();
            } catch (const std::system_error&) {
                max_threads = started;  // no more threads can start: the others do the work
            }
    }

    void live(int thread) {
        for (uint32_t last = 0;;) {
            const bool takes_part = thread < threads.load(std::memory_order_relaxed);
            const auto has_loop = [&] { return loop.load(std::memory_order_acquire) != last; };
            if (!takes_part || !spin_until(has_loop)) {
                std::unique_lock<std::mutex> lock(mutex);
                sleeping++;
                wake.wait(lock, [&] { return loop != last; });
                sleeping--;
            }
            last = loop.load(std::memory_order_acquire);
            work(thread, last);
        }
    }

    Share shares[MAX_THREADS];
    std::atomic<uint32_t> loop{0};  // the number of the last loop
    std::atomic<int64_t> count{0}, size{0}, remaining{0};  // unfinished parts
    std::atomic<Part> part{nullptr};
    std::atomic<const void*> body{nullptr};
    std::atomic<int> threads{0}, sleeping{0};
    int started = 0, max_threads = MAX_THREADS;
    std::mutex mutex;
    std::condition_variable wake;
};

Pool* pool = new Pool;  // its threads live as long as the process
// A child process has none of these threads.
[[maybe_unused]] const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

int within_limits(int number) { return std::max(1, std::min(number, MAX_THREADS)); }
std::atomic<int> num_threads{within_limits(int(std::thread::hardware_concurrency()))};

}  // namespace

void run_parts(int64_t count, int64_t size, Part part, const void* body) {
    if (count <= 0) return;
    size = std::max(size, count / MAX_PARTS + 1);
    const int threads = num_threads.load(std::memory_order_relaxed);
    if (count <= size || threads == 1 || pool->busy.test_and_set(std::memory_order_acquire))
        return part(body, 0, count);
    pool->run(count, size, part, body, threads);
    pool->busy.clear(std::memory_order_release);
}

void kernels::set_threads(int number) { num_threads = within_limits(number); }
