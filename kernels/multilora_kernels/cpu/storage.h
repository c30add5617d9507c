// Storage types that C++17 has no arithmetic for: only their bits matter here.
#pragma once

#include <cstdint>

namespace multilora {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Codes of lora_codes.h: one, and two of which the first is in the lower four bits, as two's complement.
struct Int8Code {
  int8_t value;
};

struct Int4Codes {
  uint8_t pair;
};

}  // namespace multilora
