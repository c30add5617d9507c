// The operators paged_attention and rotary_attention.
//
// The single query of an answer is cut by ranges of keys, so that a long one uses all cores; queries of a prompt, one too, by
// key-value head and block of queries. The cuts depend only on the sequence itself, and partial results are joined in the
// order of the keys: neither the batch nor the number of threads changes a result, nor how a prompt is cut.
#include "paged.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "capability.h"
#include "turns.h"
#include "work.h"

namespace multilora {
namespace {

// Queries of one task, unless the heads that share a key-value head are more.
constexpr int64_t kMaxQueries = 48;
// Cost of loading one key and value, in multiplications of one with a query.
constexpr int64_t kKeyLoadCost = 4;
// Least cost that is worth a thread of its own: some microseconds.
constexpr int64_t kGrainCost = 1 << 9;
// The largest element of a head becomes the largest code. Below kSmallestScaled, whose inverse is still a number, all codes of
// a head are zero.
constexpr float kSmallestScaled = 0x1p-100f;
// Elements of queries, keys and values that are worth a thread of their own.
constexpr int64_t kGrainElements = 1 << 12;

// The sequence, the heads, the tokens of the batch and the keys of one task.
struct Piece {
  int64_t sequence;
  int64_t first_head, end_head;  // of keys and values; one head for queries of a prompt
  int64_t first_token, tokens, first_position, first_key, end_key;
  int64_t partial;  // place of its results among the partial ones; -1 if it has all keys of its queries
  bool is_decode;   // the query of an answer
};

struct Batch {
  const Tensor &q, &keys, &values;
  const Sequences& sequences;
  float scale, softcap;
  const float* sinks;  // [num_heads], or null
  DistanceBias bias;   // of all heads

  int64_t group() const { return q.size(1) / keys.size(1); }
  int64_t head_dim() const { return q.size(2); }
  // The oldest key that the query at a position sees.
  int64_t oldest_key(int64_t position) const {
    return sequences.window > 0 ? std::max<int64_t>(0, position - sequences.window + 1) : 0;
  }
  DistanceBias bias_from(int64_t kv_head) const {
    return {bias.values ? bias.values + kv_head * group() * bias.num_distances : nullptr, bias.num_distances};
  }
  int64_t tokens_per_piece() const { return std::max<int64_t>(1, kMaxQueries / group()); }
};

// The pieces of all sequences of a batch.
struct Pieces {
  const Batch& batch;
  std::vector<Piece> list;
  int64_t num_partial = 0, cost = 0;
  int64_t head_parts;  // pieces of a single query with the same keys
  bool has_prefill = false;  // queries of a prompt

  explicit Pieces(const Batch& batch) : batch(batch) {
    const auto* starts = batch.sequences.query_starts.data<int64_t>();
    const auto* contexts = batch.sequences.context_lens.data<int64_t>();
    const int64_t num_sequences = batch.sequences.context_lens.numel();
    // A head's results do not depend on the heads beside it.
    head_parts = num_sequences < Team::available() ? std::min(batch.keys.size(1), Team::available()) : 1;
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t num_queries = starts[s + 1] - starts[s];
      if (s < batch.sequences.num_decodes) {
        add_query(s, starts[s], contexts[s]);
      } else {
        add_queries(s, starts[s], num_queries, contexts[s]);
        has_prefill = true;
      }
    }
  }

  void add_query(int64_t sequence, int64_t token, int64_t context) {
    const int64_t position = context - 1, oldest = batch.oldest_key(position);
    for (int64_t key = oldest, end; key < context; key = end) {
      end = end_of_piece(key, context);
      const int64_t partial = key == oldest && end == context ? -1 : num_partial++;
      const int64_t heads = batch.keys.size(1);
      for (int64_t part = 0; part < head_parts; ++part) {
        const int64_t first_head = heads * part / head_parts, end_head = heads * (part + 1) / head_parts;
        add({sequence, first_head, end_head, token, 1, position, key, end, partial, true});
      }
    }
  }

  // Pieces end at multiples of kKeySplit, and have at least half as many keys where there are several. Their ends depend on
  // nothing but the query's own keys.
  static int64_t end_of_piece(int64_t first_key, int64_t context) {
    const int64_t end = (first_key + kKeySplit / 2 + kKeySplit - 1) / kKeySplit * kKeySplit;
    return context - end < kKeySplit / 2 ? context : end;
  }

  void add_queries(int64_t sequence, int64_t first_token, int64_t num_queries, int64_t context) {
    for (int64_t head = 0; head < batch.keys.size(1); ++head) {
      for (int64_t token = 0; token < num_queries; token += batch.tokens_per_piece()) {
        const int64_t tokens = std::min(batch.tokens_per_piece(), num_queries - token);
        const int64_t position = context - num_queries + token;
        const int64_t oldest = batch.oldest_key(position);
        add({sequence, head, head + 1, first_token + token, tokens, position, oldest, position + tokens, -1, false});
      }
    }
  }

  void add(const Piece& piece) {
    const int64_t heads = piece.end_head - piece.first_head;
    cost += (piece.end_key - piece.first_key) * heads * (piece.tokens * batch.group() + kKeyLoadCost);
    list.push_back(piece);
  }
};

// The results of some queries, see DecodeTask. max and sum follow the rows of out.
struct Results {
  float *out, *max, *sum;

  Results(float* memory, int64_t queries, int64_t head_dim)
      : out(memory), max(out + queries * padded_head_dim(head_dim)), sum(max + queries) {}

  static int64_t size(int64_t queries, int64_t head_dim) { return queries * (padded_head_dim(head_dim) + 2); }

  // The results from a query on.
  Results from(int64_t query, int64_t head_dim) const {
    Results some = *this;
    some.out += query * padded_head_dim(head_dim);
    some.max += query;
    some.sum += query;
    return some;
  }
};

const int64_t* block_table_of(const Batch& batch, const Piece& piece) {
  const Tensor& tables = batch.sequences.block_tables;
  return tables.data<int64_t>() + piece.sequence * tables.stride(0);
}

// The place of the first head of a piece in slot 0.
const char* first_head_of(const Piece& piece, const Tensor& cache) {
  return static_cast<const char*>(cache.data()) + piece.first_head * cache.stride(1) * cache.element_size();
}

// out: [num_tokens, num_heads * head_dim]
AttentionTask attention_task(const Batch& batch, const Piece& piece, const Tensor& out) {
  const int64_t first_element = piece.first_head * batch.group() * batch.head_dim();
  const float* q = batch.q.data<float>() + piece.first_token * batch.q.stride(0) + first_element;
  float* to = out.data<float>() + piece.first_token * out.stride(0) + first_element;
  const float* sinks = batch.sinks ? batch.sinks + piece.first_head * batch.group() : nullptr;
  return {q, batch.q.stride(0), piece.tokens, batch.group(), batch.head_dim(), batch.scale, batch.softcap, sinks,
          batch.bias_from(piece.first_head), piece.first_position, batch.sequences.window, first_head_of(piece, batch.keys),
          first_head_of(piece, batch.values), batch.keys.stride(0), block_table_of(batch, piece), batch.sequences.block_size,
          piece.first_key, piece.end_key, to, out.stride(0)};
}

// The place of the first key of a piece.
const void* first_key_of(const Batch& batch, const Piece& piece) {
  const int64_t block_size = batch.sequences.block_size, place = piece.first_key % block_size;
  const int64_t slot = block_table_of(batch, piece)[piece.first_key / block_size] * block_size + place;
  return first_head_of(piece, batch.keys) + slot * batch.keys.stride(0) * batch.keys.element_size();
}

// results: of the piece's first query on.
DecodeTask decode_task(const Batch& batch, const Piece& piece, const Piece& next, const Results& results) {
  const int64_t first_element = piece.first_head * batch.group() * batch.head_dim();
  const float* q = batch.q.data<float>() + piece.first_token * batch.q.stride(0) + first_element;
  return {q, piece.end_head - piece.first_head, batch.group(), batch.head_dim(), batch.scale, batch.softcap,
          batch.bias_from(piece.first_head), first_head_of(piece, batch.keys), first_head_of(piece, batch.values),
          batch.keys.stride(0), batch.keys.stride(1), block_table_of(batch, piece), batch.sequences.block_size,
          piece.first_position, piece.first_key, piece.end_key, first_key_of(batch, next), results.out, results.max, results.sum};
}

// The factor of a sum of weighted values. max, sum: of all keys, see DecodeTask; sink: null for none.
float share_of(float max, float sum, const float* sink) {
  if (!sink) {
    return 1.0f / sum;
  }
  const float top = std::max(max, *sink), worth = std::exp(max - top);
  return worth / (sum * worth + std::exp(*sink - top));
}

// Some heads of a single query. results: of all its heads. out: [num_tokens, num_heads * head_dim]
void write(const Batch& batch, const Piece& piece, int64_t first_head, int64_t end_head, const Results& results,
           const Tensor& out) {
  const int64_t head_dim = batch.head_dim();
  for (int64_t i = first_head * batch.group(); i < end_head * batch.group(); ++i) {
    const float* from = results.out + i * padded_head_dim(head_dim);
    float* to = out.data<float>() + piece.first_token * out.stride(0) + i * head_dim;
    const float share = share_of(results.max[i], results.sum[i], batch.sinks ? batch.sinks + i : nullptr);
    for (int64_t d = 0; d < head_dim; ++d) {
      to[d] = from[d] * share;
    }
  }
}

// Adds the results of later keys of the same queries.
void join(const Results& results, const Results& later, int64_t queries, int64_t head_dim) {
  const int64_t row_size = padded_head_dim(head_dim);
  for (int64_t i = 0; i < queries; ++i) {
    const float max = std::max(results.max[i], later.max[i]);
    const float scale = std::exp(results.max[i] - max), later_scale = std::exp(later.max[i] - max);
    for (int64_t d = i * row_size; d < (i + 1) * row_size; ++d) {
      results.out[d] = results.out[d] * scale + later.out[d] * later_scale;
    }
    results.sum[i] = results.sum[i] * scale + later.sum[i] * later_scale;
    results.max[i] = max;
  }
}

struct Run {
  const Batch& batch;
  const Pieces& pieces;
  const AttentionKernels& kernels;
  const Tensor& out;
  std::unique_ptr<float[]> partial_memory{new float[pieces.num_partial * partial_size()]};

  int64_t partial_size() const { return Results::size(batch.q.size(1), batch.head_dim()); }
  Results partial(int64_t place) const {
    return {partial_memory.get() + place * partial_size(), batch.q.size(1), batch.head_dim()};
  }

  // Threads take single queries in ranges, in the order in which their keys lie. In a batch with prompts they take all
  // pieces in turn, the last ones first, which are the most expensive ones.
  void all() const {
    const int64_t num_pieces = pieces.list.size();
    const int64_t most_shares = std::min(num_pieces, Team::available());
    const int64_t shares = std::clamp<int64_t>(pieces.cost / kGrainCost, 1, std::max<int64_t>(1, most_shares));
    Turns turns(num_pieces);
    Ranges ranges(num_pieces, shares);
    Team::share_out(shares, [&](int64_t share) {
      // The memory of a tensor begins with a cache line.
      const Tensor memory = Tensor::empty({scratch_size() + Results::size(queries(), batch.head_dim())}, DType::float32);
      float* scratch = memory.data<float>();
      if (pieces.has_prefill) {
        turns.take([&](int64_t turn) { one(num_pieces - 1 - turn, scratch); });
      } else {
        ranges.take(share, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            one(i, scratch);
          }
        });
      }
    });
    join_partial();
  }

  // The most queries of one piece.
  int64_t queries() const { return std::max(batch.tokens_per_piece() * batch.group(), batch.q.size(1)); }
  int64_t scratch_size() const {
    return std::max(attention_scratch(queries(), batch.head_dim()), decode_scratch(queries(), batch.head_dim()));
  }

  // scratch: scratch_size() floats, then the floats of a piece's results.
  void one(int64_t i, float* scratch) const {
    const Piece &piece = pieces.list[i], &next = pieces.list[std::min<int64_t>(i + 1, pieces.list.size() - 1)];
    if (!piece.is_decode) {
      return kernels.attend(attention_task(batch, piece, out), scratch);
    }
    const bool is_partial = piece.partial >= 0;
    const Results results =
        is_partial ? partial(piece.partial) : Results(scratch + scratch_size(), queries(), batch.head_dim());
    const Results of_piece = results.from(piece.first_head * batch.group(), batch.head_dim());
    kernels.decode(decode_task(batch, piece, next, of_piece), scratch);
    if (!is_partial) {
      write(batch, piece, piece.first_head, piece.end_head, results, out);
    }
  }

  // The pieces of the same query follow each other, and those with the same keys have the same place.
  void join_partial() const {
    const Piece* first = nullptr;
    for (const Piece& piece : pieces.list) {
      if (piece.partial < 0 || piece.first_head > 0) {
        continue;
      }
      if (first && first->first_token == piece.first_token) {
        join(partial(first->partial), partial(piece.partial), batch.q.size(1), batch.head_dim());
      } else {
        first = &piece;
      }
      if (piece.end_key == piece.first_position + 1) {
        write(batch, *first, 0, batch.keys.size(1), partial(first->partial), out);
      }
    }
  }
};

void check(const Batch& batch) {
  MULTILORA_CHECK(batch.q.dim() == 3 && batch.keys.dim() == 3 && batch.keys.sizes() == batch.values.sizes() &&
                      batch.keys.strides() == batch.values.strides() && batch.keys.dtype() == batch.values.dtype() &&
                      head_dim_of(batch.keys) == batch.head_dim() && batch.q.size(1) % batch.keys.size(1) == 0,
                  "queries ", batch.q.sizes(), ", keys ", batch.keys.sizes(), " and values ", batch.values.sizes(),
                  " do not belong together");
  const auto& [block_tables, query_starts, context_lens, num_decodes, block_size, window] = batch.sequences;
  MULTILORA_CHECK(batch.keys.stride(2) == 1 && block_tables.stride(1) == 1, "rows are contiguous");
  MULTILORA_CHECK(query_starts.is_contiguous() && context_lens.is_contiguous() &&
                      query_starts.numel() == context_lens.numel() + 1 && block_tables.size(0) == context_lens.numel(),
                  "query_starts has one element more than context_lens, and block_tables a row for each of those");
  MULTILORA_CHECK(
      num_decodes >= 0 && num_decodes <= context_lens.numel() && query_starts.data<int64_t>()[num_decodes] == num_decodes,
      "the first ", num_decodes, " sequences have one token each");
  const auto* tables = block_tables.data<int64_t>();
  const auto* contexts = context_lens.data<int64_t>();
  const int64_t num_blocks = batch.keys.size(0) / block_size;
  for (int64_t s = 0; s < context_lens.numel(); ++s) {
    const int64_t used = (contexts[s] + block_size - 1) / block_size;
    MULTILORA_CHECK(used <= block_tables.size(1), "sequence ", s, " has more tokens than blocks");
    for (int64_t i = 0; i < used; ++i) {
      const int64_t block = tables[s * block_tables.stride(0) + i];
      MULTILORA_CHECK(block >= 0 && block < num_blocks, "block ", block, " is none of ", num_blocks);
    }
  }
}

Tensor sinks_of(const AttentionOptions& options, int64_t num_heads) {
  if (!options.sinks.is_defined()) {
    return {};
  }
  MULTILORA_CHECK(options.sinks.dim() == 1 && options.sinks.numel() == num_heads, "sinks are one of each of ", num_heads,
                  " heads, not ", options.sinks.sizes());
  return as_float32(options.sinks);
}

DistanceBias bias_of(const AttentionOptions& options, int64_t num_heads) {
  const Tensor& bias = options.distance_bias;
  if (!bias.is_defined()) {
    return {};
  }
  MULTILORA_CHECK(bias.dim() == 2 && bias.size(0) == num_heads && bias.size(1) > 0 && bias.is_contiguous(),
                  "a bias by distance is contiguous [", num_heads, ", distances], not ", bias.sizes());
  MULTILORA_CHECK(options.softcap == 0, "scores with a bias by distance have no softcap, as is ", options.softcap);
  return {bias.data<float>(), bias.size(1)};
}

// Types of codes of 8 bits.
template <class T>
constexpr bool kIsCode = std::is_same_v<T, int8_t> || std::is_same_v<T, Float8>;

template <class T>
constexpr float kLargestCode = std::is_same_v<T, int8_t> ? 127 : 448;

// Stores the codes and the scale of a head as quantize_rows of kv_rows.py computes them.
template <class T>
void store_codes(const float* x, int64_t head_dim, T* row) {
  // Bits of numbers without sign are in the order of the numbers, with infinity and NaN behind all others.
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  int32_t top = 0;
  for (int64_t d = 0; d < head_dim; ++d) {
    int32_t bits;
    std::memcpy(&bits, x + d, sizeof(bits));
    top = std::max(top, bits & kMagnitude);
  }
  float largest;
  std::memcpy(&largest, &top, sizeof(largest));
  const bool is_zero = largest < kSmallestScaled, is_number = top < kInfinity;
  const float scale = !is_number ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0.0f : largest / kLargestCode<T>;
  if (is_zero || !is_number) {
    std::memset(row, 0, head_dim);
  } else {
    const float codes_per_unit = kLargestCode<T> / largest;
    for (int64_t d = 0; d < head_dim; ++d) {
      if constexpr (std::is_same_v<T, int8_t>) {
        row[d] = static_cast<int8_t>(std::lrint(x[d] * codes_per_unit));
      } else {
        row[d] = nearest<Float8>(x[d] * codes_per_unit);
      }
    }
  }
  std::memcpy(row + head_dim, &scale, sizeof(scale));
}

// The heads of a step's tokens, float32: queries are turned into `q`, keys turned into the cache, values put there as they are.
// Where nothing turns, queries stay where they are.
struct Heads {
  const Tensor& qkv;  // [num_tokens, heads * head_dim]
  const Angles& angles;   // [num_tokens, 1, rotary_dim]
  const Tensor &q, &keys, &values, &slots;

  int64_t head_dim() const { return head_dim_of(keys); }
  int64_t rotary_dim() const { return angles.cos.size(-1); }
  bool turns() const { return rotary_dim() > 0; }

  void check() const {
    const int64_t num_tokens = qkv.size(0);
    const auto& [cos, sin, is_interleaved] = angles;
    MULTILORA_CHECK(cos.sizes() == sin.sizes() && cos.numel() == num_tokens * rotary_dim() && rotary_dim() % 2 == 0 &&
                        rotary_dim() <= head_dim(),
                    "cos and sin are [", num_tokens, ", 1, an even number up to ", head_dim(), "], not ", cos.sizes(), " and ",
                    sin.sizes());
    MULTILORA_CHECK(slots.is_contiguous() && slots.numel() == num_tokens, "slots are one of each token");
    const auto* slot = slots.data<int64_t>();
    for (int64_t token = 0; token < num_tokens; ++token) {
      MULTILORA_CHECK(slot[token] >= 0 && slot[token] < keys.size(0), "slot ", slot[token], " is none of ", keys.size(0));
    }
  }

  template <class T>
  void place() const {
    const int64_t row_size = qkv.size(1), kv_size = keys.size(1) * head_dim();
    rows_in_ranges(qkv.size(0), std::max<int64_t>(1, kGrainElements / row_size), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<float[]> turned(new float[kv_size]);
      for (int64_t token = begin; token < end; ++token) {
        const float *row = qkv.data<float>() + token * row_size, *k = row + q.size(1) * head_dim();
        if (turns()) {
          rotate(token, row, q.size(1), q.data<float>() + token * q.stride(0));
          rotate(token, k, keys.size(1), turned.get());
        }
        store<T>(token, turns() ? turned.get() : k, keys);
        store<T>(token, k + kv_size, values);
      }
    });
  }

  void rotate(int64_t token, const float* x, int64_t num_heads, float* out) const {
    const float *cos = angles.cos.data<float>(), *sin = angles.sin.data<float>();
    const int64_t first = token * rotary_dim();
    capability().rotate({x, cos + first, sin + first, num_heads, head_dim(), rotary_dim(), angles.is_interleaved, out});
  }

  template <class T>
  void store(int64_t token, const float* x, const Tensor& cache) const {
    T* slot = cache.data<T>() + slots.data<int64_t>()[token] * cache.stride(0);
    for (int64_t head = 0; head < cache.size(1); ++head) {
      const float* from = x + head * head_dim();
      T* row = slot + head * cache.stride(1);
      if constexpr (kIsCode<T>) {
        store_codes(from, head_dim(), row);
      } else {
        std::transform(from, from + head_dim(), row, nearest<T>);
      }
    }
  }
};

void place(const Heads& heads) {
  heads.check();
  switch (heads.keys.dtype()) {
    case DType::float32:
      return heads.place<float>();
    case DType::bfloat16:
      return heads.place<BFloat16>();
    case DType::float16:
      return heads.place<Float16>();
    case DType::int8:
      return heads.place<int8_t>();
    case DType::float8_e4m3fn:
      return heads.place<Float8>();
    default:
      MULTILORA_CHECK(false, "keys and values are float32, bfloat16, float16, int8 or float8_e4m3fn, not ",
                      name_of(heads.keys.dtype()));
  }
}

}  // namespace

int64_t head_dim_of(const Tensor& cache) {
  const bool has_codes = cache.dtype() == DType::int8 || cache.dtype() == DType::float8_e4m3fn;
  return cache.size(-1) - (has_codes ? kRowScaleBytes : 0);
}

Tensor paged_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Sequences& sequences,
                       const AttentionOptions& options) {
  const Tensor rows = q.dtype() == DType::float32 && q.stride(2) == 1 && q.stride(1) == q.size(2) ? q : as_float32(q);
  MULTILORA_CHECK(options.softcap >= 0, "softcap is not negative, as is ", options.softcap);
  const Tensor sinks = sinks_of(options, q.size(1));
  const Batch batch{rows, keys, values, sequences, float(options.scale), float(options.softcap),
                    sinks.is_defined() ? sinks.data<float>() : nullptr, bias_of(options, q.size(1))};
  check(batch);
  const Tensor out = Tensor::empty({q.size(0), q.size(1) * q.size(2)}, DType::float32);
  const Pieces pieces(batch);
  const DType stored = keys.dtype();
  const AttentionKernels& kernels =
      options.may_round ? rounding_attention_kernels_of(stored, batch.head_dim()) : attention_kernels_of(stored);
  Run{batch, pieces, kernels, out}.all();
  return from_float32(out, q.dtype());
}

Tensor rotary_attention(const Tensor& qkv, const Angles& angles, const Tensor& keys, const Tensor& values, const Tensor& slots,
                        const Sequences& sequences, const AttentionOptions& options) {
  const int64_t head_dim = head_dim_of(keys), num_heads = qkv.size(1) / head_dim - 2 * keys.size(1);
  MULTILORA_CHECK(qkv.dim() == 2 && keys.dim() == 3 && keys.sizes() == values.sizes() && keys.stride(2) == 1 &&
                      values.stride(2) == 1 && num_heads > 0 && qkv.size(1) % head_dim == 0,
                  "qkv ", qkv.sizes(), ", keys ", keys.sizes(), " and values ", values.sizes(), " do not belong together");
  const Tensor heads = as_float32(qkv), cos = as_float32(angles.cos), sin = as_float32(angles.sin);
  const int64_t sizes[] = {qkv.size(0), num_heads, head_dim}, strides[] = {qkv.size(1), head_dim, 1};
  const bool turns = cos.size(-1) > 0;
  const Tensor q = turns ? Tensor::empty(Integers(sizes, 3), DType::float32)
                         : Tensor(heads.data(), DType::float32, 3, sizes, strides);
  place({heads, {cos, sin, angles.is_interleaved}, q, keys, values, slots});
  const Tensor out = paged_attention(q, keys, values, sequences, options);
  return from_float32(out, qkv.dtype());
}

}  // namespace multilora
