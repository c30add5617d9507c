// The operators lora_shrink and lora_expand, each half by itself.
#include <algorithm>

#include "apply.h"
#include "capability.h"
#include "lora_tasks.h"
#include "parallel.h"
#include "work.h"

namespace multilora {
namespace {

template <class Task, class Kernel>
void run_in_parallel(const WorkList<Task>& work, Kernel kernel) {
  parallel_for(0, work.cost(), kThreadCost,
               [&](int64_t begin, int64_t end) { work.run(begin, end, kernel, weights_of(work.shares.back().task)); });
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

void expand_all(const Expand& expand, const Columns<int32_t>& rank, Integers slice_sizes, const Blocks& blocks,
                const LoraKernels& kernels) {
  WorkList<ExpandTask> work;
  for (const Block& block : blocks) {
    int64_t first_output = 0;
    for (int64_t s = 0; s < slice_sizes.size(); first_output += slice_sizes[s++]) {
      const int64_t r = rank.at(block.lora_index, s), size = slice_sizes[s];
      if (r > 0) {
        const ExpandTask task = expand.task(block, s, s, r, first_output, size);
        work.add(task, size, kOutputUnit, kOutputUnit * Expand::output_cost(block, r));
      }
    }
  }
  run_in_parallel(work, kernels.expand);
}

}  // namespace

Tensor lora_shrink(const Tensor& x, int64_t first_slice, int64_t num_slices, const Tables& tables, const Segments& segments) {
  const Tensor rows = as_float32_rows(x);
  const Tensor v = Tensor::empty({1, num_slices, x.size(0), tables.max_rank}, DType::float32);
  const Shrink shrink(rows, {v.data<float>(), v.stride(1), v.stride(2)}, tables, first_slice);
  shrink_all(shrink, num_slices, blocks_of(segments), lora_kernels_of(tables.arena.dtype()));
  return v;
}

void lora_expand(const Tensor& v, const Tensor& y, int64_t first_slice, Integers slice_sizes, const Tables& tables,
                 const Segments& segments) {
  MULTILORA_CHECK(v.size(0) == 1, "on the CPU v has one part, not ", v.size(0));
  const auto blocks = blocks_of(segments);
  if (blocks.empty()) {
    return;
  }
  const Tensor rows = as_float32_rows(y);
  const Expand expand({v.data<float>(), v.stride(1), v.stride(2)}, rows, tables, first_slice);
  expand_all(expand, {tables.rank, first_slice}, slice_sizes, blocks, lora_kernels_of(tables.arena.dtype()));
  if (!rows.is_same(y)) {
    copy(rows, y);
  }
}

}  // namespace multilora
