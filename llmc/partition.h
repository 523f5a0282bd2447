// partition.h -- which blocks each pipeline stage holds: `even`, `auto`, or counts as in `4,4,3,1`.
//
// L blocks and S stages give cuts (S+1): stage s holds the blocks cuts[s] .. cuts[s+1]-1, the first stage the embedding
// as well, the last one the head. A stage may be empty, so S goes up to L+2: embedding alone, one block each, head
// alone. The head is not a small appendix: for GPT-2 124M it weighs 4.9 blocks, and with an even split the other stages
// wait for it. Two partitions follow from the costs alone; the planner goes on from them with the simulator:
//   auto_partition   the most expensive stage is as cheap as possible, and the stages as equal as that allows:
//       1. limit = min over all cuts of max_s cost(s);  2. min over the cuts with cost(s) <= limit of sum_s cost(s)^2,
//       both by dynamic programming over (stages, blocks), O(S L^2)
//   rank_partition   the same for ranks with several stages: what counts is the sum over the stages of a rank
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "llmc/model_cost.h"

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

/// Cuts that give each rank an equal share of the work, and each of its stages an equal share of the rank's blocks: a
/// rank that has the head gets fewer. `owner`: rank of each stage. Blocks are placed in order, so the shares are met to
/// half a block. O(S + L).
inline std::vector<int> rank_partition(const ModelCost& model, const std::vector<int>& owner, int ranks) {
  const int stages = static_cast<int>(owner.size()), blocks = static_cast<int>(model.blocks.size());
  std::vector<double> fixed(ranks, 0.0);
  std::vector<int> count(ranks, 0);
  fixed[owner.front()] += total_cost(model.embedding);
  fixed[owner.back()] += total_cost(model.head);
  for (int rank : owner) count[rank]++;
  double room = 0, all = 0;
  std::vector<double> budget(ranks);
  for (int rank = 0; rank < ranks; rank++)
    room += budget[rank] = std::max(0.0, whole_cost(model) / ranks - fixed[rank]);
  for (const StageCost& block : model.blocks) all += total_cost(block);
  std::vector<int> cuts(1, 0);
  double placed = 0, due = 0;
  for (int stage = 0, next = 0; stage + 1 < stages; stage++) {
    due += room > 0 ? all / room * budget[owner[stage]] / count[owner[stage]] : all / stages;
    while (next < blocks && placed + total_cost(model.blocks[next]) / 2 < due)
      placed += total_cost(model.blocks[next++]);
    cuts.push_back(next);
  }
  cuts.push_back(blocks);
  return cuts;
}

/// The counts of a --partition list; empty for `even` and `auto`. User error for anything else.
inline std::vector<int> partition_counts(const std::string& text) {
  std::vector<int> counts;
  if (text == "even" || text == "auto") return counts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(',', begin);
    const std::string field = text.substr(begin, end == std::string::npos ? end : end - begin);
    const bool digits = !field.empty() && field.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || field.size() > 6) {
      user_error("--partition %s: \"%s\" is not a number of blocks; use even, auto or counts such as 4,4,3,1",
                 text.c_str(), field.c_str());
    }
    counts.push_back(atoi(field.c_str()));
  }
  return counts;
}

/// User error unless the counts of `--partition text` are one for each stage and place all blocks. Names the nearest
/// counts that work.
inline void check_counts(const std::string& text, const std::vector<int>& counts, int stages, int blocks) {
  if (static_cast<int>(counts.size()) != stages) {
    user_error("--partition %s has %zu counts for %d stages; use --partition %s", text.c_str(), counts.size(), stages,
               partition_text(even_partition(blocks, stages)).c_str());
  }
  long long sum = 0;
  for (int count : counts) sum += count;
  if (sum != blocks) {
    user_error("--partition %s places %lld blocks, the model has %d; use --partition %s", text.c_str(), sum, blocks,
               partition_text(cuts_from_counts(nearest_counts(counts, blocks))).c_str());
  }
}

/// User error where `chunks` stages on each of `pp` ranks are more than embedding, blocks and head can fill.
/// `min_chunks`: fewest that the schedule can have.
inline void check_stage_count(int pp, int chunks, int blocks, int min_chunks = 1) {
  const long long stages = static_cast<long long>(pp) * chunks, most = blocks + 2;
  if (stages <= most) return;
  const bool fewer_chunks = chunks > min_chunks && static_cast<long long>(pp) * min_chunks <= most;
  user_error("--pp %d%s is %lld stages, too many for %d blocks: at most %lld (embedding, blocks, head); use --%s %lld",
             pp, chunks > 1 ? format_text(" with %d chunks", chunks).c_str() : "", stages, blocks, most,
             fewer_chunks ? "chunks" : "pp", fewer_chunks ? most / pp : std::max(1LL, most / min_chunks));
}

/// The cuts (stages+1) for `--partition text`, of model.blocks.size() blocks on at most as many stages + 2. User errors
/// name the nearest partition that works: a count that is no number, a wrong number of counts, a wrong sum.
inline std::vector<int> make_partition(const std::string& text, int stages, const ModelCost& model) {
  const int blocks = static_cast<int>(model.blocks.size());
  assert(stages >= 1 && stages <= blocks + 2);
  if (text == "even") return even_partition(blocks, stages);
  if (text == "auto") return auto_partition(model, stages);
  const std::vector<int> counts = partition_counts(text);
  check_counts(text, counts, stages, blocks);
  return cuts_from_counts(counts);
}
