// The linear over codes by AMX's products of bytes, a block of rows at a time. The products of a span are the same integers as
// those of code_digits.h, and all that follows is the same arithmetic: so are the results, bit by bit.
//
// The digits of an activation are rows of their own for the matrix unit. Its sums of a span go to memory, from where vectors
// multiply them by the scales and add them to the outputs. All that a block needs at a time stays in the L1 cache: with the sums
// of four spans at a time, which do not, a product took up to twice as long.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "activation_digits.h"
#include "code_digits.h"
#include "tiles.h"
#include "work.h"

namespace multilora {
namespace {

static_assert(kTileInputs == kRowBytes);

// The fewest rows at which the matrix unit is quicker than vectors.
constexpr int64_t kLeastTileRows = 2;

// The codes of up to kTileInputs inputs for the outputs of a panel: one tile of each column.
struct CodeTiles {
  const char* first;
  int64_t next_column, next_row;  // bytes

  const char* column(int i) const { return first + i * next_column; }
};

using TileMemory = char[kPanelVectors][kTileBytes];

// The codes of so many steps as tiles, with zeros up to kTileInputs. Codes of 4 bits are taken apart.
template <class Vec, int kDigits>
inline CodeTiles tiles_of(NibbleDigits<Vec, kDigits>, const char* codes, int64_t steps, TileMemory& memory) {
  constexpr int64_t kWordBytes = NibbleDigits<Vec, kDigits>::Weights::kWordBytes;
  for (int64_t step = 0; step < kTileSteps; ++step) {
    for (int v = 0; v < kPanelVectors; ++v, codes += kWordBytes) {
      char* to = memory[v] + step * 2 * kRowBytes;
      if (step < steps) {
        Vec::store_nibbles(codes, to, to + kRowBytes);
      } else {
        std::fill_n(to, 2 * kRowBytes, char(0));
      }
    }
  }
  return {memory[0], kTileBytes, kRowBytes};
}

// Codes of 8 bits lie as tiles already.
template <class Vec, int kDigits>
inline CodeTiles tiles_of(ByteDigits<Vec, kDigits>, const char* codes, int64_t steps, TileMemory& memory) {
  constexpr int64_t kItem = kPanelVectors * kRowBytes, kItems = ByteDigits<Vec, kDigits>::kItems;
  if (steps == kTileSteps) {
    return {codes, kRowBytes, kItem};
  }
  for (int64_t row = 0; row < kTileRows; ++row, codes += kItem) {
    for (int v = 0; v < kPanelVectors; ++v) {
      char* to = memory[v] + row * kRowBytes;
      if (row < steps * kItems) {
        std::copy_n(codes + v * kRowBytes, kRowBytes, to);
      } else {
        std::fill_n(to, kRowBytes, char(0));
      }
    }
  }
  return {memory[0], kTileBytes, kRowBytes};
}

// The rows of a block for the matrix unit, in tiles of one size, of which the last two may share rows.
struct BlockTiles {
  int64_t rows, tiles, tile_rows;

  explicit BlockTiles(int64_t rows)
      : rows(rows), tiles((rows + kTileRows - 1) / kTileRows), tile_rows((rows + tiles - 1) / tiles) {}
  int64_t first_row(int64_t tile) const { return std::min(tile * tile_rows, rows - tile_rows); }
};

// sums += the products of one or two tiles of rows with the codes of some inputs. second: bytes to the second tile. Calls
// between() after the first product with each tile of codes.
template <int kTiles, class Between>
MULTILORA_INLINE void add_tile_products(const char* x, int64_t second, const CodeTiles& codes, const Between& between) {
  static_assert(kPanelVectors == 3);
  const auto multiply = [&](auto sums, int column) MULTILORA_INLINED {
    Tiles::load<Tiles::kWeights>(codes.column(column), codes.next_row);
    Tiles::multiply_bytes<sums(), Tiles::kWeights>();
  };
  Tiles::load<Tiles::kX>(x);
  multiply(std::integral_constant<int, 0>{}, 0);
  between();
  multiply(std::integral_constant<int, 1>{}, 1);
  between();
  multiply(std::integral_constant<int, 2>{}, 2);
  between();
  if constexpr (kTiles == 2) {
    Tiles::load<Tiles::kX>(x + second);
    Tiles::multiply_bytes<5, Tiles::kWeights>();
    multiply(std::integral_constant<int, 4>{}, 1);
    multiply(std::integral_constant<int, 3>{}, 0);
  }
}

// The products of a panel of codes with blocks of rows of one size.
template <class Vec, class Kind>
class CodeProducts {
 public:
  CodeProducts(const LinearTask& task, int64_t block_rows)
      : task_(task), layout_(task.in_features, task.span), rows_(block_rows), of_block_(block_rows * Kind::kDigits),
        tile_steps_(std::min(task.span, kTileInputs) / kCodeStep) {}

  // Writes the products of a panel with the rows [first, end), which are whole blocks, to sums, [rows, outputs of a panel].
  void multiply(int64_t panel, int64_t first, int64_t end, float* sums) {
    const int64_t steps = steps_of(task_.in_features), span_steps = task_.span / kCodeStep;
    codes_ = static_cast<const char*>(task_.panels) + panel * steps * kStepBytes<Kind>;
    for (int64_t span = 0; span < layout_.spans; ++span) {
      make_tiles(std::min(span_steps, steps - span * span_steps));
      scales_.read(task_, panel, span, 1);
      for (int64_t row = first; row < end; row += rows_) {
        multiply_block(row, span, row == first);
        add_products(row, span, sums + (row - first) * kPanelOutputs);
      }
    }
  }

 private:
  using F = typename Vec::F;
  static constexpr int64_t kSpanTiles = kMostSpan / kTileInputs;

  // Of the codes of the next steps.
  void make_tiles(int64_t steps) {
    num_tiles_ = 0;
    for (; steps > 0; steps -= tile_steps_, ++num_tiles_) {
      const int64_t some = std::min(steps, tile_steps_);
      tiles_[num_tiles_] = tiles_of(Kind{}, codes_, some, memory_[num_tiles_]);
      codes_ += some * kStepBytes<Kind>;
    }
  }

  const char* parts_of(int64_t row) const { return static_cast<const char*>(task_.x_parts) + row * layout_.row_bytes(); }

  // fetches: the codes that come next from memory.
  void multiply_block(int64_t row, int64_t span, bool fetches) {
    constexpr int64_t kFetchedBytes = kTileSteps * kStepBytes<Kind> / kPanelVectors;
    const int64_t next_tile = of_block_.rows * kRowBytes, input = span * task_.span;
    const char* x = parts_of(row) + input / kTileInputs * next_tile + input % kTileInputs;
    const char* ahead = codes_ + kCodesAhead;
    const auto between = [&]() MULTILORA_INLINED {
      if (fetches) {
        for (int64_t byte = 0; byte < kFetchedBytes; byte += kCacheLine) {
          fetch_line(ahead + byte);
        }
        ahead += kFetchedBytes;
      }
    };
    for (int64_t i = 0; i < of_block_.tiles; i += 2, fetches = false) {
      const int64_t at = of_block_.first_row(i);
      const char* from = x + at * kRowBytes;
      int32_t* to = products_ + at * kPanelOutputs;
      if (i + 1 < of_block_.tiles) {
        const int64_t second = of_block_.first_row(i + 1) - at;
        Sums<2>::zero();
        for (int64_t t = 0; t < num_tiles_; ++t, from += next_tile) {
          add_tile_products<2>(from, second * kRowBytes, tiles_[t], between);
        }
        Sums<2>::store(to, kPanelOutputs, second);
      } else {
        Sums<1>::zero();
        for (int64_t t = 0; t < num_tiles_; ++t, from += next_tile) {
          add_tile_products<1>(from, 0, tiles_[t], between);
        }
        Sums<1>::store(to, kPanelOutputs, 0);
      }
    }
  }

  void add_products(int64_t row, int64_t span, float* sums) const {
    const auto* numbers = reinterpret_cast<const SpanNumbers*>(parts_of(row) + layout_.numbers_offset(rows_)) + span * rows_;
    const auto add = [&](auto has_zeros, auto is_first) MULTILORA_INLINED {
      const int32_t* products = products_;
      for (int64_t r = 0; r < rows_; ++r, sums += kPanelOutputs, products += Kind::kDigits * kPanelOutputs) {
        for (int v = 0; v < kPanelVectors; ++v) {
          const F total = Vec::template total_of_products<Kind::kDigits>(products + v * kTileOutputs, kPanelOutputs);
          float* to = sums + v * kTileOutputs;
          const F sum = is_first() ? Vec::zero() : Vec::load(to);
          Vec::store(to, add_total<Vec>(total, numbers[r], scales_, 0, v, has_zeros(), sum));
        }
      }
    };
    const auto to_sums = [&](auto has_zeros) {
      span == 0 ? add(has_zeros, std::true_type{}) : add(has_zeros, std::false_type{});
    };
    task_.scaling.zeros ? to_sums(std::true_type{}) : to_sums(std::false_type{});
  }

  const LinearTask& task_;
  const DigitLayout<Kind::kDigits> layout_;
  const int64_t rows_;
  const BlockTiles of_block_;
  const int64_t tile_steps_;
  const char* codes_ = nullptr;  // of which no tiles are made yet
  int64_t num_tiles_ = 0;        // of the span
  CodeTiles tiles_[kSpanTiles];
  SpanScales<Vec, Kind, 1> scales_;
  alignas(kRowBytes) TileMemory memory_[kSpanTiles];
  alignas(kRowBytes) int32_t products_[kMatrixRows * Kind::kDigits * kPanelOutputs];
};

// Rows in blocks of `block` rows each.
template <class Vec, class Kind>
void multiply_code_blocks(const LinearTask& task, int64_t first, int64_t end, int64_t block, int64_t panel_begin,
                          int64_t panel_end) {
  if (first == end) {
    return;
  }
  const Tiles owner(false, BlockTiles(block * Kind::kDigits).tile_rows, std::min(task.span, kTileInputs));
  alignas(kCacheLine) float sums[kRowBlock * kPanelOutputs];
  CodeProducts<Vec, Kind> products(task, block);
  for (int64_t row = first; row < end; row += kRowBlock) {
    const int64_t last = std::min(row + kRowBlock, end);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      products.multiply(panel, row, last, sums);
      write_outputs<Vec>(task, row, last - row, panel, sums);
    }
  }
}

template <class Vec, class Kind>
void code_tile_linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  if (task.rows < kLeastTileRows) {
    return digit_linear<Vec, Kind>(task, panel_begin, panel_end);
  }
  const int64_t left = task.rows % kMatrixRows;
  multiply_code_blocks<Vec, Kind>(task, 0, task.rows - left, kMatrixRows, panel_begin, panel_end);
  multiply_code_blocks<Vec, Kind>(task, task.rows - left, task.rows, left, panel_begin, panel_end);
}

template <class Vec, class Kind>
constexpr DigitUnit tile_unit() {
  return digit_unit<Vec, Kind>(code_tile_linear<Vec, Kind>);
}

}  // namespace
}  // namespace multilora
