// The linear over codes, written once over a vector type `Vec` like the linear over floats (linear_kernels.h).
//
// A code becomes the weight that it means, rounded once to float32, before it is multiplied, and the weights are added up in
// the order of float32 ones: a product has the bits of the same product with unpacked weights. The first Vec::kLinearRows rows
// turn codes into weights in registers. For other rows they leave a block of weights in the caches, which is multiplied from
// there.
//
// That costs one product a weight, by its scale. All other work leaves the units of products free (Zen 4: shifts, shuffles and
// conversions do, rotations do not).
//
// The columns of a panel of floats are long enough to be read from three places. Those of codes are a page or two, and
// processors prefetch within a page only: their steps lie side by side, and a panel is read from one end to the other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_kernels.h"
#include "storage.h"
#include "work.h"

namespace multilora {
namespace {

// Inputs whose codes are turned into weights in one go. Blocks begin at a multiple of it.
constexpr int64_t kCodeStep = 8;
static_assert(kFetchDepth % kCodeStep == 0);

constexpr int64_t steps_of(int64_t inputs) { return (inputs + kCodeStep - 1) / kCodeStep; }

// Work that takes as long as one product: a code becomes a weight.
constexpr int64_t kCodeProducts = 1;

// Kinds of codes. column_bytes(inputs): of one column. Step: kCodeStep inputs of a panel; code<I>(column) is the code of input I
// as floats. kScale: of all scales.
template <class Vec>
struct Int4Weights {
  static constexpr bool kHasZeros = true;
  static constexpr float kScale = 1;
  static constexpr int64_t kWordBytes = Vec::kWidth * sizeof(uint32_t);
  static constexpr int64_t column_bytes(int64_t inputs) { return steps_of(inputs) * kWordBytes; }

  struct Step {
    decltype(Vec::load_words(nullptr)) words[kPanelVectors];

    explicit MULTILORA_INLINE Step(const char* codes) {
      for (int v = 0; v < kPanelVectors; ++v) {
        words[v] = Vec::load_words(codes + v * kWordBytes);
      }
    }

    template <int I>
    MULTILORA_INLINE typename Vec::F code(int column) const {
      return Vec::template nibble<I>(words[column]);
    }
  };
};

template <class Vec, class T>
struct ByteWeights {
  static_assert(sizeof(T) == 1);
  static constexpr int64_t column_bytes(int64_t inputs) { return inputs * Vec::kWidth; }

  struct Step {
    const T* codes;

    explicit MULTILORA_INLINE Step(const char* codes) : codes(reinterpret_cast<const T*>(codes)) {}

    template <int I>
    MULTILORA_INLINE typename Vec::F code(int column) const {
      return Vec::load(codes + (I * kPanelVectors + column) * Vec::kWidth);
    }
  };
};

template <class Vec>
struct Int8Weights : ByteWeights<Vec, int8_t> {
  static constexpr bool kHasZeros = true;
  static constexpr float kScale = 1;
};

template <class Vec>
struct Float8Weights : ByteWeights<Vec, Float8> {
  static constexpr bool kHasZeros = false;
  static constexpr float kScale = kFloat8Scale;
};

// How a code becomes a weight, once rounded: (code - zero) * scale; or code * scale - zero * scale where the last product is
// exact, because the scale has few bits.
enum class Rounding { subtracts_first, has_exact_products };

// The numbers that turn the codes of one group of one column into weights: the scale, and the zero or minus its product with
// the scale.
template <class Vec, class Codes, Rounding kRounding>
struct GroupNumbers {
  using F = typename Vec::F;
  static constexpr bool kHasExactProducts = kRounding == Rounding::has_exact_products;

  F scale, zero;

  // place: of the group's first output among all scales.
  MULTILORA_INLINE void read(const GroupScaling& scaling, int64_t place) {
    scale = scale_at(scaling, place);
    if constexpr (Codes::kScale != 1) {
      scale = Vec::mul(scale, Vec::broadcast(Codes::kScale));
    }
    if constexpr (Codes::kHasZeros) {
      zero = zero_at(scaling, place);
      if constexpr (kHasExactProducts) {
        zero = Vec::sub(Vec::zero(), Vec::mul(zero, scale));
      }
    }
  }

  // Fetches the scales of so many neighbouring outputs. Zeros are few bytes, which nearly no weight has.
  static MULTILORA_INLINE void fetch(const GroupScaling& scaling, int64_t place, int64_t outputs) {
    const int64_t size = scaling.type == ScaleType::float32 ? sizeof(float) : sizeof(BFloat16);
    for (int64_t byte = 0; byte < outputs * size; byte += kCacheLine) {
      fetch_line(static_cast<const char*>(scaling.scales) + place * size + byte);
    }
  }

  MULTILORA_INLINE F weight(F code) const {
    if constexpr (!Codes::kHasZeros) {
      return Vec::mul(code, scale);
    } else {
      return kHasExactProducts ? Vec::fma(code, scale, zero) : Vec::mul(Vec::sub(code, zero), scale);
    }
  }

 private:
  static MULTILORA_INLINE F zero_at(const GroupScaling& scaling, int64_t place) {
    if (!scaling.zeros) {
      return Vec::zero();
    }
    return scaling.has_float_zeros ? Vec::load(static_cast<const float*>(scaling.zeros) + place)
                                   : Vec::load(static_cast<const int8_t*>(scaling.zeros) + place);
  }

  static MULTILORA_INLINE F scale_at(const GroupScaling& scaling, int64_t place) {
    switch (scaling.type) {
      case ScaleType::bfloat16:
        return Vec::load(static_cast<const BFloat16*>(scaling.scales) + place);
      case ScaleType::float16:
        return Vec::load(static_cast<const Float16*>(scaling.scales) + place);
      default:
        return Vec::load(static_cast<const float*>(scaling.scales) + place);
    }
  }
};

// The same memory, of which the compiler keeps nothing in registers: sums of Vec::kLinearRows rows take nearly all of them.
template <class T>
MULTILORA_INLINE T* reloaded(T* memory) {
  asm("" : "+r"(memory));
  return memory;
}

// One block of one panel of codes.
template <class Vec, class Codes, Rounding kRounding>
struct CodeBlock {
  using F = typename Vec::F;
  using Inputs = std::make_integer_sequence<int, kCodeStep>;
  using Numbers = GroupNumbers<Vec, Codes, kRounding>;

  const char* first;  // codes
  int64_t depth;
  const GroupScaling& scaling;
  int64_t panel;
  int64_t groups;       // of a column
  int64_t first_input;  // of the block

  // Calls body(numbers of each column, first, end) for the inputs of each group that lie in the block. The numbers of the same
  // group of the next panel are fetched meanwhile.
  template <class Body>
  MULTILORA_INLINE void for_each_group(const Body& body) const {
    int64_t group = first_input / scaling.group_size, end = (group + 1) * scaling.group_size - first_input;
    for (int64_t k = 0; k < depth; ++group, end += scaling.group_size) {
      Numbers numbers[kPanelVectors];
      constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth;
      const int64_t place = (panel * groups + group) * kPanelWidth;
      for (int v = 0; v < kPanelVectors; ++v) {
        numbers[v].read(scaling, place + v * Vec::kWidth);
      }
      Numbers::fetch(scaling, place + groups * kPanelWidth, kPanelWidth);
      const int64_t last = std::min(end, depth);
      body(numbers, k, last);
      k = last;
    }
  }

  // Calls body(weights of each column, input) for the inputs of the step that begins at k, from `begin` to `end`, or for all of
  // them if IsWhole. numbers: of each column, of the group to which the inputs belong. Reloads: they stay in memory.
  template <bool IsWhole, bool Reloads, class Body>
  MULTILORA_INLINE void step(const Numbers* numbers, int64_t k, int64_t begin, int64_t end, const Body& body) const {
    const typename Codes::Step codes(first + kPanelVectors * Codes::column_bytes(k));
    for_constants(Inputs{}, [&](auto i) MULTILORA_INLINED {
      if (IsWhole || k + i < end) {
        const Numbers* of_column = Reloads ? reloaded(numbers) : numbers;
        F weight[kPanelVectors];
        for (int v = 0; v < kPanelVectors; ++v) {
          weight[v] = of_column[v].weight(codes.template code<i>(v));
        }
        if (IsWhole || k + i >= begin) {
          body(weight, k + i);
        }
      }
    });
  }
};

// One block of one panel of codes, times the first rows, as LinearTile. Groups end at multiples of kCodeStep, or with the inputs.
// Keeps: the weights as they were multiplied stay in `kept`.
template <class Vec, class Block, bool Keeps>
struct CodeTile {
  using F = typename Vec::F;
  static constexpr int kPanelWidth = kPanelVectors * Vec::kWidth;

  const float* x;
  int64_t x_stride;
  const Block& block;
  float* sums;    // [rows, kPanelWidth]
  bool is_first;  // block of the panel: there are no sums yet
  NextBlock next;
  float* kept;  // of each column [kMaxBlockDepth, Vec::kWidth], or null

  // The first rows.
  template <int Rows>
  MULTILORA_INLINE void run(int64_t) const {
    constexpr bool kReloads = Rows == Vec::kLinearRows;
    F sum[Rows][kPanelVectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        sum[r][v] = Vec::zero();
      }
    }
    const auto accumulate = [&](const F* weight, int64_t k) MULTILORA_INLINED {
      for (int v = 0; Keeps && v < kPanelVectors; ++v) {
        Vec::store(kept + (v * kMaxBlockDepth + k) * Vec::kWidth, weight[v]);
      }
      for (int r = 0; r < Rows; ++r) {
        const F value = Vec::broadcast_once(x[r * x_stride + k]);
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[r][v] = Vec::fma(value, weight[v], sum[r][v]);
        }
      }
    };
    block.for_each_group([&](const auto* numbers, int64_t k, int64_t end) MULTILORA_INLINED {
      for (; k + kCodeStep <= end; k += kCodeStep) {
        if (next.tiles > 0) {
          next.fetch(k / kCodeStep * next.piece_lines);
        }
        block.template step<true, kReloads>(numbers, k, k, end, accumulate);
      }
      if (k < end) {
        block.template step<false, kReloads>(numbers, k, k, end, accumulate);
      }
    });
    float* to = sums;
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v, to += Vec::kWidth) {
        Vec::store(to, is_first ? sum[r][v] : Vec::add(Vec::load(to), sum[r][v]));
      }
    }
  }
};

// Writes the weights of a block to `to`, of each column [kMaxBlockDepth, Vec::kWidth].
template <class Vec, class Block>
void unpack(const Block& block, float* to) {
  block.for_each_group([&](const auto* numbers, int64_t begin, int64_t end) MULTILORA_INLINED {
    for (int64_t k = begin / kCodeStep * kCodeStep; k < end; k += kCodeStep) {
      block.template step<false, false>(numbers, k, begin, end, [&](const auto* weight, int64_t input) MULTILORA_INLINED {
        for (int v = 0; v < kPanelVectors; ++v) {
          Vec::store(to + (v * kMaxBlockDepth + input) * Vec::kWidth, weight[v]);
        }
      });
    }
  });
}

// One block of one panel of codes for up to kRowBlock rows, added to their sums.
template <class Vec, class Codes, Rounding kRounding>
void quantized_block(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, int64_t k, float* sums) {
  using Block = CodeBlock<Vec, Codes, kRounding>;
  const int64_t depth = std::min(block_depth(task.in_features), task.in_features - k);
  const int64_t column = Codes::column_bytes(task.in_features), piece = Codes::column_bytes(depth);
  const char* codes = static_cast<const char*>(task.panels) + kPanelVectors * (panel * column + Codes::column_bytes(k));
  const char* ahead = codes + kPanelVectors * piece;
  const int64_t group_size = task.scaling.group_size, groups = (task.in_features + group_size - 1) / group_size;
  const Block block{codes, depth, task.scaling, panel, groups, k};
  const float* x = task.x + first_row * task.x_stride + k;
  const NextBlock next = next_block<Vec>(ahead, piece, Codes::column_bytes(kFetchDepth), rows, rows + kCodeProducts);
  const bool is_direct = groups == 1 || group_size % kCodeStep == 0;
  if (is_direct && rows <= Vec::kLinearRows) {
    return run_rest<Vec::kLinearRows>(0, rows, CodeTile<Vec, Block, false>{x, task.x_stride, block, sums, k == 0, next, nullptr});
  }
  alignas(kCacheLine) float unpacked[kMaxBlockDepth * kPanelVectors * Vec::kWidth];
  const FloatWeights<Vec, float> floats{unpacked, kMaxBlockDepth * Vec::kWidth};
  const LinearTile<Vec, FloatWeights<Vec, float>> all{x, task.x_stride, floats, depth, sums, k == 0, next, nullptr};
  if (!is_direct) {
    unpack<Vec>(block, unpacked);
    return run_all_rows<Vec>(all, 0, rows);
  }
  CodeTile<Vec, Block, true>{x, task.x_stride, block, sums, k == 0, next, unpacked}.template run<Vec::kLinearRows>(0);
  run_all_rows<Vec>(all, Vec::kLinearRows, rows);
}

template <class Vec, class Codes, Rounding kRounding>
void quantized_linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  for_each_block<Vec>(task, panel_begin, panel_end, [&](int64_t row, int64_t rows, int64_t panel, int64_t k, float* sums) {
    quantized_block<Vec, Codes, kRounding>(task, row, rows, panel, k, sums);
  });
}

template <class Vec>
constexpr QuantizedKernels quantized_kernels() {
  constexpr Rounding kWide = Rounding::subtracts_first, kNarrow = Rounding::has_exact_products;
  return {quantized_linear<Vec, Int4Weights<Vec>, kNarrow>, quantized_linear<Vec, Int4Weights<Vec>, kWide>,
          quantized_linear<Vec, Int8Weights<Vec>, kNarrow>, quantized_linear<Vec, Int8Weights<Vec>, kWide>,
          quantized_linear<Vec, Float8Weights<Vec>, kNarrow>};
}

}  // namespace
}  // namespace multilora
