// Reads memory as fast as it goes, and times it: the bandwidth that bounds a decode step. And multiplies and adds in registers as fast as
// that goes: the FLOP rate that no library's matrix product need reach.
//
// Each thread owns a part of the buffer (first touched by itself) and adds it up, several passes in a row. The clock runs
// from the moment that all threads are ready to the moment that the last one is done. Sums are returned, so that no
// compiler can leave the reading out.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

typedef uint64_t Lane __attribute__((vector_size(64)));
constexpr size_t kUnroll = 8;  // independent sums, so that additions do not wait for each other

uint64_t sum_part(const Lane* data, size_t lanes) {
    Lane sums[kUnroll] = {};
    for (size_t i = 0; i + kUnroll <= lanes; i += kUnroll)
        for (size_t j = 0; j < kUnroll; ++j) sums[j] += data[i + j];
    uint64_t total = 0;
    for (const Lane& sum : sums)
        for (int k = 0; k < 8; ++k) total += sum[k];
    return total;
}

#if defined(__AVX512F__)
typedef float Floats __attribute__((vector_size(64)));
#else
typedef float Floats __attribute__((vector_size(32)));
#endif
constexpr int kChains = 12;  // independent sums, so that none waits for itself, and all of them in registers

float multiply_add(long passes) {
    Floats sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = Floats{} + static_cast<float>(i);
    Floats factor = Floats{} + 0.999f, term = Floats{} + 0.001f;
    asm volatile("" : "+m"(factor), "+m"(term));  // not known to the compiler
    for (long pass = 0; pass < passes; ++pass)
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + term;
    float total = 0;
    for (const Floats& sum : sums) total += sum[0];
    return total;
}

}  // namespace

// Giga floating-point operations a second of all threads together, a multiply-add being two; the best of `repeats`, each of so many passes.
extern "C" double hotpass_multiply_add(int threads, long passes, int repeats) {
    double best = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        std::vector<std::thread> workers;
        std::vector<float> totals(threads);
        const auto start = std::chrono::steady_clock::now();
        for (int index = 0; index < threads; ++index)
            workers.emplace_back([&totals, index, passes] { totals[index] = multiply_add(passes); });
        for (auto& worker : workers) worker.join();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        const double operations = 2.0 * threads * passes * kChains * (sizeof(Floats) / sizeof(float));
        const double rate = operations / seconds / 1e9;
        if (rate > best && totals[0] == totals[0]) best = rate;
    }
    return best;
}

// Reads `bytes` (over all threads) `passes` times, `repeats` times over; writes each repeat's seconds to `seconds`.
// Returns the sum of everything read, or 0 when memory could not be had.
extern "C" uint64_t hotpass_read(size_t bytes, int threads, int passes, int repeats, double* seconds) {
    const size_t lanes = bytes / threads / sizeof(Lane) / kUnroll * kUnroll;
    std::vector<Lane*> parts(threads, nullptr);
    std::vector<uint64_t> sums(threads, 0);
    std::atomic<int> ready{0}, done{0}, failed{0}, round{0}, finished{0};
    std::chrono::steady_clock::time_point start, end;  // written by one thread each, between the atomics

    auto work = [&](int index) {
        Lane* part = static_cast<Lane*>(std::aligned_alloc(4096, (lanes * sizeof(Lane) / 4096 + 1) * 4096));
        parts[index] = part;
        if (part == nullptr) ++failed;
        else
            for (size_t i = 0; i < lanes; ++i) part[i] = Lane{} + i;
        if (part != nullptr) sums[index] += sum_part(part, lanes);
        for (int repeat = 1; repeat <= repeats; ++repeat) {
            ++ready;
            while (round.load(std::memory_order_acquire) < repeat) {
            }
            if (!failed)
                for (int pass = 0; pass < passes; ++pass) {
                    sums[index] += sum_part(part, lanes);
                    asm volatile("" ::: "memory");  // the next pass reads again
                }
            if (++done == threads * repeat) {
                end = std::chrono::steady_clock::now();
                finished.store(repeat, std::memory_order_release);
            }
        }
    };

    std::vector<std::thread> workers;
    for (int index = 0; index < threads; ++index) workers.emplace_back(work, index);
    for (int repeat = 1; repeat <= repeats; ++repeat) {
        while (ready.load() < threads * repeat) std::this_thread::sleep_for(std::chrono::microseconds(50));
        start = std::chrono::steady_clock::now();
        round.store(repeat, std::memory_order_release);
        while (finished.load(std::memory_order_acquire) < repeat)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        seconds[repeat - 1] = std::chrono::duration<double>(end - start).count();
    }
    for (auto& worker : workers) worker.join();
    uint64_t total = 0;
    for (uint64_t sum : sums) total += sum;
    for (Lane* part : parts) std::free(part);
    return failed ? 0 : total;
}
