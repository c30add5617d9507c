// The linear over packed weights, written once over a vector type `Vec` (avx512.cpp, avx2.cpp and plain.cpp define one).
//
// A panel is kPanelVectors columns, each a vector of outputs, inputs first. A thread reads its panels from one end to the
// other, the columns of each side by side: processors prefetch some lines ahead of every place at which memory is read, so
// that three places keep it busier than one. Every output is a sum over blocks of block_depth(in_features) inputs, each block
// one chain of fused multiply-adds, so that it depends on neither the other rows, nor the tile, nor the thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "storage.h"
#include "lora_kernels.h"
#include "vectors.h"
#include "work.h"

namespace multilora {
namespace {

// Most inputs of one block: its weights stay in the L1 cache, or nearly, while every row uses them, and the fewer blocks,
// the less often sums are added to the outputs.
constexpr int64_t kMaxBlockDepth = 256;
// Inputs between two requests for weights of the next block.
constexpr int64_t kFetchDepth = 8;
// Products of vectors with one cache line of weights that take about as long as the line takes to come. With fewer products,
// the processor's own prefetchers are the quickest, and our requests, of which a core has few under way, only hinder them; with
// more products, the prefetchers sleep between blocks.
constexpr int64_t kLineProducts = 6;
// The most tiles of rows that each convert weights of 16 bits for themselves; of more tiles, the first keeps the converted
// weights for the others.
constexpr int64_t kDirectTiles = 2;
// Rows whose activations stay in the L2 cache while all panels of a thread pass by, and whose sums of one panel are kept side
// by side until they are complete: rows of the outputs may be a multiple of 4096 bytes apart, and then the rows of a tile would
// drive each other out of the caches.
constexpr int64_t kRowBlock = 128;

// Inputs of one block. Blocks are as even as possible: each fetches as many inputs of the next block as it has itself.
constexpr int64_t block_depth(int64_t in_features) {
  const int64_t blocks = (in_features + kMaxBlockDepth - 1) / kMaxBlockDepth;
  const int64_t depth = (in_features + blocks - 1) / blocks;
  return (depth + kFetchDepth - 1) / kFetchDepth * kFetchDepth;
}

// The weights that a thread reads after a block of a panel, of the same size: three pieces, of floats one of each column.
struct NextBlock {
  const char* first;
  int64_t next_piece;   // bytes from one to the next
  int64_t tiles;        // of rows that ask for it
  int64_t piece_lines;  // of each piece, every kFetchDepth inputs of such a tile

  inline void fetch(int64_t line) const {
    for (int64_t i = 0; i < piece_lines; ++i) {
      for (int v = 0; v < kPanelVectors; ++v) {
        fetch_line(first + v * next_piece + (line + i) * kCacheLine);
      }
    }
  }
};

// The part of the next block that the tiles fetch which multiply `rows` rows with one block, and the interval of fetches.
// step_bytes: of a column's weights of kFetchDepth inputs. products: of each weight, or work that takes as long.
template <class Vec>
NextBlock next_block(const void* first, int64_t next_piece, int64_t step_bytes, int64_t rows, int64_t products) {
  const int64_t tiles = (rows + Vec::kLinearRows - 1) / Vec::kLinearRows;
  const int64_t lines = (step_bytes + kCacheLine - 1) / kCacheLine;
  const bool is_fetched = products * kFetchDepth * kCacheLine >= kLineProducts * step_bytes;
  return {static_cast<const char*>(first), next_piece, is_fetched ? std::min(tiles, lines) : 0, (lines + tiles - 1) / tiles};
}

// The floats of one block of one panel.
template <class Vec, class T>
struct FloatWeights {
  using F = typename Vec::F;

  const T* first;  // of each column [depth, Vec::kWidth]
  int64_t next_column;

  MULTILORA_INLINE F load(int column, int64_t k) const { return Vec::load(first + column * next_column + k * Vec::kWidth); }
};

// Calls body(0) .. body(Count - 1), each number a constant.
template <int... I, class Body>
MULTILORA_INLINE void for_constants(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>{}), ...);
}

// One block of one panel, times some rows. Keeps: the weights stay in `kept` in the form in which they were multiplied.
template <class Vec, class Weights, bool Keeps = false>
struct LinearTile {
  using F = typename Vec::F;
  using Inputs = std::make_integer_sequence<int, kFetchDepth>;
  static constexpr int kPanelWidth = kPanelVectors * Vec::kWidth;

  const float* x;
  int64_t x_stride;
  Weights weights;
  int64_t depth;
  float* sums;    // [rows, kPanelWidth]
  bool is_first;  // block of the panel: there are no sums yet
  NextBlock next;
  float* kept;  // of each column [kMaxBlockDepth, Vec::kWidth], or null

  template <int Rows>
  MULTILORA_INLINE void run(int64_t first_row) const {
    const float* x_row = x + first_row * x_stride;
    F sum[Rows][kPanelVectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        sum[r][v] = Vec::zero();
      }
    }
    const auto accumulate = [&](int64_t k) MULTILORA_INLINED {
      F weight[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        weight[v] = Vec::loaded_once(weights.load(v, k));
        if constexpr (Keeps) {
          Vec::store(kept + (v * kMaxBlockDepth + k) * Vec::kWidth, weight[v]);
        }
      }
      for (int r = 0; r < Rows; ++r) {
        const F value = Vec::broadcast_once(x_row[r * x_stride + k]);
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[r][v] = Vec::fma(value, weight[v], sum[r][v]);
        }
      }
    };
    const int64_t tile = first_row / Vec::kLinearRows, steps = depth / kFetchDepth;
    int64_t k = 0;
    for (; k + kFetchDepth <= depth; k += kFetchDepth) {
      if (tile < next.tiles) {
        next.fetch((tile * steps + k / kFetchDepth) * next.piece_lines);
      }
      if constexpr (Rows == Vec::kLinearRows) {  // nearly all the time is spent here: unrolled, 5 % less of it on Zen 4
        for_constants(Inputs{}, [&](auto i) MULTILORA_INLINED { accumulate(k + i); });
      } else {
        for (int64_t j = k; j < k + kFetchDepth; ++j) {
          accumulate(j);
        }
      }
    }
    for (; k < depth; ++k) {
      accumulate(k);
    }
    float* to = sums + first_row * kPanelWidth;
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v, to += Vec::kWidth) {
        Vec::store(to, is_first ? sum[r][v] : Vec::add(Vec::load(to), sum[r][v]));
      }
    }
  }
};

// Calls tile.run<Rows>(first_row) while at least Rows rows are left, then once for the rest.
template <int Rows, class Tile>
MULTILORA_INLINE void run_rest(int64_t first, int64_t count, const Tile& tile) {
  if constexpr (Rows > 0) {
    if (count - first == Rows) {
      tile.template run<Rows>(first);
    } else {
      run_rest<Rows - 1>(first, count, tile);
    }
  }
}

template <int Rows, class Tile>
MULTILORA_INLINE void run_rows(int64_t first, int64_t count, const Tile& tile) {
  for (; count - first >= Rows; first += Rows) {
    tile.template run<Rows>(first);
  }
  run_rest<Rows - 1>(first, count, tile);
}

// Every row of a block. Not inlined: it is large, and several kernels end in it.
template <class Vec, class Weights>
__attribute__((noinline)) void run_all_rows(const LinearTile<Vec, Weights>& tile, int64_t first, int64_t rows) {
  run_rows<Vec::kLinearRows>(first, rows, tile);
}

// One block of one panel of floats for up to kRowBlock rows, added to their sums.
template <class Vec, class T>
void linear_block(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, int64_t k, float* sums) {
  const int64_t depth = std::min(block_depth(task.in_features), task.in_features - k);
  const int64_t column = task.in_features * Vec::kWidth;
  const T* weights = static_cast<const T*>(task.panels) + panel * kPanelVectors * column + k * Vec::kWidth;
  const T* ahead = weights + depth * Vec::kWidth + (k + depth < task.in_features ? 0 : (kPanelVectors - 1) * column);
  const NextBlock next = next_block<Vec>(ahead, column * sizeof(T), kFetchDepth * Vec::kWidth * sizeof(T), rows, rows);
  const float* x = task.x + first_row * task.x_stride + k;
  const FloatWeights<Vec, T> stored{weights, column};
  if constexpr (!std::is_same_v<T, float>) {
    if (rows > kDirectTiles * Vec::kLinearRows) {
      alignas(kCacheLine) float kept[kMaxBlockDepth * LinearTile<Vec, FloatWeights<Vec, T>>::kPanelWidth];
      const LinearTile<Vec, FloatWeights<Vec, T>, true> first{x, task.x_stride, stored, depth, sums, k == 0, next, kept};
      first.template run<Vec::kLinearRows>(0);
      const FloatWeights<Vec, float> converted{kept, kMaxBlockDepth * Vec::kWidth};
      const LinearTile<Vec, FloatWeights<Vec, float>> others{x, task.x_stride, converted, depth, sums, k == 0, next, nullptr};
      return run_all_rows<Vec>(others, Vec::kLinearRows, rows);
    }
  }
  const LinearTile<Vec, FloatWeights<Vec, T>> all{x, task.x_stride, stored, depth, sums, k == 0, next, nullptr};
  run_all_rows<Vec>(all, 0, rows);
}

// Writes the complete sums of a panel to the places of its outputs.
template <class Vec>
void write_outputs(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, const float* sums) {
  constexpr int64_t kWidth = kPanelVectors * Vec::kWidth;
  const int64_t outputs = std::min(kWidth, task.out_features - panel * kWidth);
  for (int64_t r = 0; r < rows; ++r) {
    float* y = task.y + (first_row + r) * task.y_stride + panel * kWidth;
    for_each_vector<Vec>(outputs, [&](int64_t n, auto part) { part.store(y + n, Vec::load(sums + r * kWidth + n)); });
  }
}

// All blocks of some panels. block(first_row, rows, panel, first_input, sums) adds one to the sums of some rows.
template <class Vec, class Block>
MULTILORA_INLINE void for_each_block(const LinearTask& task, int64_t panel_begin, int64_t panel_end, const Block& block) {
  alignas(kCacheLine) float sums[kRowBlock * kPanelVectors * Vec::kWidth];
  for (int64_t row = 0; row < task.rows; row += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, task.rows - row);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t k = 0; k < task.in_features; k += block_depth(task.in_features)) {
        block(row, rows, panel, k, sums);
      }
      write_outputs<Vec>(task, row, rows, panel, sums);
    }
  }
}

template <class Vec, class T>
void linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  for_each_block<Vec>(task, panel_begin, panel_end, [&](int64_t row, int64_t rows, int64_t panel, int64_t k, float* sums) {
    linear_block<Vec, T>(task, row, rows, panel, k, sums);
  });
}

}  // namespace
}  // namespace multilora
