// Threads that stay together through many short pieces of parallel work.
//
// A region of `parallel_for` begins and ends with all of its threads: where regions are microseconds apart that is much of
// their cost, and a thread that the system has put aside holds up all others, even if they have done its work. The threads of a
// team wait for jobs that their leader shares out, and a job is over as soon as no thread is at it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>

#include "function_ref.h"
#include "parallel.h"

namespace multilora {

// A thread that checks a condition again and again.
class Waiting {
 public:
  // Waits between two checks: first as long as the processor says, later as long as other work has this core.
  void pause() {
    if (++looks_ > kLooks) {
      return std::this_thread::yield();
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  // Some ten microseconds, longer than a leader's work between two jobs. After that time the other thread has been put aside;
  // beside other processes, steps that slept until it was back took 9 and 15 % longer than steps that yield.
  static constexpr int64_t kLooks = 1000;

  int64_t looks_ = 0;
};

class Team {
 public:
  using Job = FunctionRef<void(int64_t)>;

  // Calls body() on this thread while others are at hand for its jobs.
  template <class Body>
  static void gather(const Body& body) {
    if (led_ || in_parallel_region() || num_threads() == 1) {
      return body();
    }
    Team team(num_threads());
    parallel_for(0, team.size_, 1, [&](int64_t member, int64_t) {
      if (member == 0) {
        team.lead(body);
      } else {
        team.follow(member);
      }
    });
  }

  // Threads that a job may have here.
  static int64_t available() { return led_ ? led_->size_ : in_parallel_region() ? 1 : num_threads(); }

  // Calls job(0) and, on every other thread that comes meanwhile, job of another number below `shares`: each of them does
  // the work that is still to be done.
  static void share_out(int64_t shares, Job job) {
    if (shares <= 1) {
      job(0);
    } else if (led_) {
      led_->run(shares, job);
    } else {
      parallel_for(0, shares, 1, [&](int64_t share, int64_t) { job(share); });
    }
  }

 private:
  explicit Team(int64_t size) : size_(size) {}

  // The state by which threads join a job, in one word: its number, the threads that it is for, whether it can still be joined,
  // and the number of other threads at it.
  static constexpr uint64_t kIsOpen = 1 << 16;
  static uint64_t opened(uint64_t number, uint64_t shares) { return number << 32 | shares << 17 | kIsOpen; }
  static uint64_t number_of(uint64_t state) { return state >> 32; }
  static bool admits(uint64_t state, uint64_t member) {
    return (state & kIsOpen) && member < (state >> 17 & 0x7fff);
  }
  static bool has_others(uint64_t state) { return state & 0xffff; }

  template <class Body>
  void lead(const Body& body) {
    struct Leading {
      Team& team;
      Team* before = std::exchange(led_, &team);
      ~Leading() {
        led_ = before;
        team.is_over_.store(true, std::memory_order_release);
      }
    } leading{*this};
    body();
  }

  void follow(uint64_t member) {
    uint64_t last = 0;
    for (Waiting waiting; !is_over_.load(std::memory_order_acquire);) {
      uint64_t state = state_.load(std::memory_order_relaxed);
      if (number_of(state) == last || !admits(state, member) ||
          !state_.compare_exchange_strong(state, state + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        waiting.pause();
        continue;
      }
      last = number_of(state);
      try {
        (*job_)(member);
      } catch (...) {
        if (!has_failed_.exchange(true)) {
          error_ = std::current_exception();
        }
      }
      state_.fetch_sub(1, std::memory_order_release);
      waiting = {};
    }
  }

  void run(int64_t shares, const Job& job) {
    struct Running {
      Team& team;
      ~Running() {
        team.state_.fetch_and(~kIsOpen, std::memory_order_relaxed);
        for (Waiting waiting; has_others(team.state_.load(std::memory_order_acquire));) {
          waiting.pause();
        }
        led_ = &team;
      }
    };
    job_ = &job;
    state_.store(opened(++num_jobs_, shares), std::memory_order_release);
    {
      led_ = nullptr;  // a job leads no team
      const Running running{*this};
      job(0);
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  static inline thread_local Team* led_ = nullptr;  // by this thread

  const int64_t size_;
  uint64_t num_jobs_ = 0;
  const Job* job_ = nullptr;
  std::exception_ptr error_;  // of another thread
  std::atomic<bool> has_failed_{false};
  alignas(64) std::atomic<uint64_t> state_{0};
  std::atomic<bool> is_over_{false};
};

}  // namespace multilora
