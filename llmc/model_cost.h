// model_cost.h -- what one micro-batch costs in each part of a model: FLOPs from its sizes, or times that were
// measured.
//
// The planner and the simulator only compare and add costs, so the unit is free; `unit` says which it is. FLOPs count
// what is really multiplied: causal attention half of its square, the backward pass of attention two and a half times
// its forward pass (the scores are computed again), the head once forward and twice backward.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/gpt2_config.h"
#include "llmc/schedule.h"

constexpr int kRecomputeLevels = 4;  // of StageRange::recompute

/// Cost of one micro-batch in each part. The head's three parts all run inside F of the last stage.
struct ModelCost {
  StageCost embedding;
  std::vector<StageCost> blocks;  // (L)
  StageCost head;
  /// What level k of recomputation adds to each block; below zero where work moves from W to I. [0] is zero.
  std::array<StageCost, kRecomputeLevels> recompute{};
  double transfer = 0;         // one message between two stages
  bool early_gradient = true;  // the executor sends dx of an unsplit B before its weight gradient
  std::string unit = "GFLOP";
};

/// FLOPs that a device does in the time in which a value reaches the next device, for cost models without a
/// measurement: a data-centre GPU beside its links, 400 TFLOP/s and 270 GB/s in bf16; half the rate and twice the bytes
/// in fp32.
constexpr double kFlopsPerValue = 3000;

/// GFLOP of a micro-batch of B x T tokens. Per token and block: 24 C^2 in the four matrices and 2 C (T + 1) in
/// attention, on average over the positions. Head: 2 C Vp. GELU and layernorm count 8 FLOPs an element where they are
/// done again. The weight gradients that recomputation moves into I: see gpt2_block.h.
inline ModelCost gpt2_model_cost(const GPT2Config& config, int B, int T) {
  const double C = config.channels, giga_rows = 1e-9 * B * T;
  const double matmul = giga_rows * 24 * C * C, attention = giga_rows * 2 * C * (T + 1.0);
  const double head = giga_rows * 2 * C * config.padded_vocab;
  const double gelu = giga_rows * 8 * 4 * C, layernorm = giga_rows * 8 * C;
  ModelCost cost;
  cost.embedding = {giga_rows * C, giga_rows * 2 * C, 0};
  cost.blocks.assign(static_cast<size_t>(config.layers), {matmul + attention, matmul + 2.5 * attention, matmul});
  cost.head = {head, head, head};
  const double moved[kRecomputeLevels] = {0, matmul / 3, matmul * 11 / 12, matmul};  // fcproj; and fc, qkv; and attproj
  const double again[kRecomputeLevels] = {0, gelu, gelu + 2 * layernorm, matmul + attention};
  for (int level = 1; level < kRecomputeLevels; level++) {
    cost.recompute[level] = {0, moved[level] + again[level], -moved[level]};
  }
  cost.transfer = giga_rows * C * kFlopsPerValue;
  return cost;
}

/// Cost of each stage, for the simulator. `recompute`: level of each stage, empty: none. `forward_only`: the head runs
/// its forward alone.
inline std::vector<StageCost> stage_costs(const ModelCost& model, const std::vector<int>& cuts,
                                          const std::vector<int>& recompute = {}, bool forward_only = false) {
  std::vector<StageCost> costs(cuts.size() - 1);
  for (size_t stage = 0; stage < costs.size(); stage++) {
    for (int block = cuts[stage]; block < cuts[stage + 1]; block++) add_cost(&costs[stage], model.blocks[block]);
    if (recompute.empty()) continue;
    add_cost(&costs[stage], model.recompute[recompute[stage]], cuts[stage + 1] - cuts[stage]);
    costs[stage].backward_weight = std::max(0.0, costs[stage].backward_weight);  // rounding
  }
  add_cost(&costs.front(), model.embedding);
  costs.back().forward += forward_only ? model.head.forward : total_cost(model.head);
  return costs;
}

/// Cost of a whole micro-batch without recomputation: the work that a perfect pipeline spreads over its ranks.
inline double whole_cost(const ModelCost& model) {
  double sum = total_cost(model.embedding) + total_cost(model.head);
  for (const StageCost& block : model.blocks) sum += total_cost(block);
  return sum;
}
