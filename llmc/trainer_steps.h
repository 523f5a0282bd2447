// trainer_steps.h -- Trainer, part 2: the loop and what happens in it.
#pragma once

#include "llmc/trainer.h"

inline void Trainer::run() {
  for (int64_t step = first_step_;; ++step) {
    const bool news = step == 0 || step > first_step_;  // a resumed run has said it all about the step it resumes from
    if (news && val_data_ && is_due(options_.val_every, step)) validate(step);
    if (news && step > 0 && is_due(options_.sample_every, step)) sample(step);
    if (step > first_step_ && is_due(options_.checkpoint_every, step)) save(step);
    if (step >= steps_) break;
    train(step);
  }
  if (options_.save_model) write_model_file();
  const unsigned long long hash = model_->parameter_hash();
  if (control_.rank() == 0) {
    printf("final step %lld loss %.9g norm %.9g params %016llx\n",
           static_cast<long long>(std::max(steps_, first_step_)), last_.loss, last_.norm, hash);
    flush_standard_output();
  }
  reporter_->finish();
}

inline LearningRateSchedule Trainer::learning_rate() const {
  LearningRateSchedule schedule;
  schedule.shape = parse_learning_rate_shape(options_.lr_schedule);
  schedule.peak = options_.lr;
  schedule.warmup_steps = options_.warmup;
  schedule.total_steps = std::max<int64_t>(1, steps_);
  schedule.final_fraction = options_.lr_final;
  return schedule;
}

// Files can turn out to be damaged or gone in the middle of a run, on one rank or on several: all stop with one
// message.
inline TokenBatch Trainer::read_batch(TokenData& data, const SampleOrder& order, uint64_t position, uint64_t samples,
                                      const Share& share) {
  TokenBatch batch;
  run_together(control_, [&] {
    batch = load_batch(data, order, position, samples, share, {options_.micro_batch, options_.seq_len});
  });
  return batch;
}

// Optimizer step number step + 1.
inline void Trainer::train(int64_t step) {
  const auto start = std::chrono::steady_clock::now();
  AdamW adamw{};
  const double rate = learning_rate_at(learning_rate(), step);
  adamw.learning_rate = static_cast<float>(rate);
  adamw.beta1 = static_cast<float>(options_.beta1);
  adamw.beta2 = static_cast<float>(options_.beta2);
  adamw.epsilon = static_cast<float>(options_.eps);
  adamw.weight_decay = static_cast<float>(options_.weight_decay);
  adamw.step = static_cast<int>(step + 1);
  adamw.seed = static_cast<uint64_t>(options_.seed);
  const uint64_t position = options_.overfit ? 0 : position_;
  const TokenBatch batch =
      read_batch(*train_data_, order_, position, sequences_per_step(), model_->micro_batch_share());
  reporter_->before_step(step + 1);
  last_ = model_->train_step(batch, adamw, options_.clip);
  device_->synchronize();
  position_ += sequences_per_step();
  StepMetrics metrics;
  metrics.step = step + 1;
  metrics.loss = last_.loss;
  metrics.grad_norm = last_.norm;
  metrics.lr = rate;
  metrics.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  metrics.tokens_per_second = static_cast<double>(options_.batch_tokens) / metrics.milliseconds * 1000.0;
  log_.train_step(metrics);
  reporter_->after_step(step + 1, log_);
}

// Mean loss per target over the first val_batches steps' worth of the validation data, in the order of the files, in
// runs of at most kForwardMicroBatches micro-batches per replica. The sum is the same for every layout.
inline void Trainer::validate(int64_t step) {
  uint64_t samples = val_data_->samples();
  const uint64_t batches = static_cast<uint64_t>(options_.val_batches);  // -1: more than there can be
  if (batches < samples / sequences_per_step()) samples = batches * sequences_per_step();
  const uint64_t B = static_cast<uint64_t>(options_.micro_batch), per_run = B * kForwardMicroBatches * grid_.replicas;
  const SampleOrder in_order{val_data_->samples(), 0, false};
  LossSum sum;
  for (uint64_t first = 0; first < samples; first += per_run) {
    const uint64_t count = std::min(per_run, samples - first);
    const int micro_batches = static_cast<int>(ceil_div(count, B));
    const Share share = contiguous_share(micro_batches, grid_.replicas, grid_.replica());
    model_->evaluate(read_batch(*val_data_, in_order, first, count, share), share.first, micro_batches, &sum);
  }
  log_.validation(step, sum.mean());
}

// Text that the model continues from the prompt. Every rank draws the same tokens from the same logits.
inline void Trainer::sample(int64_t step) {
  const SamplingSettings settings{options_.temperature, options_.top_k, static_cast<uint64_t>(options_.seed)};
  std::vector<int> tokens = tokenizer_->prompt_tokens(options_.sample_prompt);
  for (int i = 0; i < options_.sample_tokens; ++i) {
    const int window = std::min(static_cast<int>(tokens.size()), options_.seq_len);
    const std::vector<float> logits = model_->next_token_logits(&tokens[tokens.size() - window], window);
    tokens.push_back(sample_token(logits, settings, static_cast<uint64_t>(step), static_cast<uint64_t>(i)));
  }
  std::string text;
  for (int token : tokens) text += tokenizer_->decode(token);
  log_.message(format_text("--- sample after step %lld ---\n%s\n---", static_cast<long long>(step),
                           printable_text(text).c_str()));
}

inline void Trainer::save(int64_t step) {
  run_together(control_, [&] { log_.sync(); });
  checkpoints_->save(meta(step), {&model_->optimizer()});
  checkpoints_->prune(static_cast<int>(options_.keep), static_cast<int>(options_.keep_major));
}

// The master parameters as an llm.c model file, RUN/model.bin: fp32 or bf16 as this build.
inline void Trainer::write_model_file() {
  const LlmcPrecision precision = sizeof(floatX) == sizeof(float) ? LlmcPrecision::kFloat32 : LlmcPrecision::kBfloat16;
  const std::string path = file("model.bin");
  std::optional<LlmcModelWriter> writer;
  run_together(control_, [&] {
    if (control_.rank() == 0) writer.emplace(LlmcModelWriter::create(path, config_, precision));
  });
  run_together(control_, [&] {
    if (control_.rank() != 0) writer.emplace(LlmcModelWriter::join(path, config_, precision));
    StageOptimizer& optimizer = model_->optimizer();
    std::vector<float> host;
    for (const OwnedRange& range : optimizer.accountable()) {
      host.resize(range.count);
      device_->copy_to_host(host.data(), optimizer.master(range), range.count * sizeof(float));
      writer->write(host.data(), range.tensor, range.first, range.count);
    }
    writer->sync();
  });
  run_together(control_, [&] {
    if (control_.rank() == 0) writer->commit();
  });
}
