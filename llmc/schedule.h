// schedule.h -- pipeline schedules as plain data: for every rank the list of actions in the order in which it runs
// them.
//
//   S stages, p ranks, m micro-batches. Stage s lives on rank owner[s]; F(s,i) is the forward pass of micro-batch i
//   through stage s, B(s,i) its backward pass. B may be split into I(s,i), the input gradient that the previous stage
//   waits for, and W(s,i), the weight gradient that nobody waits for. i counts within one replica and may run over any
//   m >= 0.
//
// Communication is not in the lists. It follows from owner[]: a hop between stages of two ranks is a message, a hop
// within a rank is a hand-over (plan.h). So a generator is a handful of lines, and none can misplace a send.
// Micro-batches go up in every list, also in the backward part: each weight gradient is then the sum of the same terms
// in the same order as on one device, which is what makes all schedules equal bit for bit.
// The generators are in schedules.h and greedy_schedule.h, files in schedule_csv.h.
#pragma once

#include <algorithm>
#include <cassert>
#include <string>
#include <vector>

#include "llmc/check.h"

enum class Op { kForward, kBackward, kBackwardInput, kBackwardWeight };

struct Action {
  Op op;
  int stage;        // 0 .. stages-1
  int micro_batch;  // 0 .. micro_batches-1, within the replica
};

struct Schedule {
  std::string name;
  int ranks = 1;          // p, the ranks of one replica
  int stages = 1;         // S >= 1
  int micro_batches = 0;  // m >= 0; 0 is a replica that has no data in this step
  bool forward_only = false;
  std::vector<int> owner;                    // (S) rank of each stage
  std::vector<std::vector<Action>> actions;  // (p) lists
};

/// "F(2,5)": forward of micro-batch 5 through stage 2. Letters F, B, I (input gradient), W (weight gradient).
inline char op_letter(Op op) {
  switch (op) {
    case Op::kForward:
      return 'F';
    case Op::kBackward:
      return 'B';
    case Op::kBackwardInput:
      return 'I';
    case Op::kBackwardWeight:
      return 'W';
  }
  return '?';
}
inline std::string action_text(const Action& action) {
  return format_text("%c(%d,%d)", op_letter(action.op), action.stage, action.micro_batch);
}

/// Where the stages go: one a rank; or v a rank, dealt round and round (stage s on rank s % p), or to and fro, so that
/// the first and the last stage share rank 0 and every turn is a hop within a rank.
///     kLine  0 1 2 3          kLoop  0 1 2 3 0 1 2 3          kV  0 1 2 3 3 2 1 0
enum class Placement { kLine, kLoop, kV };

/// The rank (S) of each of the ranks * chunks stages. kLine: chunks must be 1.
inline std::vector<int> place_stages(Placement placement, int ranks, int chunks) {
  assert(ranks >= 1 && chunks >= 1 && (placement != Placement::kLine || chunks == 1));
  std::vector<int> owner;
  for (int stage = 0; stage < ranks * chunks; stage++) {
    const bool back = placement == Placement::kV && stage / ranks % 2 == 1;
    owner.push_back(back ? ranks - 1 - stage % ranks : stage % ranks);
  }
  return owner;
}

/// Lists without actions.
inline Schedule empty_schedule(const std::string& name, int ranks, const std::vector<int>& owner, int micro_batches) {
  assert(ranks >= 1 && micro_batches >= 0);
  Schedule schedule;
  schedule.name = name;
  schedule.ranks = ranks;
  schedule.stages = static_cast<int>(owner.size());
  schedule.micro_batches = micro_batches;
  schedule.owner = owner;
  schedule.actions.resize(static_cast<size_t>(ranks));
  return schedule;
}

/// Time of one micro-batch on one stage, any unit. The last stage's `forward` holds the head's forward and backward.
struct StageCost {
  double forward = 0;
  double backward_input = 0;
  double backward_weight = 0;
};

inline double total_cost(const StageCost& cost) { return cost.forward + cost.backward_input + cost.backward_weight; }

inline void add_cost(StageCost* sum, const StageCost& part, double factor = 1) {
  sum->forward += factor * part.forward;
  sum->backward_input += factor * part.backward_input;
  sum->backward_weight += factor * part.backward_weight;
}

struct PlanCosts {
  std::vector<StageCost> stages;  // (S), every time >= 0
  double transfer = 0;            // one message between two ranks
  bool early_gradient = false;    // the message of an unsplit B leaves before its weight gradient, as in pipeline.h
  std::vector<StageCost> each =
      {};  // (S m) of each micro-batch on each stage, where they were measured; empty: `stages`

  /// m: micro-batches of the step.
  const StageCost& of(int stage, int micro_batch, int m) const {
    return each.empty() ? stages[stage] : each[static_cast<size_t>(stage) * m + micro_batch];
  }
};

/// The same time for every stage: enough where only order and slots matter.
inline PlanCosts equal_costs(int stages, StageCost cost = {1, 1, 1}, double transfer = 0) {
  return {std::vector<StageCost>(static_cast<size_t>(stages), cost), transfer};
}

inline double action_cost(const StageCost& cost, Op op) {
  if (op == Op::kForward) return cost.forward;
  if (op == Op::kBackwardInput) return cost.backward_input;
  return op == Op::kBackwardWeight ? cost.backward_weight : cost.backward_input + cost.backward_weight;
}

/// Forward passes alone, for validation: the stages stay where training has put them (`owner`), m is free. A rank with
/// several stages has a choice of order:
///   group g >= 1   g micro-batches through each of its stages in turn
///   group 0        a wave: F(s,i) at tick v i + s, v = S/p. In a V of two stages a rank its two ticks never meet, so
///                  nobody waits but for the first input; where ticks do meet the lower stage goes first.
/// 0 and 1 need one slot a stage and never hang; a larger g may need up to g slots where a rank hands over to itself.
/// make_forward_plan (plan.h) chooses.
inline Schedule forward_only_schedule(int ranks, const std::vector<int>& owner, int micro_batches, int group = 1) {
  Schedule schedule = empty_schedule("forward", ranks, owner, micro_batches);
  schedule.forward_only = true;
  const int stages = schedule.stages, chunks = std::max(1, stages / ranks);
  const int ticks = group > 0 ? 0 : chunks * micro_batches + stages;
  for (int tick = 0; tick < ticks; tick++) {
    for (int stage = tick % chunks; stage < std::min(stages, tick + 1); stage += chunks) {
      const int i = (tick - stage) / chunks;
      if (i < micro_batches) schedule.actions[owner[stage]].push_back({Op::kForward, stage, i});
    }
  }
  for (int first = 0; group > 0 && first < micro_batches; first += group) {
    for (int stage = 0; stage < stages; stage++) {
      for (int i = first; i < std::min(first + group, micro_batches); i++) {
        schedule.actions[owner[stage]].push_back({Op::kForward, stage, i});
      }
    }
  }
  return schedule;
}

/// How far a stage has come in its rank's list.
struct StageProgress {
  int forward = 0, backward = 0, weight = 0;  // the micro-batches below these numbers are done
};

/// Why `action` must not come next on its stage; empty if it may.
inline std::string misplaced(const Schedule& schedule, int rank, const Action& action, const StageProgress& progress) {
  const int i = action.micro_batch, owner = schedule.owner[action.stage];
  if (owner != rank) return format_text("stage %d belongs to rank %d", action.stage, owner);
  const auto due = [&](Op op, int next) {
    if (i < next) return format_text("%s is there twice", action_text(action).c_str());
    return action_text({op, action.stage, next}) + " must come first (micro-batches go up)";
  };
  if (action.op == Op::kForward) return i == progress.forward ? "" : due(Op::kForward, progress.forward);
  if (schedule.forward_only) return "a forward-only plan has no backward pass";
  if (action.op == Op::kBackwardWeight) {
    if (i != progress.weight) return due(Op::kBackwardWeight, progress.weight);
    return i < progress.backward ? "" : "it comes before its input gradient";
  }
  if (i != progress.backward) return due(action.op, progress.backward);
  if (i >= progress.forward) return "it comes before its forward pass";
  if (action.op == Op::kBackward && i != progress.weight) return due(Op::kBackwardWeight, progress.weight);
  return "";
}

/// A list for every rank and a rank for every stage: "" or what is missing.
inline std::string check_placement(const Schedule& schedule) {
  if (schedule.stages < 1 || schedule.micro_batches < 0)
    return "needs at least one stage and no fewer than 0 micro-batches";
  if (static_cast<int>(schedule.owner.size()) != schedule.stages) return "needs a rank for each stage";
  if (static_cast<int>(schedule.actions.size()) != schedule.ranks) return "needs a list for each rank";
  for (int stage = 0; stage < schedule.stages; stage++) {
    const int rank = schedule.owner[stage];
    if (rank < 0 || rank >= schedule.ranks)
      return format_text("stage %d is on rank %d, which does not exist", stage, rank);
  }
  return "";
}

/// The first action of a rank's list that must not be where it is, with the reason, or "". Counts in `progress` and
/// `peak` (S each) what comes before it.
inline std::string check_list(const Schedule& schedule, int rank, std::vector<StageProgress>* progress,
                              std::vector<int>* peak) {
  const int m = schedule.micro_batches;
  for (size_t k = 0; k < schedule.actions[rank].size(); k++) {
    const Action& action = schedule.actions[rank][k];
    const bool stage_exists = action.stage >= 0 && action.stage < schedule.stages;
    const bool exists =
        stage_exists && action.micro_batch >= 0 && action.micro_batch < m && op_letter(action.op) != '?';
    const std::string reason =
        exists ? misplaced(schedule, rank, action, (*progress)[action.stage]) : "there is no such stage or micro-batch";
    if (!reason.empty()) {
      return format_text("rank %d, action %zu, %s: %s", rank, k, action_text(action).c_str(), reason.c_str());
    }
    StageProgress& stage = (*progress)[action.stage];
    if (action.op == Op::kForward) stage.forward++;
    if (action.op == Op::kBackward || action.op == Op::kBackwardInput) stage.backward++;
    if (action.op == Op::kBackward || action.op == Op::kBackwardWeight) stage.weight++;
    if (!schedule.forward_only) (*peak)[action.stage] = std::max((*peak)[action.stage], stage.forward - stage.weight);
  }
  return "";
}

/// Each (stage, micro-batch) has one F and one B (or one I and one W) on its owner, in an order that the rank alone can
/// run: F before B, I before W, each ascending. Returns "" and the peak in flight of each stage (most micro-batches
/// between F and the end of B or W; 1 if forward only), or the rank, action and reason of the first fault (and the rank
/// in *rank_at_fault, if asked for). O(actions).
inline std::string check_lists(const Schedule& schedule, std::vector<int>* peak, int* rank_at_fault = nullptr) {
  std::string fault = check_placement(schedule);
  if (!fault.empty()) return fault;
  const int m = schedule.micro_batches;
  int at = 0;
  std::vector<StageProgress> progress(schedule.stages);
  peak->assign(schedule.stages, schedule.forward_only ? std::min(m, 1) : 0);
  for (int rank = 0; rank < schedule.ranks && fault.empty(); rank++) {
    fault = check_list(schedule, rank, &progress, peak);
    at = rank;
  }
  for (int stage = 0; stage < schedule.stages && fault.empty(); stage++) {
    const StageProgress& done = progress[stage];
    Action missing{Op::kForward, stage, done.forward};
    if (done.forward == m && !schedule.forward_only) {
      missing = done.backward < m ? Action{Op::kBackward, stage, done.backward}
                                  : Action{Op::kBackwardWeight, stage, done.weight};
    }
    if (missing.micro_batch == m) continue;
    at = schedule.owner[stage];
    fault = format_text("rank %d: %s is missing", at, action_text(missing).c_str());
  }
  if (rank_at_fault) *rank_at_fault = at;
  return fault;
}
