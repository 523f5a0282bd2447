// parallel_gpt2_steps.h -- the member functions of ParallelGPT2: construction, train step, evaluation, sampling, hash.
#pragma once

#include "llmc/element_hash.h"
#include "llmc/parallel_gpt2.h"
#include "llmc/together.h"

namespace parallel_gpt2_detail {

// Link numbers behind the pipeline's own (2 per stage): the two directions of the tied embedding's exchange.
inline int tied_link(int stages, bool to_last) { return 2 * stages + (to_last ? 1 : 0); }

inline std::vector<Link> all_links(const Grid& grid) {
  std::vector<Link> links;
  for (int replica = 0; replica < grid.replicas; ++replica) {
    const auto rank_of = [&](int stage) { return grid.rank_of(stage, replica); };
    for (const Link& link : pipeline_links(grid.pipeline, rank_of)) links.push_back(link);
    if (grid.pipeline == 1) continue;
    const int first = rank_of(0), last = rank_of(grid.pipeline - 1);
    links.push_back({first, last, tied_link(grid.pipeline, true)});
    links.push_back({last, first, tied_link(grid.pipeline, false)});
  }
  return links;
}

}  // namespace parallel_gpt2_detail

inline StageRange ParallelGPT2::stage_range(int stage) const {
  return {cuts_[stage], cuts_[stage + 1], stage == 0, stage + 2 == static_cast<int>(cuts_.size())};
}

inline ModelCost ParallelGPT2::cost() const {
  const GPT2Config& model = settings_.model;
  return gpt2_model_cost(model.layers, settings_.shape.T, model.channels, model.padded_vocab);
}

inline Plan ParallelGPT2::make_forward_plan(int micro_batches) const {
  Plan plan = make_plan(forward_only_schedule(grid_.pipeline, train_plan_.schedule.owner, micro_batches),
                        {stage_costs(cost(), cuts_, true)});
  int& slots = plan.slots[grid_.stage()];
  slots = std::min(slots, stage_->slots());
  return plan;
}

inline ParallelGPT2::ParallelGPT2(const ParallelSettings& settings, const Grid& grid, Control& control,
                                  Communicator* world, Blas& blas, cudaStream_t stream)
    : settings_(settings),
      grid_(grid),
      control_(control),
      world_(world),
      blas_(blas),
      stream_(stream),
      table_(gpt2_parameter_table(settings.model)),
      buckets_(make_model_buckets(table_)) {
  run_together(control_, [&] {
    cuts_ = make_partition(settings.partition, grid.pipeline, cost());
    layout_ = make_stage_layout(table_, stage_range(grid.stage()), grid.replicas);
    train_plan_ = make_plan(make_schedule(settings.schedule, grid.pipeline, micro_batch_share().count),
                            {stage_costs(cost(), cuts_)});
  });
  if (world_) world_->open_links(parallel_gpt2_detail::all_links(grid));
  if (grid.replicas > 1) replicas_ = world_->split(grid.stage(), grid.replica(), "replicas");
  run_together(control_, [&] { allocate(); });
}

// Everything that takes device memory, which may be too small on some of the ranks.
inline void ParallelGPT2::allocate() {
  const StageRange range = layout_.range;
  const int most = std::max(1, std::max(micro_batch_share().count, settings_.forward_micro_batches));
  const int slots = std::max(1, train_plan_.slots[grid_.stage()]);
  optimizer_ =
      std::make_unique<StageOptimizer>(ledger_, table_, layout_, settings_.zero_stage, replicas_.get(), stream_);
  gradients_ = std::make_unique<GradientTree>(ledger_, layout_, micro_batch_share().count, settings_.exact, stream_);
  workspace_ = std::make_unique<GPT2Workspace>(ledger_, settings_.model, settings_.shape, range.head);
  stage_ = std::make_unique<GPT2Stage>(GPT2StageSetup{settings_.model, table_, layout_, ledger_, blas_, *workspace_,
                                                      gradients_.get(), optimizer_->parameters(), settings_.shape,
                                                      slots, most, stream_});
  std::vector<GPT2Stage*> stages(grid_.pipeline, nullptr);
  std::vector<int> ranks;
  for (int s = 0; s < grid_.pipeline; ++s) ranks.push_back(grid_.rank_of(s, grid_.replica()));
  stages[grid_.stage()] = stage_.get();
  pipeline_ = std::make_unique<Pipeline<GPT2Stage>>(stages, ranks, grid_.stage(), world_, stream_);
  if (grid_.pipeline > 1 && (range.embedding || range.head)) {
    const Bucket* bucket = optimizer_->find_bucket(range.embedding ? "wte.weight" : "wte.head");
    tied_ = DeviceArray<float>("gradient exchange", optimizer_->reduced_range(*bucket).second, &ledger_);
  }
  if (range.head) host_losses_ = PinnedArray<float>(static_cast<size_t>(settings_.shape.rows()) * most);
}

inline size_t ParallelGPT2::forecast_bytes() const {
  const StageRange range = layout_.range;
  const StageMemory memory = StageOptimizer::forecast(layout_, settings_.zero_stage);
  const int k = micro_batch_share().count, most = std::max(1, std::max(k, settings_.forward_micro_batches));
  const size_t rows = settings_.shape.rows();
  size_t bytes = memory.parameters * sizeof(floatX) + memory.receive * sizeof(float);
  bytes += memory.state * sizeof(float) * (StageOptimizer::kHasMaster ? 3 : 2);
  bytes += memory.gradients * sizeof(float) * GradientTree::buffer_count(k, settings_.exact);
  bytes += slot_bytes(settings_.model, range.blocks(), settings_.shape) * stage_->slots();
  bytes += GPT2Workspace::bytes(settings_.model, settings_.shape, range.head);
  if (range.embedding || range.head) bytes += (5 * rows + 1) * sizeof(int) * most;
  if (range.head) bytes += rows * sizeof(float) * most;
  return bytes + tied_.bytes();
}

inline void ParallelGPT2::load(const TokenBatch& batch) {
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  stage_->set_shape(settings_.shape);
  const size_t rows = settings_.shape.rows();
  for (int j = 0; j < batch.micro_batches; ++j) {
    stage_->load_tokens(j, batch.inputs.data() + j * rows, batch.targets.data() + j * rows);
  }
}

// d wte = head part + lookup part, in that order, on whichever rank holds the table.
inline void ParallelGPT2::sum_tied_embedding(float* gradients) {
  const StageRange range = layout_.range;
  if (range.embedding && range.head) {
    const auto lookup = optimizer_->reduced_range(*optimizer_->find_bucket("wte.weight"));
    const auto head = optimizer_->reduced_range(*optimizer_->find_bucket("wte.head"));
    add(gradients + lookup.first, gradients + head.first, gradients + lookup.first, lookup.second, stream_);
  } else if (range.embedding || range.head) {
    exchange_tied_embedding(gradients);
  }
}

inline void ParallelGPT2::exchange_tied_embedding(float* gradients) {
  const bool first = layout_.range.embedding;
  const int peer = grid_.rank_of(first ? grid_.pipeline - 1 : 0, grid_.replica());
  const auto range = optimizer_->reduced_range(*optimizer_->find_bucket(first ? "wte.weight" : "wte.head"));
  float* mine = gradients + range.first;
  const size_t bytes = range.second * sizeof(float);
  using parallel_gpt2_detail::tied_link;
  Ticket received = world_->receive(tied_.data(), bytes, peer, tied_link(grid_.pipeline, !first), stream_);
  Ticket sent = world_->send(mine, bytes, peer, tied_link(grid_.pipeline, first), stream_);
  world_->wait(received, stream_);
  world_->wait(sent, stream_);
  const float *head = first ? tied_.data() : mine, *lookup = first ? mine : tied_.data();
  add(mine, head, lookup, range.second, stream_);
}

// One exact sum over the ranks of everything a step needs to know: sums of squares of all norm blocks (if asked for; a
// stage without parameters has no `gradients` and takes part), the loss of each of `total` micro-batches, and the
// number of targets of each.
inline std::vector<double> ParallelGPT2::global_sums(const TokenBatch& batch, int first, int total, bool with_squares,
                                                     const float* gradients) {
  const size_t squares = with_squares ? total_norm_blocks(buckets_) : 0, rows = settings_.shape.rows();
  std::vector<double> sums(squares + 2 * static_cast<size_t>(total), 0.0);
  const bool head = layout_.range.head;
  for (int j = 0; head && j < batch.micro_batches; ++j) {
    CUDA_CHECK(cudaMemcpyAsync(host_losses_.data() + j * rows, stage_->losses(j), rows * sizeof(float),
                               cudaMemcpyDeviceToHost, stream_));
  }
  if (with_squares) optimizer_->square_sums(gradients, sums.data());
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  for (int j = 0; head && j < batch.micro_batches; ++j) {
    double &loss = sums[squares + first + j], &targets = sums[squares + total + first + j];
    for (size_t row = 0; row < rows; ++row) {
      loss += host_losses_.data()[j * rows + row];
      targets += batch.targets[j * rows + row] >= 0;
    }
  }
  control_.sum(sums.data(), sums.size());
  return sums;
}

inline void ParallelGPT2::add_losses(const std::vector<double>& sums, int total, LossSum* result) const {
  const double* losses = sums.data() + sums.size() - 2 * static_cast<size_t>(total);
  for (int i = 0; i < total; ++i) {
    result->loss += losses[i];
    result->targets += losses[total + i];
  }
}

inline void ParallelGPT2::report_not_finite(double loss, const std::vector<double>& sums, int step) const {
  if (std::isnan(loss)) loss = NAN;  // not "-nan"
  const char* remedy = "nothing was updated; resume from a checkpoint with a smaller --lr or another --seed";
  for (const ModelBucket& bucket : buckets_) {
    for (size_t block = 0; block < norm_blocks(bucket.elements); ++block) {
      if (std::isfinite(sums[bucket.first_norm_block + block])) continue;
      environment_error_on_all_ranks("step %d: loss %g, the gradient of %s is not finite; %s", step, loss,
                                     bucket.name.c_str(), remedy);
    }
  }
  environment_error_on_all_ranks("step %d: loss is %g; %s", step, loss, remedy);
}

inline StepResult ParallelGPT2::train_step(const TokenBatch& batch, AdamW adamw, double clip) {
  load(batch);
  gradients_->begin_step(batch.micro_batches, stream_);
  pipeline_->run(train_plan_, true);
  float* gradients = gradients_->finish();
  optimizer_->reduce(gradients);
  sum_tied_embedding(gradients);
  const int total = settings_.micro_batches;
  const std::vector<double> sums = global_sums(batch, micro_batch_share().first, total, true, gradients);
  LossSum loss;
  add_losses(sums, total, &loss);
  double squares = 0.0;
  for (size_t i = 0; i < total_norm_blocks(buckets_); ++i) squares += sums[i];
  StepResult result{loss.mean(), loss.targets > 0 ? std::sqrt(squares) / loss.targets : 0.0};
  if (!std::isfinite(result.loss) || !std::isfinite(result.norm)) report_not_finite(result.loss, sums, adamw.step);
  const double factor = clip > 0.0 && result.norm > clip ? clip / result.norm : 1.0;
  adamw.gradient_scale = loss.targets > 0 ? static_cast<float>(factor / loss.targets) : 0.0f;
  optimizer_->update(gradients, adamw);
  optimizer_->gather_parameters();
  return result;
}

inline void ParallelGPT2::evaluate(const TokenBatch& batch, int first, int total, LossSum* sum) {
  load(batch);
  pipeline_->run(make_forward_plan(batch.micro_batches), false);
  add_losses(global_sums(batch, first, total, false, nullptr), total, sum);
}

inline std::vector<float> ParallelGPT2::next_token_logits(const int* tokens, int count) {
  const int V = settings_.model.vocab;
  std::vector<float> logits(V, 0.0f);
  if (grid_.replica() == 0) {
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    // Attention is causal, so what stands behind the last token does not matter; few different shapes keep plans few.
    const int T = std::min(round_up(count, 16), settings_.shape.T);
    std::vector<int> padded(tokens, tokens + count);
    padded.resize(T, 0);
    const std::vector<int> no_targets(T, -1);
    stage_->set_shape({1, T});
    stage_->load_tokens(0, padded.data(), no_targets.data());
    pipeline_->run(make_forward_plan(1), false);
    if (layout_.range.head) {
      std::vector<floatX> row(V);
      CUDA_CHECK(cudaMemcpyAsync(row.data(), stage_->row_logits(0, count - 1), V * sizeof(floatX),
                                 cudaMemcpyDeviceToHost, stream_));
      CUDA_CHECK(cudaStreamSynchronize(stream_));
      for (int i = 0; i < V; ++i) logits[i] = static_cast<float>(row[i]);
    }
  }
  control_.broadcast(logits.data(), V * sizeof(float), grid_.rank_of(grid_.pipeline - 1, 0));
  return logits;
}

inline uint64_t ParallelGPT2::parameter_hash() {
  uint64_t hash = 0;
  std::vector<float> host;
  for (const OwnedRange& range : optimizer_->accountable()) {
    host.resize(range.count);
    CUDA_CHECK(cudaMemcpyAsync(host.data(), optimizer_->master(range), range.count * sizeof(float),
                               cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    hash += element_hash(host.data(), range.count, optimizer_->global_element(range));
  }
  control_.sum(&hash, 1);
  return hash;
}
