// Attention of several queries over the paged cache, written once over a vector type `Vec`, which avx512.cpp, avx2.cpp and
// plain.cpp define. decode.h has attention of a single query.
//
// A task is one key-value head of one sequence with a block of its queries and a range of its keys. Every query has a lane to
// itself: scores are [key, query] and outputs [element, query], so that both are products of the cache's rows, read where they
// lie, with vectors of queries, and the softmax never looks across lanes. It is carried from tile to tile of keys
// (arXiv:2205.14135, algorithm 1). Tiles begin at multiples of kKeyTile, and every score, sum and output is one chain of
// operations in the order of the keys: a query's result does not depend on the other queries.
//
// Pairs of bfloat16 (`kTakesPairs`): queries and weights are rounded, and a product takes two elements of a row, or two keys,
// at a time. Weights are relative to a power of two, as in decode.h; a pair of keys is an even key and the next one. With a
// matrix unit (`kHasTiles`) products are of kPairDims elements or keys at a time, and keys outside of a tile of keys have no
// weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention_tiles.h"
#include "cache_rows.h"
#include "exponential.h"
#include "lora_kernels.h"
#include "work.h"

namespace multilora {
namespace {

// Vectors of queries in one product: with kLinearRows rows they fill the registers.
constexpr int kQueryVectors = 3;

// The cache lines of some rows that are read soon. They are requested one by one between products: all requests at once would
// fill the queue of loads that a core waits for.
template <class T>
struct RowLines {
  const T* cache;
  const int64_t *row, *end;  // elements from `cache` to each row
  int64_t num_bytes, byte = 0;  // of a row

  MULTILORA_INLINE void fetch_one() {
    if (row == end) {
      return;
    }
    __builtin_prefetch(reinterpret_cast<const char*>(cache + *row) + byte);
    byte += kCacheLine;
    if (byte >= num_bytes) {
      byte = 0;
      ++row;
    }
  }
};

// c[r, :] = c[r, :] * scale[:] + sum_k element(r, k) * b[k, :] for kLinearRows rows and Vectors vectors of columns; without
// a scale c counts as zero. Rows of b and c are `stride` apart. Not inlined: it needs all registers.
template <class Vec, int Vectors, class Element, class T>
__attribute__((noinline)) void multiply_tile(const Element& element, const float* b, int64_t depth, const float* scale, float* c,
                                             int64_t stride, RowLines<T> ahead) {
  using F = typename Vec::F;
  constexpr int kRows = Vec::kLinearRows;
  F sum[kRows][Vectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      const int64_t column = v * Vec::kWidth;
      sum[r][v] = scale ? Vec::mul(Vec::load(c + r * stride + column), Vec::load(scale + column)) : Vec::zero();
    }
  }
  const auto add_product = [&](int64_t k) {
    F columns[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      columns[v] = Vec::loaded_once(Vec::load(b + k * stride + v * Vec::kWidth));
    }
    for (int r = 0; r < kRows; ++r) {
      const F value = Vec::broadcast_once(element(r, k));
      for (int v = 0; v < Vectors; ++v) {
        sum[r][v] = Vec::fma(value, columns[v], sum[r][v]);
      }
    }
  };
  // One line for every two products: together all float32 lines of the rows.
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    ahead.fetch_one();
    ahead.fetch_one();
    add_product(k);
    add_product(k + 1);
    add_product(k + 2);
    add_product(k + 3);
  }
  for (; k < depth; ++k) {
    add_product(k);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      Vec::store(c + r * stride + v * Vec::kWidth, sum[r][v]);
    }
  }
}

// to[c, r] = from[r, c]; rows and columns are multiples of kDimUnit.
template <class Vec>
void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
  typename Vec::F column[kDimUnit];
  for (int64_t r = 0; r < rows; r += Vec::kWidth) {
    for (int64_t c = 0; c < columns; c += kDimUnit) {
      Vec::template transpose<kDimUnit>(from + r * columns + c, columns, column);
      for (int i = 0; i < kDimUnit; ++i) {
        Vec::store(to + (c + i) * rows + r, column[i]);
      }
    }
  }
}

// The keys first + begin .. first + end - 1; first is a multiple of kKeyTile.
struct KeyTile {
  int64_t first, begin, end;
  int64_t slot_offsets[kKeyTile];  // of each key in the cache, in elements; a key outside of the tile has that of a neighbour
};

// Rows of keys or values: row j is base + offsets[j].
struct CacheRows {
  const float* base;
  const int64_t* offsets;
};

template <class Vec, class T>
class Attention {
 public:
  Attention(const AttentionTask& task, float* scratch)
      : task(task), head_dim(task.head_dim), padded_dim(padded_head_dim(head_dim)), queries(task.tokens * task.group),
        lanes(padded_queries(queries)), q(scratch), out(q + padded_dim * lanes), scores(out + padded_dim * lanes),
        max(scores + kKeyTile * lanes), sum(max + lanes), scale(sum + lanes), rows(scale + lanes) {
    for (int64_t j = 0; j < kKeyTile; ++j) {
      row_offsets[j] = j * padded_dim;
    }
  }

  void run() const {
    load_queries();
    std::fill_n(out, padded_dim * lanes, 0.0f);
    load_sinks();
    if constexpr (kHasTiles<Vec>) {
      const Tiles owner(false, kTileRows);
      add_all_keys();
    } else {
      add_all_keys();
    }
    store_outputs();
  }

 private:
  using F = typename Vec::F;
  static constexpr int kRows = Vec::kLinearRows;
  static_assert(kKeyTile % kRows == 0 && kDimUnit % kRows == 0, "tiles and heads are whole groups of rows");

  template <int N>
  using Count = std::integral_constant<int, N>;

  const AttentionTask& task;
  const int64_t head_dim, padded_dim, queries, lanes;
  float *const q, *const out;        // [padded_dim, lanes]
  float* const scores;               // [kKeyTile, lanes], then weights
  float *const max, *const sum;      // [lanes]
  float* const scale;                // [lanes], factors of `out` and `sum` when a tile is added
  float* const rows;                 // [kKeyTile or lanes, padded_dim]
  int64_t row_offsets[kKeyTile];     // in `rows`

  // Scales the queries, and pads them with zeros. Pairs lie as [padded_dim / 2, lanes, 2].
  void load_queries() const {
    const float factor = task.scale * kLog2OfE;
    std::fill_n(rows, lanes * padded_dim, 0.0f);
    for (int64_t token = 0; token < task.tokens; ++token) {
      for (int64_t i = 0; i < task.group; ++i) {
        const float* from = task.q + token * task.q_stride + i * head_dim;
        float* to = rows + (token * task.group + i) * padded_dim;
        for (int64_t d = 0; d < head_dim; ++d) {
          to[d] = from[d] * factor;
        }
      }
    }
    transpose<Vec>(rows, lanes, padded_dim, q);
    if constexpr (kTakesPairs<Vec>) {
      for (int64_t d = 0; d < padded_dim; d += 2) {
        for (int64_t lane = 0; lane < lanes; lane += Vec::kWidth) {
          const float* first = q + d * lanes + lane;
          Vec::store_all(q + d / 2 * lanes + lane, Vec::rounded_pairs(Vec::load(first), Vec::load(first + lanes)));
        }
      }
    }
  }

  // A sink is the first score of its lane; its value is zero.
  void load_sinks() const {
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    std::fill_n(max, lanes, kLowest);
    std::fill_n(sum, lanes, 0.0f);
    if (task.sinks) {
      for (int64_t lane = 0; lane < queries; ++lane) {
        const float sink = std::max(kLowest, task.sinks[lane % task.group] * kLog2OfE);
        max[lane] = kTakesPairs<Vec> ? std::ceil(sink) : sink;
        sum[lane] = std::exp2(sink - max[lane]);
      }
    }
  }

  void store_outputs() const {
    for (int64_t lane = 0; lane < lanes; lane += Vec::kWidth) {
      const F share = Vec::div(Vec::broadcast(1.0f), Vec::load(sum + lane));
      for (float* place = out + lane; place < out + padded_dim * lanes; place += lanes) {
        Vec::store(place, Vec::mul(Vec::load(place), share));
      }
    }
    transpose<Vec>(out, padded_dim, lanes, rows);
    for (int64_t token = 0; token < task.tokens; ++token) {
      for (int64_t i = 0; i < task.group; ++i) {
        std::copy_n(rows + (token * task.group + i) * padded_dim, head_dim, task.out + token * task.out_stride + i * head_dim);
      }
    }
  }

  // The tile that begins at a key; behind the last key it is empty.
  KeyTile tile_from(int64_t first) const {
    KeyTile tile{first, std::max<int64_t>(task.first_key - first, 0), std::min(task.end_key - first, kKeyTile), {}};
    if (tile.end <= 0) {
      return tile;
    }
    for (int64_t j = tile.begin; j < tile.end;) {
      const int64_t place = (first + j) % task.block_size;
      int64_t slot = task.block_table[(first + j) / task.block_size] * task.block_size + place;
      for (const int64_t end = std::min(tile.end, j + task.block_size - place); j < end; ++j) {
        tile.slot_offsets[j] = slot++ * task.slot_stride;
      }
    }
    std::fill_n(tile.slot_offsets, tile.begin, tile.slot_offsets[tile.begin]);
    std::fill(tile.slot_offsets + tile.end, tile.slot_offsets + kKeyTile, tile.slot_offsets[tile.end - 1]);
    return tile;
  }

  void add_all_keys() const {
    KeyTile next = tile_from(task.first_key / kKeyTile * kKeyTile);
    while (next.end > 0) {
      const KeyTile tile = next;
      next = tile_from(tile.first + kKeyTile);
      add_keys(tile, next);
    }
  }

  // The rows of the next product are fetched meanwhile: values with the scores, the next tile's keys with the outputs.
  void add_keys(const KeyTile& tile, const KeyTile& next) const {
    if constexpr (kHasTiles<Vec>) {
      score_tiles(tile);
    } else if constexpr (kTakesPairs<Vec>) {
      for_each_block([&](auto vectors, int64_t lane) { score_pairs<vectors.value>(lane, tile); });
    } else {
      const CacheRows keys = load_rows(task.keys, tile);
      for_each_block([&](auto vectors, int64_t lane) { score<vectors.value>(lane, keys, tile); });
    }
    if (task.softcap > 0) {
      cap_all<Vec>(scores + tile.begin * lanes, (tile.end - tile.begin) * lanes, task.softcap * kLog2OfE);
    }
    if (task.bias.values) {
      add_bias(tile);
    }
    hide_unseen(tile);
    for_each_block([&](auto vectors, int64_t lane) { weigh<vectors.value>(lane, tile); });
    if constexpr (kHasTiles<Vec>) {
      pair_values(tile);
      turn_values();
      add_value_tiles(tile, next);
    } else if constexpr (kTakesPairs<Vec>) {
      pair_values(tile);
      for_each_block([&](auto vectors, int64_t lane) { add_value_pairs<vectors.value>(lane, tile, next); });
    } else {
      const CacheRows values = load_rows(task.values, tile);
      for_each_block([&](auto vectors, int64_t lane) { add_values<vectors.value>(lane, values, tile, next); });
    }
  }

  // Calls block(Count<vectors>, first lane) until all lanes are covered.
  template <class Block>
  void for_each_block(const Block& block) const {
    constexpr int64_t kBlock = kQueryVectors * Vec::kWidth;
    int64_t lane = 0;
    for (; lanes - lane >= kBlock; lane += kBlock) {
      block(Count<kQueryVectors>{}, lane);
    }
    for (; lane < lanes; lane += Vec::kWidth) {
      block(Count<1>{}, lane);
    }
  }

  // Whole rows of float32 are used where they lie; others are converted and padded with zeros.
  CacheRows load_rows(const void* cache, const KeyTile& tile) const {
    if constexpr (std::is_same_v<T, float>) {
      if (head_dim == padded_dim) {
        return {static_cast<const float*>(cache), tile.slot_offsets};
      }
    }
    for (int64_t j = tile.begin; j < tile.end; ++j) {
      const T* from = static_cast<const T*>(cache) + tile.slot_offsets[j];
      float* to = rows + row_offsets[j];
      const auto value = [&](F element) {
        if constexpr (kIsCode<T>) {
          return Vec::mul(element, Vec::broadcast(scale_of(from, head_dim)));
        } else {
          return element;
        }
      };
      int64_t d = 0;
      for (; d + Vec::kWidth <= head_dim; d += Vec::kWidth) {
        Vec::store(to + d, value(Vec::load(from + d)));
      }
      for (; d < padded_dim; d += Vec::kWidth) {
        Vec::store(to + d, value(Vec::load_first(from + d, int(std::max<int64_t>(head_dim - d, 0)))));
      }
    }
    return {rows, row_offsets};
  }

  // The rows of the keys begin .. end - 1 of a tile that are in the tile.
  RowLines<T> lines_of(const void* cache, const KeyTile& tile, int64_t begin, int64_t end) const {
    const int64_t num_keys = std::max<int64_t>(tile.end, 0);
    return {static_cast<const T*>(cache), tile.slot_offsets + std::min(begin, num_keys),
            tile.slot_offsets + std::min(end, num_keys), row_bytes<T>(head_dim)};
  }

  // scores[j, lane] = sum_d keys[j, d] * q[d, lane]; groups of rows may begin before the tile's keys and end behind them.
  template <int Vectors>
  void score(int64_t lane, const CacheRows& keys, const KeyTile& tile) const {
    for (int64_t j = tile.begin / kRows * kRows; j < tile.end; j += kRows) {
      const float* row[kRows];
      for (int r = 0; r < kRows; ++r) {
        row[r] = keys.base + keys.offsets[j + r];
      }
      multiply_tile<Vec, Vectors>([&](int r, int64_t d) { return row[r][d]; }, q + lane, head_dim, nullptr,
                                  scores + j * lanes + lane, lanes, lines_of(task.values, tile, j, lane == 0 ? j + kRows : j));
    }
  }

  // The same for pairs, which are read where they lie.
  template <int Vectors>
  void score_pairs(int64_t lane, const KeyTile& tile) const {
    for (int64_t j = tile.begin / kRows * kRows; j < tile.end; j += kRows) {
      const T* row[kRows];
      for (int r = 0; r < kRows; ++r) {
        row[r] = static_cast<const T*>(task.keys) + tile.slot_offsets[j + r];
      }
      const auto pair = [&](int r, int64_t k) {
        float bits;
        std::memcpy(&bits, row[r] + 2 * k, sizeof(bits));
        return bits;
      };
      multiply_tile<typename Vec::Products, Vectors>(pair, q + lane, head_dim / 2, nullptr, scores + j * lanes + lane, lanes,
                                                     lines_of(task.values, tile, j, lane == 0 ? j + kRows : j));
    }
  }

  // The same by tiles, for whole groups of keys. Keys of one block of the cache are read where they lie.
  void score_tiles(const KeyTile& tile) const {
    const int64_t first = tile.begin / kTileRows;
    const bool are_together = task.block_size % kTileRows == 0;
    RowGroups groups{{}, (tile.end + kTileRows - 1) / kTileRows - first,
                     (are_together ? task.slot_stride : padded_dim) * int64_t(sizeof(T))};
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t j = (first + g) * kTileRows, seen = std::max(j, tile.begin);
      const T* row = static_cast<const T*>(task.keys) + tile.slot_offsets[seen] - (seen - j) * task.slot_stride;
      groups.first[g] = reinterpret_cast<const char*>(are_together ? row : copied_keys(tile, j));
    }
    const int64_t lines = lines_of_lanes();
    auto ahead = lines_of(task.values, tile, tile.begin, tile.end);
    for (int64_t lane = 0; lane < lanes; lane += kTileOutputs) {
      const ColumnPairs of_queries{reinterpret_cast<const char*>(q + lane), lanes * int64_t(sizeof(float))};
      multiply_groups(groups, of_queries, head_dim / kPairDims, false, scores + first * kTileRows * lanes + lane, lanes);
      for (int64_t i = 0; i < lines; ++i) {
        ahead.fetch_one();
      }
    }
  }

  // Copies kTileRows keys side by side, to `rows`.
  const T* copied_keys(const KeyTile& tile, int64_t first) const {
    T* copies = reinterpret_cast<T*>(rows) + first * padded_dim;
    for (int64_t j = 0; j < kTileRows; ++j) {
      std::copy_n(static_cast<const T*>(task.keys) + tile.slot_offsets[first + j], head_dim, copies + j * padded_dim);
    }
    return copies;
  }

  // Cache lines of a tile's keys or values for each vector of lanes.
  int64_t lines_of_lanes() const {
    const int64_t vectors = lanes / kTileOutputs, lines = kKeyTile * ((row_bytes<T>(head_dim) + kCacheLine - 1) / kCacheLine);
    return (lines + vectors - 1) / vectors;
  }

  // A key after its query is hidden later. `rows` holds the biases of one key.
  void add_bias(const KeyTile& tile) const {
    const auto [values, num_distances] = task.bias;
    const F factor = Vec::broadcast(kLog2OfE);
    std::fill(rows + queries, rows + lanes, 0.0f);
    for (int64_t j = tile.begin; j < tile.end; ++j) {
      float* bias = rows;
      for (int64_t token = 0; token < task.tokens; ++token) {
        const int64_t distance = task.first_position + token - (tile.first + j);
        const float* value = values + std::clamp<int64_t>(distance, 0, num_distances - 1);
        for (int64_t i = 0; i < task.group; ++i) {
          *bias++ = value[i * num_distances];
        }
      }
      float* row = scores + j * lanes;
      for (int64_t lane = 0; lane < lanes; lane += Vec::kWidth) {
        Vec::store(row + lane, Vec::fma(Vec::load(rows + lane), factor, Vec::load(row + lane)));
      }
    }
  }

  // Hides each key from the queries that do not see it.
  void hide_unseen(const KeyTile& tile) const {
    const int64_t last_position = task.first_position + task.tokens - 1;
    const bool is_last_key_seen = tile.first + tile.end - 1 <= task.first_position;
    const bool is_first_key_seen = task.window == 0 || last_position - (tile.first + tile.begin) < task.window;
    if (is_first_key_seen && is_last_key_seen) {
      return;
    }
    for (int64_t token = 0; token < task.tokens; ++token) {
      const int64_t position = task.first_position + token;
      const int64_t oldest = task.window > 0 ? position - task.window + 1 : 0;
      const int64_t begin = std::clamp(oldest - tile.first, tile.begin, tile.end);
      const int64_t end = std::clamp(position + 1 - tile.first, begin, tile.end);
      hide(token, tile.begin, begin);
      hide(token, end, tile.end);
    }
  }

  // Hides the keys begin .. end - 1 of a tile from a token's queries.
  void hide(int64_t token, int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < end; ++j) {
      std::fill_n(scores + j * lanes + token * task.group, task.group, -std::numeric_limits<float>::infinity());
    }
  }

  // Turns scores into weights relative to the largest score so far of their lane, and adds them to the lane's sum.
  template <int Vectors>
  void weigh(int64_t first_lane, const KeyTile& tile) const {
    const int64_t row_size = lanes;
    float *const first = scores + tile.begin * row_size + first_lane, *const end = scores + tile.end * row_size;
    F largest[Vectors], total[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      largest[v] = Vec::load(max + first_lane + v * Vec::kWidth);
      total[v] = Vec::zero();
    }
    for (const float* row = first; row < end; row += row_size) {
      for (int v = 0; v < Vectors; ++v) {
        largest[v] = Vec::max(largest[v], Vec::load(row + v * Vec::kWidth));
      }
    }
    if constexpr (kTakesPairs<Vec>) {
      for (int v = 0; v < Vectors; ++v) {
        largest[v] = Vec::round_up(largest[v]);
      }
      for (int64_t j = tile.begin / 2 * 2; j < tile.end; j += 2) {
        for (int v = 0; v < Vectors; ++v) {
          const float* row = scores + j * row_size + first_lane + v * Vec::kWidth;
          const auto weight = [&](const float* of) { return power_of_two<Vec>(Vec::sub(Vec::load(of), largest[v])); };
          const auto pairs = Vec::rounded_pairs(j < tile.begin ? Vec::zero() : weight(row),
                                                j + 1 < tile.end ? weight(row + row_size) : Vec::zero());
          Vec::store_all(scores + j / 2 * row_size + first_lane + v * Vec::kWidth, pairs);
          total[v] = Vec::add(total[v], Vec::add(Vec::first_of(pairs), Vec::second_of(pairs)));
        }
      }
      if constexpr (kHasTiles<Vec>) {
        clear_pairs<Vectors>(first_lane, tile.begin / kPairDims * kTileRows, tile.begin / 2);
        clear_pairs<Vectors>(first_lane, (tile.end + 1) / 2, (tile.end + kPairDims - 1) / kPairDims * kTileRows);
      }
    } else {
      for (float* row = first; row < end; row += row_size) {
        for (int v = 0; v < Vectors; ++v) {
          const F weight = power_of_two<Vec>(Vec::sub(Vec::load(row + v * Vec::kWidth), largest[v]));
          Vec::store(row + v * Vec::kWidth, weight);
          total[v] = Vec::add(total[v], weight);
        }
      }
    }
    for (int v = 0; v < Vectors; ++v) {
      const int64_t lane = first_lane + v * Vec::kWidth;
      const F worth = power_of_two<Vec>(Vec::sub(Vec::load(max + lane), largest[v]));
      Vec::store(scale + lane, worth);
      Vec::store(sum + lane, Vec::fma(Vec::load(sum + lane), worth, total[v]));
      Vec::store(max + lane, largest[v]);
    }
  }

  // Gives the pairs of keys begin .. end - 1 no weight.
  template <int Vectors>
  void clear_pairs(int64_t first_lane, int64_t begin, int64_t end) const {
    for (int64_t pair = begin; pair < end; ++pair) {
      for (int v = 0; v < Vectors; ++v) {
        Vec::store(scores + pair * lanes + first_lane + v * Vec::kWidth, Vec::zero());
      }
    }
  }

  // Puts the values of two keys side by side: `rows` is [kKeyTile / 2, padded_dim, 2]. For tiles, also those of keys outside of
  // the tile of keys, which have no weight, but must be numbers.
  void pair_values(const KeyTile& tile) const {
    const T* values = static_cast<const T*>(task.values);
    const int64_t begin = kHasTiles<Vec> ? 0 : tile.begin / 2 * 2, end = kHasTiles<Vec> ? kKeyTile : tile.end;
    for (int64_t j = begin; j < end; j += 2) {
      const T *first = values + tile.slot_offsets[j], *second = values + tile.slot_offsets[j + 1];
      float* to = rows + row_offsets[j / 2];
      for (int64_t d = 0; d < head_dim; d += kPairDims) {
        const auto a = Vec::load_all(first + d), b = Vec::load_all(second + d);
        F lower = F(Vec::lower_in_turn(a, b)), upper = F(Vec::upper_in_turn(a, b));
        Vec::put_in_order(lower, upper);
        Vec::store(to + d, lower);
        Vec::store(to + d + Vec::kWidth, upper);
      }
    }
  }

  // The pairs of values by element, behind `rows`: [padded_dim, kKeyTile].
  float* turned_values() const { return rows + kKeyTile / 2 * padded_dim; }

  void turn_values() const {
    F column[kDimUnit];
    for (int64_t pair = 0; pair < kKeyTile / 2; pair += Vec::kWidth) {
      for (int64_t d = 0; d < padded_dim; d += kDimUnit) {
        Vec::template transpose<kDimUnit>(rows + pair * padded_dim + d, padded_dim, column);
        for (int i = 0; i < kDimUnit; ++i) {
          Vec::store(turned_values() + (d + i) * (kKeyTile / 2) + pair, column[i]);
        }
      }
    }
  }

  // As add_values, for tiles.
  void add_value_tiles(const KeyTile& tile, const KeyTile& next) const {
    constexpr int64_t kRowPairs = kKeyTile / 2;
    for (int64_t lane = 0; lane < lanes; lane += Vec::kWidth) {
      const F worth = Vec::load(scale + lane);
      for (float* place = out + lane; place < out + padded_dim * lanes; place += lanes) {
        Vec::store(place, Vec::mul(Vec::load(place), worth));
      }
    }
    const int64_t first = tile.begin / kPairDims, steps = (tile.end + kPairDims - 1) / kPairDims - first;
    const int64_t lines = lines_of_lanes();
    auto ahead = lines_of(task.keys, next, 0, kKeyTile);
    for (int64_t lane = 0; lane < lanes; lane += kTileOutputs) {
      const ColumnPairs weights{reinterpret_cast<const char*>(scores + first * kTileRows * lanes + lane),
                                lanes * int64_t(sizeof(float))};
      for (int64_t d = 0; d < padded_dim; d += kMostGroups * kTileRows) {
        RowGroups groups{{}, std::min<int64_t>(kMostGroups, (padded_dim - d) / kTileRows), kRowPairs * int64_t(sizeof(float))};
        for (int64_t g = 0; g < groups.count; ++g) {
          const float* of_group = turned_values() + (d + g * kTileRows) * kRowPairs + first * kTileRows;
          groups.first[g] = reinterpret_cast<const char*>(of_group);
        }
        multiply_groups(groups, weights, steps, true, out + d * lanes + lane, lanes);
      }
      for (int64_t i = 0; i < lines; ++i) {
        ahead.fetch_one();
      }
    }
  }

  // As add_values, for pairs of keys.
  template <int Vectors>
  void add_value_pairs(int64_t lane, const KeyTile& tile, const KeyTile& next) const {
    const int64_t first = tile.begin / 2, num_pairs = (tile.end + 1) / 2 - first;
    for (int64_t d = 0; d < padded_dim; d += kRows) {
      const int64_t begin = d * kKeyTile / padded_dim, end = (d + kRows) * kKeyTile / padded_dim;
      const float* column = rows + row_offsets[first] + d;
      multiply_tile<typename Vec::Products, Vectors>([&](int r, int64_t pair) { return column[pair * padded_dim + r]; },
                                                     scores + first * lanes + lane, num_pairs, scale + lane,
                                                     out + d * lanes + lane, lanes,
                                                     lines_of(task.keys, next, begin, lane == 0 ? end : begin));
    }
  }

  // out[d, lane] = out[d, lane] * scale[lane] + sum_j values[j, d] * weights[j, lane]
  template <int Vectors>
  void add_values(int64_t lane, const CacheRows& values, const KeyTile& tile, const KeyTile& next) const {
    const int64_t *offsets = values.offsets + tile.begin, num_keys = tile.end - tile.begin;
    for (int64_t d = 0; d < padded_dim; d += kRows) {
      const int64_t begin = d * kKeyTile / padded_dim, end = (d + kRows) * kKeyTile / padded_dim;
      const float* column = values.base + d;
      multiply_tile<Vec, Vectors>([&](int r, int64_t j) { return column[offsets[j] + r]; }, scores + tile.begin * lanes + lane,
                                  num_keys, scale + lane, out + d * lanes + lane, lanes,
                                  lines_of(task.keys, next, begin, lane == 0 ? end : begin));
    }
  }
};

template <class Vec, class T>
void attend(const AttentionTask& task, float* scratch) {
  Attention<Vec, T>(task, scratch).run();
}

}  // namespace
}  // namespace multilora
