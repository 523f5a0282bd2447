// parallel_gpt2_steps.h -- the member functions of ParallelGPT2: construction, train step, evaluation, sampling, hash.
#pragma once

#include "llmc/element_hash.h"
#include "llmc/parallel_gpt2.h"
#include "llmc/together.h"

namespace parallel_gpt2_detail {

// Link numbers behind the pipeline's own (2 per stage): the two directions of the tied embedding's exchange.
inline int tied_link(int stages, bool to_last) { return 2 * stages + (to_last ? 1 : 0); }

inline std::vector<Link> all_links(const Grid& grid, const std::vector<int>& owner) {
  const int stages = static_cast<int>(owner.size());
  std::vector<Link> links;
  for (int replica = 0; replica < grid.replicas; ++replica) {
    const auto rank_of = [&](int stage) { return grid.rank_of(owner[stage], replica); };
    for (const Link& link : pipeline_links(stages, rank_of)) links.push_back(link);
    const int first = rank_of(0), last = rank_of(stages - 1);
    if (first == last) continue;
    links.push_back({first, last, tied_link(stages, true)});
    links.push_back({last, first, tied_link(stages, false)});
  }
  return links;
}

}  // namespace parallel_gpt2_detail

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
    train_plan_ = make_train_plan(settings.layout, micro_batch_share().count);
    layout_ = make_stage_layout(table_, layout_stages(settings.layout, owner(), grid.place()), grid.replicas);
  });
  agree_on_plan();
  if (world_) world_->open_links(parallel_gpt2_detail::all_links(grid, owner()));
  if (grid.replicas > 1) replicas_ = world_->split(grid.place(), grid.replica(), "replicas");
  run_together(control_, [&] { allocate(); });
}

// Different options, versions or measured costs would be a hang in the middle of a step: compared before the first.
inline void ParallelGPT2::agree_on_plan() const {
  const std::vector<uint64_t> hashes = control_.gathered(plan_hash(train_plan_, settings_.layout.cuts), "plan");
  for (int rank = 0; rank < control_.size(); ++rank) {
    const int first = grid_.rank_of(0, rank % grid_.replicas);  // replicas may have plans of their own
    if (hashes[rank] == hashes[first]) continue;
    environment_error_on_all_ranks(
        "ranks %d and %d have made different plans; start all ranks with the same program and the same options", first,
        rank);
  }
}

inline int ParallelGPT2::most_micro_batches() const {
  return std::max(1, std::max(micro_batch_share().count, settings_.forward_micro_batches));
}

// Everything that takes device memory, which may be too small on some of the ranks.
inline void ParallelGPT2::allocate() {
  const int count = micro_batch_share().count;
  optimizer_ =
      std::make_unique<StageOptimizer>(ledger_, table_, layout_, settings_.zero_stage, replicas_.get(), stream_);
  gradients_ = std::make_unique<GradientTree>(ledger_, layout_, count, settings_.exact, stream_);
  workspace_ = std::make_unique<GPT2Workspace>(ledger_, settings_.model, settings_.shape, layout_.stages);
  build_stages();
  const size_t tied = StageOptimizer::forecast(layout_, settings_.zero_stage, grid_.replica()).tied;
  if (layout_.has_embedding() != layout_.has_head()) tied_ = DeviceArray<float>("gradient exchange", tied, &ledger_);
  if (layout_.has_head()) {
    host_losses_ = PinnedArray<float>(static_cast<size_t>(settings_.shape.rows()) * most_micro_batches());
  }
}

inline void ParallelGPT2::build_stages() {
  const int stages = train_plan_.schedule.stages;
  std::vector<GPT2Stage*> here(stages, nullptr);
  std::vector<int> ranks;
  for (int s = 0; s < stages; ++s) {
    ranks.push_back(rank_of_stage(s));
    if (owner()[s] != grid_.place()) continue;
    const GPT2StageSetup setup{settings_.model,
                               table_,
                               layout_,
                               static_cast<int>(stages_.size()),
                               ledger_,
                               blas_,
                               *workspace_,
                               gradients_.get(),
                               optimizer_->parameters(),
                               settings_.shape,
                               std::max(1, train_plan_.slots[s]),
                               most_micro_batches(),
                               stream_};
    stages_.push_back(std::make_unique<GPT2Stage>(setup));
    here[s] = stages_.back().get();
  }
  pipeline_ = std::make_unique<Pipeline<GPT2Stage>>(here, ranks, grid_.place(), world_, stream_);
}

inline RankMemory ParallelGPT2::forecast() const {
  return gpt2_rank_memory({settings_.model, table_, settings_.shape, settings_.layout, train_plan_, grid_.place(),
                           grid_.replicas, grid_.replica(), settings_.zero_stage, settings_.exact,
                           most_micro_batches()});
}

// A forward-only run of this replica, in the slots that training has.
inline Plan ParallelGPT2::forward_plan(int micro_batches) const {
  std::vector<int> slots = train_plan_.slots;
  for (int& count : slots) count = std::max(1, count);
  return make_forward_plan(settings_.layout.ranks, owner(), micro_batches, layout_costs(settings_.layout, true), slots);
}

inline void ParallelGPT2::load(const TokenBatch& batch) {
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  const size_t rows = settings_.shape.rows();
  for (const auto& stage : stages_) {
    stage->set_shape(settings_.shape);
    for (int j = 0; j < batch.micro_batches; ++j) {
      stage->load_tokens(j, batch.inputs.data() + j * rows, batch.targets.data() + j * rows);
    }
  }
}

// d wte = head part + lookup part, in that order, on whichever rank holds the table.
inline void ParallelGPT2::sum_tied_embedding(float* gradients) {
  if (layout_.has_embedding() && layout_.has_head()) {
    const auto lookup = optimizer_->reduced_range(*optimizer_->find_bucket("wte.weight"));
    const auto head = optimizer_->reduced_range(*optimizer_->find_bucket("wte.head"));
    add(gradients + lookup.first, gradients + head.first, gradients + lookup.first, lookup.second, stream_);
  } else if (layout_.has_embedding() || layout_.has_head()) {
    exchange_tied_embedding(gradients);
  }
}

inline void ParallelGPT2::exchange_tied_embedding(float* gradients) {
  const bool first = layout_.has_embedding();
  const int stages = train_plan_.schedule.stages, peer = rank_of_stage(first ? stages - 1 : 0);
  const auto range = optimizer_->reduced_range(*optimizer_->find_bucket(first ? "wte.weight" : "wte.head"));
  float* mine = gradients + range.first;
  const size_t bytes = range.second * sizeof(float);
  using parallel_gpt2_detail::tied_link;
  Ticket received = world_->receive(tied_.data(), bytes, peer, tied_link(stages, !first), stream_);
  Ticket sent = world_->send(mine, bytes, peer, tied_link(stages, first), stream_);
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
  GPT2Stage* const head = head_stage();
  for (int j = 0; head && j < batch.micro_batches; ++j) {
    CUDA_CHECK(cudaMemcpyAsync(host_losses_.data() + j * rows, head->losses(j), rows * sizeof(float),
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
  if (recorder_) recorder_->begin_step();
  pipeline_->run(train_plan_, true);
  float* gradients = gradients_->finish();
  mark("reduce");
  optimizer_->reduce(gradients);
  mark("tied embedding");
  sum_tied_embedding(gradients);
  mark("norm");
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
  mark("optimizer");
  optimizer_->update(gradients, adamw);
  mark("gather");
  optimizer_->gather_parameters();
  return result;
}

inline void ParallelGPT2::evaluate(const TokenBatch& batch, int first, int total, LossSum* sum) {
  load(batch);
  pipeline_->run(forward_plan(batch.micro_batches), false);
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
    for (const auto& stage : stages_) {
      stage->set_shape({1, T});
      stage->load_tokens(0, padded.data(), no_targets.data());
    }
    pipeline_->run(forward_plan(1), false);
    if (GPT2Stage* const head = head_stage()) {
      std::vector<floatX> row(V);
      CUDA_CHECK(cudaMemcpyAsync(row.data(), head->row_logits(0, count - 1), V * sizeof(floatX), cudaMemcpyDeviceToHost,
                                 stream_));
      CUDA_CHECK(cudaStreamSynchronize(stream_));
      for (int i = 0; i < V; ++i) logits[i] = static_cast<float>(row[i]);
    }
  }
  control_.broadcast(logits.data(), V * sizeof(float), grid_.rank_of(owner().back(), 0));
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
