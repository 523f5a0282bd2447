// plan.h -- checks a schedule, counts its activation slots and simulates it, in one pass over its dependency graph.
//
// Memory: micro-batch i uses activation slot i % slots[s] of stage s. A slot holds the stage's input x, its activations
// and its output y. The gradient dy is received over y (the next stage has y by then), the input gradient dx is written
// over x and sent from there. So a slot is the only credit there is.
// Nodes: F, B (or I and W), xF(s,i) "activation i into stage s", xB(s,i) "gradient i into stage s". Edges:
//   order        the actions of a rank's list, one after the other
//   data         F(s-1,i) -> xF(s,i) -> F(s,i) -> B(s,i);  B(s+1,i) -> xB(s,i) -> B(s,i);  I(s,i) -> W(s,i)
//   link         xF(s,i-1) -> xF(s,i), xB(s,i-1) -> xB(s,i): the messages of a hop keep their order
//   same buffer  xF(s+1,i) -> xB(s,i): y has been sent before dy comes over it
//   credit       W(s,i-slots) -> xF(s,i) and xB(s-1,i-slots) -> xF(s,i): the slot is free, its dx has been sent
// A hop within a rank has no message: F(s,i) reads y of stage s-1, B(s,i) writes dx over it, and the credit goes to F.
// The loss head, forward and backward, is the tail of F on the last stage and leaves dy in y.
// If the graph has no cycle, no timing can make the plan hang, provided that a rank posts each receive as soon as its
// credit is there, not when it comes to the action that needs it. Sends may be rendezvous.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "llmc/schedules.h"

/// kBackward is B or I; kWeight is there only where the backward pass is split; the last two only between two ranks.
enum class NodeKind { kForward, kBackward, kWeight, kActivation, kGradient };
constexpr int kNodeKinds = 5;

inline NodeKind node_kind(Op op) {
  if (op == Op::kForward) return NodeKind::kForward;
  return op == Op::kBackwardWeight ? NodeKind::kWeight : NodeKind::kBackward;
}

struct PlanNode {
  NodeKind kind;
  int stage;  // of a message: the stage that receives
  int micro_batch;
};

struct Interval {
  double start = 0;
  double end = 0;
};

struct Plan {
  Schedule schedule;
  PlanCosts costs;
  std::vector<int> slots;       // (S) activation slots to allocate
  std::vector<int> peak;        // (S) most micro-batches between F and the end of B or W; 1 if forward only
  std::vector<PlanNode> order;  // every node, by start time and never before one that it depends on (blocking executor)
  std::vector<Interval> times;  // (kNodeKinds S m) simulated, see at(); zeros for nodes that are not there
  std::vector<double> busy;     // (p) time that the rank computes
  double makespan = 0;          // from the first action of any rank to the end of the last
  double bubble = 0;            // idle time of a rank, mean over the ranks: makespan - sum(busy)/p
  double bubble_fraction = 0;   // bubble / makespan; 0 for an empty plan

  int node_id(NodeKind kind, int stage, int micro_batch) const {
    return (static_cast<int>(kind) * schedule.stages + stage) * schedule.micro_batches + micro_batch;
  }
  const Interval& at(NodeKind kind, int stage, int micro_batch) const {
    return times[node_id(kind, stage, micro_batch)];
  }
};

/// Whether stage s gets its input by message: there is a stage s-1, and another rank has it.
inline bool has_link_into(const Schedule& schedule, int stage) {
  return stage > 0 && stage < schedule.stages && schedule.owner[stage] != schedule.owner[stage - 1];
}

// ---- the graph ----------------------------------------------------------------------------------------------------

/// The nodes and edges of the header comment. Requires lists that check_lists accepts.
class PlanGraph {
 public:
  explicit PlanGraph(const Plan& plan) : plan_(plan), schedule_(plan.schedule) {
    const size_t nodes = static_cast<size_t>(kNodeKinds) * schedule_.stages * schedule_.micro_batches;
    assert(nodes <= INT32_MAX);
    cost_.assign(nodes, kAbsent);
    successors_.resize(nodes);
    for (const std::vector<Action>& list : schedule_.actions) add_list(list);
    for (int stage = 0; stage < schedule_.stages; stage++) {
      for (int i = 0; i < schedule_.micro_batches; i++) {
        add_input(stage, i);
        if (!schedule_.forward_only) add_gradient(stage, i);
        if (i >= plan_.slots[stage]) add_credit(stage, i);
      }
    }
  }

  /// For every node, by node_id, those that wait for it.
  const std::vector<std::vector<int>>& successors() const { return successors_; }

  /// Start and end of every node, each as early as its predecessors allow, and the nodes in order of start. Returns ""
  /// or the nodes of a cycle. Ties go to the lower node number, so the result is the same everywhere.
  std::string simulate(std::vector<Interval>* times, std::vector<PlanNode>* order) const {
    const int nodes = static_cast<int>(cost_.size());
    std::vector<int> waits_for(nodes, 0);
    for (const std::vector<int>& next : successors_) {
      for (int node : next) waits_for[node]++;
    }
    times->assign(nodes, Interval());
    order->clear();
    using Ready = std::pair<double, int>;
    std::priority_queue<Ready, std::vector<Ready>, std::greater<Ready>> ready;
    size_t present = 0;
    for (int node = 0; node < nodes; node++) {
      if (cost_[node] == kAbsent) continue;
      present++;
      if (waits_for[node] == 0) ready.push({0.0, node});
    }
    while (!ready.empty()) {
      const int node = ready.top().second;
      ready.pop();
      order->push_back(decode(node));
      Interval& time = (*times)[node];
      time.end = time.start + cost_[node];
      for (int next : successors_[node]) {
        (*times)[next].start = std::max((*times)[next].start, release(node, next, time));
        if (--waits_for[next] == 0) ready.push({(*times)[next].start, next});
      }
    }
    return order->size() == present ? "" : describe_cycle(waits_for);
  }

 private:
  static constexpr double kAbsent = -1;

  /// When `next` no longer waits for `node`: at its end, or when an unsplit B has its input gradient.
  double release(int node, int next, const Interval& time) const {
    const PlanNode from = decode(node);
    const bool early = plan_.costs.early_gradient && from.kind == NodeKind::kBackward &&
                       decode(next).kind == NodeKind::kGradient &&
                       cost_[id(NodeKind::kWeight, from.stage, from.micro_batch)] == kAbsent;
    return early ? time.start + cost_of(from.stage, from.micro_batch).backward_input : time.end;
  }

  const StageCost& cost_of(int stage, int i) const { return plan_.costs.of(stage, i, schedule_.micro_batches); }
  int id(NodeKind kind, int stage, int i) const { return plan_.node_id(kind, stage, i); }
  PlanNode decode(int node) const {
    const int m = schedule_.micro_batches, stages = schedule_.stages;
    return {static_cast<NodeKind>(node / m / stages), node / m % stages, node % m};
  }
  void edge(int from, int to) { successors_[from].push_back(to); }

  void add_list(const std::vector<Action>& list) {
    int previous = -1;
    for (const Action& action : list) {
      const int node = id(node_kind(action.op), action.stage, action.micro_batch);
      cost_[node] = action_cost(cost_of(action.stage, action.micro_batch), action.op);
      if (previous >= 0) edge(previous, node);
      previous = node;
    }
  }

  /// The way of the activation into F(s,i).
  void add_input(int stage, int i) {
    const int forward = id(NodeKind::kForward, stage, i);
    if (stage == 0) return;
    const int producer = id(NodeKind::kForward, stage - 1, i);
    if (!has_link_into(schedule_, stage)) return edge(producer, forward);
    const int message = id(NodeKind::kActivation, stage, i);
    cost_[message] = plan_.costs.transfer;
    edge(producer, message);
    edge(message, forward);
    if (i > 0) edge(id(NodeKind::kActivation, stage, i - 1), message);
  }

  /// The way of the gradient into B(s,i), and W after I.
  void add_gradient(int stage, int i) {
    const int backward = id(NodeKind::kBackward, stage, i), weight = id(NodeKind::kWeight, stage, i);
    edge(id(NodeKind::kForward, stage, i), backward);
    if (cost_[weight] != kAbsent) edge(backward, weight);
    if (stage + 1 == schedule_.stages) return;
    const int producer = id(NodeKind::kBackward, stage + 1, i);
    if (!has_link_into(schedule_, stage + 1)) return edge(producer, backward);
    const int message = id(NodeKind::kGradient, stage, i);
    cost_[message] = plan_.costs.transfer;
    edge(producer, message);
    edge(message, backward);
    edge(id(NodeKind::kActivation, stage + 1, i), message);
    if (i > 0) edge(id(NodeKind::kGradient, stage, i - 1), message);
  }

  /// Micro-batch i takes the slot that `old` = i - slots has used.
  void add_credit(int stage, int i) {
    const int old = i - plan_.slots[stage];
    const bool by_message = has_link_into(schedule_, stage);
    const int taker = id(by_message ? NodeKind::kActivation : NodeKind::kForward, stage, i);
    if (schedule_.forward_only) {  // free as soon as the next stage has y
      if (stage + 1 == schedule_.stages) return edge(id(NodeKind::kForward, stage, old), taker);
      const NodeKind reader = has_link_into(schedule_, stage + 1) ? NodeKind::kActivation : NodeKind::kForward;
      return edge(id(reader, stage + 1, old), taker);
    }
    const bool split = cost_[id(NodeKind::kWeight, stage, old)] != kAbsent;
    edge(id(split ? NodeKind::kWeight : NodeKind::kBackward, stage, old), taker);
    if (by_message) edge(id(NodeKind::kGradient, stage - 1, old), taker);
  }

  std::string node_text(int node) const {
    const PlanNode at = decode(node);
    const int rank = schedule_.owner[at.stage];
    if (at.kind == NodeKind::kActivation || at.kind == NodeKind::kGradient) {
      const bool activation = at.kind == NodeKind::kActivation;
      return format_text("%s %d to stage %d", activation ? "activation" : "gradient", at.micro_batch, at.stage);
    }
    const bool split = cost_[id(NodeKind::kWeight, at.stage, at.micro_batch)] != kAbsent;
    const char letter = at.kind == NodeKind::kForward ? 'F' : at.kind == NodeKind::kWeight ? 'W' : split ? 'I' : 'B';
    return format_text("rank %d %c(%d,%d)", rank, letter, at.stage, at.micro_batch);
  }

  /// Every node that is left waits for another that is left: walk backwards until one comes again.
  std::string describe_cycle(const std::vector<int>& waits_for) const {
    const int nodes = static_cast<int>(cost_.size());
    std::vector<int> predecessor(nodes, -1), seen(nodes, 0);
    int node = -1;
    for (int from = 0; from < nodes; from++) {
      if (cost_[from] == kAbsent || waits_for[from] == 0) continue;
      for (int to : successors_[from]) predecessor[to] = from;
      node = from;
    }
    while (seen[node]++ == 0) node = predecessor[node];
    std::string text = "it would hang in a circle: " + node_text(node);
    constexpr int kMostNodes = 12;
    int count = 0;
    for (int at = predecessor[node]; at != node; at = predecessor[at]) {
      if (++count <= kMostNodes) text += " waits for " + node_text(at);
    }
    if (count > kMostNodes) text += format_text(" ... (%d more)", count - kMostNodes);
    return text + " waits for " + node_text(node);
  }

  const Plan& plan_;
  const Schedule& schedule_;
  std::vector<double> cost_;
  std::vector<std::vector<int>> successors_;
};

// ---- the plan -----------------------------------------------------------------------------------------------------

/// The slots of each stage, from its peak in flight: min(m, peak + 1 if the input comes by message).
/// Peak slots always suffice: take any order of the actions that the bare dependencies allow, put xF just before its F
/// and xB just after its B; F(s,i) then comes after W(s,i-peak), so this order satisfies the credits too, and where
/// there is an order there is no cycle. With just as many, though, the next input could not be under way while the rank
/// computes; one more slot hides it, for one micro-batch's activations of each of the rank's stages.
/// More slots gain nothing, the simulated time is that of one slot for every micro-batch: for gpipe, 1f1b, looped-bfs
/// and the zero-bubble ones at any costs, for the others with equal stages and transfers up to half a stage's F+I+W.
/// (Where links are slower than that, further slots could save those others up to 30%; test_plan.cpp.)
/// Forward only: two slots, one computes and one moves.
inline std::vector<int> count_slots(const Schedule& schedule, const std::vector<int>& peak) {
  std::vector<int> slots(peak.size());
  for (int stage = 0; stage < schedule.stages; stage++) {
    const bool one_more = schedule.forward_only || has_link_into(schedule, stage);
    slots[stage] = std::min(schedule.micro_batches, peak[stage] + (one_more ? 1 : 0));
  }
  return slots;
}

/// Checks plan->schedule with plan->slots (counted here if empty) and plan->costs, and fills in the rest. Returns ""
/// or, leaving the rest undefined, what is wrong. Host only, deterministic, O(S m log(S m)).
inline std::string evaluate_plan(Plan* plan) {
  const Schedule& schedule = plan->schedule;
  const std::string fault = check_lists(schedule, &plan->peak);
  if (!fault.empty()) return fault;
  assert(static_cast<int>(plan->costs.stages.size()) == schedule.stages && "one cost for each stage");
  if (plan->slots.empty()) plan->slots = count_slots(schedule, plan->peak);
  assert(static_cast<int>(plan->slots.size()) == schedule.stages && "one number of slots for each stage");
  for (int stage = 0; stage < schedule.stages; stage++) {
    if (plan->slots[stage] < plan->peak[stage]) {
      return format_text("rank %d, stage %d: %d micro-batches are in flight, but it has %d activation slots",
                         schedule.owner[stage], stage, plan->peak[stage], plan->slots[stage]);
    }
  }
  const std::string cycle = PlanGraph(*plan).simulate(&plan->times, &plan->order);
  if (!cycle.empty()) return cycle;
  plan->makespan = 0;
  plan->busy.assign(schedule.ranks, 0);
  double total = 0;
  for (const PlanNode& node : plan->order) {
    const Interval& time = plan->at(node.kind, node.stage, node.micro_batch);
    plan->makespan = std::max(plan->makespan, time.end);
    if (node.kind == NodeKind::kActivation || node.kind == NodeKind::kGradient) continue;
    plan->busy[schedule.owner[node.stage]] += time.end - time.start;
    total += time.end - time.start;
  }
  plan->bubble = plan->makespan - total / schedule.ranks;
  plan->bubble_fraction = plan->makespan > 0 ? plan->bubble / plan->makespan : 0;
  return "";
}

/// The plan of a schedule. `slots` empty: counted by count_slots; else these, one for each stage. A schedule that
/// cannot run is a user error (it may come from a file) that names the rank, the action and the reason.
inline Plan make_plan(Schedule schedule, PlanCosts costs, std::vector<int> slots = {}) {
  Plan plan;
  plan.schedule = std::move(schedule);
  plan.costs = std::move(costs);
  plan.slots = std::move(slots);
  const std::string fault = evaluate_plan(&plan);
  if (!fault.empty()) user_error("schedule %s cannot run: %s", plan.schedule.name.c_str(), fault.c_str());
  return plan;
}

/// The fastest forward-only plan for stages on the ranks `owner` (S) with the slots that training has (S, each >= 1;
/// empty: two a stage). Tries every order of forward_only_schedule, the wave and groups of 1..p micro-batches; those
/// that would need more slots are left out, and group 1 is always there. Ties go to the wave, then to the smaller
/// group.
inline Plan make_forward_plan(int ranks, const std::vector<int>& owner, int micro_batches, const PlanCosts& costs,
                              const std::vector<int>& slots = {}) {
  Plan best;
  for (int group = 0; group <= (static_cast<int>(owner.size()) > ranks ? ranks : 1); group++) {
    Plan plan;
    plan.schedule = forward_only_schedule(ranks, owner, micro_batches, group);
    plan.costs = costs;
    plan.slots = slots;
    if (!evaluate_plan(&plan).empty()) continue;
    if (best.schedule.owner.empty() || plan.makespan < best.makespan) best = std::move(plan);
  }
  assert(!best.schedule.owner.empty() && "group 1 always runs");
  return best;
}

/// FNV-1a over everything in the plan and the cuts of its partition. Ranks compare it before the first step: different
/// flags, versions or measured costs are then an error message and not a hang.
class PlanHash {
 public:
  template <class Number>
  void add(Number number) {
    unsigned char bytes[sizeof(Number)];
    memcpy(bytes, &number, sizeof(Number));
    for (unsigned char byte : bytes) value_ = (value_ ^ byte) * 0x100000001b3ULL;
  }
  template <class Number>
  void add(const std::vector<Number>& numbers) {
    add(numbers.size());
    for (const Number& number : numbers) add(number);
  }
  void add(const Interval& time) { add(time.start), add(time.end); }
  void add(const Action& action) { add(static_cast<int>(action.op)), add(action.stage), add(action.micro_batch); }
  void add(const PlanNode& node) { add(static_cast<int>(node.kind)), add(node.stage), add(node.micro_batch); }
  void add(const StageCost& cost) { add(cost.forward), add(cost.backward_input), add(cost.backward_weight); }
  void add(const std::string& text) { add(std::vector<char>(text.begin(), text.end())); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

inline uint64_t plan_hash(const Plan& plan, const std::vector<int>& cuts = {}) {
  PlanHash hash;
  const Schedule& schedule = plan.schedule;
  hash.add(schedule.name), hash.add(schedule.ranks), hash.add(schedule.stages), hash.add(schedule.micro_batches);
  hash.add(static_cast<int>(schedule.forward_only)), hash.add(schedule.owner), hash.add(schedule.actions);
  hash.add(plan.costs.stages), hash.add(plan.costs.each), hash.add(plan.costs.transfer),
      hash.add(plan.costs.early_gradient), hash.add(plan.slots), hash.add(plan.peak);
  hash.add(plan.order), hash.add(plan.times), hash.add(plan.busy), hash.add(plan.makespan), hash.add(plan.bubble);
  hash.add(plan.bubble_fraction), hash.add(cuts);
  return hash.value();
}
