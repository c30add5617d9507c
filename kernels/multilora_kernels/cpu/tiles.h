// The two kernels, written once over a vector type `Vec` (avx512.cpp, avx2.cpp and plain.cpp each bring one).
//
// Every output is one chain of fused multiply-adds whose order depends only on the hidden size or the rank: not on the
// other rows of the batch, nor on how many rows a tile holds, nor on the thread. That makes results bitwise repeatable.
#pragma once

#include <algorithm>
#include <cstdint>

#include "work.h"

namespace multilora {
namespace {

// Calls tile<N>(first_row) for N = Rows, Rows / 2 .. 1 until all rows are covered.
template <int Rows, class Tile>
inline void for_each_row_tile(int64_t first, int64_t count, const Tile& tile) {
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

  template <int Rows>
  inline void run(int64_t first_row) const {
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
    int64_t k = 0;
    for (; k + Vec::kWidth <= in; k += Vec::kWidth) {
      accumulate(k, [](const auto* p) { return Vec::load(p); });
    }
    if (k < in) {
      accumulate(k, [n = int(in - k)](const auto* p) { return Vec::load_first(p, n); });
    }
    for (int r = 0; r < Rows; ++r) {
      float* v = task.v + task.rows.tokens[first_row + r] * task.v_stride + first_rank;
      for (int j = 0; j < Ranks; ++j) {
        v[j] = Vec::sum(sum[j][r]);
      }
    }
  }
};

template <class Vec, class T>
void shrink(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end) {
  int64_t j = rank_begin;
  for (; j + kRankUnit <= rank_end; j += kRankUnit) {
    for_each_row_tile<Vec::kShrinkRows>(0, task.rows.count, ShrinkTile<Vec, T, kRankUnit>{task, j});
  }
  for (; j < rank_end; ++j) {
    for_each_row_tile<Vec::kShrinkRows>(0, task.rows.count, ShrinkTile<Vec, T, 1>{task, j});
  }
}

// One vector of outputs, for any rows of the task. The weights come transposed, lane i of column j is b[output + i, j].
template <class Vec, class T>
struct ExpandTile {
  using F = typename Vec::F;

  const ExpandTask& task;
  int64_t output;
  int lanes;
  const F* columns;

  template <int Rows>
  inline void run(int64_t first_row) const {
    const float* v[Rows];
    F sum[Rows];
    for (int r = 0; r < Rows; ++r) {
      v[r] = v_row(first_row + r);
      sum[r] = Vec::zero();
    }
    for (int64_t j = 0; j < task.rank; ++j) {
      const F column = columns[j];
      for (int r = 0; r < Rows; ++r) {
        sum[r] = Vec::fma(Vec::broadcast(v[r][j]), column, sum[r]);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      add_to_output(first_row + r, sum[r]);
    }
  }

  inline const float* v_row(int64_t row) const { return task.v + task.rows.tokens[row] * task.v_stride; }

  inline void add_to_output(int64_t row, F update) const {
    float* y = task.y + task.rows.tokens[row] * task.y_stride + output;
    const F total = Vec::add(Vec::load_first(y, lanes), update);
    Vec::store_first(y, task.magnitude ? Vec::mul(total, magnitude()) : total, lanes);
  }

  inline F magnitude() const { return Vec::load_first(static_cast<const T*>(task.magnitude) + output, lanes); }

  inline const T* weights() const { return static_cast<const T*>(task.b) + output * task.rank; }

  // The same sums as run<1>, in the same order, with the weights never leaving the registers.
  inline void run_single_row() const {
    constexpr int kColumns = Vec::kWidth;
    const float* v = v_row(0);
    F sum = Vec::zero(), tile[kColumns];
    int64_t j = 0;
    if (lanes == Vec::kWidth) {
      for (; j + kColumns <= task.rank; j += kColumns) {
        Vec::transpose(weights() + j, task.rank, tile);
        for (int c = 0; c < kColumns; ++c) {
          sum = Vec::fma(Vec::broadcast(v[j + c]), tile[c], sum);
        }
      }
    }
    for (; j < task.rank; j += kColumns) {
      const int n = columns_from(j);
      Vec::transpose_part(weights() + j, task.rank, lanes, n, tile);
      for (int c = 0; c < n; ++c) {
        sum = Vec::fma(Vec::broadcast(v[j + c]), tile[c], sum);
      }
    }
    add_to_output(0, sum);
  }

  inline void run_all_rows(F* scratch) {
    for (int64_t j = 0; j < task.rank; j += Vec::kWidth) {
      Vec::transpose_part(weights() + j, task.rank, lanes, columns_from(j), scratch + j);
    }
    columns = scratch;
    for_each_row_tile<Vec::kExpandRows>(0, task.rows.count, *this);
  }

  inline int columns_from(int64_t j) const { return int(std::min<int64_t>(Vec::kWidth, task.rank - j)); }
};

template <class Vec, class T>
void expand(const ExpandTask& task, int64_t output_begin, int64_t output_end) {
  typename Vec::F scratch[kMaxRank];
  for (int64_t n = output_begin; n < output_end; n += Vec::kWidth) {
    ExpandTile<Vec, T> tile{task, n, int(std::min<int64_t>(Vec::kWidth, output_end - n)), nullptr};
    if (task.rows.count == 1) {
      tile.run_single_row();
    } else {
      tile.run_all_rows(scratch);
    }
  }
}

template <class Vec, class T>
constexpr Kernels kernels_for() {
  return {shrink<Vec, T>, expand<Vec, T>};
}

}  // namespace
}  // namespace multilora
