// The operator multilora::paged_attention for CPU tensors (schema: attention.py).
//
// Work is cut by sequence, key-value head, block of queries and, for sequences with a single query, range of keys, so
// that one long sequence uses all cores. The cuts depend only on the sequence itself, and partial results are joined in
// the order of the keys: neither the batch nor the number of threads changes a result.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "capability.h"
#include "work.h"

namespace multilora {
namespace {

// Queries of one task, unless the heads that share a key-value head are more.
constexpr int64_t kMaxQueries = 64;
// Keys of one task of a sequence with a single query.
constexpr int64_t kKeySplit = 4 * kKeyTile;
// Cost of loading one key and value, in multiplications of one with a query.
constexpr int64_t kKeyLoadCost = 4;
// Least cost that is worth a thread of its own: some microseconds.
constexpr int64_t kGrainCost = 1 << 9;

// Of one task: whose, which tokens of the batch, which keys.
struct Piece {
  int64_t sequence, head, first_token, tokens, first_position, first_key, end_key;
  int64_t partial;  // place of its results among the partial ones; -1 if it has all keys of its queries
  int64_t cost_before;
};

struct Batch {
  const at::Tensor &q, &keys, &values, &block_tables;
  int64_t block_size, window;
  float scale;

  int64_t group() const { return q.size(1) / keys.size(1); }
  int64_t head_dim() const { return q.size(2); }
  int64_t tokens_per_piece() const { return std::max<int64_t>(1, kMaxQueries / group()); }
};

struct Pieces {
  std::vector<Piece> list;
  int64_t num_partial = 0, cost = 0;

  void add(Piece piece, int64_t group) {
    piece.cost_before = cost;
    cost += (piece.end_key - piece.first_key) * (piece.tokens * group + kKeyLoadCost);
    num_partial += piece.partial >= 0;
    list.push_back(piece);
  }
};

Pieces pieces_of(const Batch& batch, const at::Tensor& query_starts, const at::Tensor& context_lens) {
  const auto *starts = query_starts.const_data_ptr<int64_t>(), *contexts = context_lens.const_data_ptr<int64_t>();
  Pieces pieces;
  for (int64_t s = 0; s < context_lens.numel(); ++s) {
    const int64_t num_queries = starts[s + 1] - starts[s];
    const int64_t split = num_queries == 1 ? kKeySplit : contexts[s];
    for (int64_t head = 0; head < batch.keys.size(1); ++head) {
      for (int64_t token = 0; token < num_queries; token += batch.tokens_per_piece()) {
        const int64_t tokens = std::min(batch.tokens_per_piece(), num_queries - token);
        const int64_t position = contexts[s] - num_queries + token, end = position + tokens;
        const int64_t oldest = batch.window > 0 ? std::max<int64_t>(0, position - batch.window + 1) : 0;
        const bool is_whole = oldest / split == (end - 1) / split;
        for (int64_t key = oldest, next; key < end; key = next) {
          next = std::min(end, (key / split + 1) * split);
          const int64_t partial = is_whole ? -1 : pieces.num_partial;
          pieces.add({s, head, starts[s] + token, tokens, position, key, next, partial, 0}, batch.group());
        }
      }
    }
  }
  return pieces;
}

// Of some queries; see AttentionTask. max and sum follow the rows of out.
struct Results {
  float *out, *max, *sum;

  Results(float* memory, int64_t queries, int64_t head_dim)
      : out(memory), max(out + queries * padded_head_dim(head_dim)), sum(max + queries) {}

  static int64_t size(int64_t queries, int64_t head_dim) { return queries * (padded_head_dim(head_dim) + 2); }
};

AttentionTask task_of(const Batch& batch, const Piece& piece, const Results& results) {
  const auto head_of = [&](const at::Tensor& cache) {
    return static_cast<const char*>(cache.const_data_ptr()) + piece.head * cache.stride(1) * cache.element_size();
  };
  const float* q = batch.q.const_data_ptr<float>() + piece.first_token * batch.q.stride(0);
  return {q + piece.head * batch.group() * batch.q.stride(1), batch.q.stride(0), piece.tokens, batch.group(),
          batch.head_dim(), batch.scale, piece.first_position, batch.window, head_of(batch.keys), head_of(batch.values),
          batch.keys.stride(0), batch.block_tables.const_data_ptr<int64_t>() + piece.sequence * batch.block_tables.stride(0),
          batch.block_size, piece.first_key, piece.end_key, results.out, results.max, results.sum};
}

// out: [num_tokens, num_heads * head_dim]
void write(const Batch& batch, const Piece& piece, const Results& results, const at::Tensor& out) {
  const int64_t group = batch.group(), head_dim = batch.head_dim();
  for (int64_t i = 0; i < piece.tokens * group; ++i) {
    const float* from = results.out + i * padded_head_dim(head_dim);
    float* to = out.mutable_data_ptr<float>() + (piece.first_token + i / group) * out.stride(0) +
        (piece.head * group + i % group) * head_dim;
    const float share = 1.0f / results.sum[i];
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
  AttentionKernel attend;
  const at::Tensor& out;
  std::unique_ptr<float[]> partial_memory{new float[pieces.num_partial * partial_size()]};

  int64_t partial_size() const { return Results::size(batch.group(), batch.head_dim()); }
  Results partial(int64_t place) const {
    return {partial_memory.get() + place * partial_size(), batch.group(), batch.head_dim()};
  }

  void all() const {
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t shares = std::clamp<int64_t>(pieces.cost / kGrainCost, 1, threads);
    const auto first_piece = [&](int64_t share) {
      const auto is_before = [](const Piece& piece, int64_t cost) { return piece.cost_before < cost; };
      const int64_t cost = pieces.cost * share / shares;
      return std::lower_bound(pieces.list.begin(), pieces.list.end(), cost, is_before) - pieces.list.begin();
    };
    at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) { some(first_piece(begin), first_piece(end)); });
    join_partial();
  }

  void some(int64_t begin, int64_t end) const {
    const int64_t queries = batch.tokens_per_piece() * batch.group();
    const int64_t scratch_size = attention_scratch(queries, batch.head_dim());
    const std::unique_ptr<float[]> memory(new float[scratch_size + Results::size(queries, batch.head_dim())]);
    const Results own(memory.get() + scratch_size, queries, batch.head_dim());
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces.list[i];
      attend(task_of(batch, piece, piece.partial < 0 ? own : partial(piece.partial)), memory.get());
      if (piece.partial < 0) {
        write(batch, piece, own, out);
      }
    }
  }

  // The pieces of the same query follow each other.
  void join_partial() const {
    const Piece* first = nullptr;
    for (const Piece& piece : pieces.list) {
      if (piece.partial < 0) {
        continue;
      }
      if (first && first->first_token == piece.first_token && first->head == piece.head) {
        join(partial(first->partial), partial(piece.partial), batch.group(), batch.head_dim());
      } else {
        first = &piece;
      }
      if (piece.end_key == piece.first_position + piece.tokens) {
        write(batch, *first, partial(first->partial), out);
      }
    }
  }
};

void check(const Batch& batch, const at::Tensor& query_starts, const at::Tensor& context_lens) {
  TORCH_CHECK(batch.q.dim() == 3 && batch.keys.dim() == 3 && batch.keys.sizes() == batch.values.sizes() &&
                  batch.keys.strides() == batch.values.strides() && batch.keys.scalar_type() == batch.values.scalar_type() &&
                  batch.keys.size(2) == batch.head_dim() && batch.q.size(1) % batch.keys.size(1) == 0,
              "queries ", batch.q.sizes(), ", keys ", batch.keys.sizes(), " and values ", batch.values.sizes(),
              " do not belong together");
  TORCH_CHECK(batch.keys.stride(2) == 1 && batch.block_tables.stride(1) == 1, "rows are contiguous");
  TORCH_CHECK(query_starts.is_contiguous() && context_lens.is_contiguous() &&
                  query_starts.numel() == context_lens.numel() + 1 && batch.block_tables.size(0) == context_lens.numel(),
              "query_starts has one element more than context_lens, and block_tables a row for each of those");
  const auto* tables = batch.block_tables.const_data_ptr<int64_t>();
  const auto* contexts = context_lens.const_data_ptr<int64_t>();
  const int64_t num_blocks = batch.keys.size(0) / batch.block_size;
  for (int64_t s = 0; s < context_lens.numel(); ++s) {
    const int64_t used = (contexts[s] + batch.block_size - 1) / batch.block_size;
    TORCH_CHECK(used <= batch.block_tables.size(1), "sequence ", s, " has more tokens than blocks");
    for (int64_t i = 0; i < used; ++i) {
      const int64_t block = tables[s * batch.block_tables.stride(0) + i];
      TORCH_CHECK(block >= 0 && block < num_blocks, "block ", block, " is none of ", num_blocks);
    }
  }
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                           const at::Tensor& block_tables, const at::Tensor& query_starts, const at::Tensor& context_lens,
                           int64_t block_size, int64_t window, double scale) {
  const at::Tensor rows = q.scalar_type() == at::kFloat && q.stride(2) == 1 && q.stride(1) == q.size(2)
      ? q : q.to(at::kFloat).contiguous();
  const Batch batch{rows, keys, values, block_tables, block_size, window, float(scale)};
  check(batch, query_starts, context_lens);
  const at::Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, rows.options());
  const Pieces pieces = pieces_of(batch, query_starts, context_lens);
  Run{batch, pieces, kernels_of(keys.scalar_type()).attend, out}.all();
  return q.scalar_type() == at::kFloat ? out : out.to(q.scalar_type());
}

}  // namespace
}  // namespace multilora

TORCH_LIBRARY_IMPL(multilora, CPU, m) { m.impl("paged_attention", multilora::paged_attention); }
