// Work that the threads of a parallel region take in turn.
//
// Cores are not equally fast: on a virtual machine one may have half of a physical core, and a thread that slept comes
// late. Equal shares wait for the slowest of them; of pieces, a slow thread takes fewer. Who does a piece changes no result.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace multilora {

// Threads that a parallel region may have here.
inline int64_t available_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

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

// Calls piece(0) .. piece(count - 1), each by whichever thread is free.
template <class Piece>
void in_turn(int64_t count, const Piece& piece) {
  Turns turns(count);
  at::parallel_for(0, std::min(count, available_threads()), 1, [&](int64_t, int64_t) { turns.take(piece); });
}

// Calls body(begin, end) for all pieces of at most `size` of the rows 0 .. rows - 1.
template <class Body>
void rows_in_turn(int64_t rows, int64_t size, const Body& body) {
  in_turn((rows + size - 1) / size, [&](int64_t piece) { body(piece * size, std::min(rows, (piece + 1) * size)); });
}

}  // namespace multilora
