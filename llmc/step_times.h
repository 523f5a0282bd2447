// step_times.h -- when the actions, messages and phases of a step took place: plain data, from a run (recorder.h) or
// from a simulated plan. What telemetry.h and trace.h work on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "llmc/clock.h"
#include "llmc/plan.h"

/// `ready`: when what the action sends was there. Of an unsplit B that is the end of its input gradient, else `end`.
struct ActionTime {
  Action action;
  double start = 0, ready = 0, end = 0;
};

/// One rank's end of a message between two stages. `stage` is the one that receives: from stage-1 for an activation,
/// from stage+1 for a gradient. `ready`: when this end could begin, `done`: when it was finished.
struct TransferTime {
  bool is_send = false;
  bool is_gradient = false;
  int stage = 0;
  int micro_batch = 0;
  size_t bytes = 0;
  double ready = 0, done = 0;
};

/// Work outside the pipeline: reduction, norm, optimizer.
struct PhaseTime {
  std::string name;
  double start = 0, end = 0;
};

/// One rank's step. All times in seconds after `begin`, which is on the host's clock.
struct StepTimes {
  double begin = 0;
  double end = 0;                   // of the step: its last event
  std::vector<ActionTime> actions;  // in the order in which the rank ran them
  std::vector<TransferTime> transfers;
  std::vector<PhaseTime> phases;
};

/// A message from rank to rank, both ends together: under way from `begin`, when its data was there and its receive
/// could begin, to `end`, when the receiver had it. So it holds whatever time the backend takes to notice either.
struct MessageTime {
  int from = 0, to = 0;  // ranks of the pipeline
  bool is_gradient = false;
  int stage = 0;  // receives
  int micro_batch = 0;
  size_t bytes = 0;
  double begin = 0, end = 0;
};

// ---- all ranks on one clock ---------------------------------------------------------------------------------------

namespace step_times_detail {

template <class Value>
inline void put(std::string* bytes, const Value& value) {
  static_assert(std::is_trivially_copyable<Value>::value, "copied byte by byte");
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(Value));
}
template <class Value>
inline void put(std::string* bytes, const std::vector<Value>& values) {
  put(bytes, values.size());
  for (const Value& value : values) put(bytes, value);
}

/// Reads what put() wrote, in the same order.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <class Value>
  void get(Value* value) {
    assert(at_ + sizeof(Value) <= bytes_.size());
    memcpy(value, bytes_.data() + at_, sizeof(Value));
    at_ += sizeof(Value);
  }
  template <class Value>
  void get(std::vector<Value>* values) {
    size_t count = 0;
    get(&count);
    values->resize(count);
    for (Value& value : *values) get(&value);
  }
  void get(std::string* text) {
    std::vector<char> characters;
    get(&characters);
    text->assign(characters.begin(), characters.end());
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace step_times_detail

inline std::string to_bytes(const StepTimes& times) {
  using step_times_detail::put;
  std::string bytes;
  put(&bytes, times.begin), put(&bytes, times.end), put(&bytes, times.actions), put(&bytes, times.transfers);
  put(&bytes, times.phases.size());
  for (const PhaseTime& phase : times.phases) {
    put(&bytes, std::vector<char>(phase.name.begin(), phase.name.end()));
    put(&bytes, phase.start), put(&bytes, phase.end);
  }
  return bytes;
}

inline StepTimes from_bytes(const std::string& bytes) {
  step_times_detail::Reader reader(bytes);
  StepTimes times;
  size_t phases = 0;
  reader.get(&times.begin), reader.get(&times.end), reader.get(&times.actions), reader.get(&times.transfers);
  reader.get(&phases);
  times.phases.resize(phases);
  for (PhaseTime& phase : times.phases) reader.get(&phase.name), reader.get(&phase.start), reader.get(&phase.end);
  return times;
}

/// The same times counted from another moment: every time + `seconds`, begin - `seconds`.
inline void shift(StepTimes* times, double seconds) {
  times->begin -= seconds;
  times->end += seconds;
  for (ActionTime& action : times->actions) {
    action.start += seconds, action.ready += seconds, action.end += seconds;
  }
  for (TransferTime& transfer : times->transfers) transfer.ready += seconds, transfer.done += seconds;
  for (PhaseTime& phase : times->phases) phase.start += seconds, phase.end += seconds;
}

/// Brings the ranks to the clock of the first one, and counts from the start of the first action of any (from the
/// earliest begin if there is none).
inline void align(std::vector<StepTimes>* ranks, const std::vector<ClockOffset>& offsets) {
  assert(ranks->size() == offsets.size());
  double origin = 1e300, earliest = 1e300;
  for (size_t r = 0; r < ranks->size(); ++r) {
    StepTimes& times = (*ranks)[r];
    times.begin -= offsets[r].offset;
    earliest = std::min(earliest, times.begin);
    for (const ActionTime& action : times.actions) origin = std::min(origin, times.begin + action.start);
  }
  if (origin == 1e300) origin = earliest;
  for (StepTimes& times : *ranks) shift(&times, times.begin - origin);
}

/// The steps of all ranks of the group on one clock, in rank order, on rank 0; nothing on the others. Collective; some
/// 100 bytes an action to rank 0.
inline std::vector<StepTimes> gather_step_times(Control& control, const StepTimes& mine) {
  const std::vector<ClockOffset> offsets = measure_clocks(control);
  std::vector<StepTimes> ranks;
  for (const std::string& bytes : control.gather_texts(to_bytes(mine))) ranks.push_back(from_bytes(bytes));
  if (!ranks.empty()) align(&ranks, offsets);
  return ranks;
}

// ---- messages, plans ----------------------------------------------------------------------------------------------

/// Both ends of every message, ordered by link and begin. `ranks` on one clock.
inline std::vector<MessageTime> join_messages(const std::vector<StepTimes>& ranks) {
  std::map<std::tuple<bool, int, int>, std::pair<int, double>> produced;  // what a message carries: by whom, when
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const ActionTime& time : ranks[rank].actions) {
      if (time.action.op == Op::kBackwardWeight) continue;
      const bool is_gradient = time.action.op != Op::kForward;
      const int receiver = time.action.stage + (is_gradient ? -1 : 1);
      produced[std::make_tuple(is_gradient, receiver, time.action.micro_batch)] = {static_cast<int>(rank), time.ready};
    }
  }
  std::vector<MessageTime> messages;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const TransferTime& transfer : ranks[rank].transfers) {
      if (transfer.is_send) continue;
      const auto producer = produced.find(std::make_tuple(transfer.is_gradient, transfer.stage, transfer.micro_batch));
      assert(producer != produced.end() && "a message that nobody has sent");
      const double begin = std::max(producer->second.second, transfer.ready);
      messages.push_back({producer->second.first, static_cast<int>(rank), transfer.is_gradient, transfer.stage,
                          transfer.micro_batch, transfer.bytes, std::min(begin, transfer.done), transfer.done});
    }
  }
  std::stable_sort(messages.begin(), messages.end(), [](const MessageTime& a, const MessageTime& b) {
    return std::make_tuple(a.from, a.to, a.is_gradient, a.stage, a.begin) <
           std::make_tuple(b.from, b.to, b.is_gradient, b.stage, b.begin);
  });
  return messages;
}

/// When the simulated action has what it sends; see ActionTime::ready.
inline double output_time(const Plan& plan, const Action& action) {
  const Interval& time = plan.at(node_kind(action.op), action.stage, action.micro_batch);
  const bool early = plan.costs.early_gradient && action.op == Op::kBackward;
  if (!early) return time.end;
  return time.start + plan.costs.of(action.stage, action.micro_batch, plan.schedule.micro_batches).backward_input;
}

/// The simulated plan as if every rank had recorded it; seconds are the plan's unit of time, messages have no bytes.
inline std::vector<StepTimes> simulated_step_times(const Plan& plan) {
  const Schedule& schedule = plan.schedule;
  std::vector<StepTimes> ranks(static_cast<size_t>(schedule.ranks));
  for (int rank = 0; rank < schedule.ranks; ++rank) {
    for (const Action& action : schedule.actions[rank]) {
      const Interval& time = plan.at(node_kind(action.op), action.stage, action.micro_batch);
      ranks[rank].actions.push_back({action, time.start, output_time(plan, action), time.end});
    }
    ranks[rank].end = plan.makespan;
  }
  for (const PlanNode& node : plan.order) {
    const bool is_gradient = node.kind == NodeKind::kGradient;
    if (!is_gradient && node.kind != NodeKind::kActivation) continue;
    const int receiver = schedule.owner[node.stage], sender = schedule.owner[node.stage + (is_gradient ? 1 : -1)];
    const Interval& time = plan.at(node.kind, node.stage, node.micro_batch);
    for (bool is_send : {true, false}) {
      ranks[is_send ? sender : receiver].transfers.push_back(
          {is_send, is_gradient, node.stage, node.micro_batch, 0, time.start, time.end});
    }
  }
  return ranks;
}
