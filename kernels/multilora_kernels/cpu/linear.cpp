// The operators packed_linear and packed_embedding for CPU tensors.
#include "linear.h"

#include <algorithm>

#include "capability.h"
#include "parallel.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Cost of reading a weight, in multiply-adds.
constexpr int64_t kReadCost = 8;
// Pieces in which a thread takes a weight's panels, of a few microseconds each: at the end the other threads wait for one
// piece only.
constexpr int64_t kPanelPieces = 32;
// Rows of one piece of a prompt's product: few, so that threads end at nearly the same time, and so many that work with a
// weight takes longer than its way from memory.
constexpr int64_t kRowPiece = 64;
// A matrix unit is so fast that weights must be used for more rows, unless threads would then have too few pieces.
constexpr int64_t kMatrixRowPiece = 256, kLeastPieces = 4;
static_assert(kRowPiece % kMatrixRows == 0);
// Cost of taking an activation apart, in multiply-adds: into bfloat16, and into digits.
constexpr int64_t kSplitCost = 4, kDigitsCost = 32;
// Elements of embeddings that are worth a thread.
constexpr int64_t kGrainElements = 1 << 12;

// The unit that multiplies these panels by pairs; null where vectors do.
const PairUnit* unit_of(const Panels& panels) {
  const DType dtype = panels.data.dtype();
  if (!panels.is_paired()) {
    return panels.scaling ? nullptr : pair_unit_for(dtype, panels.in_features());
  }
  const PairUnit* unit = panels.scaling ? code_unit_for(dtype, panels.scaling->group_size, panels.in_features())
                                        : rounding_unit_for(dtype, panels.in_features());
  MULTILORA_CHECK(unit, "this processor multiplies no such pairs of ", name_of(dtype));
  return unit;
}

// The unit that multiplies these panels by digits; null where floats are multiplied.
const DigitUnit* digit_unit_of(const Panels& panels) {
  if (!panels.scaling || panels.scaling->digits == 0) {
    return nullptr;
  }
  const auto& [scales, zeros, group_size, in_features, digits] = *panels.scaling;
  for (const bool may_round : {false, true}) {
    const DigitUnit* unit = digit_unit_for(panels.data.dtype(), group_size, in_features, may_round);
    if (unit && unit->digits == digits && panels.item_inputs() == unit->item_inputs) {
      return unit;
    }
  }
  MULTILORA_CHECK(false, "this processor multiplies no ", name_of(panels.data.dtype()), " in groups of ", group_size,
                  " with activations of ", digits, " digits");
}

// The place of the weight of an input for an output of a column, from the beginning of the column.
struct InVectors {
  int64_t lanes;
  int64_t operator()(int64_t output, int64_t input) const { return input * lanes + output; }
};

struct InPairs {
  int64_t operator()(int64_t output, int64_t input) const {
    constexpr int64_t kOutputs = 16, kPair = 2;
    return (input - input % kPair) * kOutputs + output * kPair + input % kPair;
  }
};

template <class T, class Place>
void copy_embeddings(const Tensor& token_ids, const Tensor& panels, int64_t num_embeddings, const Place& place, Tensor& rows) {
  const int64_t in_features = Panels{panels}.in_features(), lanes = panels.size(3);
  const auto* ids = token_ids.data<int64_t>();
  const T* weights = panels.data<T>();
  float* out = rows.data<float>();
  const int64_t grain = std::max<int64_t>(1, kGrainElements / in_features);
  parallel_for(0, token_ids.numel(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      MULTILORA_CHECK_INDEX(ids[i] >= 0 && ids[i] < num_embeddings, "token ", ids[i], " is not one of ", num_embeddings);
      const T* column = weights + ids[i] / lanes * lanes * in_features;
      for (int64_t k = 0; k < in_features; ++k) {
        out[i * in_features + k] = to_float(column[place(ids[i] % lanes, k)]);
      }
    }
  });
}

// Whether codes of 8 bits lie in items of four inputs.
bool has_quads(const Tensor& data) { return data.dtype() == DType::int8 && data.dim() == 5 && data.size(4) == 4; }

}  // namespace

void check_panels(const Panels& panels, int64_t out_features) {
  const Tensor& data = panels.data;
  const int64_t width = capability().panel_width, lanes = width / kPanelVectors;
  const bool are_items = data.dim() == 4 || panels.is_paired() || (panels.scaling && has_quads(data));
  const bool is_whole = are_items && data.is_contiguous() && data.size(3) == lanes;
  if (panels.scaling) {
    MULTILORA_CHECK(is_whole && data.size(2) == kPanelVectors, "codes must be contiguous [panels, items, ", kPanelVectors, ", ",
                    lanes, "] or [panels, items, ", kPanelVectors, ", ", lanes, ", inputs of an item], not ", data.sizes());
  } else {
    MULTILORA_CHECK(is_whole && data.size(1) == kPanelVectors, "panels must be contiguous [panels, ", kPanelVectors,
                    ", in_features, ", lanes, "] or [panels, ", kPanelVectors, ", in_features / 2, ", lanes, ", 2], not ",
                    data.sizes());
  }
  const int64_t num_panels = data.size(0);
  MULTILORA_CHECK(out_features > (num_panels - 1) * width && out_features <= num_panels * width, num_panels, " panels of ",
                  width, " outputs do not hold ", out_features);
  if (panels.scaling) {
    check_codes(panels);
  }
}

PanelKernel::PanelKernel(const Panels& panels) : digits_(digit_unit_of(panels)), in_features_(panels.in_features()) {
  pairs_ = digits_ ? nullptr : unit_of(panels);
  if (panels.scaling) {
    group_size_ = panels.scaling->group_size;
  }
  if (digits_) {
    kernel_ = digits_->linear;
    span_ = digits_->span(group_size_, in_features_);
    row_parts_ = digits_->row_bytes(in_features_, span_);
  } else if (pairs_) {
    kernel_ = pairs_->linear;
    row_parts_ = (in_features_ + pairs_->inputs_unit - 1) / pairs_->inputs_unit * pairs_->inputs_unit * pairs_->parts_size;
    if (panels.scaling && panels.scaling->zeros.is_defined()) {
      row_sums_ = (in_features_ + group_size_ - 1) / group_size_;
    }
  } else {
    kernel_ = panels.scaling ? quantized_kernel_of(panels) : kernels_of(panels.data.dtype()).linear;
  }
}

int64_t PanelKernel::split_cost() const { return digits_ ? kDigitsCost : kSplitCost; }

int64_t PanelKernel::split_units(int64_t rows) const {
  if (digits_) {
    return rows;
  }
  return (rows + kMatrixRows - 1) / kMatrixRows * ((in_features_ + kMatrixInputs - 1) / kMatrixInputs);
}

void PanelKernel::split(const LinearTask& task, int64_t unit_begin, int64_t unit_end) const {
  void* parts = const_cast<void*>(task.x_parts);
  if (digits_) {
    digits_->split({task.x, task.x_stride, task.rows, task.in_features, span_, parts}, unit_begin, unit_end);
  } else if (pairs_) {
    pairs_->split({task.x, task.x_stride, task.rows, task.in_features, parts}, unit_begin, unit_end);
  }
}

void PanelKernel::add_up(const LinearTask& task, int64_t row_begin, int64_t row_end) const {
  if (row_sums_) {
    const GroupSumTask sum{task.x_parts, task.in_features, group_size_, const_cast<float*>(task.x_sums)};
    capability().pair_units->of_codes->add_up(sum, row_begin, row_end);
  }
}

LinearTask task_of(const Panels& panels, int64_t out_features) {
  LinearTask task{};
  task.panels = panels.data.data();
  task.in_features = panels.in_features();
  task.out_features = out_features;
  if (panels.scaling) {
    task.scaling = group_scaling_of(*panels.scaling);
  }
  return task;
}

PackedLinear::PackedLinear(const Tensor& rows, const Panels& panels, int64_t out_features) {
  check_panels(panels, out_features);
  MULTILORA_CHECK(rows.dim() == 2 && rows.dtype() == DType::float32 && rows.size(1) == panels.in_features(),
                  "x must be float32 [rows, ", panels.in_features(), "], not ", name_of(rows.dtype()), " ", rows.sizes());
  x_ = rows.stride(1) == 1 ? rows : contiguous(rows);
  y_ = Tensor::empty({x_.size(0), out_features}, DType::float32);
  task_ = task_of(panels, out_features);
  task_.x = x_.data<float>();
  task_.x_stride = x_.stride(0);
  task_.rows = x_.size(0);
  task_.y = y_.data<float>();
  task_.y_stride = out_features;
  const PanelKernel kernel(panels);
  kernel_ = kernel.kernel();
  task_.span = kernel.span();
  if (kernel.row_parts() > 0) {
    split_rows(kernel);
  }
  num_panels_ = panels.data.size(0);
  panel_width_ = capability().panel_width;
  const int64_t cost = num_panels_ * panel_width_ * task_.in_features * (task_.rows + kReadCost);
  piece_rows_ = rows_of_piece(kernel.is_of_pairs() ? kMatrixRowPiece : kRowPiece);
  row_pieces_ = (task_.rows + piece_rows_ - 1) / piece_rows_;
  threads_ = std::max<int64_t>(1, std::min({cost / kThreadCost, num_panels_ * row_pieces_, Team::available()}));
  panel_pieces_ = row_pieces_ > 1 ? num_panels_ : std::min(num_panels_, threads_ * kPanelPieces);
}

void PackedLinear::split_rows(const PanelKernel& kernel) {
  row_parts_ = kernel.row_parts();
  x_parts_ = Tensor::empty({task_.rows * row_parts_}, DType::uint8);
  task_.x_parts = x_parts_.data();
  const int64_t units = kernel.split_units(task_.rows);
  const int64_t threads = std::clamp<int64_t>(x_.numel() * kernel.split_cost() / kThreadCost, 1, Team::available());
  in_ranges(threads, threads,
            [&](int64_t i, int64_t end) { kernel.split(task_, units * i / threads, units * end / threads); });
  if (kernel.row_sums() > 0) {
    x_sums_ = Tensor::empty({task_.rows, kernel.row_sums()}, DType::float32);
    task_.x_sums = x_sums_.data<float>();
    in_ranges(threads, threads, [&](int64_t i, int64_t end) {
      kernel.add_up(task_, task_.rows * i / threads, task_.rows * end / threads);
    });
  }
}

int64_t PackedLinear::rows_of_piece(int64_t most) const {
  int64_t rows = most;
  while (rows > kRowPiece && (task_.rows + rows - 1) / rows * num_panels_ < kLeastPieces * Team::available()) {
    rows /= 2;
  }
  return rows;
}

// The task of a piece's rows of the same product, from a multiple of kMatrixRows on.
LinearTask PackedLinear::rows_from(int64_t first) const {
  LinearTask some = task_;
  some.x += first * task_.x_stride;
  some.y += first * task_.y_stride;
  if (task_.x_parts) {
    some.x_parts = static_cast<const char*>(task_.x_parts) + first * row_parts_;
  }
  if (task_.x_sums) {
    some.x_sums += first * x_sums_.size(1);
  }
  some.rows = std::min(piece_rows_, task_.rows - first);
  return some;
}

void PackedLinear::run(int64_t begin, int64_t end, const Bias& bias) const {
  while (begin < end) {
    const int64_t row_piece = begin / panel_pieces_, before = row_piece * panel_pieces_;
    const int64_t last = std::min(end, before + panel_pieces_);
    const LinearTask task = rows_from(row_piece * piece_rows_);
    const int64_t first_panel = num_panels_ * (begin - before) / panel_pieces_;
    const int64_t end_panel = num_panels_ * (last - before) / panel_pieces_;
    kernel_(task, first_panel, end_panel);
    bias.add_to(task.y, task.y_stride, task.rows, first_panel * panel_width_,
                std::min(end_panel * panel_width_, task.out_features));
    begin = last;
  }
}

Bias::Bias(const Tensor& bias, int64_t out_features) {
  if (bias.is_defined()) {
    MULTILORA_CHECK(bias.dtype() == DType::float32 && bias.dim() == 1 && bias.size(0) == out_features && bias.is_contiguous(),
                    "bias must be float32 [", out_features, "], not ", name_of(bias.dtype()), " ", bias.sizes());
    values_ = bias.data<float>();
  }
}

void Bias::add_to(const Tensor& y) const {
  if (values_) {
    const int64_t size = y.size(1);
    float* rows = y.data<float>();
    rows_in_ranges(y.size(0), kRowPiece, [&](int64_t begin, int64_t end) {
      add_to(rows + begin * size, size, end - begin, 0, size);
    });
  }
}

Tensor packed_linear(const Tensor& x, const Panels& panels, int64_t out_features, const Tensor& bias) {
  const Bias to_add(bias, out_features);
  const PackedLinear linear(x, panels, out_features);
  in_ranges(linear.num_pieces(), linear.num_threads(), [&](int64_t begin, int64_t end) { linear.run(begin, end, to_add); });
  return linear.y();
}

Tensor packed_embedding(const Tensor& token_ids, const Tensor& panels, int64_t num_embeddings) {
  check_panels({panels}, num_embeddings);
  MULTILORA_CHECK(token_ids.dim() == 1 && token_ids.dtype() == DType::int64, "token_ids must be int64 [tokens], not ",
                  name_of(token_ids.dtype()), " ", token_ids.sizes());
  const Tensor ids = contiguous(token_ids);
  Tensor rows = Tensor::empty({ids.size(0), Panels{panels}.in_features()}, DType::float32);
  const InVectors in_vectors{panels.size(3)};
  switch (panels.dtype()) {
    case DType::float32:
      copy_embeddings<float>(ids, panels, num_embeddings, in_vectors, rows);
      break;
    case DType::bfloat16:
      if (unit_of({panels})) {
        copy_embeddings<BFloat16>(ids, panels, num_embeddings, InPairs{}, rows);
      } else {
        copy_embeddings<BFloat16>(ids, panels, num_embeddings, in_vectors, rows);
      }
      break;
    case DType::float16:
      copy_embeddings<Float16>(ids, panels, num_embeddings, in_vectors, rows);
      break;
    default:
      MULTILORA_CHECK(false, "weights are float32, bfloat16 or float16, not ", name_of(panels.dtype()));
  }
  return rows;
}

}  // namespace multilora
