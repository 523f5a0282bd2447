// telemetry.h -- what a step's times say about the pipeline: where each rank's time went, what the bubble was and what
// it should have been, how well messages were hidden, who is slow. Pure functions of plain data; text in
// telemetry_text.h.
//
//   rank 0 |F0F1........B0----F2..B1----..|     busy = F + B + I + W
//   rank 1 |,,F0B0----F1B1----....F2..B2--|     , warm-up   . waiting for an activation or a gradient, other, drain
//
// Between the start of the first action of any rank and the end of the last one (the makespan) a rank is busy or idle.
// Idle time before its first action is warm-up, after its last action drain. A gap in between is waiting up to the
// arrival of what the next action needs, if that came after the rank had become idle; the rest is `other` (the host was
// late, the device slow to start). All bubbles are sync bubbles: makespan - mean busy.
#pragma once

#include <cmath>
#include <optional>

#include "llmc/step_times.h"

/// Seconds of one rank.
struct RankTimes {
  double forward = 0, backward = 0, input_gradient = 0, weight_gradient = 0;
  double warm_up = 0, wait_activation = 0, wait_gradient = 0, other = 0, drain = 0;
  double after = 0;  // from the end of the makespan to the end of the step: reduction, norm, optimizer
  double busy() const { return forward + backward + input_gradient + weight_gradient; }
  double idle() const { return warm_up + wait_activation + wait_gradient + other + drain; }
};

/// All messages of one direction between two stages.
struct LinkTimes {
  int from = 0, to = 0;  // ranks of the pipeline
  bool is_gradient = false;
  int stage = 0;  // receives
  int messages = 0;
  size_t bytes = 0;
  double total = 0;    // seconds under way, added up
  double exposed = 0;  // of these, while the receiver was idle before the action that takes the message
  double latency() const { return messages > 0 ? total / messages : 0; }
  double bytes_per_second() const { return total > 0 ? static_cast<double>(bytes) / total : 0; }
  double overlap() const { return total > 0 ? 1 - exposed / total : 1; }
};

struct PipelineReport {
  std::string schedule;
  int ranks = 0, stages = 0, micro_batches = 0;
  std::vector<RankTimes> rank;    // (ranks)
  std::vector<LinkTimes> links;   // those that had messages
  std::vector<PhaseTime> phases;  // by name: start 0, end the longest total of any rank
  PlanCosts costs;                // measured: each action's time and their means, median time of a message; seconds
  double makespan = 0, simulated_makespan = 0;
  double bubble = 0, simulated_bubble = 0;  // seconds a rank, mean over the ranks
  std::optional<double> closed_form;        // the same for equal stages and free messages, if the caller knows it
  double mean_busy = 0;
  double imbalance = 1;          // most busy / mean busy
  std::vector<double> slowness;  // (ranks) busy time over planned cost, relative to the median rank; 0: nothing planned
  double bubble_fraction() const { return makespan > 0 ? bubble / makespan : 0; }
  double simulated_fraction() const { return simulated_makespan > 0 ? simulated_bubble / simulated_makespan : 0; }
  double closed_form_fraction() const { return *closed_form / (*closed_form + mean_busy); }
  /// Part of the message time of all links that was hidden behind work; 1 without messages.
  double overlap() const {
    LinkTimes all;
    for (const LinkTimes& link : links) all.total += link.total, all.exposed += link.exposed;
    return all.overlap();
  }
};

namespace telemetry_detail {

/// The lower median: with two values the smaller one, so that the other can be compared with it. 0 if there is none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const size_t middle = (values.size() - 1) / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle), values.end());
  return values[middle];
}

using ActionKey = std::tuple<bool, int, int>;  // gradient or activation into (stage, micro-batch)

/// What action needs before it starts; false for what needs nothing from another stage.
inline bool needs(const Schedule& schedule, const Action& action, ActionKey* key) {
  const bool is_gradient = action.op != Op::kForward;
  if (action.op == Op::kBackwardWeight) return false;
  if (is_gradient ? action.stage + 1 == schedule.stages : action.stage == 0) return false;
  *key = std::make_tuple(is_gradient, action.stage, action.micro_batch);
  return true;
}

/// When what each action needs arrived at its rank by message. A hand-over within a rank is never waited for.
inline std::map<ActionKey, double> arrivals(const std::vector<MessageTime>& messages) {
  std::map<ActionKey, double> arrival;
  for (const MessageTime& m : messages) arrival[std::make_tuple(m.is_gradient, m.stage, m.micro_batch)] = m.end;
  return arrival;
}

inline RankTimes rank_times(const Schedule& schedule, const StepTimes& times, double makespan,
                            const std::map<ActionKey, double>& arrival) {
  RankTimes rank;
  double idle_since = 0;
  bool first = true;
  for (const ActionTime& time : times.actions) {
    const Op op = time.action.op;
    double& kind = op == Op::kForward         ? rank.forward
                   : op == Op::kBackward      ? rank.backward
                   : op == Op::kBackwardInput ? rank.input_gradient
                                              : rank.weight_gradient;
    kind += time.end - time.start;
    ActionKey key;
    double waited = 0;
    if (needs(schedule, time.action, &key) && arrival.count(key) != 0) {
      waited = std::min(std::max(arrival.at(key) - idle_since, 0.0), time.start - idle_since);
    }
    if (first) {
      rank.warm_up = time.start;
    } else {
      (std::get<0>(key) ? rank.wait_gradient : rank.wait_activation) += waited;
      rank.other += time.start - idle_since - waited;
    }
    idle_since = time.end;
    first = false;
  }
  rank.drain = makespan - idle_since;
  rank.after = std::max(times.end - makespan, 0.0);
  return rank;
}

/// Cost of each micro-batch on each stage (S m), as it was in this step.
inline std::vector<StageCost> measured_costs(const Schedule& schedule, const std::vector<StepTimes>& ranks) {
  std::vector<StageCost> costs(static_cast<size_t>(schedule.stages) * schedule.micro_batches);
  for (const StepTimes& times : ranks) {
    for (const ActionTime& time : times.actions) {
      const Op op = time.action.op;
      StageCost& cost =
          costs[static_cast<size_t>(time.action.stage) * schedule.micro_batches + time.action.micro_batch];
      if (op == Op::kForward) cost.forward = time.end - time.start;
      if (op == Op::kBackward || op == Op::kBackwardInput) cost.backward_input = time.ready - time.start;
      if (op == Op::kBackward) cost.backward_weight = time.end - time.ready;
      if (op == Op::kBackwardWeight) cost.backward_weight = time.end - time.start;
    }
  }
  return costs;
}

/// Mean over the micro-batches for each stage; 0 where there are none.
inline std::vector<StageCost> mean_costs(const Schedule& schedule, const std::vector<StageCost>& each) {
  std::vector<StageCost> means(static_cast<size_t>(schedule.stages));
  for (size_t k = 0; k < each.size(); ++k) {
    add_cost(&means[k / schedule.micro_batches], each[k], 1.0 / schedule.micro_batches);
  }
  return means;
}

inline std::vector<LinkTimes> link_times(const Schedule& schedule, const std::vector<StepTimes>& ranks,
                                         const std::vector<MessageTime>& messages) {
  std::map<ActionKey, Interval> idle_before;  // the gap before the action that takes the message
  for (const StepTimes& times : ranks) {
    double idle_since = 0;
    for (const ActionTime& time : times.actions) {
      ActionKey key;
      if (needs(schedule, time.action, &key)) idle_before[key] = {idle_since, time.start};
      idle_since = time.end;
    }
  }
  std::vector<LinkTimes> links;
  for (const MessageTime& m : messages) {  // ordered by link
    if (links.empty() || links.back().stage != m.stage || links.back().is_gradient != m.is_gradient) {
      links.push_back({m.from, m.to, m.is_gradient, m.stage});
    }
    LinkTimes& link = links.back();
    const Interval& gap = idle_before.at(std::make_tuple(m.is_gradient, m.stage, m.micro_batch));
    link.messages++;
    link.bytes += m.bytes;
    link.total += m.end - m.begin;
    link.exposed += std::max(std::min(m.end, gap.end) - std::max(m.begin, gap.start), 0.0);
  }
  return links;
}

/// Counts the times of a replica from its own first action: others may have begun before it.
inline void start_at_first_action(std::vector<StepTimes>* ranks) {
  double first = 1e300;
  for (const StepTimes& times : *ranks) {
    if (!times.actions.empty()) first = std::min(first, times.actions.front().start);
  }
  if (first == 1e300) return;
  for (StepTimes& times : *ranks) shift(&times, -first);
}

/// The longest total of any rank, for each name in order of first appearance.
inline std::vector<PhaseTime> phase_times(const std::vector<StepTimes>& ranks) {
  std::vector<PhaseTime> longest;
  for (const StepTimes& times : ranks) {
    std::map<std::string, double> totals;
    for (const PhaseTime& phase : times.phases) totals[phase.name] += phase.end - phase.start;
    for (const PhaseTime& phase : times.phases) {
      auto found = std::find_if(longest.begin(), longest.end(), [&](const auto& l) { return l.name == phase.name; });
      if (found == longest.end()) found = longest.insert(longest.end(), {phase.name, 0, 0});
      found->end = std::max(found->end, totals[phase.name]);
    }
  }
  return longest;
}

inline std::vector<double> slowness(const std::vector<double>& busy, const std::vector<double>& planned) {
  std::vector<double> ratios(busy.size(), 0), present;
  for (size_t r = 0; r < busy.size(); ++r) {
    if (planned[r] <= 0) continue;
    ratios[r] = busy[r] / planned[r];
    present.push_back(ratios[r]);
  }
  const double middle = median(present);
  for (double& ratio : ratios) ratio = middle > 0 ? ratio / middle : 0;
  return ratios;
}

}  // namespace telemetry_detail

/// The report of one replica's step. `ranks`: its ranks in pipeline order, on one clock (gather_step_times); `plan`:
/// the plan that they ran, whose costs may be in any unit. Deterministic; O(S m log(S m)).
inline PipelineReport make_report(const Plan& plan, std::vector<StepTimes> ranks) {
  using namespace telemetry_detail;
  const Schedule& schedule = plan.schedule;
  assert(static_cast<int>(ranks.size()) == schedule.ranks && "the times of every rank of the replica");
  start_at_first_action(&ranks);
  PipelineReport report;
  report.schedule = schedule.name;
  report.ranks = schedule.ranks, report.stages = schedule.stages, report.micro_batches = schedule.micro_batches;
  for (const StepTimes& times : ranks) {
    if (!times.actions.empty()) report.makespan = std::max(report.makespan, times.actions.back().end);
  }
  const std::vector<MessageTime> messages = join_messages(ranks);
  const std::map<ActionKey, double> arrival = arrivals(messages);
  std::vector<double> busy, durations;
  for (const StepTimes& times : ranks) {
    report.rank.push_back(rank_times(schedule, times, report.makespan, arrival));
    busy.push_back(report.rank.back().busy());
    report.mean_busy += busy.back() / schedule.ranks;
  }
  report.bubble = report.makespan - report.mean_busy;
  if (report.mean_busy > 0) report.imbalance = *std::max_element(busy.begin(), busy.end()) / report.mean_busy;
  report.slowness = slowness(busy, plan.busy);
  report.links = link_times(schedule, ranks, messages);
  report.phases = phase_times(ranks);
  for (const MessageTime& message : messages) durations.push_back(message.end - message.begin);
  const std::vector<StageCost> each = measured_costs(schedule, ranks);
  report.costs = {mean_costs(schedule, each), median(durations), true, each};
  Plan simulated = plan;
  simulated.costs = report.costs;
  const std::string fault = evaluate_plan(&simulated);
  assert(fault.empty() && "the plan has run");
  report.simulated_makespan = simulated.makespan;
  report.simulated_bubble = simulated.bubble;
  return report;
}

/// The plan with the times that were measured: for timeline_text.
inline Plan measured_plan(Plan plan, const PipelineReport& report, std::vector<StepTimes> ranks) {
  telemetry_detail::start_at_first_action(&ranks);
  for (const StepTimes& times : ranks) {
    for (const ActionTime& time : times.actions) {
      plan.times[plan.node_id(node_kind(time.action.op), time.action.stage, time.action.micro_batch)] = {time.start,
                                                                                                         time.end};
    }
  }
  for (size_t r = 0; r < report.rank.size(); ++r) plan.busy[r] = report.rank[r].busy();
  plan.costs = report.costs;
  plan.makespan = report.makespan, plan.bubble = report.bubble, plan.bubble_fraction = report.bubble_fraction();
  return plan;
}

/// Finds a rank that is slower for its share of work than the others, again and again: thermal limits, a neighbour on
/// the same cores, a wrong cost model.
class StragglerWatch {
 public:
  /// Named after `reports` reports in a row in which its slowness exceeds `threshold`.
  explicit StragglerWatch(int reports = 3, double threshold = 1.1) : reports_(reports), threshold_(threshold) {}

  /// The slowest such rank after this report, -1: none.
  int update(const PipelineReport& report) {
    in_a_row_.resize(report.slowness.size(), 0);
    int slowest = -1;
    for (size_t r = 0; r < in_a_row_.size(); ++r) {
      in_a_row_[r] = report.slowness[r] > threshold_ ? in_a_row_[r] + 1 : 0;
      if (in_a_row_[r] < reports_) continue;
      if (slowest < 0 || report.slowness[r] > report.slowness[static_cast<size_t>(slowest)])
        slowest = static_cast<int>(r);
    }
    return slowest;
  }

 private:
  int reports_;
  double threshold_;
  std::vector<int> in_a_row_;
};
