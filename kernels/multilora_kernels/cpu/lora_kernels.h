// LoRA shrink and expand, written once over a vector type `Vec` (avx512.cpp, avx2.cpp and plain.cpp each define one).
//
// Every output is one chain of fused multiply-adds whose order depends only on the hidden size or the rank: not on the
// other rows of the batch, nor on how many rows a tile holds, nor on the thread. That makes results bitwise repeatable.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cache_lines.h"
#include "storage.h"
#include "work.h"

// Inlined even where the compiler finds it too large: vectors must stay in registers across these calls.
#define MULTILORA_INLINED __attribute__((always_inline))  // of a lambda, behind its parameters
#define MULTILORA_INLINE inline MULTILORA_INLINED

namespace multilora {
namespace {

// Adapters come from memory once per step, in pieces too short for the hardware's prefetchers: every kernel requests weights
// itself, this number of bytes before it reads them. Memory answers in a hundred to two hundred nanoseconds.
constexpr int64_t kAheadBytes = 12288;

// The order in which a thread reads memory: some weights up to `end`, then about as many bytes from `next` on.
struct ReadingOrder {
  const char *end, *next;
  int64_t ahead;  // bytes

  ReadingOrder(const void* begin, const void* end, const void* next)
      : end(static_cast<const char*>(end)), next(static_cast<const char*>(next)),
        ahead(std::min(kAheadBytes, this->end - static_cast<const char*>(begin))) {}

  // Requests the memory that is read soon after `place`, at least `bytes` bytes.
  inline const char* after(const void* place, int64_t bytes) const {
    const char* soon = static_cast<const char*>(place) + std::max(ahead, bytes);
    return soon < end ? soon : next + (soon - end);
  }
};

// Calls tile<N>(first_row) for N = Rows, Rows / 2 .. 1 until all rows are covered.
template <int Rows, class Tile>
MULTILORA_INLINE void for_each_row_tile(int64_t first, int64_t count, const Tile& tile) {
  for (; count - first >= Rows; first += Rows) {
    tile.template run<Rows>(first);
  }
  if constexpr (Rows > 1) {
    for_each_row_tile<Rows / 2>(first, count, tile);
  }
}

template <class Vec, class T, int Ranks>
struct ShrinkTile {
  const ShrinkTask& task;
  int64_t first_rank;
  ReadingOrder order;

  template <int Rows>
  MULTILORA_INLINE void run(int64_t first_row) const {
    using F = typename Vec::F;
    const int64_t in = task.in_features;
    const T* a = static_cast<const T*>(task.a) + first_rank * in;
    const float* x[Rows];
    F sum[Ranks][Rows];
    for (int r = 0; r < Rows; ++r) {
      x[r] = task.x + task.rows.tokens[first_row + r] * task.x_stride;
      for (int j = 0; j < Ranks; ++j) {
        sum[j][r] = Vec::zero();
      }
    }
    const auto accumulate = [&](int64_t k, auto load) {
      F weight[Ranks];
      for (int j = 0; j < Ranks; ++j) {
        weight[j] = load(a + j * in + k);
      }
      for (int r = 0; r < Rows; ++r) {
        const F value = load(x[r] + k);
        for (int j = 0; j < Ranks; ++j) {
          sum[j][r] = Vec::fma(weight[j], value, sum[j][r]);
        }
      }
    };
    // A tile reads its ranks side by side, but asks for weights in the order in which they lie, which memory answers
    // sooner. So it has to ask for the whole next tile before that begins.
    const int64_t tile_bytes = Ranks * in * sizeof(T);
    const auto fetch_ahead = [&](int64_t k) {
      constexpr int64_t kBytes = Ranks * Vec::kWidth * sizeof(T);
      if (first_row == 0 && (kBytes >= kCacheLine || k * Ranks * sizeof(T) % kCacheLine == 0)) {
        const char* soon = order.after(a + k * Ranks, tile_bytes);
        for (int64_t byte = 0; byte < kBytes; byte += kCacheLine) {
          fetch_line(soon + byte);
        }
      }
    };
    int64_t k = 0;
    for (; k + Vec::kWidth <= in; k += Vec::kWidth) {
      fetch_ahead(k);
      accumulate(k, [](const auto* p) { return Vec::load(p); });
    }
    if (k < in) {
      accumulate(k, [n = int(in - k)](const auto* p) { return Vec::load_first(p, n); });
    }
    for (int r = 0; r < Rows; ++r) {
      float* v = task.v + task.rows.tokens[first_row + r] * task.v_stride + first_rank;
      for (int j = 0; j < Ranks; ++j) {
        v[j] = Vec::sum(sum[j][r]);
        if constexpr (sizeof(T) == 1) {
          v[j] *= task.scales[first_rank + j] * kLoadedScale<T>;
        }
      }
    }
  }
};

// All full tiles of Ranks ranks; returns the first rank that is left.
template <class Vec, class T, int Ranks>
int64_t shrink_ranks(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end, const ReadingOrder& order) {
  int64_t j = rank_begin;
  for (; j + Ranks <= rank_end; j += Ranks) {
    const ShrinkTile<Vec, T, Ranks> tile{task, j, order};
    for_each_row_tile<Vec::kShrinkRows>(0, task.rows.count, tile);
  }
  return j;
}

template <class Vec, class T>
void shrink(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end, const void* next) {
  const T* a = static_cast<const T*>(task.a);
  const ReadingOrder order(a + rank_begin * task.in_features, a + rank_end * task.in_features, next);
  int64_t j = rank_begin;
  if (task.rows.count > 1) {
    j = shrink_ranks<Vec, T, kRankUnit>(task, j, rank_end, order);
  }
  // Codes take longer to become floats than to come from memory: ranks side by side share what is loaded of x.
  constexpr int kSingleRowRanks = sizeof(T) == 1 ? int(kRankUnit) : Vec::kSingleRowRanks;
  j = shrink_ranks<Vec, T, kSingleRowRanks>(task, j, rank_end, order);
  shrink_ranks<Vec, T, 1>(task, j, rank_end, order);
}

// One vector of outputs for all rows of the task. `kRank` is the rank where it is known when compiling, else 0.
//
// The weights are taken kColumns ranks at a time, transposed, so that lane i of columns[c] is b[output + i, j + c]; they
// stay in registers or the L1 cache while every row uses them. A row's sums over earlier columns wait in `sums`.
template <class Vec, class T, int kRank>
struct ExpandTile {
  using F = typename Vec::F;
  static constexpr int kMaxColumns = 16;
  static constexpr int kColumns = kRank == 8 ? 8 : kMaxColumns;

  const ExpandTask& task;
  int64_t output;
  int lanes;
  F* sums;
  const char* ahead;  // memory that is read soon, as many bytes as this tile's weights

  inline int64_t rank() const { return kRank ? kRank : task.rank; }

  MULTILORA_INLINE void run() const {
    if (kRank && task.rows.count == 1 && lanes == Vec::kWidth) {
      return run_single();
    }
    F columns[kMaxColumns];
    for (int64_t j = 0; j < rank(); j += kColumns) {
      const T* weights = static_cast<const T*>(task.b) + output * rank() + j;
      fetch_ahead(j);
      if (lanes == Vec::kWidth && rank() - j >= kColumns) {
        Vec::template transpose<kColumns>(weights, rank(), columns);
        for_each_row_tile<Vec::kExpandRows>(0, task.rows.count, Accumulate{*this, columns, j, kColumns});
      } else {
        const int n = int(std::min<int64_t>(kColumns, rank() - j));
        Vec::transpose_part(weights, rank(), lanes, n, columns);
        for_each_row_tile<Vec::kExpandRows>(0, task.rows.count, Accumulate{*this, columns, j, n});
      }
    }
    for (int64_t row = 0; row < task.rows.count; ++row) {
      add_to_output(row, sums[row]);
    }
  }

  // A task with one row, the usual case: each row has an adapter of its own. As `Accumulate`, but sums stay in registers.
  MULTILORA_INLINE void run_single() const {
    const float* v = v_row(0);
    F sum = Vec::zero(), columns[kColumns];
    for (int64_t j = 0; j < rank(); j += kColumns) {
      fetch_ahead(j);
      Vec::template transpose<kColumns>(static_cast<const T*>(task.b) + output * rank() + j, rank(), columns);
      F even = sum, odd = Vec::zero();
      for (int c = 0; c < kColumns; c += 2) {
        even = Vec::fma(Vec::broadcast(v[j + c]), columns[c], even);
        odd = Vec::fma(Vec::broadcast(v[j + c + 1]), columns[c + 1], odd);
      }
      sum = Vec::add(even, odd);
    }
    add_to_output(0, sum);
  }

  MULTILORA_INLINE void fetch_ahead(int64_t column) const {
    constexpr int64_t kBytes = Vec::kWidth * kColumns * sizeof(T);
    for (int64_t line = 0; line < kBytes; line += kCacheLine) {
      fetch_line(ahead + column / kColumns * kBytes + line);
    }
  }

  struct Accumulate {
    const ExpandTile& tile;
    const F* columns;
    int64_t first_column;
    int n;

    // Two chains for a row, of the even and of the odd columns: half the latency of one.
    template <int Rows>
    MULTILORA_INLINE void run(int64_t first_row) const {
      const float* v[Rows];
      F even[Rows], odd[Rows];
      for (int r = 0; r < Rows; ++r) {
        v[r] = tile.v_row(first_row + r) + first_column;
        even[r] = first_column == 0 ? Vec::zero() : tile.sums[first_row + r];
        odd[r] = Vec::zero();
      }
      for (int c = 0; c < n; c += 2) {
        for (int r = 0; r < Rows; ++r) {
          even[r] = Vec::fma(Vec::broadcast(v[r][c]), columns[c], even[r]);
        }
        if (c + 1 < n) {
          for (int r = 0; r < Rows; ++r) {
            odd[r] = Vec::fma(Vec::broadcast(v[r][c + 1]), columns[c + 1], odd[r]);
          }
        }
      }
      for (int r = 0; r < Rows; ++r) {
        tile.sums[first_row + r] = Vec::add(even[r], odd[r]);
      }
    }
  };

  inline const float* v_row(int64_t row) const { return task.v + task.rows.tokens[row] * task.v_stride; }

  inline void add_to_output(int64_t row, F update) const {
    float* y = task.y + task.rows.tokens[row] * task.y_stride + output;
    const F total = Vec::add(Vec::load_first(y, lanes), update);
    Vec::store_first(y, task.magnitude ? Vec::mul(total, magnitude()) : total, lanes);
  }

  inline F magnitude() const { return Vec::load_first(static_cast<const T*>(task.magnitude) + output, lanes); }
};

template <class Vec, class T, int kRank>
void expand_rank(const ExpandTask& task, int64_t output_begin, int64_t output_end, const void* next) {
  typename Vec::F sums[kMaxRows];
  const T* b = static_cast<const T*>(task.b);
  const ReadingOrder order(b + output_begin * task.rank, b + output_end * task.rank, next);
  for (int64_t n = output_begin; n < output_end; n += Vec::kWidth) {
    const int lanes = int(std::min<int64_t>(Vec::kWidth, output_end - n));
    ExpandTile<Vec, T, kRank>{task, n, lanes, sums, order.after(b + n * task.rank, 0)}.run();
  }
}

// The common ranks have code of their own: with the addresses of the weights known, it is twice as fast.
template <class Vec, class T>
void expand(const ExpandTask& task, int64_t output_begin, int64_t output_end, const void* next) {
  switch (task.rank) {
    case 8:
      return expand_rank<Vec, T, 8>(task, output_begin, output_end, next);
    case 16:
      return expand_rank<Vec, T, 16>(task, output_begin, output_end, next);
    case 32:
      return expand_rank<Vec, T, 32>(task, output_begin, output_end, next);
    case 64:
      return expand_rank<Vec, T, 64>(task, output_begin, output_end, next);
    default:
      return expand_rank<Vec, T, 0>(task, output_begin, output_end, next);
  }
}

}  // namespace
}  // namespace multilora
