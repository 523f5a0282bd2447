// pipeline.h -- the executor: runs this rank's list of actions of any checked plan.
//
// It knows nothing of a schedule but the list. For each action it waits for what the action reads, runs the model, and
// starts the transfer of what the action made:
//   F(s,i)   input x: made from tokens (first stage), received, or handed over by a stage on this rank; y is sent
//   I(s,i)   output gradient over y: left by the loss head (last stage), received, or handed over; dx is sent
//   W(s,i)   weight gradient; the slot is free once dx has left            (B is I, then W; dx leaves in between)
//
// Micro-batch i of a stage lives in slot i % slots(s); x and y are sent from the slot and received into it, so there
// are no other buffers. A receive is posted as soon as its slot is free in program order; the communicator orders it
// behind the work and the sends that still use the slot. The host never waits for the compute stream inside a step. One
// device is the same code: one stage, no transfers.
//
// Tests may ask for random pauses before actions: LLMC_TEST_ACTION_DELAY=SEED.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "llmc/comm.h"
#include "llmc/plan.h"
#include "llmc/random.h"
#include "llmc/recorder.h"

/// Link numbers for open_links(): activations into stage s, and gradients into stage s.
inline int activation_link(int stage) { return 2 * stage; }
inline int gradient_link(int stage) { return 2 * stage + 1; }

/// The links of a pipeline whose stage s runs on rank `rank_of(s)` of the communicator.
template <class RankOf>
std::vector<Link> pipeline_links(int stages, RankOf rank_of) {
  std::vector<Link> links;
  for (int s = 1; s < stages; ++s) {
    if (rank_of(s - 1) == rank_of(s)) continue;
    links.push_back({rank_of(s - 1), rank_of(s), activation_link(s)});
    links.push_back({rank_of(s), rank_of(s - 1), gradient_link(s - 1)});
  }
  return links;
}

/// Stage: any struct with
///   slots(), void* input(slot), void* output(slot), size_t boundary_bytes()        what travels, device memory
///   forward(slot, micro_batch, train), backward_input(slot, micro_batch), backward_weight(slot, micro_batch)
template <class Stage>
class Pipeline {
 public:
  /// `stages[s]` is null for stages of other ranks. `ranks[s]` is the rank of stage s in `comm`, `place` this rank's
  /// index in the schedule's lists. `comm` may be null where every stage is on this rank.
  Pipeline(std::vector<Stage*> stages, std::vector<int> ranks, int place, Communicator* comm, cudaStream_t stream)
      : stages_(std::move(stages)), ranks_(std::move(ranks)), place_(place), comm_(comm), stream_(stream) {
    if (const char* seed = getenv("LLMC_TEST_ACTION_DELAY")) delay_seed_ = strtoull(seed, nullptr, 10);
  }

  /// From the next run on `recorder` hears of every action and message; null (at first): none, and no cost.
  void set_recorder(StepRecorder* recorder) { recorder_ = recorder; }

  /// Runs one step (or one forward-only pass) of `plan`. Returns when all work has been issued and all transfers are
  /// complete; the compute stream may still be busy.
  void run(const Plan& plan, bool train) {
    plan_ = &plan;
    train_ = train && !plan.schedule.forward_only;
    const size_t count = stages_.size() * static_cast<size_t>(plan.schedule.micro_batches);
    for (auto* tickets : {&input_, &output_sent_, &gradient_, &gradient_sent_}) tickets->assign(count, nullptr);
    for (int s = 0; s < stage_count(); ++s) {
      for (int i = 0; stages_[s] && i < std::min(slots(s), micro_batches()); ++i) post_input(s, i);
    }
    for (const Action& action : plan.schedule.actions[place_]) {
      pause();
      if (action.op == Op::kForward) forward(action);
      if (action.op == Op::kBackward || action.op == Op::kBackwardInput) backward_input(action);
      if (action.op == Op::kBackward || action.op == Op::kBackwardWeight) backward_weight(action);
    }
    for (auto* tickets : {&output_sent_, &gradient_sent_}) {
      for (const Ticket& ticket : *tickets) {
        if (ticket) comm_->wait_host(ticket);
      }
    }
  }

 private:
  int stage_count() const { return static_cast<int>(stages_.size()); }
  int micro_batches() const { return plan_->schedule.micro_batches; }
  int slots(int s) const { return plan_->slots[s]; }
  int slot(int s, int i) const { return i % slots(s); }
  size_t at(int s, int i) const { return static_cast<size_t>(s) * micro_batches() + i; }
  bool has_previous(int s) const { return s > 0; }
  bool has_next(int s) const { return s + 1 < stage_count(); }
  bool remote_previous(int s) const { return has_previous(s) && ranks_[s - 1] != ranks_[s]; }
  bool remote_next(int s) const { return has_next(s) && ranks_[s + 1] != ranks_[s]; }

  // The slot of (s,i) is free in program order: its input may arrive as soon as everything issued so far, and the send
  // that last used the slot, are done.
  void post_input(int s, int i) {
    if (!remote_previous(s)) return;
    Ticket last_use;
    if (i >= slots(s)) last_use = (train_ ? gradient_sent_ : output_sent_)[at(s, i - slots(s))];
    input_[at(s, i)] = comm_->receive(stages_[s]->input(slot(s, i)), stages_[s]->boundary_bytes(), ranks_[s - 1],
                                      activation_link(s), stream_, last_use);
    if (recorder_) recorder_->message(input_[at(s, i)], false, false, s, i, stages_[s]->boundary_bytes());
  }

  void hand_over(const void* from, void* to, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }

  void forward(const Action& action) {
    const int s = action.stage, i = action.micro_batch, k = slot(s, i);
    Stage& stage = *stages_[s];
    if (remote_previous(s)) comm_->wait(input_[at(s, i)], stream_);
    // Forward only: the slot's last output may still be on its way. (In training its gradient has come back.)
    if (!train_ && remote_next(s) && i >= slots(s)) comm_->wait(output_sent_[at(s, i - slots(s))], stream_);
    if (recorder_) recorder_->start_action(action);
    if (has_previous(s) && !remote_previous(s)) {
      hand_over(stages_[s - 1]->output(slot(s - 1, i)), stage.input(k), stage.boundary_bytes());
    }
    stage.forward(k, i, train_);
    if (recorder_) recorder_->end_action();
    if (remote_next(s)) send_output(s, i);
    if (!train_ && i + slots(s) < micro_batches()) post_input(s, i + slots(s));
  }

  // The output leaves, and in training its gradient comes back over it.
  void send_output(int s, int i) {
    void* output = stages_[s]->output(slot(s, i));
    const size_t bytes = stages_[s]->boundary_bytes();
    Ticket& sent = output_sent_[at(s, i)];
    sent = comm_->send(output, bytes, ranks_[s + 1], activation_link(s + 1), stream_);
    if (recorder_) recorder_->message(sent, true, false, s + 1, i, bytes);
    if (!train_) return;
    Ticket& gradient = gradient_[at(s, i)];
    gradient = comm_->receive(output, bytes, ranks_[s + 1], gradient_link(s), stream_, sent);
    if (recorder_) recorder_->message(gradient, false, true, s, i, bytes);
  }

  // The input gradient leaves as soon as it is there: in an unsplit backward pass before the weight gradient.
  void backward_input(const Action& action) {
    const int s = action.stage, i = action.micro_batch, k = slot(s, i);
    Stage& stage = *stages_[s];
    if (remote_next(s)) comm_->wait(gradient_[at(s, i)], stream_);
    if (recorder_) recorder_->start_action(action);
    stage.backward_input(k, i);
    if (has_previous(s) && !remote_previous(s)) {
      hand_over(stage.input(k), stages_[s - 1]->output(slot(s - 1, i)), stage.boundary_bytes());
    }
    if (recorder_) action.op == Op::kBackward ? recorder_->output_ready() : recorder_->end_action();
    if (!remote_previous(s)) return;
    Ticket& sent = gradient_sent_[at(s, i)];
    sent = comm_->send(stage.input(k), stage.boundary_bytes(), ranks_[s - 1], gradient_link(s - 1), stream_);
    if (recorder_) recorder_->message(sent, true, true, s - 1, i, stage.boundary_bytes());
  }

  void backward_weight(const Action& action) {
    const int s = action.stage, i = action.micro_batch;
    if (recorder_ && action.op == Op::kBackwardWeight) recorder_->start_action(action);
    stages_[s]->backward_weight(slot(s, i), i);
    if (recorder_) recorder_->end_action();
    if (i + slots(s) < micro_batches()) post_input(s, i + slots(s));
  }

  void pause() {
    if (!delay_seed_) return;
    const RandomWords words = random_u32x4(delay_seed_, static_cast<uint64_t>(place_), actions_++);
    usleep(words.x % 2000);
  }

  std::vector<Stage*> stages_;
  std::vector<int> ranks_;
  int place_;
  Communicator* comm_;
  cudaStream_t stream_;
  StepRecorder* recorder_ = nullptr;
  const Plan* plan_ = nullptr;
  bool train_ = false;
  uint64_t delay_seed_ = 0, actions_ = 0;
  // one entry per (stage, micro-batch) of the run
  std::vector<Ticket> input_, output_sent_, gradient_, gradient_sent_;
};
