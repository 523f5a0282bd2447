// comm_mpi_engine.h -- the communication thread: it moves the operations of all channels at once, none waits for
// another.
//
//   issued -> [its `after` event, its `also_after` operation] -> for each step: messages on the wire, copies -> done
//
// A channel is a queue: a directed link, or the collectives of one communicator. The head of each channel is a small
// state machine; the thread goes round, asks events, starts what can start, and calls MPI_Testsome once for all
// requests (MPI moves data only while it is called: without this thread, half of a transfer would happen in the final
// wait). When nothing moves it sleeps: 50 us at a time while things have just moved, or while the host waits beside an
// idle device, so that the message is all that the rank has to do; later longer, until the next message, new work, or a
// stream that has reached what an operation waits for (doorbell.h). Looking too often takes a core away from those who
// compute: at 50 to 200 us two ranks with a core each lost 14 % of it (bench_pipeline.py, virtual machine of 2 cores).
#pragma once

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "llmc/comm_mpi_wire.h"
#include "llmc/doorbell.h"

/// Messages and a local copy that go on at the same time; the next step begins when all are through.
struct Step {
  std::vector<Message> messages;  // at most one to send and one to receive
  const void* copy_from = nullptr;
  void* copy_to = nullptr;
  size_t copy_bytes = 0;
};

struct MpiOperation : Operation {
  MpiOperation(const OperationText& t, std::string d) : Operation(t), description(std::move(d)) {}
  const std::string description;
  std::vector<Step> steps;
  cudaEvent_t after = nullptr;
  std::shared_ptr<MpiOperation> also_after;
  Clock::time_point not_before = {};
  bool keeps_times = false;
  TransferTimes times;  // the communication thread's, until `done`
  std::atomic<bool> done{false};
};

/// A queue of operations that match those of the peers in order. Owned by a communicator, moved by the engine.
struct Channel {
  explicit Channel(int t) : tag(t) {}
  const int tag;
  uint64_t issued = 0;  // the issuing thread's; the rest is the engine's
  std::deque<std::shared_ptr<MpiOperation>> queue;
  bool started = false;
  size_t step = 0;
  bool copying = false;
  cudaEvent_t copied = nullptr;
  MessagePump send_pump, receive_pump;
  Clock::time_point last_progress;
  uint64_t last_started = 0, last_completed = 0;
  std::shared_ptr<std::atomic<uint64_t>> bytes_sent;
  ~Channel() {
    if (copied != nullptr) cudaEventDestroy(copied);
  }
};

class MpiEngine {
 public:
  MpiEngine(std::shared_ptr<Process> process, const EngineOptions& options);
  /// Finishes everything that was issued, unless something has failed.
  ~MpiEngine();

  /// Hands an operation over, whose event is on `after` (null: none). Any thread; per channel one.
  void issue(std::shared_ptr<Channel> channel, std::shared_ptr<MpiOperation> operation, cudaStream_t after);
  /// Blocks until done; throws if the engine has failed. `stream` is what the caller will issue to next; null: none.
  void wait(const MpiOperation& operation, cudaStream_t stream);

  Process& process() { return *process_; }
  EventPool& events() { return events_; }
  const EngineOptions& options() const { return wire_.options(); }

 private:
  void run();
  void loop();
  bool take_new();
  bool advance(Channel& channel);
  bool is_ready(MpiOperation& operation);
  void start_step(Channel& channel);
  void finish(Channel& channel);
  void check_time(Channel& channel);
  bool is_urgent();

  static constexpr int kSpins = 8, kShortPauses = 40;  // without movement, before the pauses get longer
  static constexpr std::chrono::microseconds kShortPause{50}, kLongPause{Doorbell::kStreamsRing ? 1000 : 200};

  const std::shared_ptr<Process> process_;
  EventPool events_;
  int device_ = 0;
  Wire wire_;

  std::mutex lock_;  // of the three below, and of `done` for those who wait
  std::vector<std::pair<std::shared_ptr<Channel>, std::shared_ptr<MpiOperation>>> inbox_;
  bool stop_ = false;
  size_t unfinished_ = 0;
  std::condition_variable finished_;
  const std::shared_ptr<Doorbell> bell_ = std::make_shared<Doorbell>();
  bool host_waits_ = false;                // under lock_
  cudaStream_t waiting_stream_ = nullptr;  // under lock_: it lives at least as long as the host waits

  std::vector<std::shared_ptr<Channel>> active_;  // communication thread only
  std::thread thread_;
};

inline MpiEngine::MpiEngine(std::shared_ptr<Process> process, const EngineOptions& options)
    : process_(std::move(process)), wire_(*process_, options) {
  CUDA_CHECK(cudaGetDevice(&device_));
  thread_ = std::thread([this] { run(); });
}

inline MpiEngine::~MpiEngine() {
  {
    std::unique_lock<std::mutex> hold(lock_);
    const bool drain = std::uncaught_exceptions() == 0;
    finished_.wait(hold, [&] { return !drain || unfinished_ == 0 || process_->has_failed(); });
    stop_ = true;
  }
  bell_->ring();
  thread_.join();
}

inline void MpiEngine::issue(std::shared_ptr<Channel> channel, std::shared_ptr<MpiOperation> operation,
                             cudaStream_t after) {
  process_->check_failure();
  if (after != nullptr) bell_->ring_after(after);
  {
    std::lock_guard<std::mutex> hold(lock_);
    inbox_.emplace_back(std::move(channel), std::move(operation));
    ++unfinished_;
  }
  bell_->ring();
}

inline void MpiEngine::wait(const MpiOperation& operation, cudaStream_t stream) {
  if (!operation.done) {
    if (stream != nullptr) bell_->ring_after(stream);  // from then on the wait is urgent
    std::unique_lock<std::mutex> hold(lock_);
    waiting_stream_ = stream;
    host_waits_ = true;
    finished_.wait(hold, [&] { return operation.done || process_->has_failed(); });
    host_waits_ = false;
  }
  if (!operation.done) process_->check_failure();
}

inline void MpiEngine::run() {
  try {
    CUDA_CHECK(cudaSetDevice(device_));
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 5000);  // ns: a pause of 50 us would else last 100
#endif
    loop();
  } catch (const Error& error) {
    process_->fail(error.what());
    std::lock_guard<std::mutex> hold(lock_);
    finished_.notify_all();
  }
}

// Nothing else is going on in this rank: the host waits for a message, and its stream has no work left.
inline bool MpiEngine::is_urgent() {
  std::lock_guard<std::mutex> hold(lock_);  // else the stream could be gone when it is asked
  if (!host_waits_ || waiting_stream_ == nullptr) return host_waits_;
  const cudaError_t status = cudaStreamQuery(waiting_stream_);
  if (status != cudaErrorNotReady) CUDA_CHECK(status);
  (void)cudaGetLastError();  // "not ready" would be the next launch's error
  return status == cudaSuccess;
}

inline void MpiEngine::loop() {
  int still = 0;  // rounds without movement
  for (;;) {
    bool moved = take_new();
    moved |= wire_.test();
    for (size_t i = 0; i < active_.size();) {
      Channel& channel = *active_[i];
      while (advance(channel)) {
        moved = true;
        channel.last_progress = Clock::now();
      }
      if (channel.queue.empty()) {
        active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        check_time(channel);
        ++i;
      }
    }
    still = moved ? 0 : still + 1;
    {
      std::lock_guard<std::mutex> hold(lock_);
      if (stop_) return;
    }
    if (active_.empty()) {
      bell_->sleep();
    } else if (still > kSpins) {
      bell_->sleep(still <= kSpins + kShortPauses || is_urgent() ? kShortPause : kLongPause);
    }
  }
}

inline bool MpiEngine::take_new() {
  std::lock_guard<std::mutex> hold(lock_);
  for (auto& [channel, operation] : inbox_) {
    if (channel->queue.empty()) {
      channel->last_progress = Clock::now();
      active_.push_back(channel);
    }
    channel->queue.push_back(std::move(operation));
  }
  const bool any = !inbox_.empty();
  inbox_.clear();
  return any;
}

inline bool MpiEngine::is_ready(MpiOperation& operation) {
  if (operation.also_after != nullptr && !operation.also_after->done) return false;
  if (operation.after != nullptr && !event_done(operation.after)) return false;
  if (operation.not_before != Clock::time_point{} && Clock::now() < operation.not_before) return false;
  if (operation.after != nullptr) events_.give_back(operation.after);
  operation.after = nullptr;
  operation.also_after = nullptr;
  return true;
}

inline bool MpiEngine::advance(Channel& channel) {
  if (channel.queue.empty()) return false;
  MpiOperation& operation = *channel.queue.front();
  if (!channel.started) {
    if (!is_ready(operation)) return false;
    channel.started = true;
    channel.last_started = operation.text.sequence;
    channel.step = 0;
    if (operation.keeps_times) operation.times.ready = host_seconds();
    start_step(channel);
    return true;
  }
  bool moved = false;
  for (MessagePump* pump : {&channel.send_pump, &channel.receive_pump}) {
    if (pump->busy()) moved |= pump->advance(wire_);
  }
  if (channel.copying && event_done(channel.copied)) channel.copying = false;
  if (channel.send_pump.busy() || channel.receive_pump.busy() || channel.copying) return moved;
  ++channel.step;
  start_step(channel);
  return true;
}

inline void MpiEngine::start_step(Channel& channel) {
  MpiOperation& operation = *channel.queue.front();
  if (channel.step == operation.steps.size()) {
    finish(channel);
    return;
  }
  const Step& step = operation.steps[channel.step];
  for (const Message& message : step.messages) {
    MessagePump& pump = message.is_send ? channel.send_pump : channel.receive_pump;
    pump.start(wire_, message, channel.tag, operation.description);
    if (message.is_send) *channel.bytes_sent += message.bytes;
  }
  if (step.copy_bytes > 0) {
    if (channel.copied == nullptr) CUDA_CHECK(cudaEventCreateWithFlags(&channel.copied, cudaEventDisableTiming));
    wire_.copy(step.copy_to, step.copy_from, step.copy_bytes, cudaMemcpyDeviceToDevice, channel.copied);
    channel.copying = true;
  }
}

inline void MpiEngine::finish(Channel& channel) {
  MpiOperation& operation = *channel.queue.front();
  channel.last_completed = operation.text.sequence;
  channel.started = false;
  if (operation.keeps_times) operation.times.done = host_seconds();
  {
    std::lock_guard<std::mutex> hold(lock_);
    operation.done = true;
    --unfinished_;
  }
  finished_.notify_all();
  channel.queue.pop_front();
}

inline void MpiEngine::check_time(Channel& channel) {
  if (!process_->is_late(channel.last_progress)) return;
  const MpiOperation& operation = *channel.queue.front();
  const char* what = channel.started ? "no data" : "the work before it has not finished";
  process_->die(format_text("%s has waited %.1f s (--comm-timeout %g): %s; last completed %llu, last started %llu",
                            operation.description.c_str(), seconds_since(channel.last_progress), process_->timeout(),
                            what, static_cast<unsigned long long>(channel.last_completed),
                            static_cast<unsigned long long>(channel.last_started)));
}
