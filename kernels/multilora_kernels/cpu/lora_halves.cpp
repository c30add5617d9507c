// The operators multilora::lora_shrink and lora_expand for CPU tensors (schemas: operators.py), each half by itself.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "apply.h"
#include "capability.h"
#include "lora_tasks.h"
#include "work.h"

namespace multilora {
namespace {

template <class Task, class Kernel>
void run_in_parallel(const WorkList<Task>& work, Kernel kernel) {
  at::parallel_for(0, work.cost(), kThreadCost, [&](int64_t begin, int64_t end) {
    work.run(begin, end, kernel, weights_of(work.shares.back().task));
  });
}

// v of the slice before, whose A is the same.
void copy_from_previous_slice(const Buffer& v, const Rows& rows, int64_t slice, int64_t r) {
  float* to = v.data + slice * v.slice_stride;
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t row = rows.tokens[i] * v.row_stride;
    std::copy_n(to - v.slice_stride + row, r, to + row);
  }
}

void shrink_all(const Shrink& shrink, int64_t num_slices, const Blocks& blocks, const LoraKernels& kernels) {
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
  run_in_parallel(work, kernels.shrink);
  for_each_slice([&](const Block& block, int64_t s, int64_t r, bool is_shared) {
    if (is_shared) {
      copy_from_previous_slice(shrink.v, block.rows, s, r);
    }
  });
}

void expand_all(const Expand& expand, const Columns<int32_t>& rank, at::IntArrayRef slice_sizes,
                const Blocks& blocks, const LoraKernels& kernels) {
  WorkList<ExpandTask> work;
  for (const Block& block : blocks) {
    int64_t first_output = 0;
    for (size_t s = 0; s < slice_sizes.size(); first_output += slice_sizes[s++]) {
      const int64_t r = rank.at(block.lora_index, s), size = slice_sizes[s];
      if (r > 0) {
        const ExpandTask task = expand.task(block, s, s, r, first_output, size);
        work.add(task, size, kOutputUnit, kOutputUnit * Expand::output_cost(block, r));
      }
    }
  }
  run_in_parallel(work, kernels.expand);
}

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
  shrink_all(shrink, num_slices, blocks, lora_kernels_of(arena.scalar_type()));
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
  expand_all(expand, {rank, first_slice}, slice_sizes, blocks, lora_kernels_of(arena.scalar_type()));
  if (!rows.is_same(y)) {
    y.copy_(rows);
  }
}

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("lora_shrink", multilora::lora_shrink);
  m.impl("lora_expand", multilora::lora_expand);
}
