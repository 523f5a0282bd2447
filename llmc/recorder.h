// recorder.h -- records when the actions, messages and phases of a step take place, with events on the compute stream.
//
//   recorder.begin_step();  pipeline.run(plan, true);  recorder.mark("reduce"); ...  recorder.mark("optimizer"); ...
//   StepTimes times = recorder.finish_step();      // waits for the stream
//
// Nothing waits in between: an action costs two events from a pool that keeps its size after the first step. An action
// starts when what it waits for is there, so a hand-over counts to the action that needs it.
#pragma once

#include <utility>

#include "llmc/comm.h"
#include "llmc/step_times.h"

class StepRecorder {
 public:
  /// `comm` moves the pipeline's messages; null where there are none. Both must outlive the recorder.
  StepRecorder(cudaStream_t stream, Communicator* comm) : stream_(stream), comm_(comm) {}
  ~StepRecorder() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// Starts recording. The stream should be idle, or `begin` is known less exactly. Waits for the stream, some 0.1 ms.
  void begin_step() {
    assert(!recording_);
    actions_.clear(), marks_.clear();
    used_ = 0;
    if (comm_) comm_->keep_times(true);
    read_clock();
    recording_ = true;
  }
  bool recording() const { return recording_; }

  /// Around the work of an action, after its waits.
  void start_action(const Action& action) {
    if (recording_) actions_.push_back({action, record(), nullptr, nullptr});
  }
  /// What the action sends is there, but it goes on (the weight gradient of an unsplit backward pass).
  void output_ready() {
    if (recording_) actions_.back().ready = record();
  }
  void end_action() {
    if (!recording_) return;
    Recorded& action = actions_.back();
    action.end = record();
    if (action.ready == nullptr) action.ready = action.end;
  }
  /// A message that this rank sends or receives; see TransferTime.
  void message(const Ticket& ticket, bool is_send, bool is_gradient, int stage, int micro_batch, size_t bytes) {
    if (recording_) messages_.push_back({ticket, {is_send, is_gradient, stage, micro_batch, bytes, 0, 0}});
  }
  /// What is issued from here to the next mark, or to the end of the step, is the phase `name`. Phases of the same name
  /// may come again.
  void mark(const char* name) {
    if (recording_) marks_.push_back({name, record()});
  }

  /// Ends recording: waits for the stream and gives the step. All messages must be complete (Pipeline::run sees to it).
  StepTimes finish_step() {
    assert(recording_);
    recording_ = false;
    if (comm_) comm_->keep_times(false);
    cudaEvent_t last = record();
    CUDA_CHECK(cudaEventSynchronize(last));
    StepTimes times;
    times.begin = base_.seconds;
    times.end = time_of(last);
    for (const Recorded& a : actions_) {
      times.actions.push_back({a.action, time_of(a.start), time_of(a.ready), time_of(a.end)});
    }
    for (Message& message : messages_) {
      const TransferTimes own = comm_->times(message.ticket, base_);
      message.time.ready = own.ready - base_.seconds;
      message.time.done = own.done - base_.seconds;
      times.transfers.push_back(message.time);
    }
    for (size_t i = 0; i < marks_.size(); ++i) {
      const double end = i + 1 < marks_.size() ? time_of(marks_[i + 1].second) : times.end;
      times.phases.push_back({marks_[i].first, time_of(marks_[i].second), end});
    }
    messages_.clear();  // the operations may be reused
    return times;
  }

 private:
  struct Recorded {
    Action action;
    cudaEvent_t start, ready, end;
  };
  struct Message {
    Ticket ticket;
    TransferTime time;
  };

  cudaEvent_t take() {
    if (used_ == events_.size()) {
      events_.push_back(nullptr);
      CUDA_CHECK(cudaEventCreate(&events_.back()));
    }
    return events_[used_++];
  }
  cudaEvent_t record() {
    cudaEvent_t event = take();
    CUDA_CHECK(cudaEventRecord(event, stream_));
    return event;
  }
  double time_of(cudaEvent_t event) const { return event_seconds(event, base_) - base_.seconds; }

  // An event and the host's clock at it: the clock is read before it is issued and after it is seen, the narrowest pair
  // of some tries counts, its middle is the time.
  void read_clock() {
    constexpr int kMostTries = 5;
    constexpr double kNarrow = 15e-6;
    cudaEvent_t best = take(), probe = take();
    double width = 1e300;
    for (int i = 0; i < kMostTries && width > kNarrow; ++i) {
      const double before = host_seconds();
      CUDA_CHECK(cudaEventRecord(probe, stream_));
      CUDA_CHECK(cudaEventSynchronize(probe));
      const double after = host_seconds();
      if (after - before >= width) continue;
      width = after - before;
      base_.seconds = (before + after) / 2;
      std::swap(best, probe);
    }
    base_.event = best;
  }

  const cudaStream_t stream_;
  Communicator* const comm_;
  bool recording_ = false;
  ClockEvent base_;
  std::vector<cudaEvent_t> events_;  // the pool; the first `used_` belong to this step
  size_t used_ = 0;
  std::vector<Recorded> actions_;
  std::vector<Message> messages_;
  std::vector<std::pair<std::string, cudaEvent_t>> marks_;
};
