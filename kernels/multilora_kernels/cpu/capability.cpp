#include "capability.h"

#include <cstdlib>
#include <cstring>

namespace multilora {
namespace {

[[maybe_unused]] Capability with_units(Capability capability, const PairUnits& units) {
  capability.name = units.name;
  capability.pair_units = &units;
  return capability;
}

[[maybe_unused]] Capability with_pairs(Capability capability, const AttentionKernels& kernels) {
  capability.pair_attention = &kernels;
  return capability;
}

[[maybe_unused]] Capability with_digits(Capability capability, const DigitUnits& units) {
  capability.digit_units = &units;
  return capability;
}

const PairUnit* of_bfloat16(const PairUnit* unit, DType dtype, int64_t in_features) {
  return unit && dtype == DType::bfloat16 && in_features % unit->inputs_unit == 0 ? unit : nullptr;
}

}  // namespace

const Capability& capability() {
#if defined(__x86_64__)
  static const Capability& best = [&]() -> const Capability& {
    const char* wanted = std::getenv("MULTILORA_CPU_CAPABILITY");
    const auto allowed = [&](const Capability& c) { return !wanted || std::strcmp(wanted, c.name) == 0; };
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl");
    static const Capability avx2 = with_digits(kAvx2, kAvx2Digits);
    const bool has_byte_products = __builtin_cpu_supports("avx512vnni");
    static const Capability avx512 = has_byte_products ? with_digits(kAvx512, kAvx512Digits) : kAvx512;
    const bool has_byte_tiles = has_byte_products && has_amx_byte_products();
    static const Capability amx =
        with_pairs(with_units(has_byte_tiles ? with_digits(avx512, kAmxDigits) : avx512, kAmx), kAmxAttention);
    static const Capability avx512_bf16 = with_pairs(with_units(avx512, kAvx512BFloat16), kAvx512PairAttention);
    if (has_avx512 && allowed(amx) && kAmx.is_available()) {
      return amx;
    }
    // Intel's processors take longer for a product of pairs than for two of floats: 84 against 173 GFLOP/s of a thread
    // (model 207).
    const bool are_pairs_quick = wanted || __builtin_cpu_is("amd");
    if (has_avx512 && allowed(avx512_bf16) && are_pairs_quick && kAvx512BFloat16.is_available()) {
      return avx512_bf16;
    }
    if (has_avx512 && allowed(avx512)) {
      return avx512;
    }
    return has_avx2 && allowed(avx2) ? avx2 : kPlain;
  }();
  return best;
#else
  return kPlain;
#endif
}

const PairUnit* pair_unit_for(DType dtype, int64_t in_features) {
  const PairUnits* units = capability().pair_units;
  return of_bfloat16(units ? units->of_float32 : nullptr, dtype, in_features);
}

const PairUnit* rounding_unit_for(DType dtype, int64_t in_features) {
  const PairUnits* units = capability().pair_units;
  return of_bfloat16(units ? units->of_bfloat16 : nullptr, dtype, in_features);
}

const PairUnit* code_unit_for(DType codes, int64_t group_size, int64_t in_features) {
  const PairUnits* units = capability().pair_units;
  if (!units || !units->of_codes) {
    return nullptr;
  }
  const CodeUnits& of_codes = *units->of_codes;
  const PairUnit* unit = codes == DType::int32 ? &of_codes.int4
      : codes == DType::int8                   ? &of_codes.int8
      : codes == DType::float8_e4m3fn          ? &of_codes.float8
                                               : nullptr;
  const bool fits = unit && (group_size >= in_features || group_size % unit->inputs_unit == 0);
  return fits ? unit : nullptr;
}

const DigitUnit* digit_unit_for(DType codes, int64_t group_size, int64_t in_features, bool may_round) {
  const DigitUnits* units = capability().digit_units;
  if (!units || (group_size < in_features && group_size % kLeastSpan != 0)) {
    return nullptr;
  }
  const DigitUnit* unit = codes == DType::int32 ? (may_round ? &units->rounding_int4 : &units->int4)
      : codes == DType::int8                    ? (may_round ? &units->rounding_int8 : &units->int8)
                                                : nullptr;
  return unit && unit->digits > 0 ? unit : nullptr;
}

const Kernels& kernels_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return capability().float32;
    case DType::bfloat16:
      return capability().bfloat16;
    case DType::float16:
      return capability().float16;
    default:
      MULTILORA_CHECK(false, "weights are float32, bfloat16 or float16, not ", name_of(dtype));
  }
}

const AttentionKernels& attention_kernels_of(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return capability().int8_rows;
    case DType::float8_e4m3fn:
      return capability().float8_rows;
    default:
      return kernels_of(dtype).attention;
  }
}

const AttentionKernels& rounding_attention_kernels_of(DType dtype, int64_t head_dim) {
  const AttentionKernels* kernels = capability().pair_attention;
  const bool fits = dtype == DType::bfloat16 && head_dim % kPairDims == 0;
  return kernels && fits ? *kernels : attention_kernels_of(dtype);
}

LoraKernels lora_kernels_of(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return capability().int8_codes;
    case DType::uint8:
      return capability().int4_codes;
    case DType::float8_e4m3fn:
      return capability().float8_codes;
    default:
      return {kernels_of(dtype).shrink, kernels_of(dtype).expand};
  }
}

}  // namespace multilora
