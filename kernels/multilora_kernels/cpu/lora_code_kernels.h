// LoRA shrink and expand over the codes of lora_codes.h, with the promises of lora_kernels.h, which has shrink of 8 bits.
//
// A 4-bit code times its scale is exact in float32, so a shrink is that of the float adapter of the same values. An expand
// multiplies the sum over the columns of equal scales.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lora_codes.h"
#include "lora_kernels.h"
#include "storage.h"
#include "work.h"

namespace multilora {
namespace {

template <class Vec, int Ranks>
struct BlockShrinkTile {
  using F = typename Vec::F;
  using Places = CodePlaces<Int4Codes>;

  const ShrinkTask& task;
  int64_t first_rank;
  ReadingOrder order;

  template <int Rows>
  MULTILORA_INLINE void run(int64_t first_row) const {
    const int64_t in = task.in_features, columns = columns_of(in), rank_bytes = Places::a_row(in);
    const char* a = static_cast<const char*>(task.a) + first_rank * rank_bytes;
    const float* x[Rows];
    F sum[Ranks][Rows];
    for (int r = 0; r < Rows; ++r) {
      x[r] = task.x + task.rows.tokens[first_row + r] * task.x_stride;
      for (int j = 0; j < Ranks; ++j) {
        sum[j][r] = Vec::zero();
      }
    }
    for (int64_t column = 0; column < columns; column += kBlockColumns) {
      const char* block = a + Places::scales_at(column);
      const int n = int(std::min(kBlockColumns, columns - column));
      if (first_row == 0) {
        fetch_ahead(a + Places::scales_at(column) * Ranks, rank_bytes, Places::block(n));
      }
      if ((column + n) * kCodeLanes <= in) {
        add_block<Rows>(block, rank_bytes, n, x, column * kCodeLanes, [](const float* p, int64_t) { return Vec::load(p); }, sum);
      } else {
        const auto load = [&](const float* p, int64_t k) {
          const int64_t left = in - k;
          return left >= Vec::kWidth ? Vec::load(p) : left > 0 ? Vec::load_first(p, int(left)) : Vec::zero();
        };
        add_block<Rows>(block, rank_bytes, n, x, column * kCodeLanes, load, sum);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      float* v = task.v + task.rows.tokens[first_row + r] * task.v_stride + first_rank;
      for (int j = 0; j < Ranks; ++j) {
        v[j] = Vec::sum(sum[j][r]);
      }
    }
  }

 private:
  // Adds a block of n columns, whose first input is `first`, to the sums.
  template <int Rows, class Load>
  static MULTILORA_INLINE void add_block(const char* block, int64_t rank_bytes, int n, const float* const* x, int64_t first,
                                         const Load& load, F (&sum)[Ranks][Rows]) {
    for (int64_t lane = 0; lane < kCodeLanes; lane += Vec::kWidth) {
      F scale[Ranks];
      for (int j = 0; j < Ranks; ++j) {
        scale[j] = Vec::load(reinterpret_cast<const BFloat16*>(block + j * rank_bytes) + lane);
      }
      for (int c = 0; c < n; c += 2) {
        F low[Ranks], high[Ranks];
        for (int j = 0; j < Ranks; ++j) {
          const char* pairs = block + j * rank_bytes + kScaleBytes + c / 2 * kCodeLanes + lane;
          Vec::load_pairs(reinterpret_cast<const Int4Codes*>(pairs), low[j], high[j]);
        }
        const int64_t k = first + c * kCodeLanes + lane;
        add_column(low, scale, x, k, load, sum);
        if (c + 1 < n) {
          add_column(high, scale, x, k + kCodeLanes, load, sum);
        }
      }
    }
  }

  template <int Rows, class Load>
  static MULTILORA_INLINE void add_column(const F (&codes)[Ranks], const F (&scale)[Ranks], const float* const* x, int64_t k,
                                          const Load& load, F (&sum)[Ranks][Rows]) {
    F weight[Ranks];
    for (int j = 0; j < Ranks; ++j) {
      weight[j] = Vec::mul(codes[j], scale[j]);
    }
    for (int r = 0; r < Rows; ++r) {
      const F value = load(x[r] + k, k);
      for (int j = 0; j < Ranks; ++j) {
        sum[j][r] = Vec::fma(weight[j], value, sum[j][r]);
      }
    }
  }

  MULTILORA_INLINE void fetch_ahead(const char* place, int64_t rank_bytes, int64_t block_bytes) const {
    const char* soon = order.after(place, Ranks * rank_bytes);
    for (int64_t line = 0; line < Ranks * block_bytes; line += kCacheLine) {
      fetch_line(soon + line);
    }
  }
};

template <class Vec, int Ranks>
int64_t shrink_block_ranks(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end, const ReadingOrder& order) {
  int64_t j = rank_begin;
  for (; j + Ranks <= rank_end; j += Ranks) {
    const BlockShrinkTile<Vec, Ranks> tile{task, j, order};
    for_each_row_tile<Vec::kShrinkRows>(0, task.rows.count, tile);
  }
  return j;
}

// Shrink of 4 bits.
template <class Vec>
void shrink_blocks(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end, const void* next) {
  const int64_t rank_bytes = CodePlaces<Int4Codes>::a_row(task.in_features);
  const char* a = static_cast<const char*>(task.a);
  const ReadingOrder order(a + rank_begin * rank_bytes, a + rank_end * rank_bytes, next);
  const int64_t rest = shrink_block_ranks<Vec, kRankUnit>(task, rank_begin, rank_end, order);
  shrink_block_ranks<Vec, 1>(task, rest, rank_end, order);
}

// The codes of some columns of a panel as floats, from a lane on.
template <class Vec, class Code>
MULTILORA_INLINE void load_columns(const Code* codes, int count, typename Vec::F* columns) {
  if constexpr (std::is_same_v<Code, Int4Codes>) {
    for (int c = 0; c < count; c += 2) {
      Vec::load_pairs(codes + c / 2 * kCodeLanes, columns[c], columns[c + 1]);
    }
  } else {
    for (int c = 0; c < count; ++c) {
      columns[c] = Vec::load(codes + c * kCodeLanes);
    }
  }
}

// By which sums over codes with equal scales are multiplied.
template <class Vec, class Code>
MULTILORA_INLINE typename Vec::F load_scale(const BFloat16* scales) {
  const typename Vec::F scale = Vec::load(scales);
  return kLoadedScale<Code> == 1 ? scale : Vec::mul(scale, Vec::broadcast(kLoadedScale<Code>));
}

// The outputs [begin, end) of one panel, for all rows of the task.
template <class Vec, class Code>
struct PanelTile {
  using F = typename Vec::F;
  using Places = CodePlaces<Code>;

  const ExpandTask& task;
  const char* panel;
  int64_t first_output;  // of the panel
  int64_t begin, end;    // in the panel
  F* sums;               // of kMaxRows rows

  MULTILORA_INLINE void run() const {
    for (int64_t lane = begin / Vec::kWidth * Vec::kWidth; lane < end; lane += Vec::kWidth) {
      for (int64_t column = 0; column < task.rank; column += kBlockColumns) {
        const int64_t n = std::min(kBlockColumns, task.rank - column);
        if (n == kBlockColumns) {
          add_columns<int(kBlockColumns)>(column, lane, n);
        } else if (n == kBlockColumns / 2) {
          add_columns<int(kBlockColumns / 2)>(column, lane, n);
        } else {
          add_columns<0>(column, lane, n);
        }
      }
      for (int64_t row = 0; row < task.rows.count; ++row) {
        add_to_output(row, lane, sums[row]);
      }
    }
  }

 private:
  // Adds n columns of equal scales to the sums. kCount: n where it is known when compiling, else 0.
  template <int kCount>
  MULTILORA_INLINE void add_columns(int64_t column, int64_t lane, int64_t n) const {
    F columns[kBlockColumns];
    const int count = kCount ? kCount : int(n);
    load_columns<Vec>(reinterpret_cast<const Code*>(panel + Places::codes_at(column)) + lane, count, columns);
    const F scale = load_scale<Vec, Code>(reinterpret_cast<const BFloat16*>(panel + Places::scales_at(column)) + lane);
    for_each_row_tile<Vec::kExpandRows>(0, task.rows.count, Accumulate<kCount>{*this, columns, scale, column, count});
  }

  // Two chains for a row, as in ExpandTile.
  template <int kCount>
  struct Accumulate {
    const PanelTile& tile;
    const F* columns;
    F scale;
    int64_t first_column;
    int n;

    template <int Rows>
    MULTILORA_INLINE void run(int64_t first_row) const {
      const int count = kCount ? kCount : n;
      const float* v[Rows];
      F even[Rows], odd[Rows];
      for (int r = 0; r < Rows; ++r) {
        v[r] = tile.task.v + tile.task.rows.tokens[first_row + r] * tile.task.v_stride + first_column;
        even[r] = odd[r] = Vec::zero();
      }
      for (int c = 0; c < count; c += 2) {
        for (int r = 0; r < Rows; ++r) {
          even[r] = Vec::fma(Vec::broadcast(v[r][c]), columns[c], even[r]);
        }
        if (c + 1 < count) {
          for (int r = 0; r < Rows; ++r) {
            odd[r] = Vec::fma(Vec::broadcast(v[r][c + 1]), columns[c + 1], odd[r]);
          }
        }
      }
      for (int r = 0; r < Rows; ++r) {
        const F before = first_column == 0 ? Vec::zero() : tile.sums[first_row + r];
        tile.sums[first_row + r] = Vec::fma(scale, Vec::add(even[r], odd[r]), before);
      }
    }
  };

  MULTILORA_INLINE void add_to_output(int64_t row, int64_t lane, F update) const {
    const int64_t output = first_output + lane;
    float* y = task.y + task.rows.tokens[row] * task.y_stride + output;
    const float* magnitude = task.magnitude ? static_cast<const float*>(task.magnitude) + output : nullptr;
    const int lanes = int(std::min<int64_t>(Vec::kWidth, end - lane));
    if (begin <= lane) {
      const F total = Vec::add(Vec::load_first(y, lanes), update);
      Vec::store_first(y, magnitude ? Vec::mul(total, Vec::load_first(magnitude, lanes)) : total, lanes);
      return;
    }
    float updates[Vec::kWidth];
    Vec::store(updates, update);
    for (int64_t i = begin - lane; i < lanes; ++i) {
      const float total = y[i] + updates[i];
      y[i] = magnitude ? total * magnitude[i] : total;
    }
  }
};

// A task with one row, the usual case: each row has an adapter of its own. As `PanelTile`, but v and the sums stay in registers.
// From the first output of a panel on.
template <class Vec, class Code, int kRank>
void expand_row(const ExpandTask& task, int64_t output_begin, int64_t output_end, const ReadingOrder& order) {
  using F = typename Vec::F;
  using Places = CodePlaces<Code>;
  static_assert(kRank % 2 == 0 && kRank <= kBlockColumns);
  constexpr int64_t kPanelBytes = Places::panel(kRank);
  const int64_t token = task.rows.tokens[0];
  F v[kRank];
  for (int c = 0; c < kRank; ++c) {
    v[c] = Vec::broadcast(task.v[token * task.v_stride + c]);
  }
  float* y = task.y + token * task.y_stride;
  const auto* magnitude = static_cast<const float*>(task.magnitude);
  for (int64_t n = output_begin; n < output_end; n += kCodeLanes) {
    const char* panel = static_cast<const char*>(task.b) + n / kCodeLanes * kPanelBytes;
    const char* soon = order.after(panel, 0);
    for (int64_t line = 0; line < kPanelBytes; line += kCacheLine) {
      fetch_line(soon + line);
    }
    for (int64_t lane = 0; lane < kCodeLanes && n + lane < output_end; lane += Vec::kWidth) {
      F columns[kRank], even = Vec::zero(), odd = Vec::zero();
      load_columns<Vec>(reinterpret_cast<const Code*>(panel + Places::codes_at(0)) + lane, kRank, columns);
      for (int c = 0; c < kRank; c += 2) {
        even = Vec::fma(v[c], columns[c], even);
        odd = Vec::fma(v[c + 1], columns[c + 1], odd);
      }
      const F scale = load_scale<Vec, Code>(reinterpret_cast<const BFloat16*>(panel + Places::scales_at(0)) + lane);
      const F update = Vec::fma(scale, Vec::add(even, odd), Vec::zero());
      const int lanes = int(std::min<int64_t>(Vec::kWidth, output_end - n - lane));
      float* to = y + n + lane;
      const F total = Vec::add(Vec::load_first(to, lanes), update);
      Vec::store_first(to, magnitude ? Vec::mul(total, Vec::load_first(magnitude + n + lane, lanes)) : total, lanes);
    }
  }
}

template <class Vec, class Code>
void expand_codes(const ExpandTask& task, int64_t output_begin, int64_t output_end, const void* next) {
  typename Vec::F sums[kMaxRows];
  const int64_t panel_bytes = CodePlaces<Code>::panel(task.rank), first = output_begin / kCodeLanes,
                last = (output_end + kCodeLanes - 1) / kCodeLanes;
  const char* b = static_cast<const char*>(task.b);
  const ReadingOrder order(b + first * panel_bytes, b + last * panel_bytes, next);
  if (task.rows.count == 1 && output_begin % kCodeLanes == 0) {
    if (task.rank == 16) {
      return expand_row<Vec, Code, 16>(task, output_begin, output_end, order);
    }
    if (task.rank == 8) {
      return expand_row<Vec, Code, 8>(task, output_begin, output_end, order);
    }
  }
  for (int64_t p = first; p < last; ++p) {
    const char *panel = b + p * panel_bytes, *soon = order.after(panel, 0);
    for (int64_t line = 0; line < panel_bytes; line += kCacheLine) {
      fetch_line(soon + line);
    }
    const int64_t first_output = p * kCodeLanes;
    PanelTile<Vec, Code>{task, panel, first_output, std::max<int64_t>(output_begin - first_output, 0),
                         std::min(output_end - first_output, kCodeLanes), sums}
        .run();
  }
}

}  // namespace
}  // namespace multilora
