// Threads that sleep between steps and meet at barriers within one.
//
// A step is one function run by every thread of the team, the caller included. Workers wait on a condition variable
// between steps, so that an idle part takes no processor time from its neighbours; within a step they spin, and give the
// processor away when somebody is long in coming (a preempted thread must be able to run).
#pragma once

#include <atomic>
#include <cstdint>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>

namespace hp {
namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Where a thread's share of so many units begins: [share(n, t, of), share(n, t + 1, of)).
inline int64_t share(int64_t units, int64_t thread, int64_t of) { return units * thread / of; }

// Pauses at a barrier before the processor is given away: some 10 µs, more than threads on cores of their own wait for each other.
// Where two share a core, each barrier costs this much.
constexpr int PATIENCE = 200;

class Team {
  public:
    explicit Team(int threads) : size_(threads) {
        for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { work(t); });
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> hold(lock_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs job(thread) on every thread; returns when all have.
    template <class Job>
    void run(Job&& job) {
        if (size_ > 1) {
            job_ = [&job](int thread) { job(thread); };
            {
                std::lock_guard<std::mutex> hold(lock_);
                started_++;
            }
            wake_.notify_all();
        }
        job(0);
        barrier();
    }

    // All threads of the team have come here before any goes on; what they wrote before is seen by all after.
    void barrier() {
        if (size_ == 1) return;
        const unsigned now = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == now; spins++) {
            if (spins < PATIENCE) pause_briefly();
            else sched_yield();
        }
    }

  private:
    void work(int thread) {
        unsigned long seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> hold(lock_);
                wake_.wait(hold, [&] { return stopping_ || started_ != seen; });
                if (stopping_) return;
                seen = started_;
            }
            job_(thread);
            barrier();
        }
    }

    const int size_;
    std::vector<std::thread> workers_;
    std::function<void(int)> job_;
    std::mutex lock_;
    std::condition_variable wake_;
    unsigned long started_ = 0;
    bool stopping_ = false;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace
}  // namespace hp
