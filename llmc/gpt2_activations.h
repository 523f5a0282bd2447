// gpt2_activations.h -- the buffers that a micro-batch needs on a pipeline stage, and their exact sizes.
//
// A slot holds everything that one micro-batch leaves behind between its forward and its backward pass on a stage:
//   input x (B,T,C), then per block ln1 qkv attention residual ln2 fc gelu output and the row statistics.
// The backward pass needs no further memory per micro-batch, because every gradient that must live on is written over
// an activation that has just died:
//   d(output) over output, d(fc) over fc, d(residual) over residual, d(qkv) over qkv, d(input) over input.
// So a stage's output gradient is received into the slot's output, its input gradient is sent from the slot's input,
// and a slot has the same size whether the input and weight gradients run together or apart.
//
// A stage with a recompute level (StageRange) keeps less: what its blocks do not keep lies in memory that all stages of
// the rank share (gpt2_workspace.h) and is made again in the backward pass (gpt2_block.h says at what cost).
//   level                        elements of floatX per token       floats per token
//   0  everything is kept        C + blocks * 16 C                  blocks * (4 + NH)
//   1  not gelu                  C + blocks * 12 C                  blocks * (4 + NH)
//   2  not gelu, ln1, ln2        C + blocks * 10 C                  blocks * (4 + NH)
//   3  only the output           C + blocks * C                     0
// GPT-2 124M, B=4 T=256, fp32: 580, 436, 364 and 39 MiB a slot.
#pragma once

#include <vector>

#include "llmc/device.h"
#include "llmc/gpt2_config.h"
#include "llmc/memory.h"
#include "llmc/stage_layout.h"

/// Shape of the micro-batch that runs through the stage: at most what was allocated.
struct BatchShape {
  int B = 0;
  int T = 0;
  int rows() const { return B * T; }
};

/// Activations of one block for one micro-batch.
struct BlockActivations {
  floatX* ln1 = nullptr;        // (B,T,C)
  floatX* qkv = nullptr;        // (B,T,3C)   later d(qkv)
  floatX* attention = nullptr;  // (B,T,C)
  floatX* residual = nullptr;   // (B,T,C)    later d(residual)
  floatX* ln2 = nullptr;        // (B,T,C)
  floatX* fc = nullptr;         // (B,T,4C)   before GELU; later d(fc)
  floatX* gelu = nullptr;       // (B,T,4C)
  floatX* output = nullptr;     // (B,T,C)    later d(output)
  float* ln1_mean = nullptr;    // (B,T)
  float* ln1_rstd = nullptr;    // (B,T)
  float* ln2_mean = nullptr;    // (B,T)
  float* ln2_rstd = nullptr;    // (B,T)
  float* lse = nullptr;         // (B,NH,T)
};

/// Recompute levels. A level includes the ones below it.
constexpr int kRecomputeGelu = 1;
constexpr int kRecomputeLayernorms = 2;
constexpr int kRecomputeBlock = 3;  // everything but the block's output

/// An array of a block: elements per token in units of C, and the highest recompute level at which a slot keeps it.
struct BlockArray {
  using Pointer = floatX* BlockActivations::*;
  Pointer pointer;
  int width;
  int kept_up_to;
};
constexpr BlockArray kBlockArrays[] = {{&BlockActivations::ln1, 1, kRecomputeGelu},
                                       {&BlockActivations::qkv, 3, kRecomputeLayernorms},
                                       {&BlockActivations::attention, 1, kRecomputeLayernorms},
                                       {&BlockActivations::residual, 1, kRecomputeLayernorms},
                                       {&BlockActivations::ln2, 1, kRecomputeGelu},
                                       {&BlockActivations::fc, 4, kRecomputeLayernorms},
                                       {&BlockActivations::gelu, 4, 0},
                                       {&BlockActivations::output, 1, kRecomputeBlock}};

/// Elements per token, in units of C, of the arrays that are kept up to a level from `lowest` to `highest`. A slot has
/// those from its own level on; a block that is made again as a whole needs those below kRecomputeBlock.
constexpr int block_width(int lowest, int highest) {
  int width = 0;
  for (const BlockArray& array : kBlockArrays) {
    if (array.kept_up_to >= lowest && array.kept_up_to <= highest) width += array.width;
  }
  return width;
}

/// Points these arrays at `memory`, one after the other; returns the end.
inline floatX* place_block_arrays(BlockActivations& block, floatX* memory, size_t BTC, int lowest, int highest) {
  for (const BlockArray& array : kBlockArrays) {
    if (array.kept_up_to < lowest || array.kept_up_to > highest) continue;
    block.*array.pointer = memory;
    memory += array.width * BTC;
  }
  return memory;
}

/// Floats of the statistics of one block: mean and 1 / standard deviation of both layernorms, log-sum-exp of attention.
inline size_t block_statistic_elements(const GPT2Config& config, const BatchShape& shape) {
  return static_cast<size_t>(shape.rows()) * (4 + config.heads);
}

/// Points the statistics at `memory`; returns the end.
inline float* place_block_statistics(BlockActivations& block, float* memory, const GPT2Config& config,
                                     const BatchShape& shape) {
  const size_t rows = shape.rows();
  block.ln1_mean = memory;
  block.ln1_rstd = memory + rows;
  block.ln2_mean = memory + 2 * rows;
  block.ln2_rstd = memory + 3 * rows;
  block.lse = memory + 4 * rows;
  return memory + block_statistic_elements(config, shape);
}

/// One activation slot of a stage. `output` is the last block's output, or the input where the stage has no blocks.
struct ActivationSlot {
  floatX* input = nullptr;
  floatX* output = nullptr;
  std::vector<BlockActivations> blocks;
};

/// Memory of one slot: floatX and float arrays.
struct SlotMemory {
  DeviceArray<floatX> values;
  DeviceArray<float> statistics;
};

inline size_t slot_value_elements(const GPT2Config& config, int blocks, const BatchShape& shape, int recompute) {
  const size_t per_block = block_width(recompute, kRecomputeBlock);
  return static_cast<size_t>(shape.rows()) * config.channels * (1 + per_block * static_cast<size_t>(blocks));
}
inline size_t slot_statistic_elements(const GPT2Config& config, int blocks, const BatchShape& shape, int recompute) {
  return recompute < kRecomputeBlock ? block_statistic_elements(config, shape) * static_cast<size_t>(blocks) : 0;
}
/// Device memory of one slot of a stage with `blocks` blocks: what its two arrays take, exactly.
inline size_t slot_bytes(const GPT2Config& config, int blocks, const BatchShape& shape, int recompute) {
  return slot_value_elements(config, blocks, shape, recompute) * sizeof(floatX) +
         slot_statistic_elements(config, blocks, shape, recompute) * sizeof(float);
}

/// Cuts a slot's memory, sized by the two functions above, into named arrays. What the slot does not keep at this level
/// is where `shared` says, for every block the same.
inline ActivationSlot carve_slot(SlotMemory& memory, const GPT2Config& config, int blocks, const BatchShape& shape,
                                 int recompute, const BlockActivations& shared) {
  const size_t BTC = static_cast<size_t>(shape.rows()) * config.channels;
  float* statistics = memory.statistics.data();
  ActivationSlot slot;
  slot.input = slot.output = memory.values.data();
  floatX* values = slot.input + BTC;
  for (int l = 0; l < blocks; ++l) {
    BlockActivations block = shared;
    values = place_block_arrays(block, values, BTC, recompute, kRecomputeBlock);
    if (recompute < kRecomputeBlock) statistics = place_block_statistics(block, statistics, config, shape);
    slot.output = block.output;
    slot.blocks.push_back(block);
  }
  return slot;
}
