// Storage types of adapters that C++17 has no arithmetic for: only their bits matter here.
#pragma once

#include <cstdint>

namespace multilora {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

}  // namespace multilora
