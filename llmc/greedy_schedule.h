// greedy_schedule.h -- a schedule made for given costs, by event-driven list scheduling.
//
// Each rank takes, whenever it is free, what it can start first:
//   I(s,i)   when F(s,i) is done here and the gradient from stage s+1 has arrived
//   F(s,i)   when the input has arrived and the rank has memory, see below
//   W(s,i)   when I(s,i) is done; W fills the gaps
// Ties go I < F < W, then to the deeper stage, then to the lower micro-batch. Decisions are made in the order of time
// over all ranks, so nothing that arrives later could have changed one. In a V, equal costs, 3 micro-batches:
//     rank 0 |F0F1F2....f0i0f1i1f2i2I0w0I1w1I2w2W0W1W2|          (zb-v: 44 columns)
//     rank 1 |..F0F1F2f0..f1i0f2i1I0i2I1w0I2w1w2W0W1W2|
//     rank 2 |....F0f0F1f1F2f2i0I0i1I1i2I2w0w1w2W0W1W2|
//
// Memory is counted in chunk activations from F to the end of W, cap * v of them on a rank. F of the rank's k-th chunk
// (0 <= k < v) must leave v-1-k free, or the early chunks would take everything and the deep ones, whose backward
// passes give memory back, could never run. With that rule the generator cannot get stuck: look at the deepest stage
// with a forward pass whose backward pass has not come; the stage after it has its input, and its rank holds only
// activations of shallower chunks, the last of which has left room for it.
//
// Unlike the written schedules it knows the costs: it fits unequal stages, slow links and few micro-batches, where
// those leave gaps. It looks no step ahead, though, and for many micro-batches on many ranks zb-v may be better: the
// planner simulates both.
#pragma once

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "llmc/schedule.h"

class GreedyScheduler {
 public:
  GreedyScheduler(const std::vector<int>& owner, int ranks, int micro_batches, const PlanCosts& costs, int cap)
      : schedule_(empty_schedule("greedy", ranks, owner, micro_batches)),
        costs_(costs.stages.empty() ? equal_costs(schedule_.stages, {1, 1, 1}, costs.transfer) : costs),
        stages_(owner.size()),
        ranks_(static_cast<size_t>(ranks)) {
    assert(costs_.stages.size() == owner.size() && "one cost for each stage");
    for (size_t stage = owner.size(); stage-- > 0;) {
      Rank& rank = ranks_[owner[stage]];
      stages_[stage].deeper = rank.chunks++;
      rank.capacity = (cap > 0 ? cap : ranks) * rank.chunks;
    }
    for (Stage& stage : stages_) {
      stage.input_at.assign(static_cast<size_t>(micro_batches), 0);
      stage.gradient_at = stage.input_at;
    }
  }

  Schedule run() {
    for (;;) {
      Candidate best;
      for (int stage = 0; stage < schedule_.stages; stage++) consider(stage, &best);
      if (best.start == kNever) return schedule_;
      take(best);
    }
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Stage {
    int forward = 0, input = 0, weight = 0;     // done so far
    int deeper = 0;                             // later stages on the same rank
    std::vector<double> input_at, gradient_at;  // (m) arrival, set when the neighbour has decided
  };
  struct Rank {
    double free_at = 0;
    int in_flight = 0, capacity = 0, chunks = 0;  // chunk activations
  };
  struct Candidate {
    double start = kNever;
    int kind = 0;  // 0 I, 1 F, 2 W: the order of ties
    int stage = 0, micro_batch = 0;
    bool operator<(const Candidate& other) const {
      return std::make_tuple(start, kind, -stage, micro_batch) <
             std::make_tuple(other.start, other.kind, -other.stage, other.micro_batch);
    }
  };

  void consider(int s, Candidate* best) const {
    const Stage& stage = stages_[s];
    const Rank& rank = ranks_[schedule_.owner[s]];
    const int m = schedule_.micro_batches;
    const auto offer = [&](double ready, int kind, int i) {
      *best = std::min(*best, Candidate{std::max(rank.free_at, ready), kind, s, i});
    };
    const bool last = s + 1 == schedule_.stages;
    const int gradients = last ? stage.forward : std::min(stage.forward, stages_[s + 1].input);
    if (stage.input < gradients) offer(stage.gradient_at[stage.input], 0, stage.input);
    const int inputs = s == 0 ? m : stages_[s - 1].forward;
    const bool room = rank.in_flight + 1 <= rank.capacity - stage.deeper;
    if (stage.forward < inputs && room) offer(stage.input_at[stage.forward], 1, stage.forward);
    if (stage.weight < stage.input) offer(0, 2, stage.weight);
  }

  void take(const Candidate& chosen) {
    const int s = chosen.stage, i = chosen.micro_batch;
    const Op op = chosen.kind == 0 ? Op::kBackwardInput : chosen.kind == 1 ? Op::kForward : Op::kBackwardWeight;
    Stage& stage = stages_[s];
    Rank& rank = ranks_[schedule_.owner[s]];
    rank.free_at = chosen.start + action_cost(costs_.stages[s], op);
    schedule_.actions[schedule_.owner[s]].push_back({op, s, i});
    const auto arrival_at = [&](int other) {
      return rank.free_at + (schedule_.owner[s] == schedule_.owner[other] ? 0 : costs_.transfer);
    };
    if (op == Op::kForward) {
      stage.forward++, rank.in_flight++;
      if (s + 1 < schedule_.stages) stages_[s + 1].input_at[i] = arrival_at(s + 1);
    } else if (op == Op::kBackwardInput) {
      stage.input++;
      if (s > 0) stages_[s - 1].gradient_at[i] = arrival_at(s - 1);
    } else {
      stage.weight++, rank.in_flight--;
    }
  }

  Schedule schedule_;
  PlanCosts costs_;
  std::vector<Stage> stages_;
  std::vector<Rank> ranks_;
};

/// The schedule of the header comment for stages on the ranks `owner` (S), m >= 0, `costs` (S stages; none: all equal,
/// and costs.transfer is used). `cap` >= 1: whole micro-batches in flight on a rank; 0: p. More memory, fewer gaps.
/// Deterministic; O(S) for each of 3 S m actions.
inline Schedule greedy_schedule(const std::vector<int>& owner, int ranks, int micro_batches, const PlanCosts& costs,
                                int cap = 0) {
  return GreedyScheduler(owner, ranks, micro_batches, costs, cap).run();
}
