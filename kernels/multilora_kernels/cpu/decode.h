// Attention of a single query over the paged cache, written once over a vector type `Vec`.
//
// A task is all heads of one query with a range of its keys. Keys and values are used where they lie, in their order in
// memory, and each comes from memory once: a decode step costs what its bytes cost. A score is as many chains as `Vec` has
// lanes, added in a tree; the lanes' results go together for as many keys. What a task gives depends on nothing else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "exponential.h"
#include "tiles.h"
#include "vectors.h"
#include "work.h"

namespace multilora {
namespace {

template <class Vec, class T>
class Decode {
 public:
  Decode(const DecodeTask& task, float* scratch)
      : task(task), num_keys(task.end_key - task.first_key), scores(scratch) {
    find_rows();
  }

  void run() const {
    for (int64_t key = 0; key < num_keys; key += kKeys) {
      const bool is_last = key + kKeys >= num_keys;
      const auto* ahead = static_cast<const T*>(is_last ? task.values : task.keys);
      const int64_t* rows_ahead = rows + (is_last ? 0 : key + kKeys);
      for_each_query_tile([&](auto queries, int64_t query, int64_t column) {
        score<queries.value>(query, static_cast<const T*>(task.keys) + column, key, ahead + column, rows_ahead);
      });
    }
    for (int64_t query = 0; query < num_queries(); ++query) {
      weigh(query);
    }
    std::fill_n(task.out, num_queries() * padded_head_dim(task.head_dim), 0.0f);
    for (int64_t key = 0; key < num_keys; key += kKeys) {
      const int64_t* rows_ahead = rows + (key + kKeys < num_keys ? key + kKeys : key);
      for_each_query_tile([&](auto queries, int64_t query, int64_t column) {
        add_values<queries.value>(query, static_cast<const T*>(task.values) + column, key, rows_ahead);
      });
    }
  }

 private:
  using F = typename Vec::F;
  // Keys whose scores are one vector.
  static constexpr int64_t kKeys = Vec::kWidth;
  static constexpr int kQueryTile = 4;

  template <int N>
  using Count = std::integral_constant<int, N>;

  const DecodeTask& task;
  const int64_t num_keys;
  float* const scores;  // [queries, kKeySplit], then weights
  int64_t rows[kKeySplit];  // elements from slot 0 to the slot of each key; the last one's up to a multiple of kKeys

  int64_t num_queries() const { return task.num_kv_heads * task.group; }

  void find_rows() {
    for (int64_t i = 0; i < num_keys;) {
      const int64_t key = task.first_key + i, place = key % task.block_size;
      int64_t slot = task.block_table[key / task.block_size] * task.block_size + place;
      for (const int64_t end = std::min(num_keys, i + task.block_size - place); i < end; ++i) {
        rows[i] = slot++ * task.slot_stride;
      }
    }
    std::fill(rows + num_keys, rows + (num_keys + kKeys - 1) / kKeys * kKeys, rows[num_keys - 1]);
  }

  // The part of a row that a head reads, wanted soon.
  MULTILORA_INLINE void fetch(const T* part) const {
    for (int64_t byte = 0; byte < task.head_dim * int64_t(sizeof(T)); byte += kCacheLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(part) + byte);
    }
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

  // scores[query + r, key + i] = scale * sum_d q[query + r, d] * keys[key + i, d] for kKeys keys.
  template <int Queries>
  MULTILORA_INLINE void score(int64_t query, const T* keys, int64_t key, const T* ahead, const int64_t* rows_ahead) const {
    constexpr int kTile = Vec::kDecodeKeys;
    const float* q = task.q + query * task.head_dim;
    F products[Queries][kKeys];
    for (int64_t first = 0; first < kKeys; first += kTile) {
      F sum[Queries][kTile];
      const T* row[kTile];
      for (int i = 0; i < kTile; ++i) {
        row[i] = keys + rows[key + first + i];
        fetch(ahead + rows_ahead[first + i]);
        for (int r = 0; r < Queries; ++r) {
          sum[r][i] = Vec::zero();
        }
      }
      for_each_vector<Vec>(task.head_dim, [&](int64_t d, auto part) {
        F q_part[Queries];
        for (int r = 0; r < Queries; ++r) {
          q_part[r] = part.load(q + r * task.head_dim + d);
        }
        for (int i = 0; i < kTile; ++i) {
          const F key_part = part.load(row[i] + d);
          for (int r = 0; r < Queries; ++r) {
            sum[r][i] = Vec::fma(q_part[r], key_part, sum[r][i]);
          }
        }
      });
      for (int r = 0; r < Queries; ++r) {
        for (int i = 0; i < kTile; ++i) {
          products[r][first + i] = sum[r][i];
        }
      }
    }
    for (int r = 0; r < Queries; ++r) {
      Vec::store(scores + (query + r) * kKeySplit + key, Vec::mul(Vec::sums(products[r]), Vec::broadcast(task.scale)));
    }
  }

  // Turns the scores of a query into weights relative to the largest.
  MULTILORA_INLINE void weigh(int64_t query) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    float* weights = scores + query * kKeySplit;
    std::fill(weights + num_keys, weights + (num_keys + kKeys - 1) / kKeys * kKeys, kNone);
    F largest = Vec::broadcast(kNone);
    for (int64_t j = 0; j < num_keys; j += kKeys) {
      largest = Vec::max(largest, Vec::load(weights + j));
    }
    const float max = Vec::largest(largest);
    F sum = Vec::zero();
    for (int64_t j = 0; j < num_keys; j += kKeys) {
      const F weight = exponential<Vec>(Vec::add(Vec::load(weights + j), Vec::broadcast(-max)));
      Vec::store(weights + j, weight);
      sum = Vec::add(sum, weight);
    }
    task.max[query] = max;
    task.sum[query] = Vec::sum(sum);
  }

  // out[query + r, :] += sum_i weights[query + r, key + i] * values[key + i, :] for up to kKeys keys.
  template <int Queries>
  MULTILORA_INLINE void add_values(int64_t query, const T* values, int64_t key, const int64_t* rows_ahead) const {
    constexpr int64_t kColumns = Vec::kAttentionVectors * Vec::kWidth;
    int64_t d = 0;
    for (; d + kColumns <= task.head_dim; d += kColumns) {
      add_columns<Queries, Vec::kAttentionVectors>(query, values + d, key, d, rows_ahead, Whole<Vec>{});
    }
    for_each_vector<Vec>(task.head_dim - d, [&](int64_t i, auto part) {
      add_columns<Queries, 1>(query, values + d + i, key, d + i, rows_ahead, part);
    });
  }

  template <int Queries, int Vectors, class Columns>
  MULTILORA_INLINE void add_columns(int64_t query, const T* values, int64_t key, int64_t d, const int64_t* rows_ahead,
                                    Columns columns) const {
    const int64_t row_size = padded_head_dim(task.head_dim), end = std::min(num_keys, key + kKeys);
    float* out = task.out + query * row_size + d;
    const float* weights = scores + query * kKeySplit;
    F sum[Queries][Vectors];
    for (int r = 0; r < Queries; ++r) {
      for (int v = 0; v < Vectors; ++v) {
        sum[r][v] = Vec::load(out + r * row_size + v * Vec::kWidth);
      }
    }
    for (int64_t j = key; j < end; ++j) {
      F value[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        value[v] = columns.load(values + rows[j] + v * Vec::kWidth);
        __builtin_prefetch(values + rows_ahead[j - key] + v * Vec::kWidth);
      }
      for (int r = 0; r < Queries; ++r) {
        const F weight = Vec::broadcast(weights[r * kKeySplit + j]);
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
};

template <class Vec, class T>
void decode(const DecodeTask& task, float* scratch) {
  Decode<Vec, T>(task, scratch).run();
}

}  // namespace
}  // namespace multilora
