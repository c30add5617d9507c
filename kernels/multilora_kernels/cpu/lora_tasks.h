// The work of one batched LoRA update as tasks: one slice of one adapter's tokens each, shrink or expand.
//
// A list of tasks is cut by cost into units of a few ranks or outputs. Units are independent, so no cut changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "apply.h"
#include "cache_lines.h"
#include "checks.h"
#include "lora_codes.h"
#include "lora_quantize.h"
#include "short_list.h"
#include "tensor.h"
#include "work.h"

namespace multilora {

// Cost of loading and converting one weight, in multiply-adds.
constexpr int64_t kLoadCost = 2;

struct Block {
  int64_t lora_index;
  Rows rows;
};

// Lists of little work lie on the stack: a single row's update would take as long as allocating them.
using Blocks = ShortList<Block, 8>;

// Neighbouring chunks of one adapter, joined up to kMaxRows tokens.
Blocks blocks_of(const Segments& segments);

// lora_linear of apply.h for the blocks of its segments, which are the same for all linears of a step.
Tensor lora_linear(const Tensor& x, const Panels& panels, int64_t first_slice, Integers slice_sizes, const Tables& tables,
                   const Blocks& blocks, const Tensor& bias);

// float32 and contiguous along a row; x itself if it is.
Tensor as_float32_rows(const Tensor& x);

template <class Task>
struct Share {
  Task task;
  int64_t size;       // ranks or outputs
  int64_t unit_size;  // of them in one unit
  int64_t unit_cost;
  int64_t cost_before;

  int64_t units() const { return (size + unit_size - 1) / unit_size; }
  int64_t cost_after() const { return cost_before + units() * unit_cost; }
  // First rank or output whose unit starts at or after `cost`.
  int64_t first_from(int64_t cost) const {
    const int64_t unit = (std::max<int64_t>(cost - cost_before, 0) + unit_cost - 1) / unit_cost;
    return std::min(unit * unit_size, size);
  }
};

inline const void* weights_of(const ShrinkTask& task) { return task.a; }
inline const void* weights_of(const ExpandTask& task) { return task.b; }

template <class Task>
struct WorkList {
  ShortList<Share<Task>, 3> shares;

  int64_t cost() const { return shares.empty() ? 0 : shares.back().cost_after(); }

  void add(const Task& task, int64_t size, int64_t unit_size, int64_t unit_cost) {
    shares.push_back({task, size, unit_size, unit_cost, cost()});
  }

  // The units whose cost starts in [begin, end). `next`: weights that the thread reads afterwards.
  template <class Kernel>
  void run(int64_t begin, int64_t end, Kernel kernel, const void* next) const {
    const auto behind = [](int64_t cost, const Share<Task>& share) { return cost < share.cost_after(); };
    auto share = std::upper_bound(shares.begin(), shares.end(), begin, behind);
    for (; share != shares.end() && share->cost_before < end; ++share) {
      const int64_t first = share->first_from(begin), last = share->first_from(end);
      if (first < last) {
        const bool is_last = share + 1 == shares.end() || share->cost_after() >= end;
        kernel(share->task, first, last, is_last ? next : weights_of((share + 1)->task));
      }
    }
  }
};

// Tasks of one thread, in the order in which it reads their weights: a kernel requests the next task's weights, so that a task
// runs once the next one is known.
template <class Task>
class Reading {
 public:
  using Kernel = void (*)(const Task& task, int64_t begin, int64_t end, const void* next);

  explicit Reading(Kernel kernel) : kernel_(kernel) {}

  // The ranks or outputs [begin, end), whose weights begin at `weights`.
  void add(const Task& task, int64_t begin, int64_t end, const void* weights) {
    finish(weights);
    task_ = task;
    begin_ = begin;
    end_ = end;
    weights_ = weights;
  }
  // next: the memory that the thread reads afterwards, null if that is unknown.
  void finish(const void* next) {
    if (weights_) {
      kernel_(task_, begin_, end_, next ? next : weights_);
      weights_ = nullptr;
    }
  }

 private:
  const Kernel kernel_;
  Task task_{};
  int64_t begin_ = 0, end_ = 0;
  const void* weights_ = nullptr;
};

// One table of LoRATables, [max_loras, num_slices], read at the slices of one fused linear.
template <class T>
struct Columns {
  const T* data;
  int64_t num_slices, first_slice;

  Columns(const Tensor& table, int64_t first) : data(table.data<T>()), num_slices(table.size(1)), first_slice(first) {}
  bool has(int64_t slice) const { return first_slice + slice < num_slices; }
  int64_t at(int64_t lora_index, int64_t slice) const { return data[lora_index * num_slices + first_slice + slice]; }
  void fetch(int64_t lora_index) const { fetch_line(data + lora_index * num_slices + first_slice); }
};

struct Weights {
  const char* arena;
  int64_t numel;
  MatrixPlaces places;

  explicit Weights(const Tensor& arena)
      : arena(static_cast<const char*>(arena.data())), numel(arena.numel()),
        places{arena.element_size(), code_bits_of(arena.dtype())} {}

  // The `bytes` bytes from an element on.
  const char* at(int64_t offset, int64_t bytes) const {
    const int64_t end = offset + bytes / places.element_size;
    MULTILORA_CHECK(offset >= 0 && end <= numel, "weights at ", offset, " .. ", end, " lie outside the arena of ", numel,
                    " elements");
    return arena + offset * places.element_size;
  }
};

// float32 [num_slices, num_tokens, max_rank]
struct Buffer {
  float* data;
  int64_t slice_stride, row_stride;
};

// Makes the shrink tasks of one fused linear.
struct Shrink {
  const float* x;
  int64_t x_stride, in_features;
  Buffer v;
  Columns<int32_t> rank;
  Columns<int64_t> a_offset;
  Weights weights;

  Shrink(const Tensor& rows, const Buffer& v, const Tables& tables, int64_t first_slice)
      : x(rows.data<float>()), x_stride(rows.stride(0)), in_features(rows.size(1)), v(v),
        rank(tables.rank, first_slice), a_offset(tables.a_offset, first_slice), weights(tables.arena) {}

  // Whether the slice's A is that of the slice before it (a fused module of the adapter, such as attn_qkv).
  bool is_shared(int64_t lora_index, int64_t slice) const {
    return slice > 0 && rank.at(lora_index, slice - 1) == rank.at(lora_index, slice) &&
        a_offset.at(lora_index, slice - 1) == a_offset.at(lora_index, slice);
  }
  // The slice's A, null where the adapter has none; the slice may lie behind those of this linear.
  const void* weights_at(const Block& block, int64_t slice) const {
    const bool is_there = rank.has(slice) && rank.at(block.lora_index, slice) > 0;
    return is_there ? weights.at(a_offset.at(block.lora_index, slice), 0) : nullptr;
  }
  ShrinkTask task(const Block& block, int64_t slice) const {
    const int64_t r = rank.at(block.lora_index, slice);
    const char* stored = weights.at(a_offset.at(block.lora_index, slice), weights.places.a_size(r, in_features));
    return {block.rows, x, x_stride, stored + weights.places.a_header(r), in_features, v.data + slice * v.slice_stride,
            v.row_stride, reinterpret_cast<const float*>(stored)};
  }
  // The place of a rank of the task's A.
  const void* rank_of(const ShrinkTask& task, int64_t rank) const {
    return static_cast<const char*>(task.a) + rank * weights.places.a_row(in_features);
  }
  int64_t unit_cost(const Block& block) const { return kRankUnit * in_features * (block.rows.count + kLoadCost); }
};

// Makes the expand tasks of one fused linear.
struct Expand {
  Buffer v;
  float* y;
  int64_t y_stride;
  Columns<int64_t> b_offset, magnitude_offset;
  Weights weights;

  Expand(const Buffer& v, const Tensor& rows, const Tables& tables, int64_t first_slice)
      : v(v), y(rows.data<float>()), y_stride(rows.stride(0)), b_offset(tables.b_offset, first_slice),
        magnitude_offset(tables.magnitude_offset, first_slice), weights(tables.arena) {}

  // `v_slice`: the slice whose part of v it reads; `first_output`: the start of the slice in y.
  ExpandTask task(const Block& block, int64_t slice, int64_t v_slice, int64_t r, int64_t first_output, int64_t size) const {
    const int64_t m = magnitude_offset.at(block.lora_index, slice);
    return {block.rows, v.data + v_slice * v.slice_stride, v.row_stride,
            weights.at(b_offset.at(block.lora_index, slice), weights.places.b_size(size, r)),
            m < 0 ? nullptr : weights.at(m, weights.places.magnitude_size(size)), r, y + first_output, y_stride};
  }
  // The place of an output of the task's B.
  const void* output_of(const ExpandTask& task, int64_t output) const {
    return static_cast<const char*>(task.b) + weights.places.b_output(output, task.rank);
  }
  static int64_t output_cost(const Block& block, int64_t r) { return r * (block.rows.count + kLoadCost); }
};

}  // namespace multilora
