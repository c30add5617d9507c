// Work that the threads of a parallel region take in turn.
//
// Cores are not equally fast: on a virtual machine one may have half of a physical core, and a thread that slept comes
// late. Equal shares wait for the slowest of them; of pieces, a slow thread takes fewer. No result depends on
// which thread does a piece.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "team.h"

namespace multilora {

// The numbers 0 .. count - 1, each given once.
class Turns {
 public:
  explicit Turns(int64_t count) : count_(count) {}

  // Calls piece(number) until there are no more; every thread does so.
  template <class Piece>
  void take(const Piece& piece) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      piece(i);
    }
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0};
};

// The numbers 0 .. count - 1, each given once: to every thread a range of them, in their order, as long as it has any, and then
// the last ones of others. So a thread reads memory from one end to the other, and no thread waits for a slow one. If there are
// fewer threads than expected, they do all pieces.
//
// A thread takes half of the rest of its range at a time: to take is an atomic operation, which waits until the results of the
// pieces before are on their way out of the core.
class Ranges {
 public:
  Ranges(const Ranges&) = delete;
  Ranges(int64_t count, int64_t threads)
      : many_(threads > kFew ? threads : 0), ranges_(threads > kFew ? many_.data() : few_.data()), threads_(threads) {
    for (int64_t t = 0; t < threads; ++t) {
      ranges_[t].bounds.store(packed(count * t / threads, count * (t + 1) / threads), std::memory_order_relaxed);
    }
  }

  // Calls body(begin, end) for the numbers begin .. end - 1 until there are no more; every thread does so. thread:
  // 0 .. threads - 1.
  template <class Body>
  void take(int64_t thread, const Body& body) {
    int64_t begin, end;
    while (ranges_[thread].take_first(begin, end)) {
      body(begin, end);
    }
    for (int64_t other = 1; other < threads_; ++other) {
      while (ranges_[(thread + other) % threads_].take_last(begin, end)) {
        body(begin, end);
      }
    }
  }

 private:
  static uint64_t packed(uint64_t begin, uint64_t end) { return begin << 32 | end; }

  struct alignas(64) Range {
    std::atomic<uint64_t> bounds;

    // The first half of its numbers, at least one. Returns whether there are any.
    bool take_first(int64_t& begin, int64_t& end) {
      for (uint64_t now = bounds.load(std::memory_order_relaxed);;) {
        const uint64_t first = now >> 32, last = now & 0xffffffff, middle = (first + last + 1) / 2;
        if (first == last) {
          return false;
        }
        if (bounds.compare_exchange_weak(now, packed(middle, last), std::memory_order_relaxed)) {
          begin = first;
          end = middle;
          return true;
        }
      }
    }
    // Its last number.
    bool take_last(int64_t& begin, int64_t& end) {
      for (uint64_t now = bounds.load(std::memory_order_relaxed);;) {
        const uint64_t first = now >> 32, last = now & 0xffffffff;
        if (first == last) {
          return false;
        }
        if (bounds.compare_exchange_weak(now, packed(first, last - 1), std::memory_order_relaxed)) {
          begin = last - 1;
          end = last;
          return true;
        }
      }
    }
  };

  static constexpr int64_t kFew = 4;  // threads: allocating memory would take as long as the work

  std::array<Range, kFew> few_;
  std::vector<Range> many_;
  Range* const ranges_;
  const int64_t threads_;
};

// Calls body(begin, end) for all of the numbers 0 .. count - 1 in `Ranges`, by at most so many threads.
template <class Body>
void in_ranges(int64_t count, int64_t threads, const Body& body) {
  Ranges ranges(count, threads);
  Team::share_out(threads, [&](int64_t thread) { ranges.take(thread, body); });
}

// Calls body(begin, end) for all pieces of at most `size` of the rows 0 .. rows - 1. A thread has neighbouring rows, most of
// which it wrote itself if they had adapters (lora_update.cpp).
template <class Body>
void rows_in_ranges(int64_t rows, int64_t size, const Body& body) {
  const int64_t count = (rows + size - 1) / size, threads = std::clamp<int64_t>(count, 1, Team::available());
  in_ranges(count, threads, [&](int64_t begin, int64_t end) { body(begin * size, std::min(rows, end * size)); });
}

// Pieces for which all threads wait.
class Awaited {
 public:
  explicit Awaited(int64_t pieces) : left_(pieces) {}

  // Calls work(claimed), which counts the pieces that it begins. These pieces are over when `work` returns, even by an
  // exception.
  template <class Work>
  void run(const Work& work) {
    struct Running {
      std::atomic<int64_t>& left;
      int64_t claimed = 0;
      ~Running() { left.fetch_sub(claimed, std::memory_order_release); }
    } running{left_};
    work(running.claimed);
  }
  // For a thread that found no piece left to claim: other threads run the pieces that are not over.
  void wait() const {
    for (Waiting waiting; left_.load(std::memory_order_acquire) > 0;) {
      waiting.pause();
    }
  }

 private:
  std::atomic<int64_t> left_;
};

}  // namespace multilora
