// parallel_gpt2.h -- a GPT-2 spread over pipeline stages and replicas: what one rank holds, and one optimizer step.
//
//   train_step:  pipeline runs this replica's micro-batches -> sums over micro-batches (tree) -> sums over replicas
//   (same tree)
//                -> tied embedding: head + lookup -> norm over all ranks -> clip -> AdamW on this rank's ranges ->
//                gather
// Everything that must not depend on the layout is done in one fixed order: losses are added left to right over the
// step's micro-batches, squares over numbered norm blocks; each summand comes from exactly one rank, so adding over
// ranks is exact. One device is the same code with one stage and one replica.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "llmc/control.h"
#include "llmc/gpt2_memory.h"
#include "llmc/grid.h"
#include "llmc/pipeline.h"

/// The model, how it is spread, and how it is run; the same on every rank.
struct ParallelSettings {
  GPT2Config model;
  BatchShape shape;               // micro-batch
  int micro_batches = 1;          // of one step, over all replicas
  int forward_micro_batches = 1;  // most micro-batches of a replica in one forward-only run
  PipelineLayout layout;
  int zero_stage = 1;
  bool exact = true;
};

/// Token sequences of this replica's micro-batches of a run: `micro_batches` x (B,T) each; target -1 = not counted.
struct TokenBatch {
  int micro_batches = 0;
  std::vector<int> inputs, targets;
};

/// Sums over a step or a validation run, equal on all ranks.
struct LossSum {
  double loss = 0.0;     // sum over targets
  double targets = 0.0;  // how many there were
  double mean() const { return targets > 0 ? loss / targets : 0.0; }
};

struct StepResult {
  double loss = 0.0;  // mean over the step's targets
  double norm = 0.0;  // of the gradient of that mean, before clipping
};

class ParallelGPT2 {
 public:
  /// `world` may be null for one rank. Collective: all ranks construct at the same point.
  ParallelGPT2(const ParallelSettings& settings, const Grid& grid, Control& control, Communicator* world, Blas& blas,
               cudaStream_t stream);

  const ParameterTable& table() const { return table_; }
  const PipelineLayout& layout() const { return settings_.layout; }
  const Plan& train_plan() const { return train_plan_; }
  const MemoryLedger& ledger() const { return ledger_; }
  StageOptimizer& optimizer() { return *optimizer_; }
  int micro_batches() const { return settings_.micro_batches; }
  Share micro_batch_share() const { return tree_share(settings_.micro_batches, grid_.replicas, grid_.replica()); }

  /// Records the steps from the next one on, null: none. The caller finishes each recorded step (recorder.h).
  void set_recorder(StepRecorder* recorder) {
    recorder_ = recorder;
    pipeline_->set_recorder(recorder);
  }

  /// GPT-2 initialisation, keyed by (seed, tensor, element).
  void initialize(uint64_t seed) {
    set_parameters(
        [&](const OwnedRange& range, float* out) {
          initial_values(out, table_.tensors[range.tensor], range.tensor, seed, range.first, range.count);
        },
        seed);
  }
  void set_parameters(const std::function<void(const OwnedRange&, float*)>& values, uint64_t seed) {
    optimizer_->set_parameters(values, seed, 0);
  }

  /// One optimizer step on this replica's micro-batches. `adamw.gradient_scale` is set here: 1 / targets, times the
  /// clipping factor if `clip` > 0 and the norm is larger. A loss or norm that is not finite is an error before
  /// anything is updated.
  StepResult train_step(const TokenBatch& batch, AdamW adamw, double clip);

  /// Adds to `sum` the losses of `total` micro-batches, of which this replica has `batch`, the first being number
  /// `first`. Left to right, so the sum over several calls does not depend on how the micro-batches were cut into
  /// calls. Parameters unchanged.
  void evaluate(const TokenBatch& batch, int first, int total, LossSum* sum);

  /// Logits (V) after the last of `count` tokens, on every rank; only replica 0 computes.
  std::vector<float> next_token_logits(const int* tokens, int count);

  /// 64-bit hash of all fp32 master parameters (element_hash.h); the same for every layout.
  uint64_t parameter_hash();

  /// Bytes that this rank's buffers should take, from sizes alone.
  RankMemory forecast() const;

 private:
  void agree_on_plan() const;
  void allocate();
  void build_stages();
  int most_micro_batches() const;
  const std::vector<int>& owner() const { return train_plan_.schedule.owner; }
  int rank_of_stage(int stage) const { return grid_.rank_of(owner()[stage], grid_.replica()); }
  GPT2Stage* head_stage() { return layout_.has_head() ? stages_.back().get() : nullptr; }
  Plan forward_plan(int micro_batches) const;
  void load(const TokenBatch& batch);
  void mark(const char* phase) {
    if (recorder_) recorder_->mark(phase);
  }
  void sum_tied_embedding(float* gradients);
  void exchange_tied_embedding(float* gradients);
  std::vector<double> global_sums(const TokenBatch& batch, int first, int total, bool with_squares,
                                  const float* gradients);
  void add_losses(const std::vector<double>& sums, int total, LossSum* result) const;
  [[noreturn]] void report_not_finite(double loss, const std::vector<double>& sums, int step) const;

  ParallelSettings settings_;
  Grid grid_;
  Control& control_;
  Communicator* world_;
  Blas& blas_;
  cudaStream_t stream_;
  MemoryLedger ledger_;
  ParameterTable table_;
  std::vector<ModelBucket> buckets_;
  std::unique_ptr<Communicator> replicas_;
  Plan train_plan_;
  StageLayout layout_;  // of this rank's stages
  std::unique_ptr<StageOptimizer> optimizer_;
  std::unique_ptr<GradientTree> gradients_;
  std::unique_ptr<GPT2Workspace> workspace_;
  std::vector<std::unique_ptr<GPT2Stage>> stages_;  // of this rank, in the order of the model
  std::unique_ptr<Pipeline<GPT2Stage>> pipeline_;
  StepRecorder* recorder_ = nullptr;
  DeviceArray<float> tied_;
  PinnedArray<float> host_losses_;
};

#include "llmc/parallel_gpt2_steps.h"
