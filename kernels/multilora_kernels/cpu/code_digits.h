// The linear over codes by products of integers, written over a vector type `Vec` that has these.
//
// Activations are integers (activation_digits.h). All products of a span are added up in integers, exactly: with codes of 4 bits
// and three digits at most 32 * 8 * 0x7f7f7f, with codes of 8 bits 32 * 128 * 0x7f7f, both below 2^31. Then the sum becomes a
// float, is multiplied by the span's unit and by the scale of its group, and is added to the output, in the order of the inputs.
// No weight is rounded, and a result depends on neither the other rows, nor the tile, nor the thread. With three digits it lies
// as near to the exact product as that of float32 weights, but has other bits.
//
// A product of bytes makes 32 of them in the time in which floats make 8, which is worth three digits, and one of words 16. And
// a word of codes of 4 bits is taken apart in half an instruction a code, where each float takes three: few rows gain most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "activation_digits.h"
#include "linear_kernels.h"
#include "quantized_kernels.h"
#include "work.h"

namespace multilora {
namespace {

// Bytes of codes that are requested ahead of those in use.
constexpr int64_t kCodesAhead = 4096;
// Bytes of the integers that make one product of a lane with its neighbours: four bytes, or two words.
constexpr int64_t kItemBytes = 4;
// The most bytes of codes of a block, as they are multiplied: they stay in the L1 cache while every row uses them.
constexpr int64_t kKeptBytes = 12288;

// Kinds of codes and digits. A step is kItems products of a lane, in each of which its activations are kItemBytes of every digit.
// codes<I>(step, column): those of the I-th product, of the lanes of a column.
template <class Vec, int kNumDigits>
struct NibbleDigits {
  using Weights = Int4Weights<Vec>;
  static constexpr int kDigits = kNumDigits, kItems = 2;

  // The even inputs of words, or the odd ones.
  template <int I>
  static MULTILORA_INLINE typename Vec::I codes(const char* step, int column) {
    return Vec::template nibbles<I>(step + column * Weights::kWordBytes);
  }
  static MULTILORA_INLINE typename Vec::I add_products(typename Vec::I codes, typename Vec::I digits, typename Vec::I sum) {
    return Vec::add_byte_products(codes, digits, sum);
  }
  static MULTILORA_INLINE typename Vec::F total(const typename Vec::I (&sums)[kDigits], int32_t surplus) {
    return Vec::total_of_bytes(sums, surplus);
  }
};

template <class Vec>
struct ByteWords {
  using Weights = Int8Weights<Vec>;
  static constexpr int kDigits = 1, kItems = 4;

  // Two neighbouring inputs.
  template <int I>
  static MULTILORA_INLINE typename Vec::I codes(const char* step, int column) {
    return Vec::bytes_as_words(step + (I * kPanelVectors + column) * 2 * Vec::kWidth);
  }
  static MULTILORA_INLINE typename Vec::I add_products(typename Vec::I codes, typename Vec::I words, typename Vec::I sum) {
    return Vec::add_word_products(codes, words, sum);
  }
  static MULTILORA_INLINE typename Vec::F total(const typename Vec::I (&sums)[kDigits], int32_t) {
    return Vec::to_float(sums[0]);
  }
};

// The spans of one block.
template <class Vec, class Kind>
constexpr int64_t kBlockSpans = kKeptBytes / (kSpanSteps * Kind::kItems * kPanelVectors * int64_t(sizeof(typename Vec::I)));

// Bytes of the codes of a step of a panel.
template <class Kind>
constexpr int64_t kStepBytes = kPanelVectors * Kind::Weights::column_bytes(kCodeStep);

// The codes of a block, made of those that are stored.
template <class Vec, class Kind>
struct StoredCodes {
  static constexpr bool kAreKept = false;
  const char* first;

  template <int I>
  MULTILORA_INLINE typename Vec::I load(int64_t step, int column) const {
    return Kind::template codes<I>(first + step * kStepBytes<Kind>, column);
  }
};

// The same codes, made before.
template <class Vec, class Kind>
struct KeptCodes {
  static constexpr bool kAreKept = true;
  typename Vec::I* kept;

  MULTILORA_INLINE typename Vec::I* place(int64_t step, int item, int column) const {
    return kept + (step * Kind::kItems + item) * kPanelVectors + column;
  }
  template <int I>
  MULTILORA_INLINE typename Vec::I load(int64_t step, int column) const {
    return *place(step, I, column);
  }
};

// Some spans of one panel, for some rows.
template <class Vec, class Kind>
struct DigitBlock {
  using F = typename Vec::F;

  int64_t first_span, spans, in_features;
  const char* rows;  // as activation_digits.h says
  int64_t row_bytes;
  float* sums;  // [rows, outputs of the panel]
  bool has_zeros;
  F scales[kBlockSpans<Vec, Kind>][kPanelVectors], zeros[kBlockSpans<Vec, Kind>][kPanelVectors];

  // Also fetches the scales of the next panel.
  MULTILORA_INLINE void read_numbers(const GroupScaling& scaling, int64_t panel) {
    constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth;
    const int64_t groups = (in_features + scaling.group_size - 1) / scaling.group_size;
    int64_t group = first_span * kSpan / scaling.group_size;
    for (int64_t i = 0; i < spans; ++group) {
      const int64_t place = (panel * groups + group) * kPanelWidth;
      Numbers numbers[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        numbers[v].read(scaling, place + v * Vec::kWidth);
      }
      Numbers::fetch(scaling, place + groups * kPanelWidth, kPanelWidth);
      for (const int64_t end = (group + 1) * scaling.group_size; i < spans && (first_span + i) * kSpan < end; ++i) {
        for (int v = 0; v < kPanelVectors; ++v) {
          scales[i][v] = numbers[v].scale;
          zeros[i][v] = numbers[v].zero;
        }
      }
    }
  }

 private:
  using Numbers = GroupNumbers<Vec, typename Kind::Weights, Rounding::subtracts_first>;
};

// The products of a block with some rows, added to their sums. Keeps: the codes stay in `kept`.
template <class Vec, class Kind, class Codes, bool Keeps>
struct DigitTile {
  using F = typename Vec::F;
  using I = typename Vec::I;
  static constexpr int kDigits = Kind::kDigits;
  static constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth;

  const DigitBlock<Vec, Kind>& block;
  Codes codes;
  KeptCodes<Vec, Kind> kept;

  template <int Rows>
  MULTILORA_INLINE void run(int64_t first_row) const {
    const char* rows = block.rows + first_row * block.row_bytes;
    float* sums = block.sums + first_row * kPanelWidth;
    F sum[Rows][kPanelVectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        sum[r][v] = block.first_span == 0 ? Vec::zero() : Vec::load(sums + r * kPanelWidth + v * Vec::kWidth);
      }
    }
    for (int64_t span = 0; span < block.spans; ++span) {
      I products[Rows][kPanelVectors][kDigits] = {};
      const int64_t left = steps_of(block.in_features) - (block.first_span + span) * kSpanSteps;
      if (left >= kSpanSteps) {
        for_constants(std::make_integer_sequence<int, kSpanSteps>{}, [&](auto i) MULTILORA_INLINED {
          add_step<Rows>(rows, span * kSpanSteps + i, products);
        });
      } else {
        for (int64_t i = 0; i < left; ++i) {
          add_step<Rows>(rows, span * kSpanSteps + i, products);
        }
      }
      add_span<Rows>(products, rows, span, sum);
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        Vec::store(sums + r * kPanelWidth + v * Vec::kWidth, sum[r][v]);
      }
    }
  }

 private:
  // step: of the block.
  template <int Rows>
  MULTILORA_INLINE void add_step(const char* rows, int64_t step, I (&products)[Rows][kPanelVectors][kDigits]) const {
    if constexpr (!Codes::kAreKept) {
      for (int64_t byte = 0; byte < kStepBytes<Kind>; byte += kCacheLine) {
        fetch_line(codes.first + step * kStepBytes<Kind> + kCodesAhead + byte);
      }
    }
    const char* digits = rows + (block.first_span * kSpanSteps + step) * kCodeStep * kDigitBytes<kDigits>;
    for_constants(std::make_integer_sequence<int, Kind::kItems>{}, [&](auto item) MULTILORA_INLINED {
      I code[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        code[v] = codes.template load<item>(step, v);
        if constexpr (Keeps) {
          *kept.place(step, item, v) = code[v];
        }
      }
      for (int r = 0; r < Rows; ++r) {
        for (int d = 0; d < kDigits; ++d) {
          const char* place = digits + r * block.row_bytes + (d * Kind::kItems + item) * kItemBytes;
          const I digit = Vec::broadcast_bytes(place);
          for (int v = 0; v < kPanelVectors; ++v) {
            products[r][v][d] = Kind::add_products(code[v], digit, products[r][v][d]);
          }
        }
      }
    });
  }

  template <int Rows>
  MULTILORA_INLINE void add_span(const I (&products)[Rows][kPanelVectors][kDigits], const char* rows, int64_t span,
                                 F (&sum)[Rows][kPanelVectors]) const {
    for (int r = 0; r < Rows; ++r) {
      const char* of_row = rows + r * block.row_bytes + digits_bytes<kDigits>(block.in_features);
      const SpanNumbers& numbers = reinterpret_cast<const SpanNumbers*>(of_row)[block.first_span + span];
      F total[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        total[v] = Kind::total(products[r][v], numbers.surplus);
      }
      if (block.has_zeros) {
        for (int v = 0; v < kPanelVectors; ++v) {
          total[v] = Vec::subtract_product(block.zeros[span][v], Vec::broadcast(numbers.sum), total[v]);
        }
      }
      const F unit = Vec::broadcast(numbers.unit);
      for (int v = 0; v < kPanelVectors; ++v) {
        sum[r][v] = Vec::fma(Vec::mul(total[v], unit), block.scales[span][v], sum[r][v]);
      }
    }
  }
};

// Some spans of one panel of codes for up to kRowBlock rows, added to their sums.
template <class Vec, class Kind>
void digit_block(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, int64_t first_span, float* sums) {
  constexpr int kRows = Vec::kDigitSums / Kind::kDigits;
  const int64_t row_bytes = digit_row_bytes<Kind::kDigits>(task.in_features);
  DigitBlock<Vec, Kind> block;
  block.first_span = first_span;
  block.spans = std::min(kBlockSpans<Vec, Kind>, spans_of(task.in_features) - first_span);
  block.in_features = task.in_features;
  block.rows = static_cast<const char*>(task.x_parts) + first_row * row_bytes;
  block.row_bytes = row_bytes;
  block.sums = sums;
  block.has_zeros = task.scaling.zeros != nullptr;
  block.read_numbers(task.scaling, panel);
  using Stored = StoredCodes<Vec, Kind>;
  using Kept = KeptCodes<Vec, Kind>;
  const int64_t first_step = panel * steps_of(task.in_features) + first_span * kSpanSteps;
  const Stored stored{static_cast<const char*>(task.panels) + first_step * kStepBytes<Kind>};
  if (rows <= kRows) {
    return run_rest<kRows>(0, rows, DigitTile<Vec, Kind, Stored, false>{block, stored, {nullptr}});
  }
  typename Vec::I made[kKeptBytes / sizeof(typename Vec::I)];
  const Kept kept{made};
  DigitTile<Vec, Kind, Stored, true>{block, stored, kept}.template run<kRows>(0);
  run_rows<kRows>(kRows, rows, DigitTile<Vec, Kind, Kept, false>{block, kept, kept});
}

template <class Vec, class Kind>
void digit_linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  alignas(kCacheLine) float sums[kRowBlock * kPanelVectors * Vec::kWidth];
  for (int64_t row = 0; row < task.rows; row += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, task.rows - row);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t span = 0; span < spans_of(task.in_features); span += kBlockSpans<Vec, Kind>) {
        digit_block<Vec, Kind>(task, row, rows, panel, span, sums);
      }
      write_outputs<Vec>(task, row, rows, panel, sums);
    }
  }
}

template <class Vec, class Kind>
constexpr DigitUnit digit_unit() {
  constexpr int kDigits = Kind::kDigits;
  return {kDigits, digit_row_bytes<kDigits>, split_into_digits<kDigits>, digit_linear<Vec, Kind>};
}

template <class Vec>
constexpr DigitUnits digit_units() {
  return {digit_unit<Vec, NibbleDigits<Vec, 3>>(), digit_unit<Vec, NibbleDigits<Vec, 2>>(), digit_unit<Vec, ByteWords<Vec>>()};
}

}  // namespace
}  // namespace multilora
