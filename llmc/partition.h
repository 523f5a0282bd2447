// partition.h -- which blocks each pipeline stage holds: `even`, `auto`, or counts as in `4,4,3,1`.
//
// L blocks and S stages give cuts (S+1): stage s holds the blocks cuts[s] .. cuts[s+1]-1, the first stage the embedding
// as well, the last one the head. A stage may be empty, so S goes up to L+2: embedding alone, one block each, head
// alone. The head is not a small appendix: for GPT-2 124M it weighs 4.9 blocks, and with an even split the other stages
// wait for it. `auto` makes the most expensive stage as cheap as possible, and the stages as equal as that allows:
//   1. limit = min over all cuts of max_s cost(s);   2. min over the cuts with every cost(s) <= limit of sum_s
//   cost(s)^2
// both by dynamic programming over (stages, blocks), O(S L^2).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "llmc/plan.h"

/// Time (or FLOPs) of one micro-batch in each part of the model. The head's three parts all run inside F of the last
/// stage.
struct ModelCost {
  StageCost embedding;
  std::vector<StageCost> blocks;  // (L)
  StageCost head;
};

inline double total_cost(const StageCost& cost) { return cost.forward + cost.backward_input + cost.backward_weight; }

/// FLOPs per token of a GPT-2. Block: 12 C^2 parameters, 2 FLOPs each in forward, input and weight gradient; attention
/// 2 T C forward (causal: half of 4 T C) and 2.5 times that backward, where the scores are computed again. Head: 2 V C.
inline ModelCost gpt2_model_cost(int layers, int T, int C, int V) {
  const double matmul = 24.0 * C * C, attention = 2.0 * T * C, head = 2.0 * V * C;
  ModelCost cost;
  cost.embedding = {1.0 * C, 0, 2.0 * C};
  cost.blocks.assign(static_cast<size_t>(layers), {matmul + attention, matmul + 2.5 * attention, matmul});
  cost.head = {head, head, head};
  return cost;
}

/// Cost of each stage, for the simulator. `forward_only`: the head runs its forward alone.
inline std::vector<StageCost> stage_costs(const ModelCost& model, const std::vector<int>& cuts,
                                          bool forward_only = false) {
  std::vector<StageCost> costs(cuts.size() - 1);
  const auto add = [](StageCost* sum, const StageCost& part) {
    sum->forward += part.forward;
    sum->backward_input += part.backward_input;
    sum->backward_weight += part.backward_weight;
  };
  for (size_t stage = 0; stage < costs.size(); stage++) {
    for (int block = cuts[stage]; block < cuts[stage + 1]; block++) add(&costs[stage], model.blocks[block]);
  }
  add(&costs.front(), model.embedding);
  costs.back().forward += forward_only ? model.head.forward : total_cost(model.head);
  return costs;
}

/// "4,4,3,1" for cuts {0,4,8,11,12}.
inline std::string partition_text(const std::vector<int>& cuts) {
  std::string text;
  for (size_t stage = 0; stage + 1 < cuts.size(); stage++) {
    text += (stage ? "," : "") + std::to_string(cuts[stage + 1] - cuts[stage]);
  }
  return text;
}

inline std::vector<int> cuts_from_counts(const std::vector<int>& counts) {
  std::vector<int> cuts(1, 0);
  for (int count : counts) cuts.push_back(cuts.back() + count);
  return cuts;
}

/// Nearly equal counts, the larger ones first: the last stage has the head to do. With two stages more than blocks, the
/// first and the last are the empty ones.
inline std::vector<int> even_partition(int blocks, int stages) {
  std::vector<int> counts(static_cast<size_t>(stages), blocks / stages);
  const int first = stages == blocks + 2 ? 1 : 0;
  for (int extra = 0; extra < blocks % stages; extra++) counts[first + extra]++;
  return cuts_from_counts(counts);
}

/// cost(stage, first block, end block) for the dynamic programme below.
class StageSums {
 public:
  StageSums(const ModelCost& model, int stages) : model_(model), stages_(stages), prefix_(1, 0.0) {
    for (const StageCost& block : model.blocks) prefix_.push_back(prefix_.back() + total_cost(block));
  }
  double operator()(int stage, int begin, int end) const {
    double cost = prefix_[end] - prefix_[begin];
    if (stage == 0) cost += total_cost(model_.embedding);
    if (stage == stages_ - 1) cost += total_cost(model_.head);
    return cost;
  }

 private:
  const ModelCost& model_;
  int stages_;
  std::vector<double> prefix_;
};

/// The `auto` of the header comment. Ties go to the earlier cut, so the result is the same on every rank.
inline std::vector<int> auto_partition(const ModelCost& model, int stages) {
  const int blocks = static_cast<int>(model.blocks.size());
  const StageSums cost(model, stages);
  constexpr double kImpossible = std::numeric_limits<double>::infinity();
  double limit = kImpossible;
  std::vector<int> cuts;
  for (int pass = 0; pass < 2; pass++) {  // 0: max of the costs, 1: sum of squares under the limit
    std::vector<std::vector<double>> best(stages + 1, std::vector<double>(blocks + 1, kImpossible));
    std::vector<std::vector<int>> from(stages + 1, std::vector<int>(blocks + 1, 0));
    best[0][0] = 0;
    for (int stage = 0; stage < stages; stage++) {
      for (int end = 0; end <= blocks; end++) {
        for (int begin = 0; begin <= end; begin++) {
          const double here = cost(stage, begin, end);
          if (best[stage][begin] == kImpossible || here > limit) continue;
          const double value = pass == 0 ? std::max(best[stage][begin], here) : best[stage][begin] + here * here;
          if (value < best[stage + 1][end]) best[stage + 1][end] = value, from[stage + 1][end] = begin;
        }
      }
    }
    if (pass == 0) limit = best[stages][blocks];
    cuts.assign(1, blocks);
    for (int stage = stages; stage > 0; stage--) cuts.insert(cuts.begin(), from[stage][cuts.front()]);
  }
  return cuts;
}

/// Counts with the given number of entries and sum that are near `counts`: blocks are taken from the fullest stages or
/// given to the emptiest. For error messages.
inline std::vector<int> nearest_counts(std::vector<int> counts, int blocks) {
  long long sum = 0;
  for (int& count : counts) sum += count = std::min(count, blocks);
  for (; sum > blocks; sum--) --*std::max_element(counts.begin(), counts.end());
  for (; sum < blocks; sum++) ++*std::min_element(counts.rbegin(), counts.rend());
  return counts;
}

/// The counts in "4,4,3,1"; a user error if a field is not a number >= 0.
inline std::vector<int> parse_counts(const std::string& text, const std::string& even) {
  std::vector<int> counts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(',', begin);
    const std::string field = text.substr(begin, end == std::string::npos ? end : end - begin);
    const bool digits = !field.empty() && field.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || field.size() > 6) {
      user_error("--partition %s: \"%s\" is not a number of blocks; use even, auto or counts such as %s", text.c_str(),
                 field.c_str(), even.c_str());
    }
    counts.push_back(atoi(field.c_str()));
  }
  return counts;
}

/// The cuts (stages+1) for `--partition text`, of model.blocks.size() blocks. User errors name the nearest partition
/// that works: more than blocks + 2 stages, a count that is no number, a wrong number of counts, a wrong sum.
inline std::vector<int> make_partition(const std::string& text, int stages, const ModelCost& model) {
  assert(stages >= 1);
  const int blocks = static_cast<int>(model.blocks.size());
  if (stages > blocks + 2) {
    user_error("%d pipeline stages are too many for %d blocks: at most %d (embedding, blocks, head); use --pp %d",
               stages, blocks, blocks + 2, blocks + 2);
  }
  const std::vector<int> even = even_partition(blocks, stages);
  if (text == "even") return even;
  if (text == "auto") return auto_partition(model, stages);
  const std::vector<int> counts = parse_counts(text, partition_text(even));
  if (static_cast<int>(counts.size()) != stages) {
    user_error("--partition %s has %zu counts for %d stages; use --partition %s", text.c_str(), counts.size(), stages,
               partition_text(even).c_str());
  }
  long long sum = 0;
  for (int count : counts) sum += count;
  if (sum != blocks) {
    user_error("--partition %s places %lld blocks, the model has %d; use --partition %s", text.c_str(), sum, blocks,
               partition_text(cuts_from_counts(nearest_counts(counts, blocks))).c_str());
  }
  return cuts_from_counts(counts);
}
