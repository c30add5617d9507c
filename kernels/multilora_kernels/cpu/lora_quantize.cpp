// Adapters of floats become the same codes, bit for bit, as in adapter_quantization.py. One thread computes them: they run
// beside the steps that serve.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "lora_codes.h"
#include "lora_quantize.h"

namespace multilora {
namespace {

using Lanes = std::array<float, kCodeLanes>;

constexpr int kLeastInt4 = -8, kMostInt4 = 7;
// The code of 8 bits of the largest magnitude.
template <class Code>
constexpr float kMostCode = 127;
template <>
inline constexpr float kMostCode<Float8> = 448;
// Scales are at most the largest BFloat16 by this, so that every code times its scale is finite.
template <class Code>
constexpr float kScaleRange = 128;
template <>
inline constexpr float kScaleRange<Float8> = 448;
// Shares of the scale with which the value of the largest magnitude has a code.
constexpr std::array<float, 3> kShares = {1.0f, 0.92f, 0.84f};

constexpr float kLargestBFloat16 = 0x1.fep127f;

inline float quotient(float value, float scale, float least, float most) {
  return std::min(std::max(value / (scale == 0 ? 1.0f : scale), least), most);
}

// The nearest integer to value / scale, the even one of two equally near ones, limited to least .. most.
inline float rounded(float value, float scale, float least, float most) {
  // A sum with this number has no bits behind the point, and rounds as every sum does.
  constexpr float kNoFraction = 3 << 22;
  return (quotient(value, scale, least, most) + kNoFraction) - kNoFraction;
}

// The code of 8 bits of the number nearest to value / scale.
template <class Code>
Code nearest_code(float value, float scale);

template <>
inline int8_t nearest_code<int8_t>(float value, float scale) {
  return static_cast<int8_t>(rounded(value, scale, -kMostCode<int8_t>, kMostCode<int8_t>));
}

template <>
inline Float8 nearest_code<Float8>(float value, float scale) {
  return nearest<Float8>(quotient(value, scale, -kMostCode<Float8>, kMostCode<Float8>));
}

// Of codes of 8 bits.
template <class Code>
float scale_of(float largest) {
  return std::min(largest / kMostCode<Code>, kLargestBFloat16 / kScaleRange<Code>);
}

inline float to_bfloat16(float value) { return to_float(nearest<BFloat16>(value)); }

void store_scales(const Lanes& scales, uint8_t* out) {
  for (int64_t l = 0; l < kCodeLanes; ++l) {
    const BFloat16 scale = nearest<BFloat16>(scales[l]);
    std::memcpy(out + 2 * l, &scale, 2);
  }
}

// Turns a row of A into codes of 8 bits, and returns its scale.
template <class Code>
float quantize_row(const float* values, int64_t count, Code* codes) {
  float largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::fabs(values[k]));
  }
  const float scale = scale_of<Code>(largest);
  for (int64_t k = 0; k < count; ++k) {
    codes[k] = nearest_code<Code>(values[k], scale);
  }
  return scale;
}

// Turns a panel of B into codes of 8 bits. columns: the columns of its 16 outputs.
template <class Code>
void quantize_panel(const Lanes* columns, int64_t count, uint8_t* out) {
  Lanes scales{};
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      scales[l] = std::max(scales[l], std::fabs(columns[c][l]));
    }
  }
  for (float& scale : scales) {
    scale = to_bfloat16(scale_of<Code>(scale));
  }
  store_scales(scales, out);
  auto* codes = reinterpret_cast<Code*>(out + kScaleBytes);
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      codes[c * kCodeLanes + l] = nearest_code<Code>(columns[c][l], scales[l]);
    }
  }
}

// The value of the largest magnitude of each lane.
Lanes largest_values(const Lanes* columns, int64_t count) {
  Lanes low = columns[0], high = columns[0], largest;
  for (int64_t c = 1; c < count; ++c) {
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      low[l] = std::min(low[l], columns[c][l]);
      high[l] = std::max(high[l], columns[c][l]);
    }
  }
  for (int64_t l = 0; l < kCodeLanes; ++l) {
    largest[l] = high[l] < -low[l] ? low[l] : high[l];
  }
  return largest;
}

Lanes squared_errors(const Lanes* columns, int64_t count, const Lanes& scales) {
  Lanes errors{};
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      const float error = rounded(columns[c][l], scales[l], kLeastInt4, kMostInt4) * scales[l] - columns[c][l];
      errors[l] += error * error;
    }
  }
  return errors;
}

// The scales of least squared error among the shares kShares.
Lanes best_scales(const Lanes* columns, int64_t count) {
  const float limit = kLargestBFloat16 / 8;
  const Lanes largest = largest_values(columns, count);
  Lanes best{}, least_errors{};
  for (size_t s = 0; s < kShares.size(); ++s) {
    Lanes scales;
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      scales[l] = to_bfloat16(std::min(std::max(largest[l] / kLeastInt4 * kShares[s], -limit), limit));
    }
    const Lanes errors = squared_errors(columns, count, scales);
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      if (s == 0 || errors[l] < least_errors[l]) {
        best[l] = scales[l];
        least_errors[l] = errors[l];
      }
    }
  }
  return best;
}

// Turns a block of at most kBlockColumns columns into codes of 4 bits.
void quantize_block(const Lanes* columns, int64_t count, uint8_t* out) {
  const Lanes scales = best_scales(columns, count);
  store_scales(scales, out);
  uint8_t* pairs = out + kScaleBytes;
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t l = 0; l < kCodeLanes; ++l) {
      const int code = static_cast<int>(rounded(columns[c][l], scales[l], kLeastInt4, kMostInt4)) & 15;
      uint8_t& pair = pairs[c / 2 * kCodeLanes + l];
      pair = static_cast<uint8_t>(c % 2 ? pair | code << 4 : code);
    }
  }
}

void quantize_blocks(const Lanes* columns, int64_t count, uint8_t* out) {
  using Places = CodePlaces<Int4Codes>;
  for (int64_t c = 0; c < count; c += kBlockColumns) {
    quantize_block(columns + c, std::min(kBlockColumns, count - c), out + Places::scales_at(c));
  }
}

void check(const Tensor& values, DType arena) {
  MULTILORA_CHECK(values.dim() == 2 && values.dtype() == DType::float32 && values.is_contiguous(),
                  "values of an adapter must be a contiguous float32 matrix, not ", name_of(values.dtype()), " ",
                  values.sizes());
  MULTILORA_CHECK(code_bits_of(arena) != 0, "an arena of codes is int8, uint8 or float8_e4m3fn, not ", name_of(arena));
}

// Calls body(a code of the type) for codes of 8 bits.
template <class Body>
void with_code(DType arena, const Body& body) {
  arena == DType::int8 ? body(int8_t()) : body(Float8());
}

}  // namespace

Tensor quantize_lora_a(const Tensor& a, DType arena) {
  check(a, arena);
  const int64_t rank = a.size(0), in = a.size(1), count = columns_of(in);
  const MatrixPlaces places{1, code_bits_of(arena)};
  const Tensor stored = Tensor::empty({places.a_size(rank, in)}, DType::uint8);
  auto* out = stored.data<uint8_t>();
  const int64_t header = places.a_header(rank);
  std::memset(out, 0, header);
  std::vector<Lanes> columns(count, Lanes{});
  for (int64_t j = 0; j < rank; ++j) {
    const float* row = a.data<float>() + j * in;
    uint8_t* row_out = out + header + j * places.a_row(in);
    if (places.bits == 4) {
      std::memcpy(columns.data(), row, in * sizeof(float));
      quantize_blocks(columns.data(), count, row_out);
    } else {
      with_code(arena, [&](auto code) {
        const float scale = quantize_row(row, in, reinterpret_cast<decltype(code)*>(row_out));
        std::memcpy(out + 4 * j, &scale, 4);
      });
    }
  }
  return stored;
}

Tensor quantize_lora_b(const Tensor& b, DType arena) {
  check(b, arena);
  const int64_t outputs = b.size(0), rank = b.size(1);
  const MatrixPlaces places{1, code_bits_of(arena)};
  const Tensor stored = Tensor::empty({places.b_size(outputs, rank)}, DType::uint8);
  auto* out = stored.data<uint8_t>();
  const auto* values = b.data<float>();
  std::vector<Lanes> columns(rank);
  for (int64_t first = 0; first < outputs; first += kCodeLanes) {
    std::fill(columns.begin(), columns.end(), Lanes{});
    for (int64_t l = 0; l < std::min(kCodeLanes, outputs - first); ++l) {
      for (int64_t j = 0; j < rank; ++j) {
        columns[j][l] = values[(first + l) * rank + j];
      }
    }
    uint8_t* panel = out + places.b_output(first, rank);
    if (places.bits == 4) {
      quantize_blocks(columns.data(), rank, panel);
    } else {
      with_code(arena, [&](auto code) { quantize_panel<decltype(code)>(columns.data(), rank, panel); });
    }
  }
  return stored;
}

}  // namespace multilora
