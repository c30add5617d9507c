// The operators multilora::quantized_linear, quantized_lora_linear and quantized_embedding for CPU tensors (schemas:
// operators.py). The linears are the ones over floats (linear.cpp, lora_update.cpp) with other kernels.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "apply.h"
#include "capability.h"
#include "linear.h"
#include "panels.h"

namespace multilora {
namespace {

// Inputs whose codes of 4 bits are one word.
constexpr int64_t kWordInputs = 8;
// Elements of embeddings that are worth a thread.
constexpr int64_t kGrainElements = 1 << 12;

int64_t divided_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit; }

void check_groups(const at::Tensor& tensor, const char* name, const Panels& panels) {
  const at::Tensor& codes = panels.data;
  const int64_t groups = divided_up(panels.scaling->in_features, panels.scaling->group_size);
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef({codes.size(0), codes.size(1), groups, codes.size(3)}) && tensor.is_contiguous(),
              name, " must be contiguous [panels, columns, ", groups, ", lanes] like codes of ", codes.sizes(), ", not ",
              tensor.sizes());
}

// Calls body(place among the tokens, column of all panels, lane) for each token, by several threads.
template <class Body>
void for_each_token(const at::Tensor& token_ids, int64_t num_embeddings, const Panels& panels, const Body& body) {
  const int64_t lanes = panels.data.size(3), grain = std::max<int64_t>(1, kGrainElements / panels.in_features());
  const auto* ids = token_ids.const_data_ptr<int64_t>();
  at::parallel_for(0, token_ids.numel(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < num_embeddings, "token ", ids[i], " is not one of ", num_embeddings);
      body(i, ids[i] / lanes, ids[i] % lanes);
    }
  });
}

template <class Scale, class Code>
void copy_embeddings(const at::Tensor& token_ids, int64_t num_embeddings, const Panels& panels, const Code& code, at::Tensor& rows) {
  const Scaling& scaling = *panels.scaling;
  const int64_t lanes = panels.data.size(3), groups = scaling.scales.size(2);
  const Scale* scales = scaling.scales.const_data_ptr<Scale>();
  const int8_t* zeros = scaling.zeros ? scaling.zeros->const_data_ptr<int8_t>() : nullptr;
  float* out = rows.mutable_data_ptr<float>();
  for_each_token(token_ids, num_embeddings, panels, [&](int64_t token, int64_t column, int64_t lane) {
    for (int64_t k = 0; k < scaling.in_features; ++k) {
      const int64_t group = (column * groups + k / scaling.group_size) * lanes + lane;
      const float zero = zeros ? zeros[group] : 0;
      out[token * scaling.in_features + k] = (code(column, k, lane) - zero) * static_cast<float>(scales[group]);
    }
  });
}

template <class Scale>
void copy_embeddings(const at::Tensor& token_ids, int64_t num_embeddings, const Panels& panels, at::Tensor& rows) {
  const int64_t items = panels.data.size(2), lanes = panels.data.size(3);
  const void* data = panels.data.const_data_ptr();
  const auto copy = [&](const auto& code) { copy_embeddings<Scale>(token_ids, num_embeddings, panels, code, rows); };
  const auto element = [&](int64_t column, int64_t item, int64_t lane) { return (column * items + item) * lanes + lane; };
  switch (panels.data.scalar_type()) {
    case at::kInt:
      return copy([&](int64_t column, int64_t k, int64_t lane) {
        const uint32_t word = static_cast<const uint32_t*>(data)[element(column, k / kWordInputs, lane)];
        return static_cast<float>(static_cast<int32_t>(word << (28 - 4 * (k % kWordInputs))) >> 28);
      });
    case at::kChar:
      return copy([&](int64_t column, int64_t k, int64_t lane) {
        return static_cast<float>(static_cast<const int8_t*>(data)[element(column, k, lane)]);
      });
    default:
      return copy([&](int64_t column, int64_t k, int64_t lane) {
        return static_cast<float>(static_cast<const at::Float8_e4m3fn*>(data)[element(column, k, lane)]);
      });
  }
}

}  // namespace

void check_codes(const Panels& panels) {
  const auto& [scales, zeros, group_size, in_features] = *panels.scaling;
  const at::ScalarType type = panels.data.scalar_type();
  TORCH_CHECK(type == at::kInt || type == at::kChar || type == at::kFloat8_e4m3fn,
              "codes are int32 words, int8 or float8_e4m3fn, not ", type);
  const int64_t items = type == at::kInt ? divided_up(in_features, kWordInputs) : in_features;
  TORCH_CHECK(in_features > 0 && panels.data.size(2) == items, in_features, " inputs are ", items, " codes of an output, not ",
              panels.data.size(2));
  TORCH_CHECK(group_size > 0 && group_size <= in_features, "a group of ", group_size, " of ", in_features, " inputs");
  check_groups(scales, "scales", panels);
  if (zeros) {
    check_groups(*zeros, "zeros", panels);
    TORCH_CHECK(zeros->scalar_type() == at::kChar && type != at::kFloat8_e4m3fn, "zeros are int8, of integers, not ",
                zeros->scalar_type(), " of ", type);
  }
}

GroupScaling group_scaling_of(const Scaling& scaling) {
  const auto type = [&] {
    switch (scaling.scales.scalar_type()) {
      case at::kFloat:
        return ScaleType::float32;
      case at::kBFloat16:
        return ScaleType::bfloat16;
      case at::kHalf:
        return ScaleType::float16;
      default:
        TORCH_CHECK(false, "scales are float32, bfloat16 or float16, not ", scaling.scales.scalar_type());
    }
  }();
  return {scaling.scales.const_data_ptr(), type, scaling.zeros ? scaling.zeros->const_data_ptr<int8_t>() : nullptr,
          scaling.group_size};
}

LinearKernel quantized_kernel_of(const Panels& panels) {
  const QuantizedKernels& kernels = capability().quantized;
  const bool has_float32 = panels.scaling->scales.scalar_type() == at::kFloat;
  switch (panels.data.scalar_type()) {
    case at::kInt:
      return has_float32 ? kernels.int4_with_float32 : kernels.int4;
    case at::kChar:
      return has_float32 ? kernels.int8_with_float32 : kernels.int8;
    default:
      return kernels.float8;
  }
}

at::Tensor quantized_embedding(const at::Tensor& token_ids, const Panels& panels, int64_t num_embeddings) {
  check_panels(panels, num_embeddings);
  TORCH_CHECK(token_ids.dim() == 1 && token_ids.scalar_type() == at::kLong, "token_ids must be int64 [tokens], not ",
              token_ids.scalar_type(), " ", token_ids.sizes());
  const at::Tensor ids = token_ids.contiguous();
  at::Tensor rows = at::empty({ids.size(0), panels.in_features()}, panels.data.options().dtype(at::kFloat));
  switch (group_scaling_of(*panels.scaling).type) {
    case ScaleType::float32:
      copy_embeddings<float>(ids, num_embeddings, panels, rows);
      break;
    case ScaleType::bfloat16:
      copy_embeddings<at::BFloat16>(ids, num_embeddings, panels, rows);
      break;
    case ScaleType::float16:
      copy_embeddings<at::Half>(ids, num_embeddings, panels, rows);
      break;
  }
  return rows;
}

namespace {

using Zeros = std::optional<at::Tensor>;

Panels panels_of(const at::Tensor& codes, const at::Tensor& scales, const Zeros& zeros, int64_t group_size, int64_t in_features) {
  return {codes, Scaling{scales, zeros ? &*zeros : nullptr, group_size, in_features}};
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales, const Zeros& zeros,
                            int64_t group_size, int64_t in_features, int64_t out_features) {
  return packed_linear(x, panels_of(codes, scales, zeros, group_size, in_features), out_features, nullptr);
}

at::Tensor quantized_lora_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales, const Zeros& zeros,
                                 int64_t group_size, int64_t in_features, int64_t first_slice, at::IntArrayRef slice_sizes,
                                 const at::Tensor& arena, const at::Tensor& rank, const at::Tensor& a_offset,
                                 const at::Tensor& b_offset, const at::Tensor& magnitude_offset, int64_t max_rank,
                                 const at::Tensor& permutation, const at::Tensor& chunk_start, const at::Tensor& chunk_length,
                                 const at::Tensor& chunk_lora_index, int64_t /*chunk_size*/,
                                 const std::optional<at::Tensor>& bias) {
  return lora_linear(x, panels_of(codes, scales, zeros, group_size, in_features), first_slice, slice_sizes,
                     {arena, rank, a_offset, b_offset, magnitude_offset, max_rank},
                     {permutation, chunk_start, chunk_length, chunk_lora_index}, bias ? &*bias : nullptr);
}

at::Tensor quantized_embedding_operator(const at::Tensor& token_ids, const at::Tensor& codes, const at::Tensor& scales,
                                        const Zeros& zeros, int64_t group_size, int64_t in_features, int64_t num_embeddings) {
  return quantized_embedding(token_ids, panels_of(codes, scales, zeros, group_size, in_features), num_embeddings);
}

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) {
  m.impl("quantized_linear", multilora::quantized_linear);
  m.impl("quantized_lora_linear", multilora::quantized_lora_linear);
  m.impl("quantized_embedding", multilora::quantized_embedding_operator);
}
