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
// Sources: GPipe, arXiv 1811.06965; 1F1B (PipeDream-Flush), arXiv 2006.09503 and 2104.04473.
#pragma once

#include <algorithm>
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

/// Lists without actions for one stage a rank: stage s on rank s.
inline Schedule empty_schedule(const std::string& name, int ranks, int micro_batches) {
  assert(ranks >= 1 && micro_batches >= 0);
  Schedule schedule;
  schedule.name = name;
  schedule.ranks = ranks;
  schedule.stages = ranks;
  schedule.micro_batches = micro_batches;
  for (int rank = 0; rank < ranks; rank++) schedule.owner.push_back(rank);
  schedule.actions.resize(static_cast<size_t>(ranks));
  return schedule;
}

/// GPipe: all forwards, then all backwards.
///     rank 0 |F0-F1-F2-F3-..................B0----B1----B2----B3----|
///     rank 1 |...F0-F1-F2-F3-.........B0----B1----B2----B3----......|
///     rank 2 |......F0-F1-F2-F3-B0----B1----B2----B3----............|
/// Bubble (p-1)(tF+tB) a step, and every micro-batch's activations are alive at once: m on each rank.
inline Schedule gpipe_schedule(int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("gpipe", ranks, micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    std::vector<Action>& list = schedule.actions[rank];
    for (int i = 0; i < micro_batches; i++) list.push_back({Op::kForward, rank, i});
    for (int i = 0; i < micro_batches; i++) list.push_back({Op::kBackward, rank, i});
  }
  return schedule;
}

/// 1F1B: as many forwards ahead as there are stages behind, then one forward, one backward in turn.
///     rank 0 |F0-F1-F2-............B0----F3-B1----...B2----...B3----|
///     rank 1 |...F0-F1-......B0----F2-B1----F3-B2----...B3----......|
///     rank 2 |......F0-B0----F1-B1----F2-B2----F3-B3----............|
/// The same bubble (p-1)(tF+tB) as GPipe, but a rank keeps only min(m, p-rank) micro-batches alive, whatever m is. With
/// fewer micro-batches than stages the warm-up takes all of them, and 1F1B is GPipe.
inline Schedule one_forward_one_backward_schedule(int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("1f1b", ranks, micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    std::vector<Action>& list = schedule.actions[rank];
    const int warm_up = std::min(ranks - 1 - rank, micro_batches);
    for (int i = 0; i < warm_up; i++) list.push_back({Op::kForward, rank, i});
    for (int i = 0; i < micro_batches - warm_up; i++) {
      list.push_back({Op::kForward, rank, warm_up + i});
      list.push_back({Op::kBackward, rank, i});
    }
    for (int i = micro_batches - warm_up; i < micro_batches; i++) list.push_back({Op::kBackward, rank, i});
  }
  return schedule;
}

/// Forward passes alone, for validation: the stages stay where training has put them (`owner`, one rank for each
/// stage), m is free. A rank with several stages takes p micro-batches through each in turn, so that the ranks overlap.
inline Schedule forward_only_schedule(int ranks, const std::vector<int>& owner, int micro_batches) {
  Schedule schedule = empty_schedule("forward", ranks, micro_batches);
  schedule.stages = static_cast<int>(owner.size());
  schedule.owner = owner;
  schedule.forward_only = true;
  for (int first = 0; first < micro_batches; first += ranks) {
    for (int stage = 0; stage < schedule.stages; stage++) {
      for (int i = first; i < std::min(first + ranks, micro_batches); i++) {
        schedule.actions[owner[stage]].push_back({Op::kForward, stage, i});
      }
    }
  }
  return schedule;
}

/// The schedules that --schedule knows.
inline const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = {"gpipe", "1f1b"};
  return names;
}

/// The schedule of that name for `ranks` >= 1 and `micro_batches` >= 0; any other name is a user error. Host only, the
/// same on every rank, O(p m).
inline Schedule make_schedule(const std::string& name, int ranks, int micro_batches) {
  if (name == "gpipe") return gpipe_schedule(ranks, micro_batches);
  if (name == "1f1b") return one_forward_one_backward_schedule(ranks, micro_batches);
  std::string known;
  for (const std::string& other : schedule_names()) known += (known.empty() ? "" : " or ") + other;
  user_error("--schedule %s is unknown; use %s", name.c_str(), known.c_str());
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

/// Each (stage, micro-batch) has one F and one B (or one I and one W) on its owner, in an order that the rank alone can
/// run: F before B, I before W, each ascending. Returns "" and the peak in flight of each stage (most micro-batches
/// between F and the end of B or W; 1 if forward only), or the rank, action and reason of the first fault. O(actions).
inline std::string check_lists(const Schedule& schedule, std::vector<int>* peak) {
  const std::string fault = check_placement(schedule);
  if (!fault.empty()) return fault;
  const int m = schedule.micro_batches;
  std::vector<StageProgress> progress(schedule.stages);
  peak->assign(schedule.stages, schedule.forward_only ? std::min(m, 1) : 0);
  for (int rank = 0; rank < schedule.ranks; rank++) {
    for (size_t k = 0; k < schedule.actions[rank].size(); k++) {
      const Action& action = schedule.actions[rank][k];
      const bool stage_exists = action.stage >= 0 && action.stage < schedule.stages;
      const bool exists =
          stage_exists && action.micro_batch >= 0 && action.micro_batch < m && op_letter(action.op) != '?';
      const std::string reason =
          exists ? misplaced(schedule, rank, action, progress[action.stage]) : "there is no such stage or micro-batch";
      if (!reason.empty()) {
        return format_text("rank %d, action %zu, %s: %s", rank, k, action_text(action).c_str(), reason.c_str());
      }
      StageProgress& stage = progress[action.stage];
      if (action.op == Op::kForward) stage.forward++;
      if (action.op == Op::kBackward || action.op == Op::kBackwardInput) stage.backward++;
      if (action.op == Op::kBackward || action.op == Op::kBackwardWeight) stage.weight++;
      if (!schedule.forward_only) (*peak)[action.stage] = std::max((*peak)[action.stage], stage.forward - stage.weight);
    }
  }
  for (int stage = 0; stage < schedule.stages; stage++) {
    const StageProgress& done = progress[stage];
    Action missing{Op::kForward, stage, done.forward};
    if (done.forward == m && !schedule.forward_only) {
      missing = done.backward < m ? Action{Op::kBackward, stage, done.backward}
                                  : Action{Op::kBackwardWeight, stage, done.weight};
    }
    if (missing.micro_batch < m) {
      return format_text("rank %d: %s is missing", schedule.owner[stage], action_text(missing).c_str());
    }
  }
  return "";
}
