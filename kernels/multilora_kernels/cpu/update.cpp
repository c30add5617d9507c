// The operators multilora::lora_apply and lora_linear for CPU tensors (schemas: operators.py): both halves of an update,
// and between them the base linear where its weights are packed, in one parallel region.
//
// A thread has a share of the ranks and a share of the outputs. It computes its ranks, then piece by piece of its outputs
// the base linear and what the update adds to it; the other threads' ranks are long done by then, so that nobody waits and
// memory is read all the time. A single thread takes slice by slice, in the order in which an adapter's weights lie. Units
// are independent: how they are shared never changes a result.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "apply.h"
#include "capability.h"
#include "linear.h"
#include "lora_tasks.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Work in shares, each done once by whoever comes first, that everybody needs all of.
//
// Nobody waits for a thread that has not begun: who would wait takes over what no one has claimed. So it ends however
// few threads there are, and in whatever order they run.
class CommonWork {
 public:
  explicit CommonWork(int64_t shares) : claimed_(shares) {}

  template <class Share>
  void run(size_t share, const Share& work) {
    if (!claimed_[share].exchange(true, std::memory_order_relaxed)) {
      work(share);
      finished_.fetch_add(1, std::memory_order_release);
    }
  }

  template <class Share>
  void finish(const Share& work) {
    for (size_t share = 0; share < claimed_.size(); ++share) {
      run(share, work);
    }
    while (finished_.load(std::memory_order_acquire) < claimed_.size()) {
      std::this_thread::yield();
    }
  }

 private:
  std::vector<std::atomic<bool>> claimed_;
  std::atomic<size_t> finished_{0};
};

// One slice of y.
struct Slice {
  int64_t first_output, size;
  int64_t output_cost;  // of each of its outputs
};

// The expand task of one block in one slice.
struct Addition {
  ExpandTask task;
  int64_t first_output, size;
  size_t share;  // whose ranks it needs, in the list of shrink tasks

  bool has(int64_t begin, int64_t end) const { return first_output < end && begin < first_output + size; }
  const void* weights_from(int64_t output, int64_t element_size) const {
    return static_cast<const char*>(task.b) + std::max<int64_t>(output - first_output, 0) * task.rank * element_size;
  }
};

class Update {
 public:
  // y: float32; holds the base linear already unless `base` computes it.
  Update(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes, const Tables& tables,
         const Blocks& blocks, const PackedLinear* base)
      : kernels_(kernels_of(tables.arena.scalar_type())), element_size_(tables.arena.element_size()), base_(base) {
    v_.resize_for_overwrite(slice_sizes.size() * x.size(0) * tables.max_rank);
    int64_t first_output = 0;
    for (const int64_t size : slice_sizes) {
      slices_.push_back({first_output, size, base ? base->output_cost : 0});
      first_output += size;
    }
    const Buffer v{v_.data(), x.size(0) * tables.max_rank, tables.max_rank};
    add_tasks(Shrink(x, v, tables, first_slice), Expand(v, y, tables, first_slice), blocks);
  }

  // `finish(begin, end)`: what is left to do for some outputs.
  template <class Finish>
  void run(const Finish& finish) const {
    const int64_t shares = std::clamp<int64_t>((shrinks_.cost() + outputs_cost()) / kThreadCost, 1, Team::available());
    if (shares == 1) {
      run_alone();
      finish(0, num_outputs());
      return;
    }
    CommonWork shrinks(shares);
    const auto shrink = [&](int64_t share) { shrink_share(share, shares); };
    // An update alone reads little for each output: in pieces that would be too short for requests ahead of them.
    const int64_t pieces = base_ ? shares * kPiecesPerThread : shares;
    Ranges outputs(pieces, shares);
    Team::share_out(shares, [&](int64_t share) {
      shrinks.run(share, shrink);
      outputs.take(share, [&](int64_t piece) {
        const int64_t first = first_output(piece, pieces), last = first_output(piece + 1, pieces);
        if (base_) {
          base_->run(first, last);
        }
        shrinks.finish(shrink);
        expand(first, last, piece + 1 == pieces / shares);
        finish(first, last);
      });
    });
  }

 private:
  void add_tasks(const Shrink& shrink, const Expand& expand, const Blocks& blocks) {
    next_linear_ = blocks.empty() ? nullptr : shrink.weights_at(blocks.front(), slices_.size());
    shrinks_.shares.reserve(blocks.size() * slices_.size());
    additions_.reserve(blocks.size() * slices_.size());
    for (const Block& block : blocks) {
      size_t v_slice = 0;
      for (size_t s = 0; s < slices_.size(); ++s) {
        Slice& slice = slices_[s];
        const int64_t r = shrink.rank.at(block.lora_index, s);
        if (r == 0) {
          continue;
        }
        if (!shrink.is_shared(block.lora_index, s)) {
          v_slice = s;
          shrinks_.add(shrink.task(block, s), r, kRankUnit, shrink.unit_cost(block));
        }
        const ExpandTask task = expand.task(block, s, v_slice, r, slice.first_output, slice.size);
        additions_.push_back({task, slice.first_output, slice.size, shrinks_.shares.size() - 1});
        slice.output_cost += Expand::output_cost(block, r);
      }
    }
  }

  void run_alone() const {
    if (base_) {
      base_->run(0, num_outputs());
    }
    size_t shrunk = 0;
    for (size_t i = 0; i < additions_.size(); ++i) {
      const Addition& addition = additions_[i];
      if (addition.share == shrunk) {
        const auto& share = shrinks_.shares[shrunk++];
        kernels_.shrink(share.task, 0, share.size, addition.task.b);
      }
      kernels_.expand(addition.task, 0, addition.size, read_after(i));
    }
  }

  // What a single thread reads after an addition.
  const void* read_after(size_t addition) const {
    const auto next = additions_.begin() + addition + 1;
    if (next == additions_.end()) {
      return what_follows(true, 0, additions_[addition]);
    }
    const bool has_ranks = next->share == additions_[addition].share;
    return has_ranks ? next->task.b : weights_of(shrinks_.shares[next->share].task);
  }

  int64_t num_outputs() const { return slices_.back().first_output + slices_.back().size; }

  int64_t outputs_cost() const {
    int64_t cost = 0;
    for (const Slice& slice : slices_) {
      cost += slice.size * slice.output_cost;
    }
    return cost;
  }

  // Where a share begins: every share costs the same, as nearly as whole units allow.
  int64_t first_output(int64_t share, int64_t shares) const {
    const int64_t unit = base_ ? base_->panel_width : kOutputUnit;
    int64_t cost = outputs_cost() * share / shares;
    for (const Slice& slice : slices_) {
      if (cost < slice.size * slice.output_cost) {
        const int64_t output = slice.first_output + cost / slice.output_cost;
        return std::min((output + unit / 2) / unit * unit, num_outputs());
      }
      cost -= slice.size * slice.output_cost;
    }
    return num_outputs();
  }

  void shrink_share(int64_t share, int64_t shares) const {
    if (shrinks_.shares.empty()) {
      return;
    }
    const int64_t cost = shrinks_.cost();
    const void* next = base_ ? base_->weights_from(first_output(share, shares)) : additions_.front().task.b;
    shrinks_.run(cost * share / shares, cost * (share + 1) / shares, kernels_.shrink, next);
  }

  // is_last: of the thread that has the first range.
  void expand(int64_t begin, int64_t end, bool is_last) const {
    const auto next_of = [&](auto addition) {
      return std::find_if(addition, additions_.end(), [&](const Addition& a) { return a.has(begin, end); });
    };
    for (auto addition = next_of(additions_.begin()); addition != additions_.end();) {
      const auto next = next_of(addition + 1);
      const void* ahead = next == additions_.end() ? what_follows(is_last, begin, *addition)
                                                   : next->weights_from(begin, element_size_);
      const int64_t first = std::max<int64_t>(begin - addition->first_output, 0);
      kernels_.expand(addition->task, first, std::min(end - addition->first_output, addition->size), ahead);
      addition = next;
    }
  }

  // What a thread reads after the last addition to a piece. A step goes through the columns of the tables in their order,
  // so that whoever has the first outputs has the first ranks of the next columns, too, and reads them when all of its
  // pieces are done; else nothing is new.
  const void* what_follows(bool is_next_linear, int64_t first_output, const Addition& last) const {
    return is_next_linear && next_linear_ ? next_linear_ : last.weights_from(first_output, element_size_);
  }

  const Kernels& kernels_;
  const int64_t element_size_;
  const PackedLinear* base_;
  c10::SmallVector<float, 128> v_;  // not filled
  c10::SmallVector<Slice, 3> slices_;
  WorkList<ShrinkTask> shrinks_;
  c10::SmallVector<Addition, 3> additions_;
  const void* next_linear_;  // the first weights behind these columns of the tables, null if there are none
};

void lora_apply(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
                const at::Tensor& arena, const at::Tensor& rank, const at::Tensor& a_offset, const at::Tensor& b_offset,
                const at::Tensor& magnitude_offset, int64_t max_rank, const at::Tensor& permutation,
                const at::Tensor& chunk_start, const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index,
                int64_t /*chunk_size*/) {
  apply(x, y, first_slice, slice_sizes, {arena, rank, a_offset, b_offset, magnitude_offset, max_rank},
        {permutation, chunk_start, chunk_length, chunk_lora_index});
}

at::Tensor lora_linear_operator(const at::Tensor& x, const at::Tensor& panels, int64_t first_slice,
                                at::IntArrayRef slice_sizes, const at::Tensor& arena, const at::Tensor& rank,
                                const at::Tensor& a_offset, const at::Tensor& b_offset, const at::Tensor& magnitude_offset,
                                int64_t max_rank, const at::Tensor& permutation, const at::Tensor& chunk_start,
                                const at::Tensor& chunk_length, const at::Tensor& chunk_lora_index, int64_t /*chunk_size*/,
                                const std::optional<at::Tensor>& bias) {
  return lora_linear(x, panels, first_slice, slice_sizes, {arena, rank, a_offset, b_offset, magnitude_offset, max_rank},
                     {permutation, chunk_start, chunk_length, chunk_lora_index}, bias ? &*bias : nullptr);
}

}  // namespace

void apply(const at::Tensor& x, const at::Tensor& y, int64_t first_slice, at::IntArrayRef slice_sizes,
           const Tables& tables, const Segments& segments) {
  const auto blocks = blocks_of(segments);
  if (blocks.empty()) {
    return;
  }
  const at::Tensor x_rows = as_float32_rows(x), y_rows = as_float32_rows(y);
  Update(x_rows, y_rows, first_slice, slice_sizes, tables, blocks, nullptr).run([](int64_t, int64_t) {});
  if (!y_rows.is_same(y)) {
    y.copy_(y_rows);
  }
}

at::Tensor lora_linear(const at::Tensor& x, const at::Tensor& panels, int64_t first_slice, at::IntArrayRef slice_sizes,
                       const Tables& tables, const Segments& segments, const at::Tensor* bias) {
  int64_t out_features = 0;
  for (const int64_t size : slice_sizes) {
    out_features += size;
  }
  const Bias to_add(bias, out_features);
  const PackedLinear base(x, panels, out_features);
  Update(base.x, base.y, first_slice, slice_sizes, tables, blocks_of(segments), &base).run([&](int64_t begin, int64_t end) {
    to_add.add_to(base.task, begin, end);
  });
  return base.y;
}

}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("lora_apply", multilora::lora_apply);
  m.impl("lora_linear", multilora::lora_linear_operator);
}
