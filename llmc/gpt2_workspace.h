// gpt2_workspace.h -- device memory that all stages of a rank share; nothing in it outlives one call of a stage.
//
// Three parts, each as large as the largest micro-batch asks for:
//   scratch    5 C floatX per token, and the floats that layernorm, bias and attention backward ask for
//   loss head  logits of a chunk of rows, statistics of the final layernorm; only with the last stage
//   one block  15 C floatX and 4 + NH floats per token: all of a block but its output, which a stage of recompute level
//              3 makes in the forward pass and again in the backward pass; only where the rank has such a stage
// The lower levels need nothing beyond the scratch: ln1, ln2 and gelu lie where they disturb nothing (see `unkept`).
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/gpt2_block.h"

/// Logits that are alive at once. On the CPU device 64 MiB in fp32: more would not be faster there, and a micro-batch
/// of 1024 tokens would otherwise need 200 MiB. A GPU wants whole waves of tiles: 5336 rows of GPT-2's vocabulary.
constexpr size_t kLogitsChunkElements = kIsCpuDevice ? size_t{1} << 24 : size_t{1} << 28;

/// Rows of logits that are alive at once. A function of the model only, so that every layout adds in the same order.
inline int logits_chunk_rows(const GPT2Config& config, int rows) {
  return static_cast<int>(std::min<size_t>(rows, std::max<size_t>(16, kLogitsChunkElements / config.padded_vocab)));
}

class GPT2Workspace {
 public:
  /// For the rank's `stages` and micro-batches of at most `shape`. Allocates bytes(...) of device memory.
  GPT2Workspace(MemoryLedger& ledger, const GPT2Config& config, const BatchShape& shape,
                const std::vector<StageRange>& stages)
      : sizes_(sizes(config, shape, stages)),
        wide_("scratch", sizes_.wide, &ledger),
        narrow_("scratch", sizes_.narrow, &ledger),
        floats_("scratch", sizes_.floats, &ledger),
        statistics_("scratch", sizes_.statistics, &ledger),
        logits_("logits", sizes_.logits, &ledger),
        block_values_("recomputed block", sizes_.block_values, &ledger),
        block_statistics_("recomputed block", sizes_.block_statistics, &ledger) {
    const size_t BTC = static_cast<size_t>(shape.rows()) * config.channels;
    if (sizes_.block_values == 0) return;
    place_block_arrays(block_, block_values_.data(), BTC, 0, kRecomputeBlock - 1);
    place_block_statistics(block_, block_statistics_.data(), config, shape);
  }

  /// Device memory of a workspace, exactly.
  static size_t bytes(const GPT2Config& config, const BatchShape& shape, const std::vector<StageRange>& stages) {
    const Sizes n = sizes(config, shape, stages);
    return (n.wide + n.narrow + n.logits + n.block_values) * sizeof(floatX) +
           (n.floats + n.statistics + n.block_statistics) * sizeof(float);
  }

  BlockScratch scratch() { return {wide_.data(), narrow_.data(), floats_.data()}; }
  float* statistics() { return statistics_.data(); }
  floatX* logits() { return logits_.data(); }

  /// Where the arrays lie that a slot of this recompute level does not keep (the other pointers mean nothing). Below
  /// level 3 in the scratch:
  ///   ln1 in narrow   read by the product that makes qkv, before attention's projection is written there; made again
  ///                   when d(attention), the last thing there, has been used up
  ///   ln2 in wide     read by the product that makes fc, before gelu is written there; made again after d(gelu)
  ///   gelu in wide    read by the last product; made again before d(gelu) is written there
  /// Level 3 requires that the workspace was made for such a stage.
  BlockActivations unkept(int recompute) {
    assert((recompute < kRecomputeBlock || sizes_.block_values > 0) && "GPT2Workspace: no memory for a whole block");
    if (recompute >= kRecomputeBlock) return block_;
    BlockActivations block;
    block.ln1 = narrow_.data();
    block.ln2 = block.gelu = wide_.data();
    return block;
  }

 private:
  struct Sizes {
    size_t wide, narrow, floats, statistics, logits, block_values, block_statistics;  // elements
  };
  static Sizes sizes(const GPT2Config& config, const BatchShape& shape, const std::vector<StageRange>& stages) {
    bool head = false, block = false;
    for (const StageRange& stage : stages) {
      head = head || stage.head;
      block = block || stage.recompute >= kRecomputeBlock;
    }
    const size_t rows = shape.rows(), BTC = rows * config.channels;
    Sizes n = {4 * BTC, BTC, block_scratch_floats(config, shape), 0, 0, 0, 0};
    if (head) n.statistics = 2 * rows;
    if (head) n.logits = static_cast<size_t>(logits_chunk_rows(config, shape.rows())) * config.padded_vocab;
    if (block) n.block_values = block_width(0, kRecomputeBlock - 1) * BTC;
    if (block) n.block_statistics = block_statistic_elements(config, shape);
    return n;
  }

  Sizes sizes_;
  DeviceArray<floatX> wide_, narrow_;
  DeviceArray<float> floats_, statistics_;
  DeviceArray<floatX> logits_, block_values_;
  DeviceArray<float> block_statistics_;
  BlockActivations block_;
};
