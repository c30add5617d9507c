// The operators lora_apply and lora_linear: both halves of an update, and before them the base linear
// where its weights are packed, in one parallel region.
//
// Threads compute the base linear, then ranks, and after all of these the update of the outputs. Each thread has adapters of
// its own, whose weights it reads from one end to the other, until it helps the slower threads. Pieces are independent: which
// thread takes which changes no result.
#include <algorithm>
#include <memory>

#include "apply.h"
#include "capability.h"
#include "linear.h"
#include "lora_tasks.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Least pieces of an update for each thread: of fewer, adapters of different ranks would make uneven shares.
constexpr int64_t kUpdatePieces = 4;

class Update {
 public:
  // y: float32; holds the base linear already unless `base` computes it.
  Update(const Tensor& x, const Tensor& y, int64_t first_slice, Integers slice_sizes, const Tables& tables,
         const Blocks& blocks, const PackedLinear* base)
      : kernels_(lora_kernels_of(tables.arena.dtype())), base_(base), blocks_(blocks), slice_sizes_(slice_sizes),
        v_(std::make_unique_for_overwrite<float[]>(slice_sizes.size() * x.size(0) * tables.max_rank)),
        shrink_(x, {v_.get(), x.size(0) * tables.max_rank, tables.max_rank}, tables, first_slice),
        expand_(shrink_.v, y, tables, first_slice), threads_(threads_for(tables.max_rank)) {
    const int64_t slices = blocks_.size() * slice_sizes.size();
    parts_ = threads_ == 1 || slices == 0 ? 1 : (threads_ * kUpdatePieces + slices - 1) / slices;
  }

  void run() const {
    if (base_ && base_->x().size(0) > kMaxRows) {
      run_by_outputs();
    } else {
      run_by_adapters();
    }
  }

 private:
  // For many rows, whose outputs would not stay in the caches: ranks, then a few outputs after the other.
  void run_by_outputs() const {
    const int64_t pieces = num_pieces(), panels = base_->num_panels();
    const int64_t panel_pieces = std::min(panels, threads_ * kPiecesPerThread);
    Ranges shrinks(pieces, threads_), outputs(panel_pieces, threads_);
    Awaited ranks(pieces);
    Team::share_out(threads_, [&](int64_t thread) {
      ranks.run([&](int64_t& claimed) {
        Reading<ShrinkTask> reading(kernels_.shrink);
        shrinks.take(thread, [&](int64_t begin, int64_t end) {
          claimed += end - begin;
          for_each_piece(begin, end, [&](const Piece& p) { add(p, reading); });
        });
        reading.finish(nullptr);
      });
      ranks.wait();
      outputs.take(thread, [&](int64_t i, int64_t end) {
        for (; i < end; ++i) {
          const int64_t first = panels * i / panel_pieces, last = panels * (i + 1) / panel_pieces;
          base_->run_panels(first, last);
          expand(first * base_->panel_width(), last * base_->panel_width());
        }
      });
    });
  }

  // The update of the outputs [begin, end) of all rows.
  void expand(int64_t begin, int64_t end) const {
    Reading<ExpandTask> reading(kernels_.expand);
    for (int64_t i = 0; i < num_pieces(); i += parts_) {
      const Piece p = piece(i);
      const int64_t slice_begin = first_output(p.slice), size = slice_sizes_[p.slice];
      add(p, std::max<int64_t>(begin - slice_begin, 0), std::min(end - slice_begin, size), reading);
    }
    reading.finish(nullptr);
  }

  // For few rows, which take the time of reading their adapters.
  void run_by_adapters() const {
    const int64_t pieces = num_pieces(), linear_pieces = base_ ? base_->num_pieces() : 0;
    Ranges linear(linear_pieces, threads_), shrinks(pieces, threads_), expands(pieces, threads_);
    Awaited before(linear_pieces + pieces);
    Team::share_out(threads_, [&](int64_t thread) {
      const int64_t first = pieces * thread / threads_;
      fetch_tables(first, pieces * (thread + 1) / threads_);
      before.run([&](int64_t& claimed) {
        linear.take(thread, [&](int64_t begin, int64_t end) {
          claimed += end - begin;
          base_->run(begin, end, Bias());
        });
        Reading<ShrinkTask> reading(kernels_.shrink);
        shrinks.take(thread, [&](int64_t begin, int64_t end) {
          claimed += end - begin;
          for_each_piece(begin, end, [&](const Piece& p) { add(p, reading); });
        });
        reading.finish(first < pieces ? b_of(first) : nullptr);
      });
      before.wait();
      Reading<ExpandTask> reading(kernels_.expand);
      expands.take(thread, [&](int64_t begin, int64_t end) {
        for_each_piece(begin, end, [&](const Piece& p) {
          const int64_t size = slice_sizes_[p.slice];
          add(p, p.begin(size, kOutputUnit), p.end(size, kOutputUnit), reading);
        });
      });
      reading.finish(first < pieces ? a_behind(first) : nullptr);
    });
  }

  // A piece is one of some parts of the ranks, or of the outputs, of one slice for one block.
  struct Piece {
    const Block& block;
    int64_t slice, rank, part, parts;

    // Parts of this number of ranks or outputs, in whole units.
    int64_t begin(int64_t size, int64_t unit) const { return bound(size, unit, part); }
    int64_t end(int64_t size, int64_t unit) const { return bound(size, unit, part + 1); }

   private:
    int64_t bound(int64_t size, int64_t unit, int64_t i) const {
      return i == parts ? size : i == 0 ? 0 : (size + unit - 1) / unit * i / parts * unit;
    }
  };

  int64_t num_pieces() const { return blocks_.size() * slice_sizes_.size() * parts_; }
  Piece piece(int64_t i) const {
    const int64_t slices = slice_sizes_.size(), slice = i / parts_ % slices;
    const Block& block = blocks_[i / parts_ / slices];
    return {block, slice, shrink_.rank.at(block.lora_index, slice), i % parts_, parts_};
  }

  // Calls body(piece) for the pieces begin .. end - 1: there are so many small ones that divisions would take as long as they.
  template <class Body>
  void for_each_piece(int64_t begin, int64_t end, const Body& body) const {
    const int64_t slices = slice_sizes_.size();
    int64_t part = begin % parts_, slice = begin / parts_ % slices, block = begin / parts_ / slices;
    for (int64_t i = begin; i < end; ++i) {
      body(Piece{blocks_[block], slice, shrink_.rank.at(blocks_[block].lora_index, slice), part, parts_});
      if (++part == parts_) {
        part = 0;
        if (++slice == slices) {
          slice = 0;
          ++block;
        }
      }
    }
  }

  int64_t threads_for(int64_t max_rank) const {
    int64_t cost = 0, rows = 0;
    for (const Block& block : blocks_) {
      rows += block.rows.count + kLoadCost;
    }
    for (const int64_t size : slice_sizes_) {
      cost += rows * max_rank * (shrink_.in_features + size);
    }
    return std::clamp<int64_t>(cost / kThreadCost, base_ ? base_->num_threads() : 1, Team::available());
  }

  // The rows of the tables that describe these pieces: they were last read for the linear before.
  void fetch_tables(int64_t first, int64_t end) const {
    const int64_t pieces_of_block = slice_sizes_.size() * parts_;
    for (int64_t i = first; i < end; i += pieces_of_block) {
      const int64_t lora_index = blocks_[i / pieces_of_block].lora_index;
      shrink_.rank.fetch(lora_index);
      shrink_.a_offset.fetch(lora_index);
      expand_.b_offset.fetch(lora_index);
      expand_.magnitude_offset.fetch(lora_index);
    }
  }

  void add(const Piece& p, Reading<ShrinkTask>& reading) const {
    const int64_t begin = p.begin(p.rank, kRankUnit), end = p.end(p.rank, kRankUnit);
    if (begin < end && !shrink_.is_shared(p.block.lora_index, p.slice)) {
      const ShrinkTask task = shrink_.task(p.block, p.slice);
      reading.add(task, begin, end, shrink_.rank_of(task, begin));
    }
  }

  void add(const Piece& p, int64_t begin, int64_t end, Reading<ExpandTask>& reading) const {
    if (begin < end && p.rank > 0) {
      const ExpandTask task = expand_task(p);
      reading.add(task, begin, end, expand_.output_of(task, begin));
    }
  }

  ExpandTask expand_task(const Piece& p) const {
    int64_t v_slice = p.slice;
    while (shrink_.is_shared(p.block.lora_index, v_slice)) {
      --v_slice;
    }
    return expand_.task(p.block, p.slice, v_slice, p.rank, first_output(p.slice), slice_sizes_[p.slice]);
  }

  int64_t first_output(int64_t slice) const {
    int64_t output = 0;
    for (int64_t s = 0; s < slice; ++s) {
      output += slice_sizes_[s];
    }
    return output;
  }

  // The first B that a thread reads if this piece is its first, null if there is none.
  const void* b_of(int64_t i) const {
    const Piece p = piece(i);
    return p.rank > 0 ? expand_task(p).b : nullptr;
  }
  // The same for the A behind these slices: a step goes through the columns of the tables in their order.
  const void* a_behind(int64_t i) const { return shrink_.weights_at(piece(i).block, slice_sizes_.size()); }

  const LoraKernels kernels_;
  const PackedLinear* base_;
  const Blocks& blocks_;
  const Integers slice_sizes_;
  const std::unique_ptr<float[]> v_;
  const Shrink shrink_;
  const Expand expand_;
  const int64_t threads_;
  int64_t parts_;
};

}  // namespace

void apply(const Tensor& x, const Tensor& y, int64_t first_slice, Integers slice_sizes, const Tables& tables,
           const Segments& segments) {
  const auto blocks = blocks_of(segments);
  if (blocks.empty()) {
    return;
  }
  const Tensor x_rows = as_float32_rows(x), y_rows = as_float32_rows(y);
  Update(x_rows, y_rows, first_slice, slice_sizes, tables, blocks, nullptr).run();
  if (!y_rows.is_same(y)) {
    copy(y_rows, y);
  }
}

Tensor lora_linear(const Tensor& x, const Panels& panels, int64_t first_slice, Integers slice_sizes, const Tables& tables,
                   const Segments& segments, const Tensor& bias) {
  return lora_linear(x, panels, first_slice, slice_sizes, tables, blocks_of(segments), bias);
}

Tensor lora_linear(const Tensor& x, const Panels& panels, int64_t first_slice, Integers slice_sizes, const Tables& tables,
                   const Blocks& blocks, const Tensor& bias) {
  int64_t out_features = 0;
  for (const int64_t size : slice_sizes) {
    out_features += size;
  }
  const Bias to_add(bias, out_features);
  const PackedLinear base(x, panels, out_features);
  Update(base.x(), base.y(), first_slice, slice_sizes, tables, blocks, &base).run();
  to_add.add_to(base.y());
  return base.y();
}

}  // namespace multilora
