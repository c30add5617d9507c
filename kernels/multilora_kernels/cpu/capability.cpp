#include "capability.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace multilora {
namespace {

[[maybe_unused]] Capability with_unit(Capability capability, const MatrixUnit& unit) {
  capability.name = unit.name;
  capability.matrix_unit = &unit;
  return capability;
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
    static const Capability amx = with_unit(kAvx512, kAmx);
    if (has_avx512 && allowed(amx) && kAmx.is_available()) {
      return amx;
    }
    if (has_avx512 && allowed(kAvx512)) {
      return kAvx512;
    }
    return has_avx2 && allowed(kAvx2) ? kAvx2 : kPlain;
  }();
  return best;
#else
  return kPlain;
#endif
}

const MatrixUnit* matrix_unit_for(c10::ScalarType dtype, int64_t in_features) {
  return dtype == c10::kBFloat16 && in_features % kMatrixInputs == 0 ? capability().matrix_unit : nullptr;
}

const Kernels& kernels_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return capability().float32;
    case c10::kBFloat16:
      return capability().bfloat16;
    case c10::kHalf:
      return capability().float16;
    default:
      TORCH_CHECK(false, "weights are float32, bfloat16 or float16, not ", dtype);
  }
}

LoraKernels lora_kernels_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kChar:
      return capability().int8_codes;
    case c10::kByte:
      return capability().int4_codes;
    default:
      return {kernels_of(dtype).shrink, kernels_of(dtype).expand};
  }
}

namespace {

std::string cpu_capability() { return capability().name; }
std::vector<int64_t> cpu_panel_shape() { return {kPanelVectors, capability().panel_width / kPanelVectors}; }
bool cpu_panels_are_tiles(c10::ScalarType dtype, int64_t in_features) { return matrix_unit_for(dtype, in_features) != nullptr; }

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_FRAGMENT(multilora, m) {
  m.def("cpu_capability() -> str", multilora::cpu_capability);
  m.def("cpu_panel_shape() -> int[]", multilora::cpu_panel_shape);
  m.def("cpu_panels_are_tiles(ScalarType dtype, int in_features) -> bool", multilora::cpu_panels_are_tiles);
}
