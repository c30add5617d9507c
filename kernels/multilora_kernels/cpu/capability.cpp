#include "capability.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace multilora {

const Capability& capability() {
#if defined(__x86_64__)
  static const Capability& best = [&]() -> const Capability& {
    const char* wanted = std::getenv("MULTILORA_CPU_CAPABILITY");
    const auto allowed = [&](const Capability& c) { return !wanted || std::strcmp(wanted, c.name) == 0; };
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl");
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

namespace {

std::string cpu_capability() { return capability().name; }
int64_t cpu_panel_width() { return capability().panel_width; }

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_FRAGMENT(multilora, m) {
  m.def("cpu_capability() -> str", multilora::cpu_capability);
  m.def("cpu_panel_width() -> int", multilora::cpu_panel_width);
}
