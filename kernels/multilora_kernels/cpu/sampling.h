// The choice of a token for each row of logits, written once over a vector type `Vec`.
//
// Tokens have weights, e^((logit - largest) / temperature), and an order: the heavier first, of equal ones that with the
// smaller id. top_k, top_p and min_p leave the first tokens up to some place, the cut. No row is sorted to find it:
// halving the range of weights that it lies in leaves a few tokens, and only these are put in order.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
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

  // Some tokens: how heavy they are, and how many.
  struct Tokens {
    double weight = 0;
    int64_t count = 0;
  };

  // The last token that is left.
  struct Cut {
    float weight;
    int64_t token;

    bool leaves(float w, int64_t t) const { return w > weight || (w == weight && t <= token); }
    // Of two, the one that leaves less.
    static Cut earlier(const Cut& a, const Cut& b) { return a.leaves(b.weight, b.token) ? b : a; }
  };

  // Tokens that are put in order, unless more have one and the same weight.
  static constexpr int64_t kMostOrdered = 128;
  // Four powers of two, as bits of a weight.
  static constexpr uint32_t kFirstStep = 4 << 23;
  // exp's smallest results but zero.
  static constexpr float kLightest = std::numeric_limits<float>::min();

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
    for_each_vector<Vec>(vocab_, [&](int64_t i, auto part) {
      part.store(weights_ + i, exponential<Vec>(Vec::mul(Vec::add(part.load(logits_ + i), minus_largest), factor)));
    });
    std::fill(weights_ + vocab_, weights_ + padded_, 0.0f);
  }

  // The tokens of a block that are at least so heavy, a positive weight.
  Tokens block_from(int64_t block, float weight) const {
    const F least = Vec::broadcast(weight), one = Vec::broadcast(1.0f);
    F sum = Vec::zero(), count = Vec::zero();
    for (int64_t i = block; i < block + kVocabBlock; i += Vec::kWidth) {
      const F w = Vec::load(weights_ + i);
      sum = Vec::add(sum, Vec::zero_where_less(w, least, w));
      count = Vec::add(count, Vec::zero_where_less(w, least, one));
    }
    return {Vec::sum(sum), int64_t(Vec::sum(count))};
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
    Cut result{std::max(kLightest, float(parameters_.min_p)), vocab_};
    const bool has_top_k = top_k > 0 && top_k < vocab_;
    if (!has_top_k && top_p >= 1) {
      return result;
    }
    const Tokens all = from(kLightest);
    double weight = all.weight;
    if (has_top_k && top_k < all.count) {
      const Place place = first_place(all, [&](const Tokens& tokens) { return tokens.count >= top_k; });
      result = Cut::earlier(result, place.cut);
      weight = place.weight;
    }
    if (top_p < 1) {
      const Place place = first_place(all, [&](const Tokens& tokens) { return tokens.weight >= top_p * weight; });
      result = Cut::earlier(result, place.cut);
    }
    return result;
  }

  struct Place {
    Cut cut;
    double weight;  // of all tokens up to it
  };

  // The first place up to which there are enough tokens. All of them are enough.
  template <class IsEnough>
  Place first_place(const Tokens& all, const IsEnough& is_enough) const {
    // Weights are positive, so that their bits are in the same order. Those from `low` on are enough, those from `high` on
    // are not.
    uint32_t low = std::bit_cast<uint32_t>(kLightest), high = std::bit_cast<uint32_t>(1.0f) + 1;
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

  // The same among the tokens of the weights [low, high), where those from `high` on are `tokens`.
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
      tokens.weight += candidate.weight;
      ++tokens.count;
      if (is_enough(tokens)) {
        break;
      }
    }
    return {last, tokens.weight};
  }

  // The part of a block that a cut leaves.
  double left_of(int64_t block, const Cut& cut) const {
    if (block <= cut.token && cut.token < block + kVocabBlock) {
      double weight = 0;
      for (int64_t i = block; i < block + kVocabBlock; ++i) {
        weight += cut.leaves(weights_[i], i) ? weights_[i] : 0.0f;
      }
      return weight;
    }
    const bool is_before = block < cut.token;
    return block_from(block, is_before ? cut.weight : std::nextafter(cut.weight, 2.0f)).weight;
  }

  // The token where the weights of the tokens left, one after the other by id, exceed `uniform` of their sum.
  int64_t draw(const Cut& cut) const {
    std::vector<double> left(padded_ / kVocabBlock);
    double whole = 0;
    for (size_t b = 0; b < left.size(); ++b) {
      left[b] = left_of(b * kVocabBlock, cut);
      whole += left[b];
    }
    double wanted = parameters_.uniform * whole;
    int64_t block = 0;
    for (size_t b = 0; b < left.size(); ++b) {
      if (left[b] > 0) {
        block = b;
        if (wanted < left[b]) {
          break;
        }
        wanted -= left[b];
      }
    }
    int64_t token = 0;
    for (int64_t i = block * kVocabBlock; i < (block + 1) * kVocabBlock; ++i) {
      if (weights_[i] > 0 && cut.leaves(weights_[i], i)) {
        token = i;
        wanted -= weights_[i];
        if (wanted < 0) {
          break;
        }
      }
    }
    return token;
  }

  const float* logits_;
  const int64_t vocab_, padded_;
  const SamplingParameters& parameters_;
  float* weights_;
};

template <class Vec>
int64_t sample(const float* logits, int64_t vocab, const SamplingParameters& parameters, float* weights) {
  return SampledRow<Vec>(logits, vocab, parameters, weights).choose();
}

}  // namespace
}  // namespace multilora
