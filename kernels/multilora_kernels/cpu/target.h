// Compiles everything after MULTILORA_TARGET("avx2,...") for that instruction set. Standard headers must come before it: an
// inline function of theirs compiled for AVX-512 could be the copy that the linker keeps for all files.
#pragma once

#define MULTILORA_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MULTILORA_TARGET(isa) \
  MULTILORA_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define MULTILORA_TARGET_END _Pragma("clang attribute pop")
#else
#define MULTILORA_TARGET(isa) _Pragma("GCC push_options") MULTILORA_PRAGMA(GCC target(isa))
#define MULTILORA_TARGET_END _Pragma("GCC pop_options")
#endif
