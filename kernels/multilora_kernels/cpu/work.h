// What the operators (ops.cpp) hand to the kernels of one instruction set (avx512.cpp, avx2.cpp, plain.cpp).
#pragma once

#include <cstdint>

namespace multilora {

// A unit is what one thread does without interruption: a block of ranks (shrink) or of outputs (expand) of one task.
constexpr int64_t kRankUnit = 4;
constexpr int64_t kOutputUnit = 16;
// Tokens of one task: enough that a large prefill reads an adapter from memory once per cache-resident block of tokens,
// few enough that their activations stay in the L2 cache.
constexpr int64_t kMaxRows = 64;

// At most kMaxRows tokens of one adapter.
struct Rows {
  const int32_t* tokens;
  int64_t count;
};

// v[t, j] = sum_k x[t, k] * a[j, k] for the tokens t of `rows`.
struct ShrinkTask {
  Rows rows;
  const float* x;
  int64_t x_stride;
  const void* a;  // [rank, in_features]
  int64_t in_features;
  float* v;
  int64_t v_stride;
};

// y[t, n] = magnitude[n] * (y[t, n] + sum_j v[t, j] * b[n, j]) for the tokens t of `rows`; no magnitude means 1.
struct ExpandTask {
  Rows rows;
  const float* v;
  int64_t v_stride;
  const void* b;          // [out_features, rank]
  const void* magnitude;  // [out_features] or null
  int64_t rank;
  float* y;
  int64_t y_stride;
};

// Vectors of outputs in one panel of packed weights.
constexpr int kPanelVectors = 3;

// y[r, n] = sum_k x[r, k] * w[n, k] for all rows r and the outputs n of some panels.
struct LinearTask {
  const float* x;
  int64_t x_stride;
  int64_t rows;
  const void* panels;  // [panels, in_features, panel width]; outputs beyond out_features are zero
  int64_t in_features;
  int64_t out_features;
  float* y;
  int64_t y_stride;
};

// `next`: the weights that the thread reads after these, fetched into the cache meanwhile.
using ShrinkKernel = void (*)(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end, const void* next);
using ExpandKernel = void (*)(const ExpandTask& task, int64_t output_begin, int64_t output_end, const void* next);

using LinearKernel = void (*)(const LinearTask& task, int64_t panel_begin, int64_t panel_end);

// The kernels for one storage type of the weights.
struct Kernels {
  ShrinkKernel shrink;
  ExpandKernel expand;
  LinearKernel linear;
};

struct Capability {
  const char* name;
  int64_t panel_width;
  Kernels float32;
  Kernels bfloat16;
  Kernels float16;
};

extern const Capability kPlain;
#if defined(__x86_64__)
extern const Capability kAvx2;
extern const Capability kAvx512;
#endif

}  // namespace multilora
