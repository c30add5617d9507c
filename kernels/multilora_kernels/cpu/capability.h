// Which instruction set serves this process.
#pragma once

#include <c10/core/ScalarType.h>

#include "work.h"

namespace multilora {

// The widest of this processor, or the narrower one that MULTILORA_CPU_CAPABILITY names.
const Capability& capability();

// Its kernels for weights of a storage type: float32, bfloat16 or float16.
const Kernels& kernels_of(c10::ScalarType dtype);

}  // namespace multilora
