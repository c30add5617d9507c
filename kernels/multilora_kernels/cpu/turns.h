// Work that the threads of a parallel region take in turn.
//
// Cores are not equally fast: on a virtual machine one may have half of a physical core, and a thread that slept comes
// late. Equal shares wait for the slowest of them; of pieces, a slow thread takes fewer. No result depends on
// which thread does a piece.
#pragma once

#include <algorithm>
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
class Ranges {
 public:
  Ranges(int64_t count, int64_t threads) : ranges_(threads) {
    for (int64_t t = 0; t < threads; ++t) {
      ranges_[t].bounds.store(packed(count * t / threads, count * (t + 1) / threads), std::memory_order_relaxed);
    }
  }

  // Calls piece(number) until there are no more; every thread does so. thread: 0 .. threads - 1.
  template <class Piece>
  void take(int64_t thread, const Piece& piece) {
    const int64_t threads = ranges_.size();
    int64_t i;
    while ((i = ranges_[thread].take<true>()) >= 0) {
      piece(i);
    }
    for (int64_t other = 1; other < threads; ++other) {
      while ((i = ranges_[(thread + other) % threads].template take<false>()) >= 0) {
        piece(i);
      }
    }
  }

 private:
  static uint64_t packed(uint64_t begin, uint64_t end) { return begin << 32 | end; }

  struct alignas(64) Range {
    std::atomic<uint64_t> bounds;

    // Its first or its last number, or -1.
    template <bool IsFirst>
    int64_t take() {
      uint64_t now = bounds.load(std::memory_order_relaxed);
      for (;;) {
        const uint64_t begin = now >> 32, end = now & 0xffffffff;
        if (begin == end) {
          return -1;
        }
        const uint64_t rest = IsFirst ? packed(begin + 1, end) : packed(begin, end - 1);
        if (bounds.compare_exchange_weak(now, rest, std::memory_order_relaxed)) {
          return IsFirst ? begin : end - 1;
        }
      }
    }
  };

  std::vector<Range> ranges_;
};

// Calls piece(0) .. piece(count - 1) in `Ranges`, by at most so many threads.
template <class Piece>
void in_ranges(int64_t count, int64_t threads, const Piece& piece) {
  Ranges ranges(count, threads);
  Team::share_out(threads, [&](int64_t thread) { ranges.take(thread, piece); });
}

// Calls body(begin, end) for all pieces of at most `size` of the rows 0 .. rows - 1. A thread has neighbouring rows, most of
// which it wrote itself if they had adapters (lora_update.cpp).
template <class Body>
void rows_in_ranges(int64_t rows, int64_t size, const Body& body) {
  const int64_t count = (rows + size - 1) / size, threads = std::clamp<int64_t>(count, 1, Team::available());
  in_ranges(count, threads, [&](int64_t piece) { body(piece * size, std::min(rows, (piece + 1) * size)); });
}

}  // namespace multilora
