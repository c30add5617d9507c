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

// Two codes of lora_codes.h; the first is in the lower four bits, as two's complement.
struct Int4Codes {
  uint8_t pair;
};

// float8_e4m3fn
struct Float8 {
  uint8_t bits;
};

// A Float8 that is a number, read as a Float16, by moving its bits, is less by this factor: the exponents' biases are 7 and 15.
constexpr float kFloat8Scale = 256;

}  // namespace multilora
