// Attention of several queries over the paged cache, written once over a vector type `Vec` (avx512.cpp, avx2.cpp and
// plain.cpp bring one); of a single one: decode.h.
//
// A task is one key-value head of one sequence with a block of its queries and a range of its keys. Keys are taken
// kKeyTile at a time, as float32 and transposed, so that scores and output are products of the same shape; the softmax
// is carried along (arXiv:2205.14135, algorithm 1). Tiles begin at multiples of kKeyTile, and every score, sum and
// output is one chain of operations in the order of the keys: a query's result does not depend on the other queries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "exponential.h"
#include "tiles.h"
#include "work.h"

namespace multilora {
namespace {

// c[r, :] = (c[r, :] * scale[r] or 0) + sum_k a[r, k] * b[k, :] for Rows rows and Vectors vectors of columns.
template <class Vec, int Rows, int Vectors>
MULTILORA_INLINE void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                    const float* scale, float* c, int64_t c_stride) {
  using F = typename Vec::F;
  F sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      const float* place = c + r * c_stride + v * Vec::kWidth;
      sum[r][v] = scale ? Vec::mul(Vec::load(place), Vec::broadcast(scale[r])) : Vec::zero();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    F columns[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      columns[v] = Vec::load(b + k * b_stride + v * Vec::kWidth);
    }
    for (int r = 0; r < Rows; ++r) {
      const F value = Vec::broadcast(a[r * a_stride + k]);
      for (int v = 0; v < Vectors; ++v) {
        sum[r][v] = Vec::fma(value, columns[v], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      Vec::store(c + r * c_stride + v * Vec::kWidth, sum[r][v]);
    }
  }
}

// The same for any number of columns that is a multiple of the vector's width.
template <class Vec, int Rows>
MULTILORA_INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                               const float* scale, float* c, int64_t c_stride, int64_t columns) {
  constexpr int kVectors = Vec::kAttentionVectors;
  int64_t n = 0;
  for (; n + kVectors * Vec::kWidth <= columns; n += kVectors * Vec::kWidth) {
    multiply_tile<Vec, Rows, kVectors>(a, a_stride, b + n, b_stride, depth, scale, c + n, c_stride);
  }
  for (; n < columns; n += Vec::kWidth) {
    multiply_tile<Vec, Rows, 1>(a, a_stride, b + n, b_stride, depth, scale, c + n, c_stride);
  }
}

// The keys first + begin .. first + end - 1; first is a multiple of kKeyTile.
struct KeyRange {
  int64_t first, begin, end;

  // Of the tile, the part that is worked on: whole vectors.
  int64_t columns(int64_t width) const { return (end + width - 1) / width * width; }
};

template <class Vec, class T>
struct Attention {
  using F = typename Vec::F;
  static constexpr int64_t kQueryTile = 4;

  const AttentionTask& task;
  const int64_t head_dim, padded_dim, queries;
  // Parts of the scratch memory, see attention_scratch.
  float *keys_transposed, *tile, *scores, *q;

  Attention(const AttentionTask& task, float* scratch)
      : task(task), head_dim(task.head_dim), padded_dim(padded_head_dim(head_dim)), queries(task.tokens * task.group),
        keys_transposed(scratch), tile(keys_transposed + padded_dim * kKeyTile), scores(tile + kKeyTile * padded_dim),
        q(scores + kQueryTile * kKeyTile) {}

  void run() const {
    load_queries();
    for (int64_t i = 0; i < queries; ++i) {
      task.max[i] = -std::numeric_limits<float>::infinity();
      task.sum[i] = 0;
      std::fill_n(task.out + i * padded_dim, padded_dim, 0.0f);
    }
    for (int64_t key = task.first_key / kKeyTile * kKeyTile; key < task.end_key; key += kKeyTile) {
      add_keys({key, std::max(task.first_key - key, int64_t(0)), std::min(kKeyTile, task.end_key - key)});
    }
  }

  // Scaled, and padded with zeros.
  void load_queries() const {
    for (int64_t i = 0; i < queries; ++i) {
      const float* from = task.q + i / task.group * task.q_stride + i % task.group * head_dim;
      for (int64_t d = 0; d < padded_dim; ++d) {
        q[i * padded_dim + d] = d < head_dim ? from[d] * task.scale : 0.0f;
      }
    }
  }

  void add_keys(const KeyRange& keys) const {
    load_rows(task.keys, keys, task.values);
    transpose_keys(keys);
    load_rows(task.values, keys, nullptr);
    int64_t i = 0;
    for (; i + kQueryTile <= queries; i += kQueryTile) {
      add_keys_to<kQueryTile>(i, keys);
    }
    switch (queries - i) {
      case 3:
        return add_keys_to<3>(i, keys);
      case 2:
        return add_keys_to<2>(i, keys);
      case 1:
        return add_keys_to<1>(i, keys);
    }
  }

  // tile[j, :] = rows of the keys `first` + j, as float32 and padded with zeros; what is not in the range is not read.
  // `next`: the cache whose rows are loaded after these, on their way meanwhile.
  void load_rows(const void* cache, const KeyRange& keys, const void* next) const {
    std::fill_n(tile, keys.begin * padded_dim, 0.0f);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const int64_t key = keys.first + j;
      const int64_t slot = task.block_table[key / task.block_size] * task.block_size + key % task.block_size;
      const T* from = static_cast<const T*>(cache) + slot * task.slot_stride;
      if (next) {
        const char* row = reinterpret_cast<const char*>(static_cast<const T*>(next) + slot * task.slot_stride);
        for (int64_t byte = 0; byte < head_dim * int64_t(sizeof(T)); byte += kCacheLine) {
          __builtin_prefetch(row + byte);
        }
      }
      float* to = tile + j * padded_dim;
      int64_t d = 0;
      for (; d + Vec::kWidth <= head_dim; d += Vec::kWidth) {
        Vec::store(to + d, Vec::load(from + d));
      }
      for (; d < padded_dim; d += Vec::kWidth) {
        Vec::store(to + d, Vec::load_first(from + d, int(std::max<int64_t>(head_dim - d, 0))));
      }
    }
    std::fill_n(tile + keys.end * padded_dim, (keys.columns(Vec::kWidth) - keys.end) * padded_dim, 0.0f);
  }

  void transpose_keys(const KeyRange& keys) const {
    F columns[kDimUnit];
    for (int64_t j = 0; j < keys.end; j += Vec::kWidth) {
      for (int64_t d = 0; d < padded_dim; d += kDimUnit) {
        Vec::template transpose<kDimUnit>(tile + j * padded_dim + d, padded_dim, columns);
        for (int c = 0; c < kDimUnit; ++c) {
          Vec::store(keys_transposed + (d + c) * kKeyTile + j, columns[c]);
        }
      }
    }
  }

  template <int Rows>
  void add_keys_to(int64_t first_query, const KeyRange& keys) const {
    multiply<Vec, Rows>(q + first_query * padded_dim, padded_dim, keys_transposed, kKeyTile, head_dim, nullptr, scores,
                        kKeyTile, keys.columns(Vec::kWidth));
    float scale[Rows];
    for (int r = 0; r < Rows; ++r) {
      scale[r] = weigh(first_query + r, keys, scores + r * kKeyTile);
    }
    multiply<Vec, Rows>(scores, kKeyTile, tile, padded_dim, keys.end, scale, task.out + first_query * padded_dim, padded_dim,
                        padded_dim);
  }

  // Turns the scores of a query into weights relative to its largest score so far, and adds them to its sum.
  // Returns what its output so far is worth relative to that.
  float weigh(int64_t query, const KeyRange& keys, float* weights) const {
    const int64_t position = task.first_position + query / task.group;
    const int64_t oldest = task.window > 0 ? position - task.window + 1 : 0;
    const int64_t begin = std::clamp(oldest - keys.first, keys.begin, keys.end);
    const int64_t end = std::clamp(position + 1 - keys.first, begin, keys.end);
    if (begin == end) {
      std::fill_n(weights, kKeyTile, 0.0f);
      return 1.0f;
    }
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    std::fill_n(weights, begin, kNone);
    std::fill_n(weights + end, keys.columns(Vec::kWidth) - end, kNone);
    F largest = Vec::broadcast(task.max[query]);
    for (int64_t j = 0; j < keys.end; j += Vec::kWidth) {
      largest = Vec::max(largest, Vec::load(weights + j));
    }
    const float max = Vec::largest(largest);
    const F minus_max = Vec::broadcast(-max);
    F sum = Vec::zero();
    for (int64_t j = 0; j < keys.end; j += Vec::kWidth) {
      const F weight = exponential<Vec>(Vec::add(Vec::load(weights + j), minus_max));
      Vec::store(weights + j, weight);
      sum = Vec::add(sum, weight);
    }
    float scale;
    Vec::store_first(&scale, exponential<Vec>(Vec::broadcast(task.max[query] - max)), 1);
    task.max[query] = max;
    task.sum[query] = task.sum[query] * scale + Vec::sum(sum);
    return scale;
  }
};

template <class Vec, class T>
void attend(const AttentionTask& task, float* scratch) {
  Attention<Vec, T>(task, scratch).run();
}

}  // namespace
}  // namespace multilora
