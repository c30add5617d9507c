// The linear over codes by products of integers, written over a vector type `Vec` that has these.
//
// Activations are integers (activation_digits.h). The products of a span are added up digit by digit, exactly. Then the sum of a
// span becomes a float, is multiplied by the span's unit and by the scale of its group, and is added to the output, in the order
// of the inputs. No weight is rounded, and a result depends on neither the other rows, nor the tile, nor the thread. With three
// digits it lies as near to the exact product as that of float32 weights, but has other bits; where an activation much larger than
// its neighbours meets zeros alone, it is less near.
//
// A product of bytes makes four of them in the time in which floats make one, which is worth three digits, and one of words two.
// And a word of codes of 4 bits is taken apart in half an instruction a code, where each float takes three: few rows gain most.
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
// codes<I>(step, column): those of the I-th product, of the lanes of a column, which are larger by kSurplus than those that they
// stand for. total(sums, numbers): of a span, from which that surplus is taken.
template <class Vec, int kNumDigits, uint32_t kSurplus>
struct ByteProducts {
  static constexpr int kDigits = kNumDigits, kItems = 2;

  static MULTILORA_INLINE typename Vec::I add_products(typename Vec::I codes, typename Vec::I digits, typename Vec::I sum) {
    return Vec::add_byte_products(codes, digits, sum);
  }
  static MULTILORA_INLINE typename Vec::F total(const typename Vec::I (&sums)[kDigits], const SpanNumbers& numbers) {
    return Vec::template total_of_bytes<kSurplus>(sums, numbers);
  }
};

template <class Vec, int kNumDigits>
struct NibbleDigits : ByteProducts<Vec, kNumDigits, 8> {
  using Weights = Int4Weights<Vec>;
  static constexpr DigitOrder kOrder = DigitOrder::even_first;
  static constexpr int64_t kItemInputs = 1;  // of an item of 8 bits

  // The even inputs of words, or the odd ones.
  template <int I>
  static MULTILORA_INLINE typename Vec::I codes(const char* step, int column) {
    return Vec::template nibbles<I>(step + column * Weights::kWordBytes);
  }
};

template <class Vec, int kNumDigits>
struct ByteDigits : ByteProducts<Vec, kNumDigits, 128> {
  using Weights = Int8Weights<Vec>;
  static constexpr DigitOrder kOrder = DigitOrder::by_input;
  static constexpr int64_t kItemInputs = 4;

  // Four neighbouring inputs.
  template <int I>
  static MULTILORA_INLINE typename Vec::I codes(const char* step, int column) {
    return Vec::without_sign(step + (I * kPanelVectors + column) * kItemInputs * Vec::kWidth);
  }
};

template <class Vec>
struct ByteWords {
  using Weights = Int8Weights<Vec>;
  static constexpr int kDigits = 1, kItems = 4;
  static constexpr DigitOrder kOrder = DigitOrder::by_input;
  static constexpr int64_t kItemInputs = 2;

  // Two neighbouring inputs.
  template <int I>
  static MULTILORA_INLINE typename Vec::I codes(const char* step, int column) {
    return Vec::bytes_as_words(step + (I * kPanelVectors + column) * kItemInputs * Vec::kWidth);
  }
  static MULTILORA_INLINE typename Vec::I add_products(typename Vec::I codes, typename Vec::I words, typename Vec::I sum) {
    return Vec::add_word_products(codes, words, sum);
  }
  static MULTILORA_INLINE typename Vec::F total(const typename Vec::I (&sums)[kDigits], const SpanNumbers&) {
    return Vec::to_float(sums[0]);
  }
};

// The steps of one block.
template <class Vec, class Kind>
constexpr int64_t kBlockSteps = kKeptBytes / (Kind::kItems * kPanelVectors * int64_t(sizeof(typename Vec::I)));

// Steps whose products are unrolled. They lie in one tile of activations.
constexpr int64_t kUnrolledSteps = kLeastSpan / kCodeStep;
static_assert(kTileSteps % kUnrolledSteps == 0);

// Bytes of the codes of a step of a panel.
template <class Kind>
constexpr int64_t kStepBytes = kPanelVectors * Kind::Weights::column_bytes(kCodeStep);

// The codes of a block, made of those that are stored.
template <class Vec, class Kind>
struct StoredCodes {
  static constexpr bool kAreKept = false;
  const char* first;

  MULTILORA_INLINE StoredCodes from(int64_t step) const { return {first + step * kStepBytes<Kind>}; }

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

  // Those of the next steps lie at constant distances. Compilers would compute each place from the step, in as much time as a
  // product takes.
  MULTILORA_INLINE KeptCodes from(int64_t step) const { return {reloaded(place(step, 0, 0))}; }

  MULTILORA_INLINE typename Vec::I* place(int64_t step, int item, int column) const {
    return kept + (step * Kind::kItems + item) * kPanelVectors + column;
  }
  template <int I>
  MULTILORA_INLINE typename Vec::I load(int64_t step, int column) const {
    return *place(step, I, column);
  }
};

// The scales and zeros of the spans of one panel, from one on. Also fetches those of the next panel.
template <class Vec, class Kind, int64_t kMostSpans>
struct SpanScales {
  using F = typename Vec::F;
  using Numbers = GroupNumbers<Vec, typename Kind::Weights, Rounding::subtracts_first>;
  F scales[kMostSpans][kPanelVectors], zeros[kMostSpans][kPanelVectors];

  MULTILORA_INLINE void read(const LinearTask& task, int64_t panel, int64_t first_span, int64_t spans) {
    constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth;
    const GroupScaling& scaling = task.scaling;
    const int64_t groups = (task.in_features + scaling.group_size - 1) / scaling.group_size;
    int64_t group = first_span * task.span / scaling.group_size;
    for (int64_t i = 0; i < spans; ++group) {
      const int64_t place = (panel * groups + group) * kPanelWidth;
      Numbers numbers[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) {
        numbers[v].read(scaling, place + v * Vec::kWidth);
      }
      Numbers::fetch(scaling, place + groups * kPanelWidth, kPanelWidth);
      for (const int64_t end = (group + 1) * scaling.group_size; i < spans && (first_span + i) * task.span < end; ++i) {
        for (int v = 0; v < kPanelVectors; ++v) {
          scales[i][v] = numbers[v].scale;
          zeros[i][v] = numbers[v].zero;
        }
      }
    }
  }
};

// sum += the total of a span's products, in its unit, times the scales.
template <class Vec, class Scales>
MULTILORA_INLINE typename Vec::F add_total(typename Vec::F total, const SpanNumbers& numbers, const Scales& of_spans, int64_t span,
                                           int column, bool has_zeros, typename Vec::F sum) {
  if (has_zeros) {
    total = Vec::subtract_product(of_spans.zeros[span][column], Vec::broadcast(numbers.sum), total);
  }
  return Vec::fma(Vec::mul(total, Vec::broadcast(numbers.unit)), of_spans.scales[span][column], sum);
}

// Some steps of one panel, for the rows of a block of digits.
template <class Vec, class Kind>
struct DigitBlock {
  using Layout = DigitLayout<Kind::kDigits>;

  int64_t first_step, steps, span_steps;
  const char* digits;          // of the first step
  int64_t next_tile;           // bytes from a tile's digits to those of the next tile
  const SpanNumbers* numbers;  // of the first span, [spans, rows]
  int64_t rows;
  float* sums;  // [rows, outputs of the panel]
  bool has_zeros;
  SpanScales<Vec, Kind, kBlockSteps<Vec, Kind> / kUnrolledSteps> of_spans;
};

// The products of a block with some rows, added to their sums. Keeps: the codes stay in `kept`.
template <class Vec, class Kind, class Codes, bool Keeps>
struct DigitTile {
  using F = typename Vec::F;
  using I = typename Vec::I;
  using Layout = DigitLayout<Kind::kDigits>;
  static constexpr int kDigits = Kind::kDigits;
  static constexpr int64_t kPanelWidth = kPanelVectors * Vec::kWidth;

  const DigitBlock<Vec, Kind>& block;
  Codes codes;
  KeptCodes<Vec, Kind> kept;

  template <int Rows>
  MULTILORA_INLINE void run(int64_t first_row) const {
    const char* digits = block.digits + first_row * Layout::kTileBytes;
    const SpanNumbers* numbers = block.numbers + first_row;
    float* sums = block.sums + first_row * kPanelWidth;
    F sum[Rows][kPanelVectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        sum[r][v] = block.first_step == 0 ? Vec::zero() : Vec::load(sums + r * kPanelWidth + v * Vec::kWidth);
      }
    }
    int64_t step = 0;
    for (int64_t span = 0; step < block.steps; ++span, numbers += block.rows) {
      I products[Rows][kPanelVectors][kDigits] = {};
      const auto add_unrolled = [&]() MULTILORA_INLINED {
        const DigitTile some{block, codes.from(step), Keeps ? kept.from(step) : kept};
        const char* place = digits_at(digits, step);
        for_constants(std::make_integer_sequence<int, kUnrolledSteps>{}, [&](auto i) MULTILORA_INLINED {
          some.template add_step<Rows>(place + i * kStepDigits, i, products);
        });
        step += kUnrolledSteps;
      };
      const auto add_rest = [&](int64_t end) MULTILORA_INLINED {
        for (; step < end; ++step) {
          add_step<Rows>(digits_at(digits, step), step, products);
        }
      };
      if constexpr (Vec::kMostSpan == kLeastSpan) {  // without a loop, which leaves the products no registers
        block.steps - step >= kUnrolledSteps ? add_unrolled() : add_rest(block.steps);
      } else {
        const int64_t end = std::min(step + block.span_steps, block.steps);
        while (end - step >= kUnrolledSteps) {
          add_unrolled();
        }
        add_rest(end);
      }
      for (int r = 0; r < Rows; ++r) {
        F total[kPanelVectors];
        for (int v = 0; v < kPanelVectors; ++v) {
          total[v] = Kind::total(products[r][v], numbers[r]);
        }
        for (int v = 0; v < kPanelVectors; ++v) {
          sum[r][v] = add_total<Vec>(total[v], numbers[r], block.of_spans, span, v, block.has_zeros, sum[r][v]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        Vec::store(sums + r * kPanelWidth + v * Vec::kWidth, sum[r][v]);
      }
    }
  }

 private:
  // Bytes of a digit of a step.
  static constexpr int64_t kStepDigits = kCodeStep * Layout::kDigitBytes;

  MULTILORA_INLINE const char* digits_at(const char* first, int64_t step) const {
    return first + step / kTileSteps * block.next_tile + step % kTileSteps * kStepDigits;
  }

  // step: of the codes.
  template <int Rows>
  MULTILORA_INLINE void add_step(const char* digits, int64_t step, I (&products)[Rows][kPanelVectors][kDigits]) const {
    if constexpr (!Codes::kAreKept) {
      for (int64_t byte = 0; byte < kStepBytes<Kind>; byte += kCacheLine) {
        fetch_line(codes.first + step * kStepBytes<Kind> + kCodesAhead + byte);
      }
    }
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
          const I digit = Vec::broadcast_bytes(digits + r * Layout::kTileBytes + d * kTileInputs + item * kItemBytes);
          for (int v = 0; v < kPanelVectors; ++v) {
            products[r][v][d] = Kind::add_products(code[v], digit, products[r][v][d]);
          }
        }
      }
    });
  }
};

// Some steps of one panel of codes for up to kRowBlock rows, added to their sums.
template <class Vec, class Kind>
void digit_block(const LinearTask& task, int64_t first_row, int64_t rows, int64_t panel, int64_t first_step, float* sums) {
  using Stored = StoredCodes<Vec, Kind>;
  using Kept = KeptCodes<Vec, Kind>;
  using Layout = DigitLayout<Kind::kDigits>;
  constexpr int kRows = Vec::kDigitSums / Kind::kDigits;
  const int64_t all_steps = steps_of(task.in_features);
  const Layout layout(task.in_features, task.span);
  const Stored stored{static_cast<const char*>(task.panels) + (panel * all_steps + first_step) * kStepBytes<Kind>};
  typename Vec::I made[kKeptBytes / sizeof(typename Vec::I)];
  const Kept kept{made};
  DigitBlock<Vec, Kind> block;
  block.first_step = first_step;
  block.steps = std::min(kBlockSteps<Vec, Kind>, all_steps - first_step);
  block.span_steps = task.span / kCodeStep;
  block.has_zeros = task.scaling.zeros != nullptr;
  const int64_t first_span = first_step / block.span_steps;
  block.of_spans.read(task, panel, first_span, (block.steps + block.span_steps - 1) / block.span_steps);
  for (int64_t row = 0; row < rows; row += kMatrixRows) {
    const char* parts = static_cast<const char*>(task.x_parts) + (first_row + row) * layout.row_bytes();
    block.rows = std::min(kMatrixRows, task.rows - first_row - row);
    block.digits = parts + first_step / kTileSteps * block.rows * Layout::kTileBytes;
    block.next_tile = block.rows * Layout::kTileBytes;
    block.numbers = reinterpret_cast<const SpanNumbers*>(parts + layout.numbers_offset(block.rows)) + first_span * block.rows;
    block.sums = sums + row * kPanelVectors * Vec::kWidth;
    if (rows <= kRows) {
      run_rest<kRows>(0, rows, DigitTile<Vec, Kind, Stored, false>{block, stored, {nullptr}});
    } else if (row == 0) {
      DigitTile<Vec, Kind, Stored, true>{block, stored, kept}.template run<kRows>(0);
      run_rows<kRows>(kRows, block.rows, DigitTile<Vec, Kind, Kept, false>{block, kept, kept});
    } else {
      run_rows<kRows>(0, block.rows, DigitTile<Vec, Kind, Kept, false>{block, kept, kept});
    }
  }
}

template <class Vec, class Kind>
void digit_linear(const LinearTask& task, int64_t panel_begin, int64_t panel_end) {
  alignas(kCacheLine) float sums[kRowBlock * kPanelVectors * Vec::kWidth];
  for (int64_t row = 0; row < task.rows; row += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, task.rows - row);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t step = 0; step < steps_of(task.in_features); step += kBlockSteps<Vec, Kind>) {
        digit_block<Vec, Kind>(task, row, rows, panel, step, sums);
      }
      write_outputs<Vec>(task, row, rows, panel, sums);
    }
  }
}

template <int kDigits>
int64_t digit_row_bytes(int64_t in_features, int64_t span) {
  return DigitLayout<kDigits>(in_features, span).row_bytes();
}

template <class Vec, class Kind>
constexpr DigitUnit digit_unit(LinearKernel linear = digit_linear<Vec, Kind>) {
  constexpr int kDigits = Kind::kDigits;
  static_assert(kBlockSteps<Vec, Kind> * kCodeStep % Vec::kMostSpan == 0);
  constexpr DigitKernel split = split_into_digits<typename Vec::Split, kDigits, Kind::kOrder>;
  return {kDigits, Kind::kItemInputs, Vec::kMostSpan, digit_row_bytes<kDigits>, split, linear};
}

}  // namespace
}  // namespace multilora
