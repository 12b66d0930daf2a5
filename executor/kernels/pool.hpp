// The threads. One region at a time is cut into chunks; whoever is free takes the next one, so that a thread
// whose core is busy with something else (two cores carry router and scheduler too) delays no more than the
// chunk it holds. Threads that wait spin for about as long as the gap between two operations of a step, then
// sleep: between steps the cores are free. Who spins yields all the while: where two of us share a core, the one
// that waits must not keep the one that works from it.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <thread>

#include "vector.hpp"

static INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
   public:
    static constexpr int MOST_CHUNKS = 0xffff;  // of one region

    void start(int num_threads) {
        for (; num_threads_ < num_threads; num_threads_++) std::thread([this] { serve(); }).detach();
    }

    int num_threads() const { return num_threads_; }

    // Calls `work(chunk)` for every chunk from 0 to `num_chunks - 1`. One caller at a time.
    template <class Work>
    void run(int num_chunks, const Work& work) {
        if (num_chunks <= 1 || num_threads_ == 1) {
            for (int chunk = 0; chunk < num_chunks; chunk++) work(chunk);
            return;
        }
        int together = (num_chunks + MOST_CHUNKS - 1) / MOST_CHUNKS;
        auto several = [&](int turn) {
            for (int chunk = turn * together; chunk < (turn + 1) * together && chunk < num_chunks; chunk++) work(chunk);
        };
        share([](const void* it, int turn) { (*(decltype(several)*)it)(turn); }, &several,
              (num_chunks + together - 1) / together);
    }

   private:
    // region (32 bits) | number of chunks (16) | next chunk (16). A claim that succeeds proves that its region
    // is still running: `call_` and `work_` are read after it.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<void (*)(const void*, int)> call_{nullptr};
    std::atomic<const void*> work_{nullptr};
    std::atomic<int> num_done_{0};
    std::atomic<int> num_sleeping_{0};
    uint32_t region_ = 0;
    int num_threads_ = 1;

    static constexpr int TURNS = 32;  // between two yields: about a microsecond
    static constexpr auto SPIN = std::chrono::microseconds(50);

    void share(void (*call)(const void*, int), const void* work, int num_chunks) {
        call_.store(call, std::memory_order_relaxed);
        work_.store(work, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        region_++;
        ticket_.store((uint64_t)region_ << 32 | (uint64_t)num_chunks << 16, std::memory_order_seq_cst);
        if (num_sleeping_.load(std::memory_order_seq_cst) > 0) wake();
        help();
        for (int turn = 0; num_done_.load(std::memory_order_acquire) < num_chunks; turn++)
            turn % TURNS ? relax() : (void)sched_yield();
    }

    uint32_t* region_word() { return (uint32_t*)&ticket_ + 1; }  // the upper half, little-endian

    void help() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            int next = ticket & 0xffff, num_chunks = ticket >> 16 & 0xffff;
            if (next >= num_chunks) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            call_.load(std::memory_order_relaxed)(work_.load(std::memory_order_relaxed), next);
            num_done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void serve() {
        for (uint32_t seen = 0;;) {
            seen = next_region(seen);
            help();
        }
    }

    uint32_t next_region(uint32_t seen) {
        auto is_new = [&](uint32_t& region) {
            region = ticket_.load(std::memory_order_acquire) >> 32;
            return region != seen;
        };
        uint32_t region;
        for (;;) {
            auto until = std::chrono::steady_clock::now() + SPIN;
            do {
                for (int turn = 0; turn < TURNS; turn++) {
                    if (is_new(region)) return region;
                    relax();
                }
                sched_yield();
            } while (std::chrono::steady_clock::now() < until);
            num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
            while (!is_new(region)) syscall(SYS_futex, region_word(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            return region;
        }
    }

    void wake() { syscall(SYS_futex, region_word(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
};

static Pool& pool() {
    static Pool& threads = *new Pool;  // never destroyed: its threads live as long as the process
    return threads;
}
