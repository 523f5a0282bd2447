// sampler.h -- picks the next token from logits: temperature, top-k, and a random number keyed by (seed, step,
// position).
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "llmc/random.h"

struct SamplingSettings {
  double temperature = 1.0;  // 0: the likeliest token
  int top_k = 0;             // 0: all tokens
  uint64_t seed = 0;
};

/// The token drawn from softmax(logits / temperature), restricted to the top_k likeliest (ties: the lower token first).
/// A pure function of its arguments. O(V log V) with top_k, else O(V); sums in double, in token order.
inline int sample_token(const std::vector<float>& logits, const SamplingSettings& settings, uint64_t step,
                        uint64_t position) {
  const int V = static_cast<int>(logits.size());
  const auto likelier = [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  std::vector<int> tokens(V);
  std::iota(tokens.begin(), tokens.end(), 0);
  if (settings.temperature <= 0.0) return *std::min_element(tokens.begin(), tokens.end(), likelier);
  if (settings.top_k > 0 && settings.top_k < V) {
    std::partial_sort(tokens.begin(), tokens.begin() + settings.top_k, tokens.end(), likelier);
    tokens.resize(settings.top_k);
  }
  float largest = logits[tokens[0]];
  for (int token : tokens) largest = std::max(largest, logits[token]);
  std::vector<double> cumulative;
  double sum = 0.0;
  for (int token : tokens) {
    sum += std::exp((logits[token] - largest) / settings.temperature);
    cumulative.push_back(sum);
  }
  constexpr uint64_t kUse = 0x53414d50;  // "SAMP"
  const double target = random_uniform(settings.seed, kUse << 32 | step, position) * sum;
  const size_t index = std::upper_bound(cumulative.begin(), cumulative.end(), target) - cumulative.begin();
  return tokens[std::min(index, tokens.size() - 1)];
}
