// The choice of a token for each row of logits, written once over a vector type `Vec`.
//
// Tokens have weights, as sampling.py defines them, and an order: the heavier token first, of equally heavy ones the token with
// the smaller id. top_k, top_p and min_p leave the first tokens up to some place, the cut. No row is sorted to find it: halving
// the range of weights that it lies in leaves a few tokens, and only these are put in order.
//
// Weights are multiples of kWeightUnit, and sums of them are exact: they do not depend on the order of addition, and so not
// on the width of a vector. Every implementation of sampling.py's definition gives the same token.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "exponential.h"
#include "vectors.h"
#include "work.h"

namespace multilora {
namespace {

template <class Vec>
class SampledRow {
 public:
  // weights: memory for the row's, padded_vocab(vocab) floats.
  SampledRow(const float* logits, int64_t vocab, const SamplingParameters& parameters, float* weights)
      : logits_(logits), vocab_(vocab), padded_(padded_vocab(vocab)), parameters_(parameters), weights_(weights) {}

  int64_t choose() const {
    const float largest = largest_logit();
    if (parameters_.top_k == 1 || !std::isfinite(largest)) {
      return (std::find(logits_, logits_ + vocab_, largest) - logits_) % vocab_;
    }
    weigh(largest);
    return draw(cut());
  }

 private:
  using F = typename Vec::F;

  // Some tokens: the sum of their weights, in units, and their number.
  struct Tokens {
    int64_t weight = 0;
    int64_t count = 0;
  };

  // The last token that is left.
  struct Cut {
    float weight;
    int64_t token;

    bool leaves(float w, int64_t t) const { return w > weight || (w == weight && t <= token); }
    // Of two cuts, the one that leaves fewer tokens.
    static Cut earlier(const Cut& a, const Cut& b) { return a.leaves(b.weight, b.token) ? b : a; }
  };

  // The most tokens that are put in order, unless more have the same weight.
  static constexpr int64_t kMostOrdered = 128;
  // Four powers of two, as bits of a weight.
  static constexpr uint32_t kFirstStep = 4 << 23;
  static constexpr float kWeightUnit = 0x1p-34f;
  // Added to a small number and taken away again, these leave its nearest multiple of kWeightUnit, and of 2^-17.
  static constexpr float kRoundToUnit = 1.5f * 0x1p23f * kWeightUnit, kRoundToCoarse = 1.5f * 0x1p6f;
  // From here on float32 has no other numbers than multiples of kWeightUnit.
  static constexpr float kRounded = 0x1p-11f;

  static int64_t in_units(double weight) { return int64_t(weight * 0x1p34); }

  float largest_logit() const {
    F largest = Vec::broadcast(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + Vec::kWidth <= vocab_; i += Vec::kWidth) {
      largest = Vec::max(largest, Vec::load(logits_ + i));
    }
    float result = Vec::largest(largest);
    for (; i < vocab_; ++i) {
      result = std::max(result, logits_[i]);
    }
    return result;
  }

  void weigh(float largest) const {
    const F minus_largest = Vec::broadcast(-largest), factor = Vec::broadcast(float(1 / parameters_.temperature));
    const F rounded = Vec::broadcast(kRounded), to_unit = Vec::broadcast(kRoundToUnit);
    for_each_vector<Vec>(vocab_, [&](int64_t i, auto part) {
      // In this order of arguments the minimum is a number even if a logit is NaN, so that sums are numbers.
      const F below = Vec::min(Vec::add(part.load(logits_ + i), minus_largest), Vec::zero());
      const F weight = exponential<Vec>(Vec::mul(below, factor));
      const F large = Vec::zero_where_less(weight, rounded, weight);
      const F small = Vec::sub(Vec::add(Vec::sub(weight, large), to_unit), to_unit);
      part.store(weights_ + i, Vec::add(large, small));
    });
    std::fill(weights_ + vocab_, weights_ + padded_, 0.0f);
  }

  // The tokens of a block that are at least as heavy as a positive weight.
  Tokens block_from(int64_t block, float weight) const {
    // A lane adds multiples of 2^-17 up to 1, and multiples of kWeightUnit up to 2^-18, each exactly.
    static_assert(kVocabBlock / Vec::kWidth <= 128);
    const F least = Vec::broadcast(weight), one = Vec::broadcast(1.0f), to_coarse = Vec::broadcast(kRoundToCoarse);
    F coarse_sum = Vec::zero(), fine_sum = Vec::zero(), count = Vec::zero();
    for (int64_t i = block; i < block + kVocabBlock; i += Vec::kWidth) {
      const F w = Vec::load(weights_ + i), left = Vec::zero_where_less(w, least, w);
      const F coarse = Vec::sub(Vec::add(left, to_coarse), to_coarse);
      coarse_sum = Vec::add(coarse_sum, coarse);
      fine_sum = Vec::add(fine_sum, Vec::sub(left, coarse));
      count = Vec::add(count, Vec::zero_where_less(w, least, one));
    }
    return {in_units(sum_of_lanes(coarse_sum) + sum_of_lanes(fine_sum)), int64_t(Vec::sum(count))};
  }

  static double sum_of_lanes(F a) {
    float lanes[Vec::kWidth];
    Vec::store(lanes, a);
    return std::accumulate(lanes, lanes + Vec::kWidth, 0.0);
  }

  Tokens from(float weight) const {
    Tokens all;
    for (int64_t block = 0; block < padded_; block += kVocabBlock) {
      const Tokens some = block_from(block, weight);
      all.weight += some.weight;
      all.count += some.count;
    }
    return all;
  }

  Cut cut() const {
    const int64_t top_k = parameters_.top_k;
    const double top_p = parameters_.top_p;
    Cut result{std::max(kWeightUnit, float(parameters_.min_p)), vocab_};
    const bool has_top_k = top_k > 0 && top_k < vocab_;
    if (!has_top_k && top_p >= 1) {
      return result;
    }
    const Tokens all = from(kWeightUnit);
    int64_t weight = all.weight;
    if (has_top_k && top_k < all.count) {
      const Place place = first_place(all, [&](const Tokens& tokens) { return tokens.count >= top_k; });
      result = Cut::earlier(result, place.cut);
      weight = place.weight;
    }
    if (top_p < 1) {
      const int64_t enough = std::clamp<int64_t>(std::ceil(top_p * double(weight)), 1, weight);
      const Place place = first_place(all, [&](const Tokens& tokens) { return tokens.weight >= enough; });
      result = Cut::earlier(result, place.cut);
    }
    return result;
  }

  struct Place {
    Cut cut;
    int64_t weight;  // of all tokens up to it
  };

  // The first place up to which there are enough tokens. All tokens are enough.
  template <class IsEnough>
  Place first_place(const Tokens& all, const IsEnough& is_enough) const {
    // Weights are positive, so that their bits are in the same order. The tokens from `low` on are enough, the tokens from
    // `high` on are not.
    uint32_t low = std::bit_cast<uint32_t>(kWeightUnit), high = std::bit_cast<uint32_t>(1.0f) + 1;
    Tokens from_low = all, from_high;
    // Few tokens have most of the weight, mostly: first down from the heaviest, by twice as many powers of two each time.
    uint32_t step = kFirstStep;
    while (from_low.count - from_high.count > kMostOrdered && high - low > 1) {
      const uint32_t middle = step > 0 && step < high - low ? high - step : low + (high - low) / 2;
      const Tokens tokens = from(std::bit_cast<float>(middle));
      if (is_enough(tokens)) {
        low = middle;
        from_low = tokens;
        step = 0;
      } else {
        high = middle;
        from_high = tokens;
        step *= 2;
      }
    }
    return in_order(std::bit_cast<float>(low), std::bit_cast<float>(high), from_high, is_enough);
  }

  // The same among the tokens of the weights [low, high); `tokens` are the tokens from `high` on.
  template <class IsEnough>
  Place in_order(float low, float high, Tokens tokens, const IsEnough& is_enough) const {
    std::vector<Cut> candidates;
    for (int64_t block = 0; block < padded_; block += kVocabBlock) {
      if (block_from(block, low).count == block_from(block, high).count) {
        continue;
      }
      for (int64_t i = block; i < block + kVocabBlock; ++i) {
        if (weights_[i] >= low && weights_[i] < high) {
          candidates.push_back({weights_[i], i});
        }
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const Cut& a, const Cut& b) { return a.weight > b.weight; });
    Cut last{high, vocab_};
    for (const Cut& candidate : candidates) {
      last = candidate;
      tokens.weight += in_units(candidate.weight);
      ++tokens.count;
      if (is_enough(tokens)) {
        break;
      }
    }
    return {last, tokens.weight};
  }

  // The part of a block that a cut leaves.
  int64_t left_of(int64_t block, const Cut& cut) const {
    if (block <= cut.token && cut.token < block + kVocabBlock) {
      int64_t weight = 0;
      for (int64_t i = block; i < block + kVocabBlock; ++i) {
        weight += cut.leaves(weights_[i], i) ? in_units(weights_[i]) : 0;
      }
      return weight;
    }
    const bool is_before = block < cut.token;
    return block_from(block, is_before ? cut.weight : std::nextafter(cut.weight, 2.0f)).weight;
  }

  // The token where the weights of the tokens left, one after the other by id, exceed `uniform` of their sum.
  int64_t draw(const Cut& cut) const {
    std::vector<int64_t> left(padded_ / kVocabBlock);
    for (size_t b = 0; b < left.size(); ++b) {
      left[b] = left_of(b * kVocabBlock, cut);
    }
    const int64_t whole = std::accumulate(left.begin(), left.end(), int64_t(0));
    int64_t wanted = std::min(int64_t(parameters_.uniform * double(whole)), whole - 1);
    size_t block = 0;
    for (; wanted >= left[block]; ++block) {
      wanted -= left[block];
    }
    int64_t token = block * kVocabBlock;
    for (;; ++token) {
      wanted -= cut.leaves(weights_[token], token) ? in_units(weights_[token]) : 0;
      if (wanted < 0) {
        return token;
      }
    }
  }

  const float* logits_;
  const int64_t vocab_, padded_;
  const SamplingParameters& parameters_;
  float* weights_;
};

// The first token that has the largest logit; a NaN is larger than all numbers.
template <class Vec>
int64_t most_probable(const float* logits, int64_t vocab) {
  using F = typename Vec::F;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const F infinity = Vec::broadcast(kInfinity), one = Vec::broadcast(1.0f);
  const float *end = logits + vocab, *rest = end - vocab % Vec::kWidth;
  // An infinite logit, or one that is no number, is not less than infinity.
  F maxima = Vec::broadcast(-kInfinity), is_not_less = Vec::zero();
  for (const float* x = logits; x < rest; x += Vec::kWidth) {
    maxima = Vec::max(maxima, Vec::load(x));
    is_not_less = Vec::max(is_not_less, Vec::zero_where_less(Vec::load(x), infinity, one));
  }
  if (Vec::largest(is_not_less) > 0 || !std::all_of(rest, end, [](float x) { return x < kInfinity; })) {
    const float* nan = std::find_if(logits, end, [](float x) { return std::isnan(x); });
    return (nan < end ? nan : std::find(logits, end, kInfinity)) - logits;
  }
  const float largest = std::max(Vec::largest(maxima), rest < end ? *std::max_element(rest, end) : -kInfinity);
  const F least = Vec::broadcast(largest);
  const float* block = logits;
  for (; block + kVocabBlock <= end; block += kVocabBlock) {
    F is_largest = Vec::zero();
    for (int64_t i = 0; i < kVocabBlock; i += Vec::kWidth) {
      is_largest = Vec::max(is_largest, Vec::zero_where_less(Vec::load(block + i), least, one));
    }
    if (Vec::largest(is_largest) > 0) {
      break;
    }
  }
  return std::find(block, end, largest) - logits;
}

template <class Vec>
int64_t sample(const float* logits, int64_t vocab, const SamplingParameters& parameters, float* weights) {
  return SampledRow<Vec>(logits, vocab, parameters, weights).choose();
}

}  // namespace
}  // namespace multilora
