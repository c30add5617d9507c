// The tasks that operators (lora_halves.cpp) hand to the kernels of one instruction set (avx512.cpp, avx2.cpp, plain.cpp).
#pragma once

#include <cstdint>

namespace multilora {

// A unit is the work that one thread does without interruption: a block of ranks (shrink) or of outputs (expand) of one task.
constexpr int64_t kRankUnit = 4;
constexpr int64_t kOutputUnit = 16;
// Least cost that is worth a thread of its own, in multiply-adds: some microseconds.
constexpr int64_t kThreadCost = 1 << 17;
// Pieces of work in which threads take weights: few enough that most of a thread's reads follow its last ones.
constexpr int64_t kPiecesPerThread = 8;
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
  const void* a;  // [rank, in_features], or as lora_codes.h says
  int64_t in_features;
  float* v;
  int64_t v_stride;
  const float* scales = nullptr;  // [rank] of codes of 8 bits
};

// y[t, n] = magnitude[n] * (y[t, n] + sum_j v[t, j] * b[n, j]) for the tokens t of `rows`; no magnitude means 1.
struct ExpandTask {
  Rows rows;
  const float* v;
  int64_t v_stride;
  const void* b;          // [out_features, rank], or as lora_codes.h says
  const void* magnitude;  // [out_features] or null; float beside codes
  int64_t rank;
  float* y;
  int64_t y_stride;
};

// Vectors of outputs in one panel of packed weights.
constexpr int kPanelVectors = 3;

// A matrix unit takes kMatrixInputs inputs of kMatrixRows rows at a time. Rows of x are split in the same way.
constexpr int64_t kMatrixInputs = 32;
constexpr int64_t kMatrixRows = 32;

enum class ScaleType { float32, bfloat16, float16 };

// The weights of codes: w[n, k] = scales[n, k / group_size] * (code[n, k] - zeros[n, k / group_size]).
struct GroupScaling {
  const void* scales;  // of `type`, [panels, groups, kPanelVectors, outputs of a vector]
  ScaleType type;
  const void* zeros;  // as scales, less by half of the range of codes; int8, or float if has_float_zeros; null if all are zero
  bool has_float_zeros;
  int64_t group_size;
};

// y[r, n] = sum_k x[r, k] * w[n, k] for all rows r and the outputs n of some panels.
struct LinearTask {
  const float* x;
  int64_t x_stride;
  int64_t rows;
  // [panels, kPanelVectors, in_features, outputs of a vector]; outputs beyond out_features are zero. For a PairUnit
  // [panels, kPanelVectors, in_features / 2, outputs of a vector, 2 inputs]: kMatrixInputs of them are a matrix unit's tile.
  // Codes lie in the order in which they are read: [panels, items, kPanelVectors, outputs of a vector]. An item of 8 bits is an
  // input; those of 32 bits are the codes of 4 bits of 8 neighbouring inputs, the first one lowest. Integers are two's
  // complement. For a PairUnit or a DigitUnit two inputs of 8 bits are an item, [panels, items, kPanelVectors, outputs of a
  // vector, 2], for a DigitUnit of bytes four, and inputs are padded with zeros to a multiple of the PairUnit's inputs_unit, or
  // of 8.
  const void* panels;
  int64_t in_features;
  int64_t out_features;
  float* y;
  int64_t y_stride;
  const void* x_parts = nullptr;  // SplitTask::parts, for a PairUnit, or DigitTask::parts
  const float* x_sums = nullptr;  // GroupSumTask::sums, for a PairUnit of codes that have zeros
  GroupScaling scaling = {};      // of codes
  int64_t span = 0;               // DigitTask::span
};

// x as the sum of parts of 16 bits, or rounded to one, in the order in which a PairUnit takes them. Every kMatrixRows rows,
// and the rows left over, lie one after the other.
struct SplitTask {
  const float* x;
  int64_t x_stride;
  int64_t rows;
  int64_t in_features;
  void* parts;
};

// The sums of the rounded activations of each group, [rows, groups].
struct GroupSumTask {
  const void* x_parts;
  int64_t in_features, group_size;
  float* sums;
};

// The fewest neighbouring inputs whose integers share an exponent (activation_digits.h).
constexpr int64_t kLeastSpan = 32;

// x as integers of digits. Every kMatrixRows rows, and the rows left over, lie one after the other.
struct DigitTask {
  const float* x;
  int64_t x_stride;
  int64_t rows;
  int64_t in_features;
  int64_t span;  // neighbouring inputs whose integers share an exponent: kLeastSpan, or two or four times as many
  void* parts;
};

// Keys of one tile.
constexpr int64_t kKeyTile = 64;
// Elements of a head, and the queries of one task, are padded to a multiple of it.
constexpr int64_t kDimUnit = 16;

constexpr int64_t padded_head_dim(int64_t head_dim) { return (head_dim + kDimUnit - 1) / kDimUnit * kDimUnit; }

constexpr int64_t padded_queries(int64_t queries) { return (queries + kDimUnit - 1) / kDimUnit * kDimUnit; }

// Floats of memory, from the begin of a cache line on, that an attention kernel works in: queries and outputs, scores, three
// numbers of each query, and rows of a tile or of all queries.
constexpr int64_t attention_scratch(int64_t queries, int64_t head_dim) {
  const int64_t lanes = padded_queries(queries), rows = lanes > kKeyTile ? lanes : kKeyTile;
  return padded_head_dim(head_dim) * (2 * lanes + rows) + lanes * (kKeyTile + 3);
}

// Added to each score, after the scale: values[head, min(distance, num_distances - 1)], where the distance is the position of
// the query less that of the key. `values` are of the first head of a task; null for none.
struct DistanceBias {
  const float* values = nullptr;
  int64_t num_distances = 0;
};

// One key-value head of one sequence: neighbouring tokens of it, the query heads that share the head, and some keys.
struct AttentionTask {
  const float* q;  // [tokens, group, head_dim], token to token q_stride
  int64_t q_stride, tokens, group, head_dim;
  float scale;
  float softcap;            // scores are softcap * tanh(scores / softcap) before the softmax; as they are if 0
  const float* sinks;       // [group], scores of no key that the softmax's denominators have besides, or null
  DistanceBias bias;
  int64_t first_position;   // of the first token; a token sees the keys up to its own position,
  int64_t window;           // and of these keys only the newest `window`, all if 0
  const void *keys, *values;  // of the head, slot to slot slot_stride
  int64_t slot_stride;
  const int64_t* block_table;
  int64_t block_size;
  int64_t first_key, end_key;  // positions
  float* out;                  // as q, token to token out_stride
  int64_t out_stride;
};

// Keys of one decode task, about: their scores stay in the L1 cache, and one long sequence is many tasks.
constexpr int64_t kKeySplit = 128;
// Most keys of one decode task: a short rest at an end of a sequence joins the task beside it.
constexpr int64_t kMaxDecodeKeys = 2 * kKeySplit;

// From the scores of one query to those of the next: a cache line more than their size, a power of two, lest all queries'
// scores of a key share two sets of a cache.
constexpr int64_t kScoreStride = kMaxDecodeKeys + 16;

// Bytes of the scale of a head's codes in the KV cache, a float32.
constexpr int64_t kRowScaleBytes = 4;

// Floats of memory that a decode kernel works in: scores, and the values of codes of as many keys as vectors have lanes, or the
// queries rounded to bfloat16.
constexpr int64_t decode_scratch(int64_t queries, int64_t head_dim) {
  const int64_t rows = kDimUnit > queries ? kDimUnit : queries;
  return queries * kScoreStride + rows * padded_head_dim(head_dim);
}

// Kernels that multiply pairs of bfloat16 take heads of a multiple of so many elements.
constexpr int64_t kPairDims = 32;

// All heads of one query, and at most kMaxDecodeKeys of its keys, all of which it sees.
struct DecodeTask {
  const float* q;  // [num_kv_heads * group, head_dim]
  int64_t num_kv_heads, group, head_dim;
  float scale, softcap;  // as in AttentionTask
  DistanceBias bias;
  const void *keys, *values;  // slot to slot slot_stride, head to head head_stride
  int64_t slot_stride, head_stride;
  const int64_t* block_table;
  int64_t block_size;
  int64_t position, first_key, end_key;  // of the query, of the keys
  const void* next;            // keys that the thread attends to after these, fetched into the cache meanwhile
  // Results by query: sum_j w_j v_j, padded rows; the largest score; sum_j w_j, w_j relative to it.
  float *out, *max, *sum;
};

// total = x + update, normed = total / sqrt(mean(total^2) + eps) * weight, by rows of `size`. A layer norm takes the mean from
// total and has a bias, or null.
struct NormTask {
  const float *x, *update, *weight, *bias;
  float eps;
  int64_t size;
  float *total, *normed;
};

// Turns the first rotary_dim elements of every head by the angles of its token; the others stay as they are. Element i becomes
// x[i] * cos[i] + x[j] * sin[i], where j is (i + rotary_dim / 2) % rotary_dim, or the neighbour i ^ 1 if it is interleaved.
struct RotationTask {
  const float *x, *cos, *sin;
  int64_t num_heads, head_dim, rotary_dim;
  bool is_interleaved;
  float* out;
};

// The parameters of a token's choice, as in sampling.py. uniform: in [0, 1).
struct SamplingParameters {
  double temperature;
  int64_t top_k;  // all if 0
  double top_p, min_p, uniform;
};

// Tokens that are read or skipped together.
constexpr int64_t kVocabBlock = 1024;

constexpr int64_t padded_vocab(int64_t vocab) { return (vocab + kVocabBlock - 1) / kVocabBlock * kVocabBlock; }

// `next`: the weights that the thread reads after these, fetched into the cache meanwhile.
using ShrinkKernel = void (*)(const ShrinkTask& task, int64_t rank_begin, int64_t rank_end, const void* next);
using ExpandKernel = void (*)(const ExpandTask& task, int64_t output_begin, int64_t output_end, const void* next);
using LinearKernel = void (*)(const LinearTask& task, int64_t panel_begin, int64_t panel_end);
// A unit is kMatrixInputs inputs of kMatrixRows rows, or as many as there are, all inputs of the first rows first.
using SplitKernel = void (*)(const SplitTask& task, int64_t unit_begin, int64_t unit_end);
using DigitKernel = void (*)(const DigitTask& task, int64_t row_begin, int64_t row_end);
using GroupSumKernel = void (*)(const GroupSumTask& task, int64_t row_begin, int64_t row_end);
using AttentionKernel = void (*)(const AttentionTask& task, float* scratch);
using DecodeKernel = void (*)(const DecodeTask& task, float* scratch);
using NormKernel = void (*)(const NormTask& task, int64_t row_begin, int64_t row_end);
// out[row, :] = f(x) for x[row, :] of `size`, or f(gate) * up for gate and up, both of `size`, side by side in x[row, :].
using ActivationKernel = void (*)(const float* x, int64_t size, float* out, int64_t row_begin, int64_t row_end);
// out = (up + 1) * gate * sigmoid(1.702 * gate) for one row of gates and ups, gate at most `limit`, up between -limit and limit.
using ClampedGateKernel = void (*)(const float* gate_up, int64_t size, float limit, float* out);
using RotationKernel = void (*)(const RotationTask& task);
// The token of one row. weights: padded_vocab(vocab) floats to work in.
using SampleKernel = int64_t (*)(const float* logits, int64_t vocab, const SamplingParameters& parameters, float* weights);
using MostProbableKernel = int64_t (*)(const float* logits, int64_t vocab);

// The kernels for one storage type of the KV cache.
struct AttentionKernels {
  AttentionKernel attend;
  DecodeKernel decode;
};

// The kernels for one storage type of the weights, or of the KV cache.
struct Kernels {
  ShrinkKernel shrink;
  ExpandKernel expand;
  LinearKernel linear;
  AttentionKernels attention;
};

// The kernels for one storage type of adapters.
struct LoraKernels {
  ShrinkKernel shrink;
  ExpandKernel expand;
};

// The kernels of linears over codes. Integers have others for scales of float32 than for those of 16 bits.
struct QuantizedKernels {
  LinearKernel int4, int4_with_float32, int8, int8_with_float32, float8;
};

// Multiplies pairs of bfloat16 and adds their products in float32.
struct PairUnit {
  int64_t inputs_unit;  // parts of a row are a multiple of it, and so must in_features be, but for codes
  int64_t parts_size;   // bytes of all parts of an activation
  SplitKernel split;
  LinearKernel linear;
};

// The units for codes in groups of a multiple of their inputs_unit, or in one group, with rounded activations.
struct CodeUnits {
  PairUnit int4, int8, float8;
  GroupSumKernel add_up;
};

// A matrix unit, or vectors' dot products.
struct PairUnits {
  const char* name;
  bool (*is_available)();          // here, to this process
  const PairUnit* of_float32;      // leaves activations as they are, or null
  const PairUnit* of_bfloat16;     // rounds activations to bfloat16
  const CodeUnits* of_codes;       // or null
};

// Multiplies codes with activations that are integers of so many digits; of none where there is no such unit. Groups are a
// multiple of kLeastSpan inputs, or all of them.
struct DigitUnit {
  int64_t digits = 0;
  int64_t item_inputs = 0;  // inputs of an item of codes of 8 bits
  int64_t most_span = 0;
  int64_t (*row_bytes)(int64_t in_features, int64_t span) = nullptr;  // of DigitTask::parts
  DigitKernel split = nullptr;
  LinearKernel linear = nullptr;

  // DigitTask::span beside groups of a size: the longest one of which they are multiples.
  int64_t span(int64_t group_size, int64_t in_features) const {
    int64_t span = most_span;
    while (span > kLeastSpan && group_size < in_features && group_size % span != 0) {
      span /= 2;
    }
    return span;
  }
};

// For codes of 4 and of 8 bits, and for activations that may be rounded.
struct DigitUnits {
  DigitUnit int4, rounding_int4, int8, rounding_int8;
};

struct Capability {
  const char* name;
  int64_t panel_width;
  NormKernel add_rms_norm, add_layer_norm;
  ActivationKernel silu_mul, gelu_tanh_mul, gelu_tanh, gelu;
  ClampedGateKernel clamped_gate_mul;
  RotationKernel rotate;
  SampleKernel sample;
  MostProbableKernel most_probable;
  Kernels float32;
  Kernels bfloat16;
  Kernels float16;
  LoraKernels int8_codes, int4_codes, float8_codes;
  AttentionKernels int8_rows, float8_rows;
  QuantizedKernels quantized;
  const PairUnits* pair_units = nullptr;
  const DigitUnits* digit_units = nullptr;
  // Over a cache of bfloat16, with queries and weights rounded to it where that is quicker; null where it never is.
  const AttentionKernels* pair_attention = nullptr;
};

extern const Capability kPlain;
#if defined(__x86_64__)
extern const Capability kAvx2;
extern const Capability kAvx512;
extern const DigitUnits kAvx2Digits;
extern const DigitUnits kAvx512Digits;  // with the dot products of AVX512_VNNI
extern const AttentionKernels kAvx512PairAttention;  // with the dot products of AVX512_BF16
extern const AttentionKernels kAmxAttention;
extern const PairUnits kAmx;
extern const DigitUnits kAmxDigits;  // kAvx512Digits, with AMX's products of bytes
bool has_amx_byte_products();        // of a processor with kAmx
extern const PairUnits kAvx512BFloat16;
#endif

}  // namespace multilora
