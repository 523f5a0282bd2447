// layout_search.h -- one candidate of the planner: the schedule is fixed, cuts and recomputation are found by trying.
//
//   cuts         start from the balanced-stage, the balanced-rank and the even partition (partition.h), then move one
//                block at a time from a stage to another as long as the simulated time falls. Long steps are searched
//                with 4 p micro-batches: beyond, only the steady part grows, in which the busiest rank decides.
//   recompute    where a rank does not fit: the levels of its stages that add least time of those that make it fit; if
//                none do, blocks move away from the ranks that miss most.
// Pure host code; the same on every rank that has the same costs.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/partition.h"
#include "llmc/pipeline_layout.h"
#include "llmc/plan_timer.h"

/// Bytes of device memory of a rank of the replica. The plan has the real number of micro-batches.
using RankBytes = std::function<size_t(const PipelineLayout&, const Plan&, int rank)>;

struct PlanRequest {
  int ranks = 1;                  // p, of one replica
  int micro_batches = 1;          // most of any replica
  ModelCost cost;                 // of one micro-batch
  std::string schedule = "auto";  // a name, a CSV file, or auto
  int chunks = 0;                 // stages of each rank; 0: free, or the schedule's natural number
  std::string partition = "auto";
  std::string recompute = "auto";  // level of every stage, or auto
  double memory_limit = 0;         // bytes of a rank; 0: none
  RankBytes bytes;                 // may be empty where there is no limit
};

struct PlanCandidate {
  PipelineLayout layout;
  double makespan = 0;         // simulated, in the unit of the costs
  double bubble_fraction = 0;  // of the makespan, mean over the ranks
  double efficiency = 0;       // work without recomputation / (p makespan)
  std::vector<size_t> bytes;   // (p); empty if there is nothing to ask
  bool fits = true;

  size_t most_bytes() const { return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end()); }
  int fullest_rank() const { return static_cast<int>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin()); }
};

/// Searches one candidate: schedule, chunks and cap are fixed.
class LayoutSearch {
 public:
  LayoutSearch(const PlanRequest& request, PipelineLayout layout) : request_(request), layout_(std::move(layout)) {
    free_cuts_ = request.partition == "auto";
    free_levels_ = request.recompute == "auto" && request.memory_limit > 0;
    assert((request.bytes || request.memory_limit <= 0) && "a memory limit needs RankBytes");
  }

  PlanCandidate run() {
    start();
    improve();
    if (request_.memory_limit > 0) {
      if (!fit() && free_cuts_) make_lean(), fit();
      if (fitted_) improve(), fit();  // other cuts may need less recomputation
    }
    return assess();
  }

 private:
  static constexpr double kNodeVisits = 6e6;  // of one climb: some 30 ms
  static constexpr int kGreedyRounds = 3;
  static constexpr double kLevelsSharedFrom = 3;

  struct Timer {
    std::unique_ptr<PlanTimer> plan;
    int micro_batches = 0;
  };

  int stages() const { return layout_.stages(); }

  /// The plan whose slots and owners the memory follows from, its timer, and one with fewer micro-batches.
  void prepare() {
    plan_ = make_train_plan(layout_, request_.micro_batches);
    const int few = std::min(request_.micro_batches, 4 * request_.ranks);
    const bool as_it_is = few == request_.micro_batches || is_schedule_file(layout_.schedule);
    full_ = {std::make_unique<PlanTimer>(plan_), request_.micro_batches};
    short_ = {as_it_is ? nullptr : std::make_unique<PlanTimer>(make_train_plan(layout_, few)), few};
  }

  /// Simulated time of the whole step, while the actions stay as prepared.
  double time(const PipelineLayout& layout) { return full_.plan->makespan(layout_costs(layout)); }

  void start() {
    const int blocks = static_cast<int>(layout_.cost.blocks.size());
    const int level = request_.recompute == "auto" ? 0 : atoi(request_.recompute.c_str());
    const int count = stages();
    layout_.recompute.assign(static_cast<size_t>(count), level);
    if (!free_cuts_) return prepare();
    layout_.cuts = auto_partition(layout_.cost, count);
    prepare();
    double best = time(layout_);
    for (const std::vector<int>& cuts :
         {rank_partition(layout_.cost, plan_.schedule.owner, layout_.ranks), even_partition(blocks, count)}) {
      PipelineLayout other = layout_;
      other.cuts = cuts;
      const double value = time(other);
      if (value < best) best = value, layout_ = other;
    }
  }

  /// First with few micro-batches, as long as these are fewer, then with all.
  void climb() {
    if (short_.plan) climb(short_);
    climb(full_);
  }

  /// Climbs. The actions of a greedy schedule follow the costs: after a climb they are made anew, which may cost what
  /// the climb has gained.
  void improve() {
    if (!free_cuts_) return;
    if (layout_.schedule.compare(0, 6, "greedy") != 0) return climb();
    PipelineLayout best = layout_;
    double least = time(layout_);
    for (int round = 0; round < kGreedyRounds; round++) {
      climb();
      prepare();
      if (time(layout_) >= least || !allowed(layout_)) break;
      best = layout_, least = time(layout_);
    }
    layout_ = best;
    prepare();
  }

  /// Moves single blocks from stage to stage while the simulated time falls.
  void climb(const Timer& timer) {
    const double visits = static_cast<double>(timer.plan->nodes());
    double left = kNodeVisits, best = timer.plan->makespan(layout_costs(layout_));
    for (bool moved = true; moved && left > 0;) {
      moved = false;
      for (int from = 0; from < stages(); from++) {
        for (int to = 0; to < stages() && left > 0; to++) {
          PipelineLayout other = layout_;
          if (!move_block(&other, from, to) || busiest(other) * timer.micro_batches >= best) continue;
          left -= visits;
          const double value = timer.plan->makespan(layout_costs(other));
          if (value >= best * (1 - 1e-9) || !allowed(other)) continue;
          best = value, layout_ = other, moved = true;
        }
      }
    }
  }

  /// One block less on stage `from`, one more on `to`; the stages between shift. False if there is none to move.
  static bool move_block(PipelineLayout* layout, int from, int to) {
    std::vector<int>& cuts = layout->cuts;
    if (from == to || cuts[from + 1] == cuts[from]) return false;
    for (int cut = std::min(from, to) + 1; cut <= std::max(from, to); cut++) cuts[cut] += from < to ? -1 : 1;
    return true;
  }

  /// No schedule is faster than the work of its busiest rank.
  double busiest(const PipelineLayout& layout) const {
    std::vector<double> work(static_cast<size_t>(layout.ranks), 0);
    const std::vector<StageCost> costs = stage_costs(layout.cost, layout.cuts, layout.recompute);
    for (int stage = 0; stage < layout.stages(); stage++) work[plan_.schedule.owner[stage]] += total_cost(costs[stage]);
    return *std::max_element(work.begin(), work.end());
  }

  // ---- memory

  bool is_over(const PipelineLayout& layout, int rank) const {
    return static_cast<double>(request_.bytes(layout, plan_, rank)) > request_.memory_limit;
  }
  bool allowed(const PipelineLayout& layout) const {
    if (request_.memory_limit <= 0 || !fitted_) return true;
    for (int rank = 0; rank < layout.ranks; rank++) {
      if (is_over(layout, rank)) return false;
    }
    return true;
  }

  /// Gives every rank that is over the limit the levels that add least time of those that make it fit. False if one
  /// cannot be made to fit; it then has the leanest levels.
  bool fit() {
    fitted_ = true;
    if (free_levels_) layout_.recompute.assign(layout_.recompute.size(), 0);
    for (int rank = 0; rank < layout_.ranks; rank++) {
      if (is_over(layout_, rank)) fitted_ &= free_levels_ && raise_levels(rank);
    }
    return fitted_;
  }

  bool raise_levels(int rank) {
    std::vector<int> mine;
    for (int stage = 0; stage < stages(); stage++) {
      if (plan_.schedule.owner[stage] == rank) mine.push_back(stage);
    }
    const size_t digits = mine.size() < kLevelsSharedFrom ? mine.size() : 1;  // many stages share one level
    struct Choice {
      double added;
      int number;  // the levels as digits
      PipelineLayout layout;
    };
    std::vector<Choice> choices;
    for (int number = 0; number < (digits == 1 ? kRecomputeLevels : kRecomputeLevels * kRecomputeLevels); number++) {
      Choice choice{0, number, layout_};
      for (size_t k = 0; k < mine.size(); k++) {
        const int level = digits == 1 || k == 0 ? number % kRecomputeLevels : number / kRecomputeLevels;
        choice.layout.recompute[mine[k]] = level;
        choice.added += total_cost(layout_.cost.recompute[level]) * block_count(mine[k]);
      }
      choices.push_back(choice);
    }
    std::stable_sort(choices.begin(), choices.end(),
                     [](const Choice& a, const Choice& b) { return a.added < b.added; });
    size_t fewest = std::numeric_limits<size_t>::max();
    for (const Choice& choice : choices) {
      const size_t bytes = request_.bytes(choice.layout, plan_, rank);
      if (bytes >= fewest) continue;
      fewest = bytes;
      layout_ = choice.layout;
      if (!is_over(layout_, rank)) return true;
    }
    return false;
  }

  int block_count(int stage) const { return layout_.cuts[stage + 1] - layout_.cuts[stage]; }

  /// Moves blocks off the ranks that are over the limit, at the leanest levels, until none is or nothing helps.
  void make_lean() {
    if (free_levels_) layout_.recompute.assign(layout_.recompute.size(), kRecomputeLevels - 1);
    for (auto least = excess(layout_); least.first > 0;) {
      PipelineLayout best = layout_;
      const auto before = least;
      for (int from = 0; from < stages(); from++) {
        if (!is_over(layout_, plan_.schedule.owner[from])) continue;
        for (int to = 0; to < stages(); to++) {
          PipelineLayout other = layout_;
          if (!move_block(&other, from, to)) continue;
          const auto value = excess(other);
          if (value < least) least = value, best = other;
        }
      }
      if (least == before) return;
      layout_ = best;
    }
  }

  /// Bytes over the limit: of the fullest rank, and of all together, which also tells apart what leaves the fullest as
  /// it is.
  std::pair<double, double> excess(const PipelineLayout& layout) const {
    std::pair<double, double> most_and_sum{0, 0};
    for (size_t bytes : all_bytes(layout, plan_)) {
      const double over = std::max(0.0, static_cast<double>(bytes) - request_.memory_limit);
      most_and_sum.first = std::max(most_and_sum.first, over);
      most_and_sum.second += over;
    }
    return most_and_sum;
  }

  std::vector<size_t> all_bytes(const PipelineLayout& layout, const Plan& plan) const {
    std::vector<size_t> bytes;
    for (int rank = 0; request_.bytes && rank < layout.ranks; rank++)
      bytes.push_back(request_.bytes(layout, plan, rank));
    return bytes;
  }

  PlanCandidate assess() const {
    const Plan plan = make_train_plan(layout_, request_.micro_batches);
    PlanCandidate candidate;
    candidate.layout = layout_;
    candidate.makespan = plan.makespan;
    candidate.bubble_fraction = plan.bubble_fraction;
    const double work = whole_cost(layout_.cost) * request_.micro_batches;
    candidate.efficiency = plan.makespan > 0 ? work / (layout_.ranks * plan.makespan) : 1;
    candidate.bytes = all_bytes(layout_, plan);
    candidate.fits = request_.memory_limit <= 0 || static_cast<double>(candidate.most_bytes()) <= request_.memory_limit;
    return candidate;
  }

  const PlanRequest& request_;
  PipelineLayout layout_;
  Plan plan_;
  Timer full_, short_;
  bool fitted_ = false;  // the layout fits the limit, and must go on doing so
  bool free_cuts_ = false, free_levels_ = false;
};
