// Products of attention by AMX, of pairs of bfloat16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear_kernels.h"
#include "tiles.h"

namespace multilora {
namespace {

// Whether `Vec` comes with the matrix unit.
template <class Vec, class = void>
constexpr bool kHasTiles = false;
template <class Vec>
constexpr bool kHasTiles<Vec, std::enable_if_t<Vec::kMultipliesTiles>> = true;

// Rows that are multiplied at a time.
constexpr int kMostGroups = 4;

// kTileRows rows each of pairs of bfloat16, row to row `stride` bytes.
struct RowGroups {
  const char* first[kMostGroups];
  int64_t count, stride;
};

// Pairs for kTileOutputs columns, row to row `stride` bytes.
struct ColumnPairs {
  const char* first;
  int64_t stride;
};

// c[r, :] = c[r, :] or zero + sum_k a[r, 2 k] * b[k, :, 0] + a[r, 2 k + 1] * b[k, :, 1] for kTileRows * steps pairs k.
// c: of the groups' rows one after the other, of float32, row to row `stride` elements.
inline void multiply_groups(const RowGroups& a, const ColumnPairs& b, int64_t steps, bool adds, float* c, int64_t stride) {
  const auto for_each_group = [&](const auto& body) MULTILORA_INLINED {
    for_constants(std::make_integer_sequence<int, kMostGroups>{}, [&](auto group) MULTILORA_INLINED {
      if (group() < a.count) {
        body(group, c + group() * kTileRows * stride);
      }
    });
  };
  const int64_t stride_bytes = stride * static_cast<int64_t>(sizeof(float));
  for_each_group([&](auto group, float* of_group) MULTILORA_INLINED {
    adds ? Tiles::load<group()>(of_group, stride_bytes) : Tiles::zero<group()>();
  });
  for (int64_t step = 0; step < steps; ++step) {
    Tiles::load<Tiles::kWeights>(b.first + step * kTileRows * b.stride, b.stride);
    for_each_group([&](auto group, float*) MULTILORA_INLINED {
      Tiles::load<Tiles::kX>(a.first[group()] + step * kRowBytes, a.stride);
      Tiles::multiply_pairs<group(), Tiles::kWeights>();
    });
  }
  for_each_group([&](auto group, float* of_group) MULTILORA_INLINED { Tiles::store<group()>(of_group, stride_bytes); });
}

}  // namespace
}  // namespace multilora
