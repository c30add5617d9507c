// Lines of the processor's caches, and requests of those that are read soon.
#pragma once

#include <cstdint>

namespace multilora {
namespace {

constexpr int64_t kCacheLine = 64;

// Into the L2 cache: the L1 cache waits for too few lines at a time to keep memory busy.
//
// With assembly, since GCC 12 drops many calls of a function of nothing but __builtin_prefetch.
inline void fetch_line(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#else
  asm volatile("" : : "r"(line));
  __builtin_prefetch(line, 0, 2);
#endif
}

}  // namespace
}  // namespace multilora
