// trainer.h -- the training loop: restore, then per step  [validate] [sample] [checkpoint]  train  log.
//
// Every rank runs the same loop on the same numbers (loss, norm, learning rate, position); rank 0 prints and writes the
// logs. Nothing in the order of training depends on validation, sampling or checkpoints: data is a function of the
// position, random numbers are keyed by what they are for.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "llmc/batch_loader.h"
#include "llmc/checkpoint.h"
#include "llmc/comm_backend.h"
#include "llmc/learning_rate.h"
#include "llmc/llmc_file.h"
#include "llmc/logger.h"
#include "llmc/measure_costs.h"
#include "llmc/model_options.h"
#include "llmc/pipeline_reporter.h"
#include "llmc/plan_report.h"
#include "llmc/sampler.h"
#include "llmc/start_device.h"
#include "llmc/together.h"
#include "llmc/tokenizer.h"
#include "llmc/train_options.h"

class Trainer {
 public:
  /// Opens everything a run needs, in an order in which mistakes show before anything is created. Collective.
  Trainer(TrainOptions options, Control& control);
  /// Trains to the last step and prints `final step N loss L norm G params H`.
  void run();

 private:
  void open_inputs();
  void build_model();
  PipelineLayout decide_layout();
  void start_log();
  void refuse_old_checkpoints() const;
  void restore_or_initialize();
  bool is_due(int64_t every, int64_t step) const { return every > 0 && (step % every == 0 || step == steps_); }
  TokenBatch read_batch(TokenData& data, const SampleOrder& order, uint64_t position, uint64_t samples,
                        const Share& share);
  void validate(int64_t step);
  void sample(int64_t step);
  void save(int64_t step);
  void write_model_file();
  void train(int64_t step);
  LearningRateSchedule learning_rate() const;
  CheckpointMeta meta(int64_t step) const;
  uint64_t sequences_per_step() const { return static_cast<uint64_t>(options_.batch_tokens / options_.seq_len); }
  std::string file(const char* name) const { return options_.out + "/" + name; }
  void print_layout() const;

  TrainOptions options_;
  Control& control_;
  Grid grid_;
  GPT2Config config_;
  std::optional<LlmcModelFile> model_file_;
  std::optional<TokenData> train_data_, val_data_;
  std::optional<Tokenizer> tokenizer_;
  SampleOrder order_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Communicator> world_;
  std::unique_ptr<ParallelGPT2> model_;
  std::unique_ptr<PipelineReporter> reporter_;
  std::unique_ptr<CheckpointStore> checkpoints_;
  Logger log_;
  int64_t steps_ = 0;       // of the whole run
  int64_t first_step_ = 0;  // steps done before this start
  uint64_t position_ = 0;   // samples trained on
  StepResult last_;         // of the newest step
};

#include "llmc/trainer_setup.h"
#include "llmc/trainer_steps.h"
