// Attention of a single query over the paged cache, written once over a vector type `Vec`.
//
// A task is all heads of one query with a range of its keys. Keys and values are used where they lie, from kPlaces places in
// turn, and each comes from memory once: a decode step takes the time of its bytes. A score is a sum of one chain for each lane
// of `Vec`, added in a tree, for as many keys at a time as there are lanes. A task's result depends on nothing else.
//
// Sums of scores and of values take codes as floats, exactly. Scales are factors of the score and of the weight.
//
// Pairs of bfloat16 (`kTakesPairs`): queries and weights are rounded. Rounding commutes with factors that are powers of two, so
// weights are relative to such a power for every range of keys, and are summed as they are multiplied.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "cache_rows.h"
#include "exponential.h"
#include "lora_kernels.h"
#include "vectors.h"
#include "work.h"

namespace multilora {
namespace {

template <class Body, int... I>
MULTILORA_INLINE void for_each_of(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}

// Calls body(0), body(1) .. body(Count - 1), each with a constant: compilers do not unroll such long loops by themselves.
template <int Count, class Body>
MULTILORA_INLINE void for_each_index(const Body& body) {
  for_each_of(body, std::make_integer_sequence<int, Count>{});
}

// Vectors of a row of values that so many queries add up at a time: kValueSums sums stay in registers.
template <class Vec>
constexpr int value_vectors(int queries) {
  int vectors = 4;
  while (vectors > 1 && vectors * queries > Vec::kValueSums) {
    vectors /= 2;
  }
  return vectors;
}

// kHeadDim is the size of a head where it is known when compiling, else 0.
template <class Vec, class T, int kHeadDim>
class Decode {
 public:
  Decode(const DecodeTask& task, float* scratch)
      : task(task), num_keys(task.end_key - task.first_key), scores(scratch),
        code_values(scratch + num_queries() * kScoreStride), rounded_q(reinterpret_cast<BFloat16*>(code_values)),
        slot_bytes((task.num_kv_heads - 1) * task.head_stride * int64_t(sizeof(T)) + row_bytes<T>(task.head_dim)),
        query_lines((slot_bytes + num_queries() * kCacheLine - 1) / (num_queries() * kCacheLine)) {
    find_rows();
  }

  void run() const {
    const T *keys = static_cast<const T*>(task.keys), *values = static_cast<const T*>(task.values);
    if constexpr (kTakesPairs<Vec>) {
      round_queries();
    }
    for (int64_t key = 0; key < num_keys; key += kKeys) {
      Ahead next = key + kKeys < num_keys ? ahead(keys, rows + key + kKeys) : ahead(values, rows);
      for (int64_t head = 0; head < task.num_kv_heads; ++head) {
        score_head(head, keys + head * task.head_stride, key, next);
      }
    }
    for (int64_t query = 0; query < num_queries(); ++query) {
      weigh(query);
    }
    std::fill_n(task.out, num_queries() * padded_head_dim(head_dim()), 0.0f);
    for (int64_t key = 0; key < num_keys; key += kKeys) {
      Ahead next = key + kKeys < num_keys ? ahead(values, rows + key + kKeys) : ahead(task.next, next_rows);
      if constexpr (kIsCode<T>) {
        scale_weights(values, key);
      }
      for_each_query_tile([&](auto queries, int64_t query, int64_t column) {
        add_values<queries.value>(query, values + column, key, next);
      });
    }
    if constexpr (kTakesPairs<Vec>) {
      put_in_order();
    }
  }

 private:
  using F = typename Vec::F;
  // Keys whose scores are one vector.
  static constexpr int kKeys = Vec::kWidth;
  static constexpr int kQueryTile = 4;
  // A processor prefetches some lines ahead of every place at which memory is read, as far as the page goes.
  static constexpr int64_t kPlaces = 8;

  template <int N>
  using Count = std::integral_constant<int, N>;

  const DecodeTask& task;
  const int64_t num_keys;
  float* const scores;       // [queries, kScoreStride], then weights
  float* const code_values;  // [kKeys, padded head_dim], of a head's keys
  BFloat16* const rounded_q;  // [queries, head_dim], of pairs, times the scale and log2(e)
  const int64_t slot_bytes;   // all heads of a key
  const int64_t query_lines;  // lines of a slot for each query, together at least all lines of the slot
  // Elements from slot 0 to the slots of the keys, in the order in which they are used. The last key's slot is repeated
  // up to a multiple of kKeys.
  int64_t rows[kMaxDecodeKeys];
  int64_t next_rows[kKeys];  // of task.next: neighbouring slots

  int64_t num_queries() const { return task.num_kv_heads * task.group; }
  MULTILORA_INLINE int64_t head_dim() const { return kHeadDim ? kHeadDim : task.head_dim; }

  void find_rows() {
    int64_t in_order[kMaxDecodeKeys];
    for (int64_t i = 0; i < num_keys;) {
      const int64_t key = task.first_key + i, place = key % task.block_size;
      int64_t slot = task.block_table[key / task.block_size] * task.block_size + place;
      for (const int64_t end = std::min(num_keys, i + task.block_size - place); i < end; ++i) {
        in_order[i] = slot++ * task.slot_stride;
      }
    }
    int64_t* row = rows;
    for_each_key([&](int64_t i) { *row++ = in_order[i]; });
    std::fill(rows + num_keys, rows + (num_keys + kKeys - 1) / kKeys * kKeys, rows[num_keys - 1]);
    for (int64_t i = 0; i < kKeys; ++i) {
      next_rows[i] = i * task.slot_stride;
    }
  }

  // Calls body(key - first_key) in the order in which keys are used.
  template <class Body>
  MULTILORA_INLINE void for_each_key(const Body& body) const {
    const int64_t keys_of_place = (num_keys + kPlaces - 1) / kPlaces;
    for (int64_t first = 0; first < keys_of_place; ++first) {
      for (int64_t i = first; i < num_keys; i += keys_of_place) {
        body(i);
      }
    }
  }

  // Keys or values that are read soon, one group of rows: their lines in the order in which they lie, because memory answers
  // neighbours soonest.
  struct Ahead {
    const char* first;
    const int64_t *row, *end;  // elements from `first`
    int64_t slot_bytes, byte = 0;

    MULTILORA_INLINE void fetch(int64_t lines) {
      for (; lines > 0 && row < end; --lines) {
        fetch_line(first + *row * int64_t(sizeof(T)) + byte);
        byte += kCacheLine;
        if (byte >= slot_bytes) {
          byte = 0;
          ++row;
        }
      }
    }
  };

  MULTILORA_INLINE Ahead ahead(const void* first, const int64_t* row) const {
    return {static_cast<const char*>(first), row, row + kKeys, slot_bytes};
  }

  // Calls tile(Count<queries>, first query, column of its key-value head) until all queries are covered.
  template <class Tile>
  MULTILORA_INLINE void for_each_query_tile(const Tile& tile) const {
    for (int64_t head = 0; head < task.num_kv_heads; ++head) {
      const int64_t column = head * task.head_stride, end = (head + 1) * task.group;
      int64_t query = head * task.group;
      for (; end - query >= kQueryTile; query += kQueryTile) {
        tile(Count<kQueryTile>{}, query, column);
      }
      switch (end - query) {
        case 3:
          tile(Count<3>{}, query, column);
          break;
        case 2:
          tile(Count<2>{}, query, column);
          break;
        case 1:
          tile(Count<1>{}, query, column);
          break;
      }
    }
  }

  // The scores of a head's queries with kKeys keys. Codes become floats once for all queries.
  MULTILORA_INLINE void score_head(int64_t head, const T* keys, int64_t key, Ahead& next) const {
    if constexpr (kIsCode<T>) {
      load_codes(keys, key);
    }
    const F scale = factors(keys, key, task.scale);
    for (int64_t query = head * task.group; query < (head + 1) * task.group; ++query) {
      next.fetch(kKeys * query_lines);
      if constexpr (kTakesPairs<Vec>) {
        score_pairs(query, keys, key);
      } else if constexpr (kIsCode<T>) {
        score(query, key, scale, [&](auto i) { return code_values + i * padded_head_dim(head_dim()); });
      } else {
        score(query, key, scale, [&](auto i) { return keys + rows[key + i]; });
      }
    }
  }

  // factor, times the scales of kKeys rows of codes.
  MULTILORA_INLINE F factors(const T* first, int64_t key, float factor) const {
    if constexpr (kIsCode<T>) {
      float scales[kKeys];
      for (int i = 0; i < kKeys; ++i) {
        scales[i] = scale_of(first + rows[key + i], head_dim());
      }
      return Vec::mul(Vec::load(scales), Vec::broadcast(factor));
    } else {
      return Vec::broadcast(factor);
    }
  }

  MULTILORA_INLINE void load_codes(const T* keys, int64_t key) const {
    for_each_index<kKeys>([&](auto i) {
      const T* from = keys + rows[key + i];
      float* to = code_values + i * padded_head_dim(head_dim());
      for_each_vector<Vec>(head_dim(), [&](int64_t d, auto part) { part.store(to + d, part.load(from + d)); });
    });
  }

  // weights[query, key + i] *= the scale of values[key + i] for all queries and kKeys keys.
  MULTILORA_INLINE void scale_weights(const T* values, int64_t key) const {
    for (int64_t head = 0; head < task.num_kv_heads; ++head) {
      const F scale = factors(values + head * task.head_stride, key, 1.0f);
      for (int64_t query = head * task.group; query < (head + 1) * task.group; ++query) {
        float* weights = scores + query * kScoreStride + key;
        Vec::store(weights, Vec::mul(Vec::load(weights), scale));
      }
    }
  }

  // scores[query, key + i] = scale[i] * sum_d q[query, d] * row(i)[d] for kKeys keys.
  template <class Row>
  MULTILORA_INLINE void score(int64_t query, int64_t key, F scale, const Row& row) const {
    constexpr int64_t kColumns = Vec::kScoreVectors * Vec::kWidth;
    const float* q = task.q + query * head_dim();
    F sum[kKeys];
    for_each_index<kKeys>([&](auto i) { sum[i] = Vec::zero(); });
    int64_t d = 0;
    for (; d + kColumns <= head_dim(); d += kColumns) {
      add_products<Vec::kScoreVectors>(q + d, d, row, Whole<Vec>{}, sum);
    }
    for_each_vector<Vec>(head_dim() - d, [&](int64_t i, auto part) {
      add_products<1>(q + d + i, d + i, row, part, sum);
    });
    Vec::store(scores + query * kScoreStride + key, Vec::mul(Vec::sums(sum), scale));
  }

  void round_queries() const {
    const F factor = Vec::broadcast(task.scale * kLog2OfE);
    for (int64_t i = 0; i < num_queries() * head_dim(); i += 2 * Vec::kWidth) {
      const F low = Vec::mul(Vec::load(task.q + i), factor), high = Vec::mul(Vec::load(task.q + i + Vec::kWidth), factor);
      Vec::store_all(rounded_q + i, Vec::rounded(low, high));
    }
  }

  // scores[query, key + i] = sum_d q[query, d] * keys[key + i, d] for kKeys keys.
  MULTILORA_INLINE void score_pairs(int64_t query, const T* keys, int64_t key) const {
    const BFloat16* q = rounded_q + query * head_dim();
    F sum[kKeys];
    for_each_index<kKeys>([&](auto i) { sum[i] = Vec::zero(); });
    for (int64_t d = 0; d < head_dim(); d += 2 * Vec::kWidth) {
      const auto q_part = Vec::load_all(q + d);
      for_each_index<kKeys>([&](auto i) { sum[i] = Vec::dot(q_part, Vec::load_all(keys + rows[key + i] + d), sum[i]); });
    }
    Vec::store(scores + query * kScoreStride + key, Vec::sums(sum));
  }

  // sum[i] += q[0] * row(i)[d], lane by lane, for some vectors.
  template <int Vectors, class Columns, class Row>
  MULTILORA_INLINE void add_products(const float* q, int64_t d, const Row& row, Columns columns, F* sum) const {
    F q_part[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      q_part[v] = columns.load(q + v * Vec::kWidth);
    }
    for_each_index<kKeys>([&](auto i) {
      const auto* elements = row(i) + d;
      for (int v = 0; v < Vectors; ++v) {
        sum[i] = Vec::fma(q_part[v], columns.load(elements + v * Vec::kWidth), sum[i]);
      }
    });
  }

  // Turns the scores of a query into weights relative to the largest.
  MULTILORA_INLINE void weigh(int64_t query) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    float* weights = scores + query * kScoreStride;
    const int64_t num_scores = (num_keys + kKeys - 1) / kKeys * kKeys;
    if (task.softcap > 0) {
      cap_all<Vec>(weights, num_scores, kTakesPairs<Vec> ? task.softcap * kLog2OfE : task.softcap);
    }
    if (task.bias.values) {
      add_bias(query, weights);
    }
    std::fill(weights + num_keys, weights + num_scores, kNone);
    F largest = Vec::broadcast(kNone);
    for (int64_t j = 0; j < num_keys; j += kKeys) {
      largest = Vec::max(largest, Vec::load(weights + j));
    }
    float max = Vec::largest(largest);
    F sum = Vec::zero();
    if constexpr (kTakesPairs<Vec>) {
      max = std::ceil(max);
      for (int64_t j = 0; j < num_keys; j += kKeys) {
        const F weight = power_of_two<Vec>(Vec::add(Vec::load(weights + j), Vec::broadcast(-max)));
        sum = Vec::add(sum, Vec::store_rounded(rounded_weights(query) + j, weight));
      }
      max /= kLog2OfE;
    } else {
      for (int64_t j = 0; j < num_keys; j += kKeys) {
        const F weight = exponential<Vec>(Vec::add(Vec::load(weights + j), Vec::broadcast(-max)));
        Vec::store(weights + j, weight);
        sum = Vec::add(sum, weight);
      }
    }
    task.max[query] = max;
    task.sum[query] = Vec::sum(sum);
  }

  // The memory of code_values, which nothing needs once all scores are there, holds the biases.
  void add_bias(int64_t query, float* query_scores) const {
    static_assert(kMaxDecodeKeys <= kDimUnit * kDimUnit, "a head has at least kDimUnit padded elements");
    const float* values = task.bias.values + query * task.bias.num_distances;
    const int64_t largest = task.bias.num_distances - 1, of_first_key = task.position - task.first_key;
    float* bias = code_values;
    for_each_key([&](int64_t i) { *bias++ = values[std::min(of_first_key - i, largest)]; });
    const F factor = Vec::broadcast(kTakesPairs<Vec> ? kLog2OfE : 1.0f);
    for (int64_t j = 0; j < num_keys; j += kKeys) {
      Vec::store(query_scores + j, Vec::fma(Vec::load(code_values + j), factor, Vec::load(query_scores + j)));
    }
  }

  // The weights take the place of the scores.
  MULTILORA_INLINE BFloat16* rounded_weights(int64_t query) const {
    return reinterpret_cast<BFloat16*>(scores + query * kScoreStride);
  }

  // out[query + r, :] += sum_i weights[query + r, key + i] * values[key + i, :] for up to kKeys keys.
  template <int Queries>
  MULTILORA_INLINE void add_values(int64_t query, const T* values, int64_t key, Ahead& next) const {
    constexpr int kVectors = value_vectors<Vec>(Queries);
    constexpr int64_t kColumns = kVectors * Vec::kWidth;
    if constexpr (kTakesPairs<Vec>) {
      return add_value_pairs<Queries>(query, values, key, next);
    }
    int64_t d = 0;
    for (; d + kColumns <= head_dim(); d += kColumns) {
      add_columns<Queries, kVectors>(query, values + d, key, d, next, Whole<Vec>{});
    }
    for_each_vector<Vec>(head_dim() - d, [&](int64_t i, auto part) {
      add_columns<Queries, 1>(query, values + d + i, key, d + i, next, part);
    });
  }

  template <int Queries, int Vectors, class Columns>
  MULTILORA_INLINE void add_columns(int64_t query, const T* values, int64_t key, int64_t d, Ahead& next,
                                    Columns columns) const {
    const int64_t row_size = padded_head_dim(head_dim()), end = std::min(num_keys, key + kKeys);
    float* out = task.out + query * row_size + d;
    const float* weights = scores + query * kScoreStride;
    F sum[Queries][Vectors];
    for (int r = 0; r < Queries; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        sum[r][v] = Vec::load(out + r * row_size + v * Vec::kWidth);
      }
    }
    for (int64_t j = key; j < end; ++j) {
      if (d == 0) {
        next.fetch(query_lines * Queries);
      }
      F value[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        value[v] = columns.load(values + rows[j] + v * Vec::kWidth);
      }
      for (int r = 0; r < Queries; ++r) {
        const F weight = Vec::broadcast(weights[r * kScoreStride + j]);
        for (int v = 0; v < Vectors; ++v) {
          sum[r][v] = Vec::fma(weight, value[v], sum[r][v]);
        }
      }
    }
    for (int r = 0; r < Queries; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        Vec::store(out + r * row_size + v * Vec::kWidth, sum[r][v]);
      }
    }
  }

  // The same for pairs of keys. Lanes of out are interleaved.
  template <int Queries>
  MULTILORA_INLINE void add_value_pairs(int64_t query, const T* values, int64_t key, Ahead& next) const {
    constexpr int kVectors = value_vectors<Vec>(Queries) / 2 * 2;
    static_assert(kVectors == 4 || kVectors == 2);
    int64_t d = 0;
    for (; d + kVectors * Vec::kWidth <= head_dim(); d += kVectors * Vec::kWidth) {
      add_column_pairs<Queries, kVectors>(query, values + d, key, d, next);
    }
    for (; d < head_dim(); d += kPairDims) {
      add_column_pairs<Queries, 2>(query, values + d, key, d, next);
    }
  }

  template <int Queries, int Vectors>
  MULTILORA_INLINE void add_column_pairs(int64_t query, const T* values, int64_t key, int64_t d, Ahead& next) const {
    const int64_t row_size = padded_head_dim(head_dim()), end = std::min(num_keys, key + kKeys);
    float* out = task.out + query * row_size + d;
    F sum[Queries][Vectors];
    for (int r = 0; r < Queries; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        sum[r][v] = Vec::load(out + r * row_size + v * Vec::kWidth);
      }
    }
    for (int64_t j = key; j < end; j += 2) {
      if (d == 0) {
        next.fetch(2 * query_lines * Queries);
      }
      typename Vec::Pairs value[Vectors];
      for (int v = 0; v < Vectors; v += 2) {
        const auto first = Vec::load_all(values + rows[j] + v * Vec::kWidth);
        const auto second = Vec::load_all(values + rows[j + 1] + v * Vec::kWidth);
        value[v] = Vec::lower_in_turn(first, second);
        value[v + 1] = Vec::upper_in_turn(first, second);
      }
      for (int r = 0; r < Queries; ++r) {
        const auto weight = Vec::broadcast_pair(rounded_weights(query + r) + j);
        for (int v = 0; v < Vectors; ++v) {
          sum[r][v] = Vec::dot(weight, value[v], sum[r][v]);
        }
      }
    }
    for (int r = 0; r < Queries; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        Vec::store(out + r * row_size + v * Vec::kWidth, sum[r][v]);
      }
    }
  }

  // The lanes of out.
  void put_in_order() const {
    for (float* out = task.out; out < task.out + num_queries() * head_dim(); out += kPairDims) {
      F lower = Vec::load(out), upper = Vec::load(out + Vec::kWidth);
      Vec::put_in_order(lower, upper);
      Vec::store(out, lower);
      Vec::store(out + Vec::kWidth, upper);
    }
  }
};

// The common sizes of heads have code of their own: with the addresses of rows' parts known, it is a third quicker.
template <class Vec, class T>
void decode(const DecodeTask& task, float* scratch) {
  switch (task.head_dim) {
    case 64:
      return Decode<Vec, T, 64>(task, scratch).run();
    case 128:
      return Decode<Vec, T, 128>(task, scratch).run();
    default:
      return Decode<Vec, T, 0>(task, scratch).run();
  }
}

}  // namespace
}  // namespace multilora
