// trainer_setup.h -- Trainer, part 1: from options to a model that is ready to train.
#pragma once

#include "llmc/trainer.h"

inline Trainer::Trainer(TrainOptions options, Control& control) : options_(std::move(options)), control_(control) {
  run_together(control_, [&] { open_inputs(); });
  build_model();
  restore_or_initialize();
  print_layout();
  ReportSettings reports;
  reports.every = options_.report_every;
  if (reports.every < 0) reports.every = grid_.pipeline > 1 ? 10 : 0;
  reports.timeline = options_.timeline;
  reports.trace = options_.trace;
  reports.trace_steps = options_.trace_steps;
  reporter_ = std::make_unique<PipelineReporter>(reports, grid_, control_, world_.get(), *model_, device_->compute());
}

// Model sizes, data, tokenizer: files that must be there, and rules that need them. Nothing is written.
inline void Trainer::open_inputs() {
  if (!options_.trace.empty()) check_output_path("--trace", options_.trace);
  if (!options_.save_schedule.empty()) check_output_path("--save-schedule", options_.save_schedule);
  model_file_ = resolve_model_options(options_, control_.size());
  config_ = model_config(options_);
  grid_ = make_grid(control_.size(), control_.rank(), options_.pp);
  tokenizer_ = Tokenizer::open(options_.tokenizer, config_.vocab);
  tokenizer_->prompt_tokens(options_.sample_prompt);
  train_data_ = TokenData::open(options_.train_data, options_.seq_len, config_.vocab, DataSplit::kTrain);
  if (options_.val_every > 0) {
    val_data_ = TokenData::open(options_.val_data, options_.seq_len, config_.vocab, DataSplit::kValidation);
  }
  order_ = {train_data_->samples(), static_cast<uint64_t>(options_.seed), options_.shuffle};
  steps_ = options_.steps >= 0 ? options_.steps : static_cast<int64_t>(train_data_->samples() / sequences_per_step());
  if (steps_ == 0 && options_.steps < 0) {
    user_error(
        "--steps -1 (one epoch) is no step: %s has %llu samples, a step takes %llu; use a smaller --batch-tokens",
        options_.train_data.c_str(), static_cast<unsigned long long>(train_data_->samples()),
        static_cast<unsigned long long>(sequences_per_step()));
  }
}

// Costs, and with them the layout, are the same on all ranks; a search that finds nothing that fits ends all of them.
inline PipelineLayout Trainer::decide_layout() {
  const bool free = has_free_layout(options_);
  const bool measured = options_.plan_costs == "measured" || (options_.plan_costs == "auto" && free);
  const BatchShape shape{options_.micro_batch, options_.seq_len};
  const int most = tree_share(static_cast<int>(micro_batches_per_step(options_)), grid_.replicas, 0).count;
  const ModelCost cost = measured ? measure_costs(config_, {shape, most, options_.exact}, levels_to_measure(options_),
                                                  grid_, control_, world_.get(), device_->blas(), device_->compute())
                                  : gpt2_model_cost(config_, shape.B, shape.T);
  PipelineLayout layout;
  run_together(control_, [&] {
    const Gpt2Planning planning(options_, config_, grid_.replicas, cost);
    const PlanResult result = planning.search_or_explain();
    layout = result.best().layout;
    if (control_.rank() != 0) return;
    if (options_.schedule == "auto") {
      printf("candidates  for one step, from %s costs; the first is taken\n%s", measured ? "measured" : "model",
             candidates_table(result, options_.memory_limit > 0).c_str());
    }
    if (!options_.save_schedule.empty()) {
      const Plan plan = make_train_plan(layout, planning.micro_batches());
      write_file_atomically(options_.save_schedule, schedule_csv_text(plan.schedule));
      printf("schedule    written to %s\n", options_.save_schedule.c_str());
    }
  });
  return layout;
}

inline void Trainer::build_model() {
  device_ = std::make_unique<Device>(control_);
  if (control_.size() > 1) {
    world_ = make_communicator(control_, options_.comm);
  } else {
    choose_backend(options_.comm, {this_device()},
                   nccl_ability());  // not used, but a wish that cannot be met is an error
  }
  ParallelSettings settings;
  settings.model = config_;
  settings.shape = {options_.micro_batch, options_.seq_len};
  settings.micro_batches = static_cast<int>(micro_batches_per_step(options_));
  settings.forward_micro_batches = val_data_ ? kForwardMicroBatches : 1;
  settings.layout = decide_layout();
  settings.zero_stage = options_.zero;
  settings.exact = options_.exact;
  model_ = std::make_unique<ParallelGPT2>(settings, grid_, control_, world_.get(), device_->blas(), device_->compute());
}

inline CheckpointMeta Trainer::meta(int64_t step) const {
  CheckpointMeta meta;
  meta.step = static_cast<int>(step);
  meta.position = position_;
  meta.seed = static_cast<uint64_t>(options_.seed);
  meta.precision = sizeof(floatX) == sizeof(float) ? "fp32" : "bf16";
  meta.model = checkpoint_model(config_);
  meta.extra["loss"] = format_text("%.17g", last_.loss);
  meta.extra["norm"] = format_text("%.17g", last_.norm);
  return meta;
}

// A run that starts afresh beside the checkpoints of another would resume from those, not from its own.
inline void Trainer::refuse_old_checkpoints() const {
  if (options_.out.empty() || options_.resume || control_.rank() != 0) return;
  const std::vector<CheckpointName> old = list_checkpoints(file("ckpt"));
  if (old.empty()) return;
  user_error(
      "--out %s holds checkpoints of an earlier run, up to step %d; use --resume 1 to go on with it, another --out to "
      "start afresh, or delete %s",
      options_.out.c_str(), old.front().step, file("ckpt").c_str());
}

inline void Trainer::restore_or_initialize() {
  const uint64_t seed = static_cast<uint64_t>(options_.seed);
  bool restored = false;
  if (!options_.out.empty()) {
    checkpoints_ = std::make_unique<CheckpointStore>(file("ckpt"), control_, model_->table(), device_->compute());
  }
  run_together(control_, [&] { refuse_old_checkpoints(); });
  if (options_.resume) {
    const std::optional<CheckpointMeta> found = checkpoints_->load_newest({&model_->optimizer()}, meta(0));
    if (found && found->seed != seed) {
      throw Error(
          ErrorKind::kUser,
          format_text("--seed %lld differs from that of the checkpoint, %llu, which keys the data order; use it, or "
                      "another --out",
                      static_cast<long long>(options_.seed), static_cast<unsigned long long>(found->seed)),
          true);
    }
    if (found) {
      restored = true;
      first_step_ = found->step;
      position_ = found->position;
      last_ = {strtod(found->extra.at("loss").c_str(), nullptr), strtod(found->extra.at("norm").c_str(), nullptr)};
    }
  }
  if (!restored && model_file_) {
    model_->set_parameters(
        [&](const OwnedRange& range, float* out) { model_file_->read(out, range.tensor, range.first, range.count); },
        seed);
  } else if (!restored) {
    model_->initialize(seed);
  }
  run_together(control_, [&] { start_log(); });
}

// Run folder, saved configuration, logs: the first thing that is written.
inline void Trainer::start_log() {
  if (control_.rank() != 0) return;
  LoggerOptions log;
  log.folder = options_.out;
  log.first_step = options_.resume && first_step_ > 0 ? first_step_ + 1 : -1;
  log.total_steps = steps_;
  log_ = Logger(log);
  if (!options_.out.empty()) write_file_atomically(file("config.txt"), train_option_table().config_text(options_));
}

inline void Trainer::print_layout() const {
  const int ranks = control_.size();
  std::vector<uint64_t> forecast(ranks), allocated(ranks);
  const uint64_t mine[2] = {model_->forecast().total(), model_->ledger().total_allocated()};
  control_.all_gather(&mine[0], forecast.data(), sizeof(uint64_t));
  control_.all_gather(&mine[1], allocated.data(), sizeof(uint64_t));
  if (control_.rank() != 0) return;
  printf("device      %s, %s, %s transport\n", device_->description().c_str(), sizeof(floatX) == 4 ? "fp32" : "bf16",
         world_ ? world_->backend() : "no");
  printf("model       GPT-2, %d layers, %d channels, %d heads, vocabulary %d, %lld parameters\n", config_.layers,
         config_.channels, config_.heads, config_.vocab, static_cast<long long>(gpt2_parameter_count(config_)));
  printf("data        %llu tokens, %llu samples of %d; step: %lld tokens in %lld micro-batches of %d x %d\n",
         static_cast<unsigned long long>(train_data_->tokens()),
         static_cast<unsigned long long>(train_data_->samples()), options_.seq_len,
         static_cast<long long>(options_.batch_tokens), static_cast<long long>(micro_batches_per_step(options_)),
         options_.micro_batch, options_.seq_len);
  const PipelineLayout& layout = model_->layout();
  const Plan& plan = model_->train_plan();
  printf("layout      %d stages on %d ranks (blocks %s) x %d replicas, %s, recompute %s, ZeRO %d\n", layout.stages(),
         grid_.pipeline, partition_text(layout.cuts).c_str(), grid_.replicas, schedule_text(layout).c_str(),
         recompute_text(layout.recompute).c_str(), options_.zero);
  if (grid_.pipeline > 1) {
    const double work = whole_cost(layout.cost) * plan.schedule.micro_batches;
    printf("plan        pipeline %.6g %s, bubble %.1f %%, efficiency %.1f %% (simulated)\n", plan.makespan,
           layout.cost.unit.c_str(), 100 * plan.bubble_fraction, 100 * work / (grid_.pipeline * plan.makespan));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    printf("memory      rank %d: %.1f MiB planned, %.1f MiB allocated\n", rank, forecast[rank] / 1048576.0,
           allocated[rank] / 1048576.0);
  }
  if (first_step_ > 0) printf("resumed     at step %lld\n", static_cast<long long>(first_step_));
  flush_standard_output();
}
