// Where the codes and scales of adapters of 8 and 4 bits lie: the counterpart of adapter_codes.py, which gives their
// meaning. Sizes and places are bytes.
#pragma once

#include <cstdint>

#include "storage.h"

namespace multilora {

// Outputs of a panel of B; inputs of a column of a 4-bit A.
constexpr int64_t kCodeLanes = 16;
// Columns of 4-bit codes that share scales.
constexpr int64_t kBlockColumns = 16;
// Of a panel, or of a block of 4-bit codes: bfloat16.
constexpr int64_t kScaleBytes = kCodeLanes * 2;

constexpr int64_t columns_of(int64_t in_features) { return (in_features + kCodeLanes - 1) / kCodeLanes; }

template <class Code>
struct CodePlaces;

template <>
struct CodePlaces<int8_t> {
  static constexpr int64_t a_header(int64_t rank) { return (4 * rank + 63) / 64 * 64; }
  static constexpr int64_t a_row(int64_t in_features) { return in_features; }
  static constexpr int64_t panel(int64_t columns) { return kScaleBytes + kCodeLanes * columns; }
  // Of the scales, and of the codes, of the kBlockColumns columns from `column` on.
  static constexpr int64_t scales_at(int64_t) { return 0; }
  static constexpr int64_t codes_at(int64_t column) { return kScaleBytes + kCodeLanes * column; }
};

template <>
struct CodePlaces<Float8> : CodePlaces<int8_t> {};

template <>
struct CodePlaces<Int4Codes> {
  static constexpr int64_t block(int64_t columns) { return kScaleBytes + kCodeLanes * ((columns + 1) / 2); }
  static constexpr int64_t a_header(int64_t) { return 0; }
  static constexpr int64_t a_row(int64_t in_features) { return panel(columns_of(in_features)); }
  static constexpr int64_t panel(int64_t columns) {
    const int64_t rest = columns % kBlockColumns;
    return columns / kBlockColumns * block(kBlockColumns) + (rest ? block(rest) : 0);
  }
  static constexpr int64_t scales_at(int64_t column) { return column / kBlockColumns * block(kBlockColumns); }
  static constexpr int64_t codes_at(int64_t column) { return scales_at(column) + kScaleBytes; }
};

// The same for adapters of any type: values of `element_size` bytes, or codes of so many bits, if not 0.
struct MatrixPlaces {
  int64_t element_size;
  int bits;

  int64_t a_header(int64_t rank) const { return bits == 8 ? CodePlaces<int8_t>::a_header(rank) : 0; }
  int64_t a_row(int64_t in_features) const {
    return bits == 4 ? CodePlaces<Int4Codes>::a_row(in_features) : in_features * element_size;
  }
  int64_t a_size(int64_t rank, int64_t in_features) const { return a_header(rank) + rank * a_row(in_features); }
  int64_t panel(int64_t rank) const {
    return bits == 4 ? CodePlaces<Int4Codes>::panel(rank) : CodePlaces<int8_t>::panel(rank);
  }
  int64_t b_size(int64_t out_features, int64_t rank) const {
    return bits ? columns_of(out_features) * panel(rank) : out_features * rank * element_size;
  }
  // Where the weights of an output begin; with codes, those of its panel.
  int64_t b_output(int64_t output, int64_t rank) const {
    return bits ? output / kCodeLanes * panel(rank) : output * rank * element_size;
  }
  int64_t magnitude_size(int64_t out_features) const { return out_features * (bits ? 4 : element_size); }
};

}  // namespace multilora
