// pipeline_layout.h -- how one replica of the model is spread over its ranks: what the planner decides, and what
// ParallelGPT2 builds.
//
// Everything else follows from it: the stages and their owners, the actions for any number of micro-batches (replicas
// may differ by one), activation slots, messages, memory. It is the same on every rank.
#pragma once

#include <string>
#include <vector>

#include "llmc/model_cost.h"
#include "llmc/plan.h"
#include "llmc/schedule_csv.h"
#include "llmc/schedules.h"

struct PipelineLayout {
  std::string schedule = "1f1b";  // a name, or a CSV file
  int ranks = 1;                  // p, of one replica
  int chunks = 1;                 // stages of each rank
  int in_flight = 0;              // greedy schedules: most micro-batches in flight on a rank; 0: p
  std::vector<int> cuts;          // (S+1) stage s holds blocks cuts[s] .. cuts[s+1]-1
  std::vector<int> recompute;     // (S) level of each stage
  ModelCost cost;                 // of one micro-batch and one message: measured times, or FLOPs

  int stages() const { return static_cast<int>(cuts.size()) - 1; }
};

/// The whole model as one stage on one rank.
inline PipelineLayout one_stage_layout(const ModelCost& cost) {
  PipelineLayout layout;
  layout.cuts = {0, static_cast<int>(cost.blocks.size())};
  layout.recompute = {0};
  layout.cost = cost;
  return layout;
}

/// Costs of the layout's stages for the simulator. `forward_only`: a validation pass.
inline PlanCosts layout_costs(const PipelineLayout& layout, bool forward_only = false) {
  return {stage_costs(layout.cost, layout.cuts, layout.recompute, forward_only), layout.cost.transfer,
          layout.cost.early_gradient};
}

inline bool is_schedule_file(const std::string& schedule) {
  return schedule.size() > 4 && schedule.compare(schedule.size() - 4, 4, ".csv") == 0;
}

/// A schedule file for `ranks` ranks and `micro_batches` micro-batches; user error if it is for others; any
/// number of micro-batches will do where `micro_batches` is below 0.
inline Schedule read_layout_schedule(const std::string& path, int ranks, int micro_batches) {
  Schedule schedule = read_schedule_csv(path);
  if (schedule.ranks != ranks) {
    user_error("--schedule %s is for %d ranks, --pp is %d; use --pp %d", path.c_str(), schedule.ranks, ranks,
               schedule.ranks);
  }
  if (micro_batches >= 0 && schedule.micro_batches != micro_batches) {
    user_error(
        "--schedule %s is for %d micro-batches, a replica has %d of a step; use --batch-tokens %d x micro-batch x "
        "seq-len x replicas",
        path.c_str(), schedule.micro_batches, micro_batches, schedule.micro_batches);
  }
  return schedule;
}

/// The actions of a replica with `micro_batches` >= 0 micro-batches. The greedy schedules fit the layout's costs.
inline Schedule layout_schedule(const PipelineLayout& layout, int micro_batches) {
  if (is_schedule_file(layout.schedule)) return read_layout_schedule(layout.schedule, layout.ranks, micro_batches);
  if (layout.in_flight == 0) {
    return make_schedule(layout.schedule, layout.ranks, layout.chunks, micro_batches, layout_costs(layout));
  }
  const std::vector<int> owner = stage_owners(find_schedule_kind(layout.schedule), layout.ranks, layout.chunks);
  Schedule schedule = greedy_schedule(owner, layout.ranks, micro_batches, layout_costs(layout), layout.in_flight);
  schedule.name = layout.schedule;
  return schedule;
}

/// The checked plan of one optimizer step of a replica with `micro_batches` >= 0 micro-batches.
inline Plan make_train_plan(const PipelineLayout& layout, int micro_batches) {
  return make_plan(layout_schedule(layout, micro_batches), layout_costs(layout));
}
