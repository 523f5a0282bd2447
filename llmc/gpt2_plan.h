// gpt2_plan.h -- the layout of a GPT-2 run, from its options: what the planner is asked, and what to do if nothing
// fits.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/gpt2_memory.h"
#include "llmc/grid.h"
#include "llmc/planner.h"
#include "llmc/train_options.h"

constexpr int kForwardMicroBatches = 8;  // of a replica in one forward-only run: validation

/// Whether the planner has something to find out, so that measured costs are worth their time.
inline bool has_free_layout(const TrainOptions& options) {
  const bool free_levels = options.recompute == "auto" && options.memory_limit > 0;
  return free_levels || (options.pp > 1 && (options.schedule == "auto" || options.partition == "auto"));
}

/// Recompute levels that a run with these options may use, so that their costs are worth measuring.
inline std::vector<int> levels_to_measure(const TrainOptions& options) {
  if (options.recompute != "auto") return {0, std::stoi(options.recompute)};
  return options.memory_limit > 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0};
}

/// Questions about a run of `replicas` replicas with resolved options and a model of these sizes.
class Gpt2Planning {
 public:
  Gpt2Planning(const TrainOptions& options, const GPT2Config& config, int replicas, const ModelCost& cost)
      : options_(options), config_(config), replicas_(replicas), cost_(cost), table_(gpt2_parameter_table(config)) {}

  /// Micro-batches of the replica that has most.
  int micro_batches() const {
    return tree_share(static_cast<int>(micro_batches_per_step(options_)), replicas_, 0).count;
  }

  /// Bytes of a rank of the replica that has most micro-batches.
  RankMemory memory(const PipelineLayout& layout, const Plan& plan, int rank) const {
    const int forward = options_.val_every > 0 ? kForwardMicroBatches : 1;
    MemoryQuestion question{config_, table_, {options_.micro_batch, options_.seq_len}, layout, plan};
    question.rank = rank;
    question.replicas = replicas_;
    question.zero_stage = options_.zero;
    question.exact = options_.exact;
    question.most_micro_batches = std::max(1, std::max(plan.schedule.micro_batches, forward));
    return gpt2_rank_memory(question);
  }

  /// The same for the search, which asks again and again: blocks are alike, so only their number counts.
  RankBytes rank_bytes() const {
    auto known = std::make_shared<std::map<std::vector<int>, size_t>>();
    return [this, known](const PipelineLayout& layout, const Plan& plan, int rank) {
      std::vector<int> key{plan.schedule.micro_batches};
      for (int s = 0; s < layout.stages(); s++) {
        if (plan.schedule.owner[s] != rank) continue;
        const int end = s == 0 ? 1 : s + 1 == layout.stages() ? 2 : 0;
        key.insert(key.end(), {end, layout.cuts[s + 1] - layout.cuts[s], layout.recompute[s], plan.slots[s]});
      }
      const auto found = known->find(key);
      if (found != known->end()) return found->second;
      return (*known)[key] = memory(layout, plan, rank).total();
    };
  }

  /// All candidates. `*this` must outlive the call only.
  PlanResult search() const { return search_plans(request()); }

  /// All candidates, of which the first fits; a user error that names rank, bytes and what would fit if none does.
  PlanResult search_or_explain() const {
    PlanResult result = search();
    if (!result.found()) explain(result);
    return result;
  }

 private:
  PlanRequest request() const {
    PlanRequest request;
    request.ranks = options_.pp;
    request.micro_batches = micro_batches();
    request.cost = cost_;
    request.schedule = options_.schedule;
    request.chunks = options_.chunks;
    request.partition = options_.partition;
    request.recompute = options_.recompute;
    request.memory_limit = options_.memory_limit * 1e9;
    request.bytes = rank_bytes();
    return request;
  }

  [[noreturn]] void explain(const PlanResult& result) const {
    const PlanCandidate& lean = result.leanest();
    const double most = static_cast<double>(lean.most_bytes()) * 1e-9;
    std::string levels;
    for (int level : lean.layout.recompute) levels += (levels.empty() ? "" : ",") + std::to_string(level);
    std::string advice;
    for (const std::string& remedy : remedies()) advice += remedy + ", or ";
    user_error(
        "--memory-limit %g GB: rank %d needs %.4g GB in the leanest plan (%s, blocks %s, recompute %s), %.3g GB too "
        "much; use %s--memory-limit %.7g",
        options_.memory_limit, lean.fullest_rank() * replicas_, most, lean.layout.schedule.c_str(),
        partition_text(lean.layout.cuts).c_str(), levels.c_str(), most - options_.memory_limit, advice.c_str(),
        std::ceil(most * 1e6) / 1e6);
  }

  struct Change {
    int kind;  // one of a kind is enough
    std::string text;
    TrainOptions options;
    int replicas;
  };

  /// Changes that make it fit, found by trying: at most two, what costs the user least first.
  std::vector<std::string> remedies() const {
    std::vector<std::string> found;
    int last = -1;
    for (const Change& change : changes()) {
      if (found.size() == 2 || change.kind == last || !fits(change)) continue;
      found.push_back(change.text), last = change.kind;
    }
    return found;
  }

  /// What may be tried, on top of free recomputation and partition.
  std::vector<Change> changes() const {
    std::vector<Change> list;
    TrainOptions lean = options_;
    std::string text;
    for (const auto option : {&TrainOptions::recompute, &TrainOptions::partition}) {
      if (lean.*option == "auto") continue;
      lean.*option = "auto";
      text += text.empty() ? "" : " ";
      text += option == &TrainOptions::recompute ? "--recompute auto" : "--partition auto";
      list.push_back({0, text, lean, replicas_});
    }
    const auto add = [&](int kind, const std::string& what, int replicas, const auto& change) {
      list.push_back({kind, text + (text.empty() ? "" : " ") + what, lean, replicas});
      change(list.back().options);
    };
    if (replicas_ > 1 && lean.zero == 0) add(1, "--zero 1", replicas_, [](TrainOptions& o) { o.zero = 1; });
    for (int B = lean.micro_batch / 2; B >= 1; B /= 2) {
      if (lean.batch_tokens % (static_cast<int64_t>(B) * lean.seq_len) != 0) continue;
      add(2, format_text("--micro-batch %d", B), replicas_, [&](TrainOptions& o) { o.micro_batch = B; });
    }
    if (lean.exact) add(3, "--exact 0", replicas_, [](TrainOptions& o) { o.exact = false; });
    for (int pp = lean.pp + 1; pp <= config_.layers + 2 && !is_schedule_file(lean.schedule); pp++) {
      if (pp % lean.pp != 0 && pp != config_.layers + 2) continue;
      add(4, format_text("--pp %d on %d ranks", pp, pp * replicas_), replicas_,
          [&](TrainOptions& o) { o.pp = pp, o.chunks = 0; });
    }
    for (int more = replicas_ * 2; more <= std::min<int64_t>(64, micro_batches_per_step(lean)); more *= 2) {
      add(5, format_text("--zero 1 on %d ranks", lean.pp * more), more, [](TrainOptions& o) { o.zero = 1; });
    }
    return list;
  }

  bool fits(const Change& change) const {
    TrainOptions options = change.options;
    if (options.schedule == "auto") options.schedule = "1f1b", options.chunks = 0;  // one of those that auto tries
    const ModelCost cost = gpt2_model_cost(config_, options.micro_batch, options.seq_len);
    try {
      return Gpt2Planning(options, config_, change.replicas, cost).search().found();
    } catch (const Error&) {
      return false;  // the change breaks another rule
    }
  }

  TrainOptions options_;
  GPT2Config config_;
  int replicas_;
  ModelCost cost_;
  ParameterTable table_;
};

/// The layout of a run on `ranks` ranks, the same on all of them if `cost` is. User error if no layout fits.
inline PipelineLayout choose_layout(const TrainOptions& options, const GPT2Config& config, int ranks,
                                    const ModelCost& cost) {
  return Gpt2Planning(options, config, ranks / options.pp, cost).search_or_explain().best().layout;
}
