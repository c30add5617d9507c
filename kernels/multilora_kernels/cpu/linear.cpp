// The operators multilora::packed_linear and packed_embedding for CPU tensors (schemas: operators.py).
#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Cost of reading a weight, in multiply-adds.
constexpr int64_t kReadCost = 8;
// Pieces in which a thread takes a weight's panels, of a few microseconds each: the others wait no longer than for the last.
constexpr int64_t kPanelPieces = 32;
// Rows of one piece of a prompt's product: few, so that threads end at nearly the same time, and enough to use each weight
// that comes from memory more often than that takes.
constexpr int64_t kRowPiece = 64;
// A matrix unit is so fast that weights must be used for more rows, unless threads have too few pieces then.
constexpr int64_t kMatrixRowPiece = 256, kLeastPieces = 4;
static_assert(kRowPiece % kMatrixRows == 0);
// Cost of taking an activation apart, in multiply-adds.
constexpr int64_t kSplitCost = 4;
// Elements of embeddings that are worth a thread.
constexpr int64_t kGrainElements = 1 << 12;

void check_panels(const at::Tensor& panels, int64_t out_features) {
  const int64_t width = capability().panel_width, lanes = width / kPanelVectors;
  TORCH_CHECK(panels.dim() == 4 && panels.is_contiguous() && panels.size(1) == kPanelVectors && panels.size(3) == lanes,
              "panels must be contiguous [panels, ", kPanelVectors, ", in_features, ", lanes, "], not ", panels.sizes());
  const int64_t num_panels = panels.size(0);
  TORCH_CHECK(out_features > (num_panels - 1) * width && out_features <= num_panels * width, num_panels, " panels of ", width,
              " outputs do not hold ", out_features);
}

// Where the weight of an input for an output of a column lies, from the beginning of the column.
struct InVectors {
  int64_t lanes;
  int64_t operator()(int64_t output, int64_t input) const { return input * lanes + output; }
};

struct InTiles {
  int64_t operator()(int64_t output, int64_t input) const {
    constexpr int64_t kOutputs = 16, kPair = 2;
    return (input - input % kPair) * kOutputs + output * kPair + input % kPair;
  }
};

template <class T, class Place>
void copy_embeddings(const at::Tensor& token_ids, const at::Tensor& panels, int64_t num_embeddings, const Place& place,
                     at::Tensor& rows) {
  const int64_t in_features = panels.size(2), lanes = panels.size(3);
  const auto* ids = token_ids.const_data_ptr<int64_t>();
  const T* weights = panels.const_data_ptr<T>();
  float* out = rows.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kGrainElements / in_features);
  at::parallel_for(0, token_ids.numel(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < num_embeddings, "token ", ids[i], " is not one of ", num_embeddings);
      const T* column = weights + ids[i] / lanes * lanes * in_features;
      for (int64_t k = 0; k < in_features; ++k) {
        out[i * in_features + k] = static_cast<float>(column[place(ids[i] % lanes, k)]);
      }
    }
  });
}

}  // namespace

PackedLinear::PackedLinear(const at::Tensor& rows, const at::Tensor& panels, int64_t out_features) {
  check_panels(panels, out_features);
  TORCH_CHECK(rows.dim() == 2 && rows.scalar_type() == at::kFloat && rows.size(1) == panels.size(2),
              "x must be float32 [rows, ", panels.size(2), "], not ", rows.scalar_type(), " ", rows.sizes());
  x = rows.stride(1) == 1 ? rows : rows.contiguous();
  y = at::empty({x.size(0), out_features}, x.options());
  task = {x.const_data_ptr<float>(), x.stride(0), x.size(0), panels.const_data_ptr(), panels.size(2),
          out_features, y.mutable_data_ptr<float>(), out_features};
  kernel = kernels_of(panels.scalar_type()).linear;
  if (const MatrixUnit* unit = matrix_unit_for(panels.scalar_type(), task.in_features)) {
    kernel = unit->linear;
    split_rows(*unit);
  }
  weight_size = panels.element_size();
  panel_width = panels.size(1) * panels.size(3);
  output_cost = task.in_features * (x.size(0) + kReadCost);
}

void PackedLinear::split_rows(const MatrixUnit& unit) {
  x_parts = at::empty({x.numel() * unit.parts_size}, x.options().dtype(at::kByte));
  const SplitTask split{task.x, task.x_stride, task.rows, task.in_features, x_parts.mutable_data_ptr()};
  task.x_parts = split.parts;
  parts_size = unit.parts_size;
  const int64_t units = (task.rows + kMatrixRows - 1) / kMatrixRows * (task.in_features / kMatrixInputs);
  const int64_t threads = std::clamp<int64_t>(x.numel() * kSplitCost / kThreadCost, 1, Team::available());
  in_ranges(threads, threads, [&](int64_t i) { unit.split(split, units * i / threads, units * (i + 1) / threads); });
}

const void* PackedLinear::weights_from(int64_t output) const {
  return static_cast<const char*>(task.panels) + output * task.in_features * weight_size;
}

int64_t PackedLinear::rows_of_piece() const {
  const int64_t num_panels = (task.out_features + panel_width - 1) / panel_width;
  int64_t rows = task.x_parts ? kMatrixRowPiece : kRowPiece;
  while (rows > kRowPiece && (task.rows + rows - 1) / rows * num_panels < kLeastPieces * Team::available()) {
    rows /= 2;
  }
  return rows;
}

LinearTask PackedLinear::rows_from(int64_t first, int64_t most) const {
  LinearTask some = task;
  some.x += first * task.x_stride;
  some.y += first * task.y_stride;
  if (task.x_parts) {
    some.x_parts = static_cast<const char*>(task.x_parts) + first * task.in_features * parts_size;
  }
  some.rows = std::min(most, task.rows - first);
  return some;
}

Bias::Bias(const at::Tensor* bias, int64_t out_features) {
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == at::kFloat && bias->dim() == 1 && bias->size(0) == out_features && bias->is_contiguous(),
                "bias must be float32 [", out_features, "], not ", bias->scalar_type(), " ", bias->sizes());
    values_ = bias->const_data_ptr<float>();
  }
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& panels, int64_t out_features, const at::Tensor* bias) {
  const Bias to_add(bias, out_features);
  const PackedLinear linear(x, panels, out_features);
  const auto run = [&](const LinearTask& task, int64_t begin, int64_t end) {
    linear.kernel(task, begin, end);
    to_add.add_to(task, begin * linear.panel_width, std::min(end * linear.panel_width, out_features));
  };
  const int64_t num_panels = panels.size(0);
  if (x.size(0) > kRowPiece) {
    const int64_t rows = linear.rows_of_piece();
    in_turn((x.size(0) + rows - 1) / rows * num_panels, [&](int64_t piece) {
      const int64_t panel = piece % num_panels;
      run(linear.rows_from(piece / num_panels * rows, rows), panel, panel + 1);
    });
    return linear.y;
  }
  const int64_t cost = num_panels * linear.panel_width * linear.output_cost;
  const int64_t threads = std::max<int64_t>(1, std::min({cost / kThreadCost, num_panels, Team::available()}));
  const int64_t pieces = std::min(num_panels, threads * kPanelPieces);
  in_ranges(pieces, threads, [&](int64_t piece) {
    run(linear.task, num_panels * piece / pieces, num_panels * (piece + 1) / pieces);
  });
  return linear.y;
}

at::Tensor packed_embedding(const at::Tensor& token_ids, const at::Tensor& panels, int64_t num_embeddings) {
  check_panels(panels, num_embeddings);
  TORCH_CHECK(token_ids.dim() == 1 && token_ids.scalar_type() == at::kLong, "token_ids must be int64 [tokens], not ",
              token_ids.scalar_type(), " ", token_ids.sizes());
  const at::Tensor ids = token_ids.contiguous();
  at::Tensor rows = at::empty({ids.size(0), panels.size(2)}, panels.options().dtype(at::kFloat));
  const InVectors in_vectors{panels.size(3)};
  switch (panels.scalar_type()) {
    case at::kFloat:
      copy_embeddings<float>(ids, panels, num_embeddings, in_vectors, rows);
      break;
    case at::kBFloat16:
      if (matrix_unit_for(at::kBFloat16, panels.size(2))) {
        copy_embeddings<at::BFloat16>(ids, panels, num_embeddings, InTiles{}, rows);
      } else {
        copy_embeddings<at::BFloat16>(ids, panels, num_embeddings, in_vectors, rows);
      }
      break;
    case at::kHalf:
      copy_embeddings<at::Half>(ids, panels, num_embeddings, in_vectors, rows);
      break;
    default:
      TORCH_CHECK(false, "weights are float32, bfloat16 or float16, not ", panels.scalar_type());
  }
  return rows;
}

namespace {

at::Tensor packed_linear_operator(const at::Tensor& x, const at::Tensor& panels, int64_t out_features) {
  return packed_linear(x, panels, out_features, nullptr);
}

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("packed_linear", multilora::packed_linear_operator);
  m.impl("packed_embedding", multilora::packed_embedding);
}
