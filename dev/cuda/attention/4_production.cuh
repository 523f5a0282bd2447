// 4_production.cuh -- adds: tiles of queries and keys in shared memory and micro-tiles in registers, so that an element
// that is loaded once serves 4 to 16 multiply-adds; any head size. It is llmc/attention.cuh itself.
#pragma once

#include "dev/cuda/attention/run.h"
#include "llmc/attention.cuh"

namespace production {

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  attention_forward(run.out, run.lse, run.qkv, run.B, run.T, run.C, run.NH, stream);
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  AttentionBackward arguments = {};
  arguments.dqkv = run.dqkv;
  arguments.scratch = run.delta;
  arguments.dout = run.dout;
  arguments.qkv = run.qkv;
  arguments.out = run.out;
  arguments.lse = run.lse;
  arguments.B = run.B;
  arguments.T = run.T;
  arguments.C = run.C;
  arguments.NH = run.NH;
  attention_backward(arguments, stream);
}

}  // namespace production
