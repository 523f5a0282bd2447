// gpt2_memory.h -- bytes of device memory that each rank of a layout will allocate, from sizes alone.
//
// The planner asks before anything exists, the trainer prints the answer beside what was allocated, and tests demand
// that the two are equal. So every DeviceArray of parallel_gpt2.h has its line here.
#pragma once

#include "llmc/gpt2_stage.h"
#include "llmc/pipeline_layout.h"
#include "llmc/zero.h"

/// One rank of one replica of a job. `plan`: of the replica's micro-batches.
struct MemoryQuestion {
  const GPT2Config& config;
  const ParameterTable& table;
  BatchShape shape;  // micro-batch
  const PipelineLayout& layout;
  const Plan& plan;
  int rank = 0;  // within the replica
  int replicas = 1;
  int replica = 0;
  int zero_stage = 0;
  bool exact = true;
  int most_micro_batches = 1;  // of one run, training or forward only
};

/// Bytes of one rank.
struct RankMemory {
  size_t parameters = 0;   // floatX
  size_t gradients = 0;    // float, all buffers of the tree
  size_t optimizer = 0;    // moments, and the fp32 master where floatX is not float
  size_t activations = 0;  // all slots of all stages
  size_t scratch = 0;      // shared by the stages: one block's scratch, logits, recomputed block, norm
  size_t exchange = 0;     // gradients on their way between replicas, tied embedding
  size_t tokens = 0;       // tokens and losses of all micro-batches
  size_t total() const { return parameters + gradients + optimizer + activations + scratch + exchange + tokens; }
};

/// The ranges of a layout's stages; those of `rank`, in the order of the model, where `rank` >= 0.
inline std::vector<StageRange> layout_stages(const PipelineLayout& layout, const std::vector<int>& owner,
                                             int rank = -1) {
  std::vector<StageRange> stages;
  for (int s = 0; s < layout.stages(); ++s) {
    if (rank >= 0 && owner[s] != rank) continue;
    stages.push_back({layout.cuts[s], layout.cuts[s + 1], s == 0, s + 1 == layout.stages(), layout.recompute[s]});
  }
  return stages;
}

/// Exact, O(stages + tensors).
inline RankMemory gpt2_rank_memory(const MemoryQuestion& q) {
  const std::vector<int>& owner = q.plan.schedule.owner;
  const StageLayout stages = make_stage_layout(q.table, layout_stages(q.layout, owner, q.rank), q.replicas);
  const StageMemory of_optimizer = StageOptimizer::forecast(stages, q.zero_stage, q.replica);
  RankMemory memory;
  memory.parameters = of_optimizer.parameters * sizeof(floatX);
  memory.gradients =
      of_optimizer.gradients * sizeof(float) * GradientTree::buffer_count(q.plan.schedule.micro_batches, q.exact);
  memory.optimizer = of_optimizer.state * sizeof(float) * (StageOptimizer::kHasMaster ? 3 : 2);
  for (int s = 0; s < q.layout.stages(); ++s) {
    if (owner[s] != q.rank) continue;
    const size_t slots = std::max(1, q.plan.slots[s]);
    memory.activations +=
        slots * slot_bytes(q.config, q.layout.cuts[s + 1] - q.layout.cuts[s], q.shape, q.layout.recompute[s]);
  }
  memory.scratch = GPT2Workspace::bytes(q.config, q.shape, stages.stages) + of_optimizer.norm_blocks * sizeof(double);
  memory.exchange = of_optimizer.receive * sizeof(float);
  if (stages.has_embedding() != stages.has_head()) memory.exchange += of_optimizer.tied * sizeof(float);
  for (const StageRange& range : stages.stages) {
    memory.tokens += GPT2Stage::token_bytes(range, q.shape) * q.most_micro_batches;
  }
  return memory;
}
