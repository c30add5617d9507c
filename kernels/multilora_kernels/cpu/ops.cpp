// The operators multilora::lora_shrink, lora_expand and lora_apply for CPU tensors (schemas: operators.py).
//
// A step's work is a list of tasks (one slice of one adapter's tokens), a task is a number of equal units, and every
// thread takes a share of the total cost. Units are independent outputs, so the split never changes a result.
// lora_apply gives every thread whole adapters where that is even enough: no barrier between the halves, and an adapter
// is read from one end to the other.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "apply.h"
#include "capability.h"
#include "work.h"

namespace multilora {
namespace {

// Cost of loading and converting one weight, in multiply-adds.
constexpr int64_t kLoadCost = 2;
// Least cost that is worth a thread of its own: some microseconds.
constexpr int64_t kGrainCost = 1 << 17;
// Whole adapters for each thread where none gets more than this much of an even share.
constexpr double kMaxImbalance = 1.2;

struct Block {
  int64_t lora_index;
  Rows rows;
};

// Neighbouring chunks of one adapter, joined up to kMaxRows tokens.
std::vector<Block> blocks_of(const Segments& segments) {
  const auto *tokens = segments.permutation.const_data_ptr<int32_t>(),
             *start = segments.chunk_start.const_data_ptr<int32_t>(),
             *length = segments.chunk_length.const_data_ptr<int32_t>(),
             *lora_index = segments.chunk_lora_index.const_data_ptr<int32_t>();
  const int64_t capacity = segments.chunk_start.numel();
  std::vector<Block> blocks;
  if (capacity > 0 && length[0] > 0) {
    blocks.reserve(capacity);
  }
  for (int64_t c = 0; c < capacity && length[c] > 0; ++c) {
    TORCH_CHECK(length[c] <= kMaxRows, "a chunk of ", length[c], " tokens exceeds ", kMaxRows);
    const bool joins = !blocks.empty() && blocks.back().lora_index == lora_index[c] &&
        blocks.back().rows.count + length[c] <= kMaxRows;
    if (joins) {
      blocks.back().rows.count += length[c];
    } else {
      blocks.push_back({lora_index[c], {tokens + start[c], length[c]}});
    }
  }
  return blocks;
}

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

const void* weights_of(const ShrinkTask& task) { return task.a; }
const void* weights_of(const ExpandTask& task) { return task.b; }

template <class Task>
struct WorkList {
  std::vector<Share<Task>> shares;

  int64_t cost() const { return shares.empty() ? 0 : shares.back().cost_after(); }

  void add(const Task& task, int64_t size, int64_t unit_size, int64_t unit_cost) {
    shares.push_back({task, size, unit_size, unit_cost, cost()});
  }

  template <class Kernel>
  void run(Kernel kernel) const {
    at::parallel_for(0, cost(), kGrainCost, [&](int64_t begin, int64_t end) {
      const auto behind = [](int64_t cost, const Share<Task>& share) { return cost < share.cost_after(); };
      auto share = std::upper_bound(shares.begin(), shares.end(), begin, behind);
      for (; share != shares.end() && share->cost_before < end; ++share) {
        const int64_t first = share->first_from(begin), last = share->first_from(end);
        if (first < last) {
          const bool is_last = share + 1 == shares.end() || share->cost_after() >= end;
          kernel(share->task, first, last, weights_of((is_last ? share : share + 1)->task));
        }
      }
    });
  }
};

// One table of LoRATables, [max_loras, num_slices], read at the slices of one fused linear.
template <class T>
struct Columns {
  const T* data;
  int64_t num_slices, first_slice;

  Columns(const at::Tensor& table, int64_t first)
      : data(table.const_data_ptr<T>()), num_slices(table.size(1)), first_slice(first) {}
  int64_t at(int64_t lora_index, int64_t slice) const { return data[lora_index * num_slices + first_slice + slice]; }
};

struct Weights {
  const char* arena;
  int64_t numel, element_size;

  explicit Weights(const at::Tensor& arena)
      : arena(static_cast<const char*>(arena.const_data_ptr())), numel(arena.numel()), element_size(arena.element_size()) {}

  const void* at(int64_t offset, int64_t size) const {
    TORCH_CHECK(offset >= 0 && offset + size <= numel, "weights at ", offset, " .. ", offset + size,
                " lie outside the arena of ", numel, " elements");
    return arena + offset * element_size;
  }
};

at::Tensor as_float32_rows(const at::Tensor& x) {
  const bool is_already = x.scalar_type() == at::kFloat && x.stride(1) == 1;
  return is_already ? x : x.to(at::kFloat).contiguous();
}

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

  Shrink(const at::Tensor& rows, const Buffer& v, const Tables& tables, int64_t first_slice)
      : x(rows.const_data_ptr<float>()), x_stride(rows.stride(0)), in_features(rows.size(1)), v(v),
        rank(tables.rank, first_slice), a_offset(tables.a_offset, first_slice), weights(tables.arena) {}

  // Whether the slice's A is that of the slice before it (a fused module of the adapter, such as attn_qkv).
  bool is_shared(int64_t lora_index, int64_t slice) const {
    return slice > 0 && rank.at(lora_index, slice - 1) == rank.at(lora_index, slice) &&
        a_offset.at(lora_index, slice - 1) == a_offset.at(lora_index, slice);
  }
  ShrinkTask task(const Block& block, int64_t slice) const {
    const int64_t r = rank.at(block.lora_index, slice);
    return {block.rows, x, x_stride, weights.at(a_offset.at(block.lora_index, slice), r * in_features), in_features,
            v.data + slice * v.slice_stride, v.row_stride};
  }
  int64_t unit_cost(const Block& block) const { return kRankUnit * in_features * (block.rows.count + kLoadCost); }
  void copy_from_previous_slice(const Rows& rows, int64_t slice, int64_t r) const {
    float* to = v.data + slice * v.slice_stride;
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t row = rows.tokens[i] * v.row_stride;
      std::copy_n(to - v.slice_stride + row, r, to + row);
    }
  }
};

// Makes the expand tasks of one fused linear.
struct Expand {
  Buffer v;
  float* y;
  int64_t y_stride;
  Columns<int64_t> b_offset, magnitude_offset;
  Weights weights;

  Expand(const Buffer& v, const at::Tensor& rows, const Tables& tables, int64_t first_slice)
      : v(v), y(rows.mutable_data_ptr<float>()), y_stride(rows.stride(0)), b_offset(tables.b_offset, first_slice),
        magnitude_offset(tables.magnitude_offset, first_slice), weights(tables.arena) {}

  // `first_output`: where the slice starts in y.
  ExpandTask task(const Block& block, int64_t slice, int64_t r, int64_t first_output, int64_t size) const {
    const int64_t m = magnitude_offset.at(block.lora_index, slice);
    return {block.rows, v.data + slice * v.slice_stride, v.row_stride,
            weights.at(b_offset.at(block.lora_index, slice), size * r), m < 0 ? nullptr : weights.at(m, size), r,
            y + first_output, y_stride};
  }
  static int64_t unit_cost(const Block& block, int64_t r) { return kOutputUnit * r * (block.rows.count + kLoadCost); }
};

void shrink_all(const Shrink& shrink, int64_t num_slices, const std::vector<Block>& blocks, const Kernels& kernels) {
  WorkList<ShrinkTask> work;
  const auto for_each_slice = [&](auto&& visit) {
    for (const Block& block : blocks) {
      for (int64_t s = 0; s < num_slices; ++s) {
        const int64_t r = shrink.rank.at(block.lora_index, s);
        if (r > 0) {
          visit(block, s, r, shrink.is_shared(block.lora_index, s));
        }
      }
    }
  };
  for_each_slice([&](const Block& block, int64_t s, int64_t r, bool is_shared) {
    if (!is_shared) {
      work.add(shrink.task(block, s), r, kRankUnit, shrink.unit_cost(block));
    }
  });
  work.run(kernels.shrink);
  for_each_slice([&](const Block& block, int64_t s, int64_t r, bool is_shared) {
    if (is_shared) {
      shrink.copy_from_previous_slice(block.rows, s, r);
    }
  });
}

void expand_all(const Expand& expand, const Columns<int32_t>& rank, at::IntArrayRef slice_sizes,
                const std::vector<Block>& blocks, const Kernels& kernels) {
  WorkList<ExpandTask> work;
  for (const Block& block : blocks) {
    int64_t first_output = 0;
    for (size_t s = 0; s < slice_sizes.size(); first_output += slice_sizes[s++]) {
      const int64_t r = rank.at(block.lora_index, s), size = slice_sizes[s];
      if (r > 0) {
        work.add(expand.task(block, s, r, first_output, size), size, kOutputUnit, Expand::unit_cost(block, r));
      }
    }
  }
  work.run(kernels.expand);
}

// One slice of one block of tokens, both halves.
struct Update {
  ShrinkTask shrink;
  ExpandTask expand;
  int64_t slice, rank, size;
  bool is_shared;

  const void* first_weights() const { return is_shared ? expand.b : shrink.a; }
};

// Both halves of one fused linear.
struct Apply {
  const Shrink& shrink;
  const Expand& expand;
  at::IntArrayRef slice_sizes;
  const std::vector<Block>& blocks;
  const Kernels& kernels;

  void run() const {
    const std::vector<int64_t> cost = costs_before();
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t shares = std::clamp<int64_t>((cost.back() + kGrainCost - 1) / kGrainCost, 1, threads);
    const auto first_block = [&](int64_t share) {
      return std::lower_bound(cost.begin(), cost.end(), cost.back() * share / shares) - cost.begin();
    };
    int64_t largest = 0;
    for (int64_t share = 0; share < shares; ++share) {
      largest = std::max(largest, cost[first_block(share + 1)] - cost[first_block(share)]);
    }
    if (shares == 1) {
      run_adapters(0, blocks.size());
    } else if (largest * shares <= kMaxImbalance * cost.back()) {
      at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) { run_adapters(first_block(begin), first_block(end)); });
    } else {
      shrink_all(shrink, slice_sizes.size(), blocks, kernels);
      expand_all(expand, shrink.rank, slice_sizes, blocks, kernels);
    }
  }

  // Of the blocks before each, and of all of them.
  std::vector<int64_t> costs_before() const {
    std::vector<int64_t> costs{0};
    costs.reserve(blocks.size() + 1);
    for (const Block& block : blocks) {
      int64_t cost = costs.back();
      for (size_t s = 0; s < slice_sizes.size(); ++s) {
        const int64_t r = shrink.rank.at(block.lora_index, s);
        cost += r * (shrink.in_features + slice_sizes[s]) * (block.rows.count + kLoadCost);
      }
      costs.push_back(cost);
    }
    return costs;
  }

  // All of the blocks [begin, end), the weights in the order in which they lie in the arena.
  void run_adapters(int64_t begin, int64_t end) const {
    const std::vector<Update> updates = updates_of(begin, end);
    for (auto update = updates.begin(); update != updates.end(); ++update) {
      if (update->is_shared) {
        shrink.copy_from_previous_slice(update->shrink.rows, update->slice, update->rank);
      } else {
        kernels.shrink(update->shrink, 0, update->rank, update->expand.b);
      }
      const void* next = update + 1 == updates.end() ? next_linear(blocks[begin], *update) : (update + 1)->first_weights();
      kernels.expand(update->expand, 0, update->size, next);
    }
  }

  std::vector<Update> updates_of(int64_t begin, int64_t end) const {
    std::vector<Update> updates;
    updates.reserve((end - begin) * slice_sizes.size());
    for (int64_t i = begin; i < end; ++i) {
      const Block& block = blocks[i];
      int64_t first_output = 0;
      for (size_t s = 0; s < slice_sizes.size(); first_output += slice_sizes[s++]) {
        const int64_t r = shrink.rank.at(block.lora_index, s), size = slice_sizes[s];
        if (r > 0) {
          updates.push_back({shrink.task(block, s), expand.task(block, s, r, first_output, size), int64_t(s), r, size,
                             shrink.is_shared(block.lora_index, s)});
        }
      }
    }
    return updates;
  }

  // Where this thread most likely goes on in the next call: the columns of the tables are in the order of the model.
  const void* next_linear(const Block& block, const Update& last) const {
    const int64_t slice = slice_sizes.size();
    const bool exists = shrink.rank.first_slice + slice < shrink.rank.num_slices && shrink.rank.at(block.lora_index, slice) > 0;
    return exists ? shrink.weights.at(shrink.a_offset.at(block.lora_index, slice), 1) : last.expand.b;
  }
};

at::Tensor lora_shrink(const at::Tensor& x, int64_t first_slice, int64_t num_slices, const at::Tensor& arena,
                       const at::Tensor& rank, const at::Tensor& a_offset, const at::Tensor& b_offset,
                       const at::Tensor& magnitude_offset, int64_t max_rank, const at::Tensor& permutation,
                       const at::Tensor& chunk_start, const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index,
                       int64_t /*chunk_size*/) {
  const at::Tensor rows = as_float32_rows(x);
  const at::Tensor v = at::empty({1, num_slices, x.size(0), max_rank}, rows.options());
  const Tables tables{arena, rank, a_offset, b_offset, magnitude_offset, max_rank};
  const Shrink shrink(rows, {v.mutable_data_ptr<float>(), v.stride(1), v.stride(2)}, tables, first_slice);
  const auto blocks = blocks_of({permutation, chunk_start, chunk_length, chunk_lora_index});
  shrink_all(shrink, num_slices, blocks, kernels_of(arena.scalar_type()));
  return v;
}

void lora_expand(const at::Tensor& v, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
                 const at::Tensor& arena, const at::Tensor& rank, const at::Tensor& a_offset, const at::Tensor& b_offset,
                 const at::Tensor& magnitude_offset, int64_t max_rank, const at::Tensor& permutation,
                 const at::Tensor& chunk_start, const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index,
                 int64_t /*chunk_size*/) {
  TORCH_CHECK(v.size(0) == 1, "on the CPU v has one part, not ", v.size(0));
  const auto blocks = blocks_of({permutation, chunk_start, chunk_length, chunk_lora_index});
  if (blocks.empty()) {
    return;
  }
  const at::Tensor rows = as_float32_rows(y);
  const Tables tables{arena, rank, a_offset, b_offset, magnitude_offset, max_rank};
  const Expand expand({v.mutable_data_ptr<float>(), v.stride(1), v.stride(2)}, rows, tables, first_slice);
  expand_all(expand, {rank, first_slice}, slice_sizes, blocks, kernels_of(arena.scalar_type()));
  if (!rows.is_same(y)) {
    y.copy_(rows);
  }
}

void lora_apply(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
                const at::Tensor& arena, const at::Tensor& rank, const at::Tensor& a_offset, const at::Tensor& b_offset,
                const at::Tensor& magnitude_offset, int64_t max_rank, const at::Tensor& permutation,
                const at::Tensor& chunk_start, const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index,
                int64_t /*chunk_size*/) {
  apply(x, y, first_slice, slice_sizes, {arena, rank, a_offset, b_offset, magnitude_offset, max_rank},
        {permutation, chunk_start, chunk_length, chunk_lora_index});
}

}  // namespace

void apply(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
           const Tables& tables, const Segments& segments) {
  const auto blocks = blocks_of(segments);
  if (blocks.empty()) {
    return;
  }
  const at::Tensor x_rows = as_float32_rows(x), y_rows = as_float32_rows(y);
  const int64_t num_slices = slice_sizes.size(), row_size = tables.max_rank, slice_size = x.size(0) * row_size;
  const std::unique_ptr<float[]> memory(new float[num_slices * slice_size]);  // not filled
  const Buffer v{memory.get(), slice_size, row_size};
  const Shrink shrink(x_rows, v, tables, first_slice);
  const Expand expand(v, y_rows, tables, first_slice);
  Apply{shrink, expand, slice_sizes, blocks, kernels_of(tables.arena.scalar_type())}.run();
  if (!y_rows.is_same(y)) {
    y.copy_(y_rows);
  }
}

}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("lora_shrink", multilora::lora_shrink);
  m.impl("lora_expand", multilora::lora_expand);
  m.impl("lora_apply", multilora::lora_apply);
}
