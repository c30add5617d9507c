// The operators multilora::lora_shrink, lora_expand and lora_apply for CPU tensors (schemas: operators.py).
//
// A step's work is a list of tasks (one slice of one adapter's tokens), a task is a number of equal units, and every
// thread takes a share of the total cost. Units are independent outputs, so the split never changes a result.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "work.h"

namespace multilora {
namespace {

// Cost of loading and converting one weight, in multiply-adds.
constexpr int64_t kLoadCost = 2;
// Least cost that is worth a thread of its own: some microseconds.
constexpr int64_t kGrainCost = 1 << 17;

const Capability& capability() {
#if defined(__x86_64__)
  static const Capability& best = [&]() -> const Capability& {
    const char* wanted = std::getenv("MULTILORA_CPU_CAPABILITY");
    const auto allowed = [&](const Capability& c) { return !wanted || std::strcmp(wanted, c.name) == 0; };
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl");
    if (has_avx512 && allowed(kAvx512)) {
      return kAvx512;
    }
    return has_avx2 && allowed(kAvx2) ? kAvx2 : kPlain;
  }();
  return best;
#else
  return kPlain;
#endif
}

const Kernels& kernels_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return capability().float32;
    case at::kBFloat16:
      return capability().bfloat16;
    case at::kHalf:
      return capability().float16;
    default:
      TORCH_CHECK(false, "adapters are float32, bfloat16 or float16, not ", dtype);
  }
}

struct Block {
  int64_t lora_index;
  Rows rows;
};

// Neighbouring chunks of one adapter, joined up to kMaxRows tokens.
std::vector<Block> blocks_of(const at::Tensor& permutation, const at::Tensor& chunk_start, const at::Tensor& chunk_length,
                             const at::Tensor& chunk_lora_index) {
  const auto *tokens = permutation.const_data_ptr<int32_t>(), *start = chunk_start.const_data_ptr<int32_t>(),
             *length = chunk_length.const_data_ptr<int32_t>(), *lora_index = chunk_lora_index.const_data_ptr<int32_t>();
  std::vector<Block> blocks;
  for (int64_t c = 0; c < chunk_start.numel() && length[c] > 0; ++c) {
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

// One table of LoRATables, [max_loras, num_slices] int64, read at the slices of one fused linear.
struct Column {
  const int64_t* data;
  int64_t num_slices, first_slice;

  Column(const at::Tensor& table, int64_t first)
      : data(table.const_data_ptr<int64_t>()), num_slices(table.size(1)), first_slice(first) {}
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

int64_t rank_at(const at::Tensor& rank, int64_t lora_index, int64_t column) {
  return rank.const_data_ptr<int32_t>()[lora_index * rank.size(1) + column];
}

at::Tensor as_float32_rows(const at::Tensor& x) {
  const at::Tensor rows = x.to(at::kFloat);
  return rows.stride(1) == 1 ? rows : rows.contiguous();
}

// The rows of a slice whose A is that of the slice before it (a fused module of the adapter, such as attn_qkv).
struct SharedResult {
  Rows rows;
  int64_t slice, rank;

  void copy_from_previous_slice(const at::Tensor& v) const {
    float* to = v.mutable_data_ptr<float>() + slice * v.stride(1);
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t row = rows.tokens[i] * v.stride(2);
      std::copy_n(to - v.stride(1) + row, rank, to + row);
    }
  }
};

at::Tensor lora_shrink(const at::Tensor& x, int64_t first_slice, int64_t num_slices, const at::Tensor& arena,
                       const at::Tensor& rank, const at::Tensor& a_offset, const at::Tensor& /*b_offset*/,
                       const at::Tensor& /*magnitude_offset*/, int64_t max_rank, const at::Tensor& permutation,
                       const at::Tensor& chunk_start, const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index,
                       int64_t /*chunk_size*/) {
  const at::Tensor rows = as_float32_rows(x);
  const int64_t in_features = rows.size(1);
  at::Tensor v = at::empty({1, num_slices, x.size(0), max_rank}, rows.options());
  const Column a(a_offset, first_slice);
  const Weights weights(arena);
  WorkList<ShrinkTask> work;
  std::vector<SharedResult> shared;
  for (const Block& block : blocks_of(permutation, chunk_start, chunk_length, chunk_lora_index)) {
    for (int64_t s = 0; s < num_slices; ++s) {
      const int64_t r = rank_at(rank, block.lora_index, first_slice + s);
      if (r == 0) {
        continue;
      }
      const bool is_shared = s > 0 && rank_at(rank, block.lora_index, first_slice + s - 1) == r &&
          a.at(block.lora_index, s - 1) == a.at(block.lora_index, s);
      if (is_shared) {
        shared.push_back({block.rows, s, r});
        continue;
      }
      const void* matrix = weights.at(a.at(block.lora_index, s), r * in_features);
      const ShrinkTask task{block.rows, rows.const_data_ptr<float>(), rows.stride(0), matrix, in_features,
                            v.mutable_data_ptr<float>() + s * v.stride(1), v.stride(2)};
      work.add(task, r, kRankUnit, kRankUnit * in_features * (block.rows.count + kLoadCost));
    }
  }
  work.run(kernels_of(arena.scalar_type()).shrink);
  for (const SharedResult& result : shared) {
    result.copy_from_previous_slice(v);
  }
  return v;
}

void expand_float32(const at::Tensor& v, const at::Tensor& y, const at::Tensor& arena, const at::Tensor& rank,
                    const at::Tensor& b_offset, const at::Tensor& magnitude_offset, int64_t first_slice,
                    at::IntArrayRef slice_sizes, const std::vector<Block>& blocks) {
  const Column b(b_offset, first_slice), magnitude(magnitude_offset, first_slice);
  const Weights weights(arena);
  WorkList<ExpandTask> work;
  for (const Block& block : blocks) {
    float* y_slice = y.mutable_data_ptr<float>();
    for (size_t s = 0; s < slice_sizes.size(); y_slice += slice_sizes[s++]) {
      const int64_t r = rank_at(rank, block.lora_index, first_slice + s), size = slice_sizes[s];
      if (r > 0) {
        const int64_t m = magnitude.at(block.lora_index, s);
        const ExpandTask task{block.rows, v.const_data_ptr<float>() + s * v.stride(1), v.stride(2),
                              weights.at(b.at(block.lora_index, s), size * r), m < 0 ? nullptr : weights.at(m, size), r,
                              y_slice, y.stride(0)};
        work.add(task, size, kOutputUnit, kOutputUnit * r * (block.rows.count + kLoadCost));
      }
    }
  }
  work.run(kernels_of(arena.scalar_type()).expand);
}

void lora_expand(const at::Tensor& v, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
                 const at::Tensor& arena, const at::Tensor& rank, const at::Tensor& /*a_offset*/,
                 const at::Tensor& b_offset, const at::Tensor& magnitude_offset, int64_t /*max_rank*/,
                 const at::Tensor& permutation, const at::Tensor& chunk_start, const at::Tensor& chunk_length,
                 const at::Tensor& chunk_lora_index, int64_t /*chunk_size*/) {
  TORCH_CHECK(v.size(0) == 1, "on the CPU v has one part, not ", v.size(0));
  const auto blocks = blocks_of(permutation, chunk_start, chunk_length, chunk_lora_index);
  if (blocks.empty()) {
    return;
  }
  const at::Tensor rows = as_float32_rows(y);
  expand_float32(v, rows, arena, rank, b_offset, magnitude_offset, first_slice, slice_sizes, blocks);
  if (!rows.is_same(y)) {
    y.copy_(rows);
  }
}

void lora_apply(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
                const at::Tensor& arena, const at::Tensor& rank, const at::Tensor& a_offset, const at::Tensor& b_offset,
                const at::Tensor& magnitude_offset, int64_t max_rank, const at::Tensor& permutation,
                const at::Tensor& chunk_start, const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index,
                int64_t chunk_size) {
  const int64_t num_slices = static_cast<int64_t>(slice_sizes.size());
  const at::Tensor v = lora_shrink(x, first_slice, num_slices, arena, rank, a_offset, b_offset, magnitude_offset, max_rank,
                                   permutation, chunk_start, chunk_length, chunk_lora_index, chunk_size);
  lora_expand(v, y, first_slice, slice_sizes, arena, rank, a_offset, b_offset, magnitude_offset, max_rank, permutation,
              chunk_start, chunk_length, chunk_lora_index, chunk_size);
}

std::string cpu_capability() { return capability().name; }

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_FRAGMENT(multilora, m) { m.def("cpu_capability() -> str", multilora::cpu_capability); }

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("lora_shrink", multilora::lora_shrink);
  m.impl("lora_expand", multilora::lora_expand);
  m.impl("lora_apply", multilora::lora_apply);
}
