// The linear over codes and over activations rounded to bfloat16, written over a vector type `Vec` whose fma is a product of
// pairs of bfloat16.
//
// Codes are exact in bfloat16. The products of a group's codes are added up, one chain in the order of the inputs, and the sum
// is multiplied by the scale of the group: no weight is rounded, and scales cost nothing per weight. A zero times the sum of the
// group's activations is subtracted from the group's sum. The blocks and the order of all sums depend on neither the other rows,
// nor the tile, nor the thread.
//
// The first Vec::kLinearRows rows turn codes into pairs in registers. For other rows they leave the pairs of a block in the L1
// cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "linear_kernels.h"
#include "quantized_kernels.h"
#include "work.h"

namespace multilora {
namespace {

// Pairs of the inputs that are taken in one go. Which inputs make a pair is the kind's own choice: activations lie in the same
// order. All kinds have zeros of both beyond the last input, up to a whole step.
constexpr int kStepPairs = kCodeStep / 2;

// The pairs of one block of one panel, made of its codes.
template <class Vec, class Codes>
struct CodedPairs {
  const char* first;

  template <int I>
  MULTILORA_INLINE typename Vec::F load(int column, int64_t step) const {
    return Codes::template pairs<I>(first + step * kPanelVectors * Codes::kStepBytes, column);
  }
};

// The same pairs, made before.
template <class Vec>
struct KeptPairs {
  float* first;

  MULTILORA_INLINE float* place(int i, int column, int64_t step) const {
    return first + ((step * kStepPairs + i) * kPanelVectors + column) * Vec::kWidth;
  }
  template <int I>
  MULTILORA_INLINE typename Vec::F load(int column, int64_t step) const {
    return Vec::load(place(I, column, step));
  }
};

// One block of one panel, and the rows that it is multiplied with.
struct PairBlock {
  const GroupScaling& scaling;
  int64_t panel, groups, group_steps;
  int64_t first_step, steps;
  const float* x;  // pairs
  int64_t x_stride;
  const float* x_sums;  // [rows, groups], or null without zeros
  float* sums;          // [rows, outputs of the panel]
  NextBlock next;
};

// The products of a block with some rows, added to their sums. Keeps: the pairs stay in `kept`.
template <class Vec, class Codes, class Pairs, bool Keeps>
struct PairTile {
  using F = typename Vec::F;
  using Numbers = GroupNumbers<Vec, Codes, Rounding::subtracts_first>;
  static constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth;

  const PairBlock& block;
  Pairs pairs;
  KeptPairs<Vec> kept;

  template <int Rows>
  MULTILORA_INLINE void run(int64_t first_row) const {
    const float* x_row = block.x + first_row * block.x_stride;
    const int64_t tile = first_row / Vec::kLinearRows;
    int64_t group = block.first_step / block.group_steps;
    for (int64_t step = 0; step < block.steps; ++group) {
      const int64_t begin = group * block.group_steps - block.first_step;
      const int64_t end = std::min(begin + block.group_steps, block.steps);
      F sum[Rows][kPanelVectors];
      for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[r][v] = Vec::zero();
        }
      }
      for (; step < end; ++step) {
        if (tile < block.next.tiles) {
          block.next.fetch((tile * block.steps + step) * block.next.piece_lines);
        }
        for_constants(std::make_integer_sequence<int, kStepPairs>{}, [&](auto i) MULTILORA_INLINED {
          F weight[kPanelVectors];
          for (int v = 0; v < kPanelVectors; ++v) {
            weight[v] = pairs.template load<i>(v, step);
            if constexpr (Keeps) {
              Vec::store(kept.place(i, v, step), weight[v]);
            }
          }
          for (int r = 0; r < Rows; ++r) {
            const F value = Vec::broadcast_once(x_row[r * block.x_stride + step * kStepPairs + i]);
            for (int v = 0; v < kPanelVectors; ++v) {
              sum[r][v] = Vec::fma(value, weight[v], sum[r][v]);
            }
          }
        });
      }
      if constexpr (Codes::kHasZeros) {
        // A group may go on in the next block: its activations count where it begins.
        if (block.x_sums && begin >= 0) {
          subtract_zeros<Rows>(sum, first_row, group);
        }
      }
      add_scaled<Rows>(sum, first_row, group);
    }
  }

 private:
  int64_t place_of(int64_t group) const { return (block.panel * block.groups + group) * kPanelWidth; }

  // Both take one column after the other: the sums of all rows leave few registers for a group's numbers.
  // Columns are constants: a loop over them with the branches of a zero's type stays a loop, and keeps all sums in memory.
  template <int Rows>
  MULTILORA_INLINE void subtract_zeros(F (&sum)[Rows][kPanelVectors], int64_t first_row, int64_t group) const {
    for_constants(std::make_integer_sequence<int, kPanelVectors>{}, [&](auto v) MULTILORA_INLINED {
      Numbers numbers;
      numbers.read(block.scaling, place_of(group) + v * Vec::kWidth);
      for (int r = 0; r < Rows; ++r) {
        const F x_sum = Vec::broadcast(block.x_sums[(first_row + r) * block.groups + group]);
        sum[r][v] = Vec::subtract_product(numbers.zero, x_sum, sum[r][v]);
      }
    });
  }

  template <int Rows>
  MULTILORA_INLINE void add_scaled(const F (&sum)[Rows][kPanelVectors], int64_t first_row, int64_t group) const {
    if (first_row == 0) {
      Numbers::fetch(block.scaling, place_of(group) + block.groups * kPanelWidth, kPanelWidth);
    }
    float* to = block.sums + first_row * kPanelWidth;
    for (int v = 0; v < kPanelVectors; ++v, to += Vec::kWidth) {
      Numbers numbers;
      numbers.read(block.scaling, place_of(group) + v * Vec::kWidth);
      for (int r = 0; r < Rows; ++r) {
        float* output = to + r * kPanelWidth;
        Vec::store(output, Vec::add_product(numbers.scale, sum[r][v], Vec::load(output)));
      }
    }
  }
};

// Not inlined, as run_all_rows.
template <class Vec, class Tile>
__attribute__((noinline)) void run_other_rows(const Tile& tile, int64_t first, int64_t rows) {
  run_rows<Vec::kLinearRows>(first, rows, tile);
}

// One block of one panel of codes for up to kRowBlock rows, added to their sums. task.x: pairs.
template <class Vec, class Codes>
void code_pair_block(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, int64_t k, float* sums) {
  const int64_t all_steps = steps_of(task.in_features), first_step = k / kCodeStep, group_size = task.scaling.group_size;
  const int64_t steps = steps_of(std::min(block_depth(task.in_features), task.in_features - k));
  const int64_t groups = (task.in_features + group_size - 1) / group_size;
  const char* codes = static_cast<const char*>(task.panels) +
      (panel * all_steps + first_step) * kPanelVectors * Codes::kStepBytes;
  const int64_t piece = steps * Codes::kStepBytes;
  const char* ahead = codes + kPanelVectors * piece;
  const PairBlock block{task.scaling,
                        panel,
                        groups,
                        groups == 1 ? all_steps : group_size / kCodeStep,
                        first_step,
                        steps,
                        task.x + first_row * task.x_stride + first_step * kStepPairs,
                        task.x_stride,
                        task.x_sums ? task.x_sums + first_row * groups : nullptr,
                        sums,
                        next_block<Vec>(ahead, piece, Codes::kStepBytes, rows, rows + kCodeProducts)};
  if (k == 0) {
    std::fill_n(sums, rows * kPanelVectors * Vec::kWidth, 0.0f);
  }
  const CodedPairs<Vec, Codes> coded{codes};
  if (rows <= Vec::kLinearRows) {
    return run_rest<Vec::kLinearRows>(0, rows, PairTile<Vec, Codes, CodedPairs<Vec, Codes>, false>{block, coded, {nullptr}});
  }
  alignas(kCacheLine) float made[kMaxBlockDepth / 2 * kPanelVectors * Vec::kWidth];
  const KeptPairs<Vec> kept{made};
  PairTile<Vec, Codes, CodedPairs<Vec, Codes>, true>{block, coded, kept}.template run<Vec::kLinearRows>(0);
  run_other_rows<Vec>(PairTile<Vec, Codes, KeptPairs<Vec>, false>{block, kept, kept}, Vec::kLinearRows, rows);
}

template <class Vec, class Codes>
void code_pair_linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  LinearTask pairs = task;
  pairs.x = static_cast<const float*>(task.x_parts);
  pairs.x_stride = steps_of(task.in_features) * kStepPairs;
  for_each_block<Vec>(pairs, panel_begin, panel_end, [&](int64_t row, int64_t rows, int64_t panel, int64_t k, float* sums) {
    code_pair_block<Vec, Codes>(pairs, row, rows, panel, k, sums);
  });
}

}  // namespace
}  // namespace multilora
