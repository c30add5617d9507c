// The operators route and expert_mlp for CPU tensors.
//
// A pair is a token and one of its experts. Pairs are sorted by expert, and by adapter within one, so that an expert's pairs are
// neighbouring rows of one product, and an adapter's pairs of one expert are neighbouring rows of one update. Several experts,
// in decode steps all of them, are multiplied in one parallel region, in phases: all pieces of a phase are done before the next
// one begins. A pair's numbers do not depend on the pieces or on other pairs, and a token's pairs are added up in the order of
// its own choice. So a token has the same bits alone and in any batch.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "capability.h"
#include "linear.h"
#include "lora_tasks.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Memory for the outputs of the pairs of a tile of tokens, which wait until the last expert is done. A prompt of more tokens is
// computed tile by tile, and each tile reads the experts again: with this memory, 2048 tokens of a model of 30 billion
// parameters are one tile. There an expert has 128 rows, and multiplying takes longer than reading.
constexpr int64_t kTileBytes = 128 << 20;
// Pairs for each thread, whose inputs and activations have memory at a time; and the least and the most for all threads, or the
// pairs of one expert if these are more. So few stay in the third cache, or nearly, and decode steps do all pairs at once.
constexpr int64_t kThreadPairs = 512, kLeastPairs = 1024, kMostPairs = 8192;
// Rows of one expert in one piece of a product. Its rows of x leave the L2 cache, but each weight comes from memory once.
constexpr int64_t kPieceRows = 256;
// More rows than a kernel takes side by side: it would go through all panels again for the others.
constexpr int64_t kKernelRows = 128;
// Cost of reading a weight, and of taking an activation apart, as in linear.cpp.
constexpr int64_t kReadCost = 8;
// Pieces of the ranks for each thread, at least.
constexpr int64_t kShrinkPieces = 4;
// Outputs of one token that are added up in one piece, and the cost of adding one, in multiply-adds.
constexpr int64_t kSumColumns = 512, kSumCost = 4;
// Logits that are worth a thread of their own.
constexpr int64_t kGrainLogits = 1 << 9;

int64_t divided_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit; }

// Neighbouring pairs of one expert.
struct Group {
  int64_t expert, first, rows;
};

// Some rows of a group, from a multiple of kMatrixRows of its rows on.
struct Chunk {
  int64_t group, first, rows;
};

// Neighbouring pairs of one expert and one adapter within a chunk.
struct Run {
  int64_t expert;
  Block block;
};

// At most kMatrixRows rows of a group, the runs of its adapters, and what is done with them between two products.
struct RowBlock {
  Chunk rows;
  int64_t first_run, end_run;
};

// The linears of one kind of all experts.
class ExpertLinear {
 public:
  // Refuses panels that do not hold the experts.
  explicit ExpertLinear(const Experts& experts) : ExpertLinear(experts, panels_of_first(experts)) {}

  const PanelKernel& kernel() const { return kernel_; }
  int64_t num_panels() const { return num_panels_; }
  int64_t in_features() const { return first_.in_features; }
  int64_t out_features() const { return first_.out_features; }
  int64_t num_weights() const { return num_panels_ * capability().panel_width * first_.in_features; }

  // Without x, rows and y.
  LinearTask task(int64_t expert) const {
    LinearTask task = first_;
    task.panels = static_cast<const char*>(task.panels) + expert * panel_bytes_;
    task.scaling.scales = static_cast<const char*>(task.scaling.scales) + expert * scale_bytes_;
    if (task.scaling.zeros) {
      const int64_t zero_bytes = task.scaling.has_float_zeros ? sizeof(float) : sizeof(int8_t);
      task.scaling.zeros = static_cast<const char*>(task.scaling.zeros) + expert * num_zeros_ * zero_bytes;
    }
    return task;
  }

 private:
  ExpertLinear(const Experts& experts, const Panels& first)
      : kernel_(first), first_(task_of(first, experts.out_features)), num_panels_(first.data.size(0)),
        panel_bytes_(first.data.numel() * first.data.element_size()) {
    first_.span = kernel_.span();
    if (first.scaling) {
      num_zeros_ = first.scaling->scales.numel();
      scale_bytes_ = num_zeros_ * first.scaling->scales.element_size();
    }
  }

  static Panels panels_of_first(const Experts& experts) {
    const Tensor& data = experts.panels.data;
    const int64_t all = data.dim() > 0 ? data.size(0) : 0, count = experts.num_experts;
    MULTILORA_CHECK(count > 0 && all > 0 && all % count == 0, all, " panels do not hold ", count, " experts");
    Panels first{data.part(0, all / count), experts.panels.scaling};
    if (first.scaling) {
      const auto part = [&](Tensor& tensor) {
        if (tensor.is_defined()) {
          MULTILORA_CHECK(tensor.dim() > 0 && tensor.size(0) == all && tensor.is_contiguous(), "scales and zeros are of ", all,
                          " panels, not ", tensor.sizes());
          tensor = tensor.part(0, all / count);
        }
      };
      part(first.scaling->scales);
      part(first.scaling->zeros);
    }
    MULTILORA_CHECK(data.is_contiguous(), "panels must be contiguous, not ", data.sizes());
    check_panels(first, experts.out_features);
    return first;
  }

  PanelKernel kernel_;
  LinearTask first_;
  int64_t num_panels_, panel_bytes_, scale_bytes_ = 0, num_zeros_ = 0;
};

// Rows of pairs, and the parts that a kernel takes of them.
struct PairRows {
  float* values = nullptr;
  int64_t stride = 0, first_pair = 0;
  Tensor parts, sums;

  void make_parts(const PanelKernel& kernel, int64_t pairs) {
    if (kernel.row_parts() > 0) {
      parts = Tensor::empty({pairs * kernel.row_parts()}, DType::uint8);
    }
    if (kernel.row_sums() > 0) {
      sums = Tensor::empty({pairs, kernel.row_sums()}, DType::float32);
    }
  }
  float* row(int64_t pair) const { return values + (pair - first_pair) * stride; }
  // Gives the task of some rows of a group their activations.
  void give(LinearTask& task, const PanelKernel& kernel, int64_t first, int64_t rows) const {
    task.x = row(first);
    task.x_stride = stride;
    task.rows = rows;
    if (parts.is_defined()) {
      task.x_parts = static_cast<const char*>(parts.data()) + (first - first_pair) * kernel.row_parts();
    }
    if (sums.is_defined()) {
      task.x_sums = sums.data<float>() + (first - first_pair) * kernel.row_sums();
    }
  }
};

// Pieces that threads take in turn. All pieces are done before the next phase begins.
class Phase {
 public:
  Phase(int64_t pieces, int64_t threads) : ranges_(pieces, threads), awaited_(pieces) {}

  template <class Body>
  void run(int64_t thread, const Body& body) {
    awaited_.run([&](int64_t& claimed) {
      ranges_.take(thread, [&](int64_t begin, int64_t end) {
        claimed += end - begin;
        body(begin, end);
      });
    });
    awaited_.wait();
  }

 private:
  Ranges ranges_;
  Awaited awaited_;
};

// The adapters of experts as tasks. The slice of a Shrink or an Expand is the expert.
class Updates {
 public:
  Updates(const ExpertAdapters& adapters, const Tensor& x, const Tensor& gate_up, const Tensor& h, const Tensor& y, float* v,
          int64_t pairs)
      : kernels_(lora_kernels_of(adapters.tables.arena.dtype())), v_{{v, 0, adapters.tables.max_rank},
                                                                     {v + pairs * adapters.tables.max_rank, 0,
                                                                      adapters.tables.max_rank}},
        inner_(gate_up.size(1) / 2), hidden_(y.size(1)),
        shrinks_{{x, v_[0], adapters.tables, adapters.gate_column},
                 {x, v_[1], adapters.tables, adapters.up_column},
                 {h, v_[0], adapters.tables, adapters.down_column}},
        expands_{{v_[0], gate_up, adapters.tables, adapters.gate_column},
                 {v_[1], gate_up, adapters.tables, adapters.up_column},
                 {v_[0], y, adapters.tables, adapters.down_column}} {}

  // Parts of the linears of experts that adapters change: gate, up and down.
  static constexpr int64_t kGate = 0, kUp = 1, kDown = 2;

  LoraKernels kernels() const { return kernels_; }

  // One of `parts` pieces of the ranks.
  void shrink(const Run& run, int64_t slice, int64_t part, int64_t parts, Reading<ShrinkTask>& reading) const {
    const Shrink& of_slice = shrinks_[slice];
    const int64_t rank = of_slice.rank.at(run.block.lora_index, run.expert), units = divided_up(rank, kRankUnit);
    const int64_t begin = units * part / parts * kRankUnit;
    const int64_t end = part + 1 == parts ? rank : units * (part + 1) / parts * kRankUnit;
    if (begin < end && !(slice == kUp && shares_a(run))) {
      const ShrinkTask task = of_slice.task(run.block, run.expert);
      reading.add(task, begin, end, of_slice.rank_of(task, begin));
    }
  }

  void expand(const Run& run, int64_t slice, Reading<ExpandTask>& reading) const {
    const ExpandTask task = expand_task(run, slice);
    if (task.rank > 0) {
      reading.add(task, 0, slice == kDown ? hidden_ : inner_, task.b);
    }
  }

  // Null where there is none.
  const void* b_of(const Run& run, int64_t slice) const { return expand_task(run, slice).b; }

 private:
  // Whether gate and up have one A.
  bool shares_a(const Run& run) const {
    const Shrink &gate = shrinks_[kGate], &up = shrinks_[kUp];
    const int64_t lora_index = run.block.lora_index, expert = run.expert;
    return gate.rank.at(lora_index, expert) == up.rank.at(lora_index, expert) &&
        gate.a_offset.at(lora_index, expert) == up.a_offset.at(lora_index, expert);
  }

  ExpandTask expand_task(const Run& run, int64_t slice) const {
    const int64_t rank = shrinks_[slice].rank.at(run.block.lora_index, run.expert);
    if (rank == 0) {
      return {};
    }
    const int64_t first_output = slice == kUp ? inner_ : 0, size = slice == kDown ? hidden_ : inner_;
    ExpandTask task = expands_[slice].task(run.block, run.expert, 0, rank, first_output, size);
    if (slice == kUp && shares_a(run)) {
      task.v = v_[0].data;
    }
    return task;
  }

  const LoraKernels kernels_;
  const Buffer v_[2];
  const int64_t inner_, hidden_;
  const Shrink shrinks_[3];
  const Expand expands_[3];
};

// One call of expert_mlp.
class ExpertMlp {
 public:
  ExpertMlp(const Tensor& x, const Routes& routes, const Experts& gate_up, const Experts& down, const Tensor& gate_up_bias,
            const Tensor& down_bias, double clamp_limit, const std::optional<ExpertAdapters>& adapters)
      : x_(x), routes_(routes), gate_up_(gate_up), down_(down), gate_up_bias_(values_of(gate_up_bias, gate_up)),
        down_bias_(values_of(down_bias, down)), clamp_limit_(static_cast<float>(clamp_limit)), adapters_(adapters),
        num_experts_(gate_up.num_experts), top_k_(routes.expert_ids.size(1)), hidden_(down.out_features),
        inner_(down_.in_features()) {}

  Tensor run() {
    const int64_t tokens = x_.size(0);
    y_ = Tensor::empty({tokens, hidden_}, DType::float32);
    const int64_t token_bytes = top_k_ * hidden_ * int64_t(sizeof(float));
    const int64_t tiles = divided_up(tokens, std::max<int64_t>(1, kTileBytes / token_bytes));
    for (int64_t tile = 0; tile < tiles; ++tile) {
      run_tile(tokens * tile / tiles, tokens * (tile + 1) / tiles);
    }
    return y_;
  }

 private:
  static const float* values_of(const Tensor& bias, const Experts& experts) {
    if (!bias.is_defined()) {
      return nullptr;
    }
    MULTILORA_CHECK(bias.dtype() == DType::float32 && bias.dim() == 2 && bias.size(0) == experts.num_experts &&
                        bias.size(1) == experts.out_features && bias.is_contiguous(),
                    "a bias must be float32 [", experts.num_experts, ", ", experts.out_features, "], not ",
                    name_of(bias.dtype()), " ", bias.sizes());
    return bias.data<float>();
  }

  void run_tile(int64_t first_token, int64_t end_token) {
    first_token_ = first_token;
    sort_pairs(end_token - first_token);
    const int64_t pairs = tokens_.size(), groups = groups_.size();
    output_rows_ = Tensor::empty({pairs, hidden_}, DType::float32);
    outputs_.values = output_rows_.data<float>();
    outputs_.stride = hidden_;
    int64_t largest = std::clamp(kThreadPairs * Team::available(), kLeastPairs, kMostPairs);
    for (const Group& group : groups_) {
      largest = std::max(largest, group.rows);
    }
    make_memory(std::min(largest, pairs));
    for (int64_t first = 0; first < groups;) {
      int64_t end = first, rows = 0;
      while (end < groups && rows + groups_[end].rows <= largest) {
        rows += groups_[end++].rows;
      }
      run_groups(first, end);
      first = end;
    }
    add_up(end_token - first_token);
  }

  // The memory for so many pairs at a time.
  void make_memory(int64_t pairs) {
    if (pairs <= room_) {
      return;
    }
    room_ = pairs;
    input_rows_ = Tensor::empty({pairs, gate_up_.in_features()}, DType::float32);
    inner_rows_ = Tensor::empty({pairs, 2 * inner_}, DType::float32);
    inputs_.values = input_rows_.data<float>();
    inputs_.stride = gate_up_.in_features();
    // Activations lie where gates were.
    activations_.values = inner_rows_.data<float>();
    activations_.stride = 2 * inner_;
    inputs_.make_parts(gate_up_.kernel(), pairs);
    activations_.make_parts(down_.kernel(), pairs);
    if (adapters_) {
      v_ = Tensor::empty({2 * pairs, adapters_->tables.max_rank}, DType::float32);
      numbers_.resize(pairs);
      std::iota(numbers_.begin(), numbers_.end(), 0);
    }
  }

  // The outputs of all pairs of some experts.
  void run_groups(int64_t first_group, int64_t end_group) {
    const int64_t first = groups_[first_group].first;
    const int64_t pairs = groups_[end_group - 1].first + groups_[end_group - 1].rows - first;
    inputs_.first_pair = activations_.first_pair = first;
    cut_into_rows(first_group, end_group);
    const int64_t threads = num_threads(pairs, end_group - first_group);
    std::optional<Updates> updates;
    if (!runs_.empty()) {
      const auto view = [pairs](float* values, int64_t stride, int64_t size, int64_t (&shape)[4]) {
        shape[0] = pairs;
        shape[1] = size;
        shape[2] = stride;
        shape[3] = 1;
        return Tensor(values, DType::float32, 2, shape, shape + 2);
      };
      int64_t shapes[4][4];
      const int64_t stride = activations_.stride;
      updates.emplace(*adapters_, view(inputs_.values, inputs_.stride, inputs_.stride, shapes[0]),
                      view(activations_.values, stride, stride, shapes[1]), view(activations_.values, stride, inner_, shapes[2]),
                      view(outputs_.row(first), hidden_, hidden_, shapes[3]), v_.data<float>(), pairs);
    }
    const int64_t num_blocks = blocks_.size(), num_runs = runs_.size(), num_chunks = chunks_.size();
    const int64_t parts = threads == 1 || num_runs == 0 ? 1 : divided_up(threads * kShrinkPieces, num_runs);
    const int64_t inner_pieces = num_chunks * gate_up_.num_panels(), outer_pieces = num_chunks * down_.num_panels();
    const bool changes_outputs = updates || down_bias_;
    Phase gathering(num_blocks, threads), activating(num_blocks, threads), ending(changes_outputs ? num_blocks : 0, threads);
    Phase multiplying(inner_pieces + 2 * num_runs * parts, threads), projecting(outer_pieces + num_runs * parts, threads);
    Team::share_out(threads, [&](int64_t thread) {
      gathering.run(thread, [&](int64_t begin, int64_t end) { gather(begin, end); });
      multiplying.run(thread, [&](int64_t begin, int64_t end) {
        multiply(gate_up_, inputs_, activations_, begin, std::min(end, inner_pieces));
        shrink(updates, Updates::kGate, 2, parts, begin - inner_pieces, end - inner_pieces);
      });
      activating.run(thread, [&](int64_t begin, int64_t end) { activate(updates, begin, end); });
      projecting.run(thread, [&](int64_t begin, int64_t end) {
        multiply(down_, activations_, outputs_, begin, std::min(end, outer_pieces));
        shrink(updates, Updates::kDown, 1, parts, begin - outer_pieces, end - outer_pieces);
      });
      ending.run(thread, [&](int64_t begin, int64_t end) { end_outputs(updates, begin, end); });
    });
  }

  // Makes the outputs of tokens of those of their experts.
  void add_up(int64_t num_tokens) const {
    const int64_t columns = divided_up(hidden_, kSumColumns), count = num_tokens * columns;
    const int64_t threads = std::clamp<int64_t>(num_tokens * top_k_ * hidden_ * kSumCost / kThreadCost, 1, Team::available());
    in_ranges(count, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t column = i % columns * kSumColumns;
        add_up(i / columns, column, std::min(hidden_, column + kSumColumns));
      }
    });
  }

  // Sorts the pairs of a tile by expert, then by adapter, then by token.
  void sort_pairs(int64_t num_tokens) {
    const int64_t pairs = num_tokens * top_k_;
    const int32_t* ids = routes_.expert_ids.data<int32_t>() + first_token_ * top_k_;
    const int64_t* mapping = adapters_ ? adapters_->mapping.data<int64_t>() + first_token_ : nullptr;
    const int64_t max_loras = adapters_ ? adapters_->tables.rank.size(0) : 0;
    for (int64_t t = 0; mapping && t < num_tokens; ++t) {
      MULTILORA_CHECK_INDEX(mapping[t] >= -1 && mapping[t] < max_loras, "adapter ", mapping[t], " is none of ", max_loras);
    }
    std::vector<int64_t> ends(num_experts_ + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) {
      MULTILORA_CHECK_INDEX(ids[i] >= 0 && ids[i] < num_experts_, "expert ", ids[i], " is none of ", num_experts_);
      ++ends[ids[i] + 1];
    }
    groups_.clear();
    for (int64_t e = 0; e < num_experts_; ++e) {
      if (ends[e + 1] > 0) {
        groups_.push_back({e, ends[e], ends[e + 1]});
      }
      ends[e + 1] += ends[e];
    }
    std::vector<int32_t> sorted(pairs);
    for (int64_t i = 0; i < pairs; ++i) {
      sorted[ends[ids[i]]++] = static_cast<int32_t>(i);
    }
    if (mapping) {
      for (const Group& group : groups_) {
        std::stable_sort(sorted.begin() + group.first, sorted.begin() + group.first + group.rows,
                         [&](int32_t a, int32_t b) { return mapping[a / top_k_] < mapping[b / top_k_]; });
      }
    }
    tokens_.resize(pairs);
    places_.resize(pairs);
    for (int64_t p = 0; p < pairs; ++p) {
      tokens_[p] = static_cast<int32_t>(sorted[p] / top_k_);
      places_[sorted[p]] = static_cast<int32_t>(p);
    }
  }

  // Makes the chunks of the products, and the blocks of rows with the runs of their adapters, of some groups.
  void cut_into_rows(int64_t first_group, int64_t end_group) {
    const int64_t first_pair = groups_[first_group].first;
    const int64_t* mapping = adapters_ ? adapters_->mapping.data<int64_t>() + first_token_ : nullptr;
    chunks_.clear();
    blocks_.clear();
    runs_.clear();
    for (int64_t g = first_group; g < end_group; ++g) {
      const auto& [expert, first, rows] = groups_[g];
      const int64_t pieces = divided_up(rows, kPieceRows);
      const int64_t size = divided_up(divided_up(rows, pieces), kMatrixRows) * kMatrixRows;
      for (int64_t row = 0; row < rows; row += size) {
        chunks_.push_back({g, first + row, std::min(size, rows - row)});
      }
      for (int64_t row = 0; row < rows; row += kMatrixRows) {
        const Chunk some{g, first + row, std::min(kMatrixRows, rows - row)};
        const int64_t first_run = runs_.size(), end = some.first + some.rows;
        for (int64_t p = some.first; mapping && p < end;) {
          const int64_t lora_index = mapping[tokens_[p]], begin = p;
          while (p < end && mapping[tokens_[p]] == lora_index) {
            ++p;
          }
          if (lora_index >= 0) {
            runs_.push_back({expert, {lora_index, {numbers_.data() + begin - first_pair, p - begin}}});
          }
        }
        blocks_.push_back({some, first_run, int64_t(runs_.size())});
      }
    }
  }

  int64_t num_threads(int64_t pairs, int64_t groups) const {
    int64_t cost = (gate_up_.num_weights() + down_.num_weights()) * (pairs + groups * kReadCost);
    for (const Run& run : runs_) {
      cost += (run.block.rows.count + kLoadCost) * adapters_->tables.max_rank * (2 * gate_up_.in_features() + 3 * inner_ + hidden_);
    }
    return std::clamp<int64_t>(cost / kThreadCost, 1, Team::available());
  }

  // Puts the tokens of blocks of rows side by side.
  void gather(int64_t begin, int64_t end) const {
    const int64_t size = gate_up_.in_features(), stride = x_.stride(0);
    const float* x = x_.data<float>() + first_token_ * stride;
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& rows = blocks_[i].rows;
      for (int64_t p = rows.first; p < rows.first + rows.rows; ++p) {
        std::copy_n(x + tokens_[p] * stride, size, inputs_.row(p));
      }
      take_apart(gate_up_, inputs_, rows);
    }
  }

  void take_apart(const ExpertLinear& linear, const PairRows& x, const Chunk& rows) const {
    const PanelKernel& kernel = linear.kernel();
    if (kernel.row_parts() == 0) {
      return;
    }
    const Group& group = groups_[rows.group];
    LinearTask task = linear.task(group.expert);
    x.give(task, kernel, group.first, group.rows);
    const int64_t begin = rows.first - group.first, end = begin + rows.rows;
    kernel.split(task, kernel.split_units(begin), kernel.split_units(end));
    kernel.add_up(task, begin, end);
  }

  // Pieces of a product: one panel for one chunk each, the panels of the first chunk first.
  void multiply(const ExpertLinear& linear, const PairRows& x, const PairRows& y, int64_t begin, int64_t end) const {
    const int64_t panels = linear.num_panels();
    while (begin < end) {
      const Chunk& chunk = chunks_[begin / panels];
      const int64_t before = begin / panels * panels, last = std::min(end, before + panels);
      LinearTask task = linear.task(groups_[chunk.group].expert);
      x.give(task, linear.kernel(), chunk.first, chunk.rows);
      task.y = y.row(chunk.first);
      task.y_stride = y.stride;
      const int64_t step = chunk.rows > kKernelRows ? 1 : last - begin;
      for (; begin < last; begin += step) {
        linear.kernel().kernel()(task, begin - before, begin - before + step);
      }
    }
  }

  // Pieces of the ranks of some neighbouring slices: all pieces of the first run's first slice first.
  void shrink(const std::optional<Updates>& updates, int64_t first_slice, int64_t slices, int64_t parts, int64_t begin,
              int64_t end) const {
    if (end <= 0) {
      return;
    }
    Reading<ShrinkTask> reading(updates->kernels().shrink);
    for (int64_t i = std::max<int64_t>(begin, 0); i < end; ++i) {
      updates->shrink(runs_[i / parts / slices], first_slice + i / parts % slices, i % parts, parts, reading);
    }
    reading.finish(nullptr);
  }

  // Adds the updates of a block's rows to the outputs of some neighbouring slices.
  void expand(const std::optional<Updates>& updates, int64_t first_slice, int64_t end_slice, const RowBlock& block) const {
    if (block.first_run == block.end_run) {
      return;
    }
    Reading<ExpandTask> reading(updates->kernels().expand);
    for (int64_t i = block.first_run; i < block.end_run; ++i) {
      for (int64_t slice = first_slice; slice < end_slice; ++slice) {
        updates->expand(runs_[i], slice, reading);
      }
    }
    const bool is_last = block.end_run == int64_t(runs_.size());
    reading.finish(is_last ? nullptr : updates->b_of(runs_[block.end_run], first_slice));
  }

  // Turns gates and ups of blocks of rows into activations.
  void activate(const std::optional<Updates>& updates, int64_t begin, int64_t end) const {
    const Capability& kernels = capability();
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& rows = blocks_[i].rows;
      expand(updates, Updates::kGate, Updates::kDown, blocks_[i]);
      add_bias(gate_up_bias_, activations_, 2 * inner_, rows);
      for (int64_t p = rows.first; p < rows.first + rows.rows; ++p) {
        float* row = activations_.row(p);
        if (clamp_limit_ > 0) {
          kernels.clamped_gate_mul(row, inner_, clamp_limit_, row);
        } else {
          kernels.silu_mul(row, inner_, row, 0, 1);
        }
      }
      take_apart(down_, activations_, rows);
    }
  }

  void end_outputs(const std::optional<Updates>& updates, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      expand(updates, Updates::kDown, Updates::kDown + 1, blocks_[i]);
      add_bias(down_bias_, outputs_, hidden_, blocks_[i].rows);
    }
  }

  void add_bias(const float* biases, const PairRows& y, int64_t size, const Chunk& rows) const {
    if (biases) {
      Bias(biases + groups_[rows.group].expert * size).add_to(y.row(rows.first), y.stride, rows.rows, 0, size);
    }
  }

  // The outputs [begin, end) of a token: those of its experts, by their weights.
  void add_up(int64_t token, int64_t begin, int64_t end) const {
    const float* weights = routes_.weights.data<float>() + (first_token_ + token) * top_k_;
    const int32_t* places = places_.data() + token * top_k_;
    float* y = y_.data<float>() + (first_token_ + token) * hidden_;
    std::fill(y + begin, y + end, 0.0f);
    for (int64_t k = 0; k < top_k_; ++k) {
      const float* row = outputs_.row(places[k]);
      for (int64_t n = begin; n < end; ++n) {
        y[n] += weights[k] * row[n];
      }
    }
  }

  const Tensor& x_;
  const Routes& routes_;
  const ExpertLinear gate_up_, down_;
  const float *const gate_up_bias_, *const down_bias_;
  const float clamp_limit_;
  const std::optional<ExpertAdapters>& adapters_;
  const int64_t num_experts_, top_k_, hidden_, inner_;

  Tensor y_, input_rows_, inner_rows_, output_rows_, v_;
  PairRows inputs_, activations_, outputs_;
  int64_t room_ = 0;              // pairs that inputs and activations have memory for
  std::vector<int32_t> numbers_;  // 0, 1, 2 ..

  // Of a tile: the tokens of the sorted pairs, and the places of the pairs among these.
  int64_t first_token_ = 0;
  std::vector<int32_t> tokens_, places_;
  std::vector<Group> groups_;
  std::vector<Chunk> chunks_;
  std::vector<RowBlock> blocks_;
  std::vector<Run> runs_;
};

// The choice of one token. taken: room for all experts.
void route_row(const float* logits, int64_t num_experts, int64_t top_k, bool is_normalised, bool* taken, int32_t* ids,
               float* weights) {
  std::fill_n(taken, num_experts, false);
  for (int64_t k = 0; k < top_k; ++k) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e) {
      if (!taken[e] && (best < 0 || logits[e] > logits[best])) {
        best = e;
      }
    }
    taken[best] = true;
    ids[k] = static_cast<int32_t>(best);
  }
  // The largest, unless one is no number.
  const float largest = logits[ids[0]];
  double sum = 0, chosen = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    sum += std::exp(logits[e] - largest);
  }
  for (int64_t k = 0; k < top_k; ++k) {
    weights[k] = std::exp(logits[ids[k]] - largest);
    chosen += weights[k];
  }
  for (int64_t k = 0; k < top_k; ++k) {
    // With a logit that is no number, the sum of all is none.
    weights[k] = static_cast<float>(weights[k] / (is_normalised && sum == sum ? chosen : sum));
  }
}

}  // namespace

std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k, bool is_normalised) {
  MULTILORA_CHECK(logits.dim() == 2 && logits.dtype() == DType::float32 && top_k > 0 && top_k <= logits.size(1),
                  "logits must be float32 [num_tokens, ", top_k, " experts or more], not ", name_of(logits.dtype()), " ",
                  logits.sizes());
  const Tensor rows = contiguous(logits);
  const int64_t tokens = rows.size(0), num_experts = rows.size(1);
  Tensor ids = Tensor::empty({tokens, top_k}, DType::int32), weights = Tensor::empty({tokens, top_k}, DType::float32);
  const float* from = rows.data<float>();
  auto* chosen = ids.data<int32_t>();
  auto* shares = weights.data<float>();
  rows_in_ranges(tokens, std::max<int64_t>(1, kGrainLogits / num_experts), [&](int64_t begin, int64_t end) {
    const auto taken = std::make_unique<bool[]>(num_experts);
    for (int64_t t = begin; t < end; ++t) {
      route_row(from + t * num_experts, num_experts, top_k, is_normalised, taken.get(), chosen + t * top_k, shares + t * top_k);
    }
  });
  return {ids, weights};
}

Tensor expert_mlp(const Tensor& x, const Routes& routes, const Experts& gate_up, const Experts& down, const Tensor& gate_up_bias,
                  const Tensor& down_bias, double clamp_limit, const std::optional<ExpertAdapters>& adapters) {
  const int64_t in_features = gate_up.panels.in_features(), inner = down.panels.in_features();
  MULTILORA_CHECK(x.dim() == 2 && x.dtype() == DType::float32 && x.size(1) == in_features, "x must be float32 [num_tokens, ",
                  in_features, "], not ", name_of(x.dtype()), " ", x.sizes());
  const Tensor &ids = routes.expert_ids, &weights = routes.weights;
  MULTILORA_CHECK(ids.dim() == 2 && ids.dtype() == DType::int32 && ids.size(0) == x.size(0) && ids.size(1) > 0 &&
                      weights.dtype() == DType::float32 && weights.sizes() == ids.sizes(),
                  "expert_ids and weights must be int32 and float32 [", x.size(0), ", top_k], not ", name_of(ids.dtype()), " ",
                  ids.sizes(), " and ", name_of(weights.dtype()), " ", weights.sizes());
  MULTILORA_CHECK(ids.is_contiguous() && weights.is_contiguous(), "expert_ids and weights must be contiguous");
  MULTILORA_CHECK(gate_up.num_experts == down.num_experts && gate_up.out_features == 2 * inner, "experts of ", gate_up.num_experts,
                  " gates and ups of ", gate_up.out_features, " outputs do not fit ", down.num_experts, " of ", inner, " inputs");
  if (adapters) {
    const auto& [tables, mapping, gate, up, down_column] = *adapters;
    const int64_t columns = tables.rank.dim() == 2 ? tables.rank.size(1) : 0, last = columns - gate_up.num_experts;
    MULTILORA_CHECK(mapping.dim() == 1 && mapping.dtype() == DType::int64 && mapping.size(0) == x.size(0) &&
                        mapping.is_contiguous(),
                    "the mapping must be contiguous int64 [", x.size(0), "], not ", name_of(mapping.dtype()), " ", mapping.sizes());
    for (const int64_t column : {gate, up, down_column}) {
      MULTILORA_CHECK_INDEX(column >= 0 && column <= last, "columns ", column, " .. ", column + gate_up.num_experts,
                            " are not all among ", columns);
    }
  }
  const Tensor rows = x.stride(1) == 1 ? x : contiguous(x);
  return ExpertMlp(rows, routes, gate_up, down, gate_up_bias, down_bias, clamp_limit, adapters).run();
}

}  // namespace multilora
