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
// Elements of floatX per token: C + blocks * 16 C; floats per token: blocks * (4 + NH). GPT-2 124M, B=4 T=256, fp32:
// 579 MiB.
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

inline size_t slot_value_elements(const GPT2Config& config, int blocks, const BatchShape& shape) {
  return static_cast<size_t>(shape.rows()) * config.channels * (1 + 16 * static_cast<size_t>(blocks));
}
inline size_t slot_statistic_elements(const GPT2Config& config, int blocks, const BatchShape& shape) {
  return static_cast<size_t>(shape.rows()) * (4 + config.heads) * static_cast<size_t>(blocks);
}
inline size_t slot_bytes(const GPT2Config& config, int blocks, const BatchShape& shape) {
  return slot_value_elements(config, blocks, shape) * sizeof(floatX) +
         slot_statistic_elements(config, blocks, shape) * sizeof(float);
}

/// Cuts a slot's memory into named arrays.
inline ActivationSlot carve_slot(SlotMemory& memory, const GPT2Config& config, int blocks, const BatchShape& shape) {
  const size_t rows = shape.rows(), BTC = rows * config.channels;
  floatX* values = memory.values.data();
  float* statistics = memory.statistics.data();
  auto take = [&](size_t n) {
    floatX* p = values;
    values += n;
    return p;
  };
  auto take_statistic = [&](size_t n) {
    float* p = statistics;
    statistics += n;
    return p;
  };
  ActivationSlot slot;
  slot.input = slot.output = take(BTC);
  for (int l = 0; l < blocks; ++l) {
    BlockActivations a;
    a.ln1 = take(BTC);
    a.qkv = take(3 * BTC);
    a.attention = take(BTC);
    a.residual = take(BTC);
    a.ln2 = take(BTC);
    a.fc = take(4 * BTC);
    a.gelu = take(4 * BTC);
    a.output = take(BTC);
    a.ln1_mean = take_statistic(rows);
    a.ln1_rstd = take_statistic(rows);
    a.ln2_mean = take_statistic(rows);
    a.ln2_rstd = take_statistic(rows);
    a.lse = take_statistic(rows * config.heads);
    slot.output = a.output;
    slot.blocks.push_back(a);
  }
  return slot;
}
