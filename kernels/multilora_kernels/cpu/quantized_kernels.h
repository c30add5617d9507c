// The linear over codes, written once over a vector type `Vec` like the linear over floats (linear_kernels.h).
//
// A code becomes the weight that it means, rounded once to float32, before it is multiplied, and the weights are added up in
// the order of float32 ones: a product has the bits of the same product with unpacked weights. For few rows, Vec::kCodeTiles
// tiles, each tile turns codes into weights in registers. For more, a block of weights is written to the caches once, and
// multiplied from there.
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

// Kinds of codes. bytes(inputs): of one column. load<I>(codes): as floats, the codes of input I of the kCodeStep whose codes
// begin there, plus offset(I), which is one of kNumOffsets. kZero: the zero of a code whose stored zero is 0. kScale: of all scales.
//
// Codes of 4 bits become floats without a conversion: they are the last bits of mantissas. The code of input I lies in its word
// from bit 4 I + 3 on, so that it needs a rotation only for every third input: at the bits 11, 15 and 19 it is read as
// 2^12, 2^8 and 2^4 plus itself. Such a sum times a scale of at most 11 bits is exact.
template <class Vec>
struct Int4Weights {
  static constexpr int kNumOffsets = 3, kFirstBit = 11;
  static constexpr float kZero = 8, kScale = 1;
  static constexpr int64_t bytes(int64_t inputs) { return (inputs + kCodeStep - 1) / kCodeStep * Vec::kWidth * sizeof(uint32_t); }
  static constexpr int rotation(int i) { return i < 2 || i == 7 ? 12 : i > 4 ? 24 : 0; }
  static constexpr int offset_of(int i) { return ((4 * i + 3 + rotation(i)) % 32 - kFirstBit) / 4; }
  static constexpr float offset(int n) { return 1 << (23 - kFirstBit - 4 * n); }

  template <int I>
  static MULTILORA_INLINE typename Vec::F load(const char* codes) {
    const auto words = Vec::template rotate_left<rotation(I)>(Vec::load_words(codes));
    return Vec::template nibble_above<kFirstBit + 4 * offset_of(I)>(words);
  }
};

template <class Vec, class T>
struct ByteWeights {
  static_assert(sizeof(T) == 1);
  static constexpr int64_t bytes(int64_t inputs) { return inputs * Vec::kWidth; }

  template <int I>
  static MULTILORA_INLINE typename Vec::F load(const char* codes) {
    return Vec::load(reinterpret_cast<const T*>(codes) + I * Vec::kWidth);
  }
};

template <class Vec>
struct Int8Weights : ByteWeights<Vec, int8_t> {
  static constexpr int kNumOffsets = 1;
  static constexpr float kZero = 0, kScale = 1;
  static constexpr int offset_of(int) { return 0; }
  static constexpr float offset(int) { return 0; }
};

template <class Vec>
struct Float8Weights : ByteWeights<Vec, Float8> {
  static constexpr int kNumOffsets = 0;
  static constexpr float kScale = kFloat8Scale;
};

// How a code becomes a weight, once rounded: (code - zero) * scale; or code * scale - zero * scale where the last product is
// exact, because the scale has few bits.
enum class Rounding { subtracts_first, has_exact_products };

// The numbers that turn the codes of one block of one panel into weights, for each group: scales, then zeros with each of
// the offsets, or minus the products of these zeros with the scales.
template <class Vec, class Codes, Rounding kRounding>
struct BlockScaling {
  static constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth, kGroupSize = (1 + Codes::kNumOffsets) * kPanelWidth;

  alignas(kCacheLine) float values[kMaxBlockDepth * kGroupSize];

  // The groups [begin, end) of `groups`.
  void read(const GroupScaling& scaling, int64_t panel, int64_t groups, int64_t begin, int64_t end) {
    for (int v = 0; v < kPanelVectors; ++v) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t from = ((panel * kPanelVectors + v) * groups + g) * Vec::kWidth;
        float* to = values + (g - begin) * kGroupSize + v * Vec::kWidth;
        const auto scale = Vec::mul(scale_at(scaling, from), Vec::broadcast(Codes::kScale));
        Vec::store(to, scale);
        if constexpr (Codes::kNumOffsets > 0) {
          const auto zero = scaling.zeros ? Vec::load(scaling.zeros + from) : Vec::zero();
          for (int n = 0; n < Codes::kNumOffsets; ++n) {
            const auto code = Vec::add(zero, Vec::broadcast(Codes::kZero + Codes::offset(n)));
            const bool is_product = kRounding == Rounding::has_exact_products;
            Vec::store(to + (1 + n) * kPanelWidth, is_product ? Vec::sub(Vec::zero(), Vec::mul(code, scale)) : code);
          }
        }
      }
    }
  }

 private:
  static typename Vec::F scale_at(const GroupScaling& scaling, int64_t from) {
    switch (scaling.type) {
      case ScaleType::bfloat16:
        return Vec::load(static_cast<const BFloat16*>(scaling.scales) + from);
      case ScaleType::float16:
        return Vec::load(static_cast<const Float16*>(scaling.scales) + from);
      default:
        return Vec::load(static_cast<const float*>(scaling.scales) + from);
    }
  }
};

// The codes of one block of one panel as weights.
template <class Vec, class Codes, Rounding kRounding>
struct QuantizedWeights {
  using F = typename Vec::F;
  using Scaling = BlockScaling<Vec, Codes, kRounding>;
  static constexpr int kStep = kCodeStep;

  const char* first;  // codes of each column
  int64_t next_column;
  const float* scaling;           // BlockScaling::values
  uint32_t group_size, in_group;  // inputs of the first group that lie before the block

  struct Step {
    const char* codes;
    int64_t next_column;
    const float* scaling;

    template <int I>
    MULTILORA_INLINE F load(int column, std::integral_constant<int, I>) const {
      const F code = Codes::template load<I>(codes + column * next_column), scale = Vec::load(scaling + column * Vec::kWidth);
      if constexpr (Codes::kNumOffsets == 0) {
        return Vec::mul(code, scale);
      } else {
        const F zero = Vec::load(scaling + (1 + Codes::offset_of(I)) * Scaling::kPanelWidth + column * Vec::kWidth);
        return kRounding == Rounding::has_exact_products ? Vec::fma(code, scale, zero) : Vec::mul(Vec::sub(code, zero), scale);
      }
    }
  };
  // The weights of the inputs [k, k + kStep), with the scales of input k + i. k: a multiple of kStep.
  MULTILORA_INLINE Step at(int64_t k, int64_t i = 0) const {
    const int64_t group = (in_group + static_cast<uint32_t>(k + i)) / group_size;
    return {first + Codes::bytes(k), next_column, scaling + group * Scaling::kGroupSize};
  }
};

// Writes the weights of `depth` inputs to `to`, of each column [kMaxBlockDepth, Vec::kWidth]. one_group: kCodeStep inputs
// belong to one group.
template <class Vec, class Weights>
void unpack(const Weights& weights, int64_t depth, bool one_group, float* to) {
  using Inputs = std::make_integer_sequence<int, kCodeStep>;
  const auto write = [&](const auto& step, int64_t k, auto i) MULTILORA_INLINED {
    for (int v = 0; v < kPanelVectors; ++v) {
      Vec::store(to + (v * kMaxBlockDepth + k + i) * Vec::kWidth, step.load(v, i));
    }
  };
  int64_t k = 0;
  for (; one_group && k + kCodeStep <= depth; k += kCodeStep) {
    const auto step = weights.at(k);
    for_constants(Inputs{}, [&](auto i) MULTILORA_INLINED { write(step, k, i); });
  }
  for (; k < depth; k += kCodeStep) {
    for_constants(Inputs{}, [&](auto i) MULTILORA_INLINED {
      if (k + i < depth) {
        write(weights.at(k, i), k, i);
      }
    });
  }
}

// One block of one panel of codes for up to kRowBlock rows, added to their sums.
template <class Vec, class Codes, Rounding kRounding>
void quantized_block(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, int64_t k,
                     BlockScaling<Vec, Codes, kRounding>& scaling, float* sums) {
  using Weights = QuantizedWeights<Vec, Codes, kRounding>;
  const int64_t depth = std::min(block_depth(task.in_features), task.in_features - k);
  const int64_t column = Codes::bytes(task.in_features);
  const char* codes = static_cast<const char*>(task.panels) + panel * kPanelVectors * column + Codes::bytes(k);
  const char* ahead = codes + Codes::bytes(depth) + (k + depth < task.in_features ? 0 : (kPanelVectors - 1) * column);
  const NextBlock next = next_block<Vec>(ahead, column, Codes::bytes(kFetchDepth), rows);
  const int64_t group_size = task.scaling.group_size, first_group = k / group_size;
  const int64_t groups = (task.in_features + group_size - 1) / group_size;
  scaling.read(task.scaling, panel, groups, first_group, (k + depth - 1) / group_size + 1);
  const Weights weights{codes, column, scaling.values, static_cast<uint32_t>(group_size),
                        static_cast<uint32_t>(k - first_group * group_size)};
  const bool one_group = groups == 1 || group_size % kCodeStep == 0;
  const float* x = task.x + first_row * task.x_stride + k;
  if (one_group && rows <= Vec::kCodeTiles * Vec::kLinearRows) {
    const LinearTile<Vec, Weights> direct{x, task.x_stride, weights, depth, sums, k == 0, next, nullptr};
    return run_all_rows<Vec>(direct, 0, rows);
  }
  alignas(kCacheLine) float unpacked[kMaxBlockDepth * kPanelVectors * Vec::kWidth];
  unpack<Vec>(weights, depth, one_group, unpacked);
  const FloatWeights<Vec, float> floats{unpacked, kMaxBlockDepth * Vec::kWidth};
  const LinearTile<Vec, FloatWeights<Vec, float>> all{x, task.x_stride, floats, depth, sums, k == 0, next, nullptr};
  run_all_rows<Vec>(all, 0, rows);
}

template <class Vec, class Codes, Rounding kRounding>
void quantized_linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  BlockScaling<Vec, Codes, kRounding> scaling;
  for_each_block<Vec>(task, panel_begin, panel_end, [&](int64_t row, int64_t rows, int64_t panel, int64_t k, float* sums) {
    quantized_block<Vec, Codes, kRounding>(task, row, rows, panel, k, scaling, sums);
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
