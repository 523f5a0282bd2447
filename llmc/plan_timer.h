// plan_timer.h -- the simulator of plan.h prepared for one schedule: the same graph, many costs, only the time.
//
// The planner asks for the time of the same actions hundreds of times, with blocks moved from stage to stage. The order
// of the nodes does not depend on costs (any topological order will do), so it is made once, with each node's
// predecessors in one array; a question is then a walk over it: some 10 ns a node instead of 1 us.
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/plan.h"

class PlanTimer {
 public:
  /// `plan`: accepted by evaluate_plan, slots included.
  explicit PlanTimer(const Plan& plan) {
    const size_t ids = plan.times.size(), nodes = plan.order.size();
    std::vector<int> position(ids, -1);
    for (size_t k = 0; k < nodes; k++) position[id(plan, plan.order[k])] = static_cast<int>(k);
    for (const PlanNode& node : plan.order) kinds_.push_back(cost_index(plan, node, position));
    const PlanGraph graph(plan);
    const std::vector<std::vector<int>>& successors = graph.successors();
    std::vector<int> count(nodes + 1, 0);
    for (size_t node = 0; node < ids; node++) {
      for (int next : successors[node]) count[position[next] + 1]++;
    }
    for (size_t k = 1; k <= nodes; k++) count[k] += count[k - 1];
    first_ = count;
    edges_.resize(static_cast<size_t>(first_.back()));
    for (size_t node = 0; node < ids; node++) {
      for (int next : successors[node]) {
        const int from = position[node];
        const bool early = plan.order[position[next]].kind == NodeKind::kGradient && kinds_[from] % 4 == kWholeBackward;
        edges_[count[position[next]]++] = {from, early};
      }
    }
    start_.resize(nodes);
    end_.resize(nodes);
  }

  size_t nodes() const { return end_.size(); }

  /// The makespan that evaluate_plan gives for these costs, to the bit.
  double makespan(const PlanCosts& costs) {
    assert(costs.each.empty() && "one cost a stage");
    cost_.assign(1, costs.transfer);
    for (const StageCost& stage : costs.stages) {
      for (Op op : {Op::kForward, Op::kBackward, Op::kBackwardInput, Op::kBackwardWeight}) {
        cost_.push_back(action_cost(stage, op));
      }
    }
    double last = 0;
    for (size_t k = 0; k < end_.size(); k++) {
      double start = 0;
      for (int e = first_[k]; e < first_[k + 1]; e++) {
        const Edge edge = edges_[e];
        const bool early = edge.early && costs.early_gradient;
        start = std::max(start, early ? start_[edge.from] + cost_[kinds_[edge.from] + 1] : end_[edge.from]);
      }
      start_[k] = start;
      end_[k] = start + cost_[kinds_[k]];
      last = std::max(last, end_[k]);
    }
    return last;
  }

 private:
  struct Edge {
    int from;
    bool early;  // a gradient that an unsplit B may send before its weight gradient
  };
  static constexpr int kWholeBackward = 2;  // place of B among the costs of a stage, modulo 4; I is the next

  static int id(const Plan& plan, const PlanNode& node) {
    return plan.node_id(node.kind, node.stage, node.micro_batch);
  }
  // Place in cost_: the message, then F, B, I, W of each stage.
  static int cost_index(const Plan& plan, const PlanNode& node, const std::vector<int>& position) {
    const bool split = position[plan.node_id(NodeKind::kWeight, node.stage, node.micro_batch)] >= 0;
    if (node.kind == NodeKind::kForward) return 1 + 4 * node.stage;
    if (node.kind == NodeKind::kBackward) return 1 + 4 * node.stage + (split ? 2 : 1);
    return node.kind == NodeKind::kWeight ? 1 + 4 * node.stage + 3 : 0;
  }

  std::vector<int> first_;  // edges into the k-th node: edges_[first_[k]] .. edges_[first_[k+1]-1]
  std::vector<Edge> edges_;
  std::vector<int> kinds_;  // of the k-th node, index in cost_
  std::vector<double> cost_, start_, end_;
};
