// Weights of codes, and the operator quantized_embedding. The linears quantized_linear and
// quantized_lora_linear are the ones over floats (linear.cpp, lora_update.cpp) with other kernels.
#include <algorithm>

#include "apply.h"
#include "capability.h"
#include "linear.h"
#include "panels.h"
#include "parallel.h"

namespace multilora {
namespace {

// Inputs whose codes of 4 bits are one word.
constexpr int64_t kWordInputs = 8;
// Elements of embeddings that are worth a thread.
constexpr int64_t kGrainElements = 1 << 12;

int64_t divided_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit; }

// Outputs of a panel.
int64_t panel_width(const Panels& panels) { return panels.data.size(2) * panels.data.size(3); }

void check_groups(const Tensor& tensor, const char* name, const Panels& panels) {
  const Tensor& codes = panels.data;
  const int64_t groups = divided_up(panels.scaling->in_features, panels.scaling->group_size);
  const int64_t sizes[] = {codes.size(0), groups, codes.size(2), codes.size(3)};
  MULTILORA_CHECK(tensor.sizes() == Integers(sizes, std::size(sizes)) && tensor.is_contiguous(), name,
                  " must be contiguous [panels, ", groups, ", columns, lanes] like codes of ", codes.sizes(), ", not ",
                  tensor.sizes());
}

// Calls body(place among the tokens, panel, output of the panel) for each token, by several threads.
template <class Body>
void for_each_token(const Tensor& token_ids, int64_t num_embeddings, const Panels& panels, const Body& body) {
  const int64_t width = panel_width(panels), grain = std::max<int64_t>(1, kGrainElements / panels.in_features());
  const auto* ids = token_ids.data<int64_t>();
  parallel_for(0, token_ids.numel(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      MULTILORA_CHECK_INDEX(ids[i] >= 0 && ids[i] < num_embeddings, "token ", ids[i], " is not one of ", num_embeddings);
      body(i, ids[i] / width, ids[i] % width);
    }
  });
}

template <class Scale, class Code>
void copy_embeddings(const Tensor& token_ids, int64_t num_embeddings, const Panels& panels, const Code& code, Tensor& rows) {
  const Scaling& scaling = *panels.scaling;
  const int64_t width = panel_width(panels), groups = scaling.scales.size(1);
  const Scale* scales = scaling.scales.data<Scale>();
  const GroupScaling of_groups = group_scaling_of(scaling);
  const auto* zeros = static_cast<const int8_t*>(of_groups.zeros);
  const auto* float_zeros = static_cast<const float*>(of_groups.zeros);
  float* out = rows.data<float>();
  for_each_token(token_ids, num_embeddings, panels, [&](int64_t token, int64_t panel, int64_t output) {
    for (int64_t k = 0; k < scaling.in_features; ++k) {
      const int64_t group = (panel * groups + k / scaling.group_size) * width + output;
      const float zero = !zeros ? 0 : of_groups.has_float_zeros ? float_zeros[group] : zeros[group];
      out[token * scaling.in_features + k] = (code(panel, k, output) - zero) * to_float(scales[group]);
    }
  });
}

template <class Scale>
void copy_embeddings(const Tensor& token_ids, int64_t num_embeddings, const Panels& panels, Tensor& rows) {
  const int64_t items = panels.data.size(1), width = panel_width(panels);
  const void* data = panels.data.data();
  const auto copy = [&](const auto& code) { copy_embeddings<Scale>(token_ids, num_embeddings, panels, code, rows); };
  const auto element = [&](int64_t panel, int64_t item, int64_t output) { return (panel * items + item) * width + output; };
  const auto byte = [&, inputs = panels.item_inputs()](int64_t panel, int64_t k, int64_t output) {
    return element(panel, k / inputs, output) * inputs + k % inputs;
  };
  switch (panels.data.dtype()) {
    case DType::int32:
      return copy([&](int64_t panel, int64_t k, int64_t output) {
        const uint32_t word = static_cast<const uint32_t*>(data)[element(panel, k / kWordInputs, output)];
        return static_cast<float>(static_cast<int32_t>(word << (28 - 4 * (k % kWordInputs))) >> 28);
      });
    case DType::int8:
      return copy([&](int64_t panel, int64_t k, int64_t output) {
        return static_cast<float>(static_cast<const int8_t*>(data)[byte(panel, k, output)]);
      });
    default:
      return copy([&](int64_t panel, int64_t k, int64_t output) {
        return to_scaled_float(static_cast<const Float8*>(data)[byte(panel, k, output)]) * kFloat8Scale;
      });
  }
}

}  // namespace

void check_codes(const Panels& panels) {
  const auto& [scales, zeros, group_size, in_features, digits] = *panels.scaling;
  const DType type = panels.data.dtype();
  MULTILORA_CHECK(type == DType::int32 || type == DType::int8 || type == DType::float8_e4m3fn,
                  "codes are int32 words, int8 or float8_e4m3fn, not ", name_of(type));
  const int64_t words = divided_up(in_features, kWordInputs);
  const int64_t inputs = panels.item_inputs();  // zeros fill the last items up to a word's inputs
  const int64_t items = type == DType::int32 ? words : inputs == 1 ? in_features : words * kWordInputs / inputs;
  MULTILORA_CHECK(in_features > 0 && panels.data.size(1) == items, in_features, " inputs are ", items,
                  " codes of an output, not ", panels.data.size(1));
  MULTILORA_CHECK(group_size > 0 && group_size <= in_features, "a group of ", group_size, " of ", in_features, " inputs");
  check_groups(scales, "scales", panels);
  if (zeros.is_defined()) {
    check_groups(zeros, "zeros", panels);
    const bool are_numbers = zeros.dtype() == DType::int8 || zeros.dtype() == DType::float32;
    MULTILORA_CHECK(are_numbers && type != DType::float8_e4m3fn, "zeros are int8 or float32, of integers, not ",
                    name_of(zeros.dtype()), " of ", name_of(type));
  }
}

GroupScaling group_scaling_of(const Scaling& scaling) {
  const auto type = [&] {
    switch (scaling.scales.dtype()) {
      case DType::float32:
        return ScaleType::float32;
      case DType::bfloat16:
        return ScaleType::bfloat16;
      case DType::float16:
        return ScaleType::float16;
      default:
        MULTILORA_CHECK(false, "scales are float32, bfloat16 or float16, not ", name_of(scaling.scales.dtype()));
    }
  }();
  const bool has_zeros = scaling.zeros.is_defined();
  const bool has_float_zeros = has_zeros && scaling.zeros.dtype() == DType::float32;
  return {scaling.scales.data(), type, has_zeros ? scaling.zeros.data() : nullptr, has_float_zeros, scaling.group_size};
}

LinearKernel quantized_kernel_of(const Panels& panels) {
  const QuantizedKernels& kernels = capability().quantized;
  const auto is_float32 = [](const Tensor& tensor) { return tensor.is_defined() && tensor.dtype() == DType::float32; };
  const bool has_float32 = is_float32(panels.scaling->scales) || is_float32(panels.scaling->zeros);
  switch (panels.data.dtype()) {
    case DType::int32:
      return has_float32 ? kernels.int4_with_float32 : kernels.int4;
    case DType::int8:
      return has_float32 ? kernels.int8_with_float32 : kernels.int8;
    default:
      return kernels.float8;
  }
}

Tensor quantized_embedding(const Tensor& token_ids, const Panels& panels, int64_t num_embeddings) {
  check_panels(panels, num_embeddings);
  MULTILORA_CHECK(token_ids.dim() == 1 && token_ids.dtype() == DType::int64, "token_ids must be int64 [tokens], not ",
                  name_of(token_ids.dtype()), " ", token_ids.sizes());
  const Tensor ids = contiguous(token_ids);
  Tensor rows = Tensor::empty({ids.size(0), panels.in_features()}, DType::float32);
  switch (group_scaling_of(*panels.scaling).type) {
    case ScaleType::float32:
      copy_embeddings<float>(ids, num_embeddings, panels, rows);
      break;
    case ScaleType::bfloat16:
      copy_embeddings<BFloat16>(ids, num_embeddings, panels, rows);
      break;
    case ScaleType::float16:
      copy_embeddings<Float16>(ids, num_embeddings, panels, rows);
      break;
  }
  return rows;
}

}  // namespace multilora
