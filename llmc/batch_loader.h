// batch_loader.h -- the token sequences of a replica's micro-batches, from positions in the global order of samples.
#pragma once

#include <cstdint>

#include "llmc/parallel_gpt2.h"
#include "llmc/shuffle.h"
#include "llmc/token_shards.h"

/// Reads micro-batches [share.first, share.first + share.count) of the run of `samples` samples that starts at global
/// position `position`; micro-batch j holds positions position + j B ... Rows beyond `samples` (a short last
/// micro-batch) get token 0 and target -1, which counts for nothing. The same positions give the same tokens whoever
/// asks.
inline TokenBatch load_batch(TokenData& data, const SampleOrder& order, uint64_t position, uint64_t samples,
                             const Share& share, const BatchShape& shape) {
  TokenBatch batch;
  batch.micro_batches = share.count;
  batch.inputs.assign(static_cast<size_t>(share.count) * shape.rows(), 0);
  batch.targets.assign(batch.inputs.size(), -1);
  for (int row = 0; row < share.count * shape.B; ++row) {
    const uint64_t sample = static_cast<uint64_t>(share.first) * shape.B + row;
    if (sample >= samples) break;
    const size_t at = static_cast<size_t>(row) * shape.T;
    data.read(order.at(position + sample), &batch.inputs[at], &batch.targets[at]);
  }
  return batch;
}
