// Rows of any length, a vector of `Vec` at a time.
#pragma once

#include <cstdint>

#include "lora_kernels.h"

namespace multilora {
namespace {

// Reads and writes a whole vector, and a vector of which only the first n lanes exist.
template <class Vec>
struct Whole {
  template <class T>
  MULTILORA_INLINE typename Vec::F load(const T* p) const {
    return Vec::load(p);
  }
  MULTILORA_INLINE void store(float* p, typename Vec::F a) const { Vec::store(p, a); }
};

template <class Vec>
struct Part {
  int n;

  template <class T>
  MULTILORA_INLINE typename Vec::F load(const T* p) const {
    return Vec::load_first(p, n);
  }
  MULTILORA_INLINE void store(float* p, typename Vec::F a) const { Vec::store_first(p, a, n); }
};

// Calls body(first element, Whole or Part) for every vector of a row.
template <class Vec, class Body>
MULTILORA_INLINE void for_each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= size; i += Vec::kWidth) {
    body(i, Whole<Vec>{});
  }
  if (i < size) {
    body(i, Part<Vec>{int(size - i)});
  }
}

}  // namespace
}  // namespace multilora
