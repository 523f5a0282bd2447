// comm.h -- messages between the devices of a group of ranks: the interface, and the group of one.
//
// An operation is issued without waiting and names the work it must come after (`after`: everything issued to that
// stream so far; `also_after`: another operation); its ticket names it to the work that must come after it (wait). So
// transfers overlap with compute, and the caller says no more about time than what is true on every device.
//
// Order. Operations on the same directed link (from, to, id) match in the order of issue; so do the collectives of one
// communicator, which all its ranks issue in the same order. Between links, and between links and collectives, there is
// no order at all: a receive whose message never comes stops its own link only. With the acyclic graph of plan.h
// this is what makes a plan free of deadlock. A send may be rendezvous (it may last until its receive is there): never
// rely on buffering. Backends: comm_mpi.h (host memory), comm_nccl.h (GPUs, one rank each), SelfCommunicator (one
// rank).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/clock.h"
#include "llmc/control.h"
#include "llmc/device.h"

enum class Transfer { kSend, kReceive, kAllToAll, kAllGather, kBroadcast };

/// What an operation is, for messages. Ranks are ranks of the job, so that people can find the process.
struct OperationText {
  Transfer kind;
  int peer;           // -1 for collectives
  int link;           // -1 for collectives
  size_t bytes;       // of one message
  uint64_t sequence;  // 1-based, counts the operations of the same link and direction, or the collectives
};

/// An issued operation; opaque to callers.
struct Operation {
  explicit Operation(const OperationText& t) : text(t) {}
  virtual ~Operation() = default;
  const OperationText text;
};
using Ticket = std::shared_ptr<Operation>;

/// An event whose time on the host's clock is known (clock.h): it brings the times of other events to that clock.
struct ClockEvent {
  cudaEvent_t event = nullptr;
  double seconds = 0;
};

/// When an operation could begin on this rank (what it comes after was done, its link was free) and when it was
/// finished here. Seconds on the host's clock.
struct TransferTimes {
  double ready = 0, done = 0;
};

/// A directed link. Several links between the same two ranks, in both directions, are told apart by their id.
struct Link {
  int from, to, id;
};

/// One group of ranks that exchange device memory. Used by one thread. Buffers must live, and must not be written
/// (sent) or touched (received), until the ticket is done. A null ticket is a finished one. Wrong ranks, unknown links
/// or overlapping buffers are programmer errors; failures of the transport are environment errors thrown by wait(),
/// wait_host(), done() or the next operation; no progress for the time-out ends the job with a line naming the
/// operation.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return control_.rank(); }
  int size() const { return control_.size(); }
  const std::string& name() const { return name_; }
  virtual const char* backend() const = 0;
  /// The same group, for host memory.
  Control& control() { return control_; }

  /// Creates the links. Collective, before their first use; the same list, in the same order, on all ranks (checked).
  void open_links(const std::vector<Link>& links);

  /// Sends `bytes` bytes at `data` to rank `peer` on link (rank, peer, link).
  virtual Ticket send(const void* data, size_t bytes, int peer, int link, cudaStream_t after,
                      Ticket also_after = nullptr) = 0;
  /// Receives exactly `bytes` bytes from rank `peer` on link (peer, rank, link).
  virtual Ticket receive(void* data, size_t bytes, int peer, int link, cudaStream_t after,
                         Ticket also_after = nullptr) = 0;
  /// Block r of `to` = block rank() of `from` on rank r. Both (size, bytes_each), not overlapping.
  /// Every rank sends (size - 1) * bytes_each bytes.
  virtual Ticket all_to_all(const void* from, void* to, size_t bytes_each, cudaStream_t after) = 0;
  /// In place: block r of data (size, bytes_each) = that block on rank r. Sends (size - 1) * bytes_each bytes.
  virtual Ticket all_gather(void* data, size_t bytes_each, cudaStream_t after) = 0;
  /// data (bytes) = that of `root`. All ranks together send (size - 1) * bytes bytes.
  virtual Ticket broadcast(void* data, size_t bytes, int root, cudaStream_t after) = 0;

  /// The next three take tickets of this communicator, of its splits, or of the one it was split from.
  /// Work issued to `stream` from now on comes after the operation. May block the host (MPI) or not (NCCL).
  virtual void wait(const Ticket& ticket, cudaStream_t stream) = 0;
  /// Whether the operation is finished: its buffers may be used by anything.
  virtual bool done(const Ticket& ticket) = 0;
  /// Blocks the host until the operation is finished.
  virtual void wait_host(const Ticket& ticket) = 0;

  /// From now on operations keep their times, or need not; off at first. Costs two clock readings an operation (MPI) or
  /// two timing events (NCCL), and no waiting.
  void keep_times(bool keep) { keep_times_ = keep; }
  /// Times of a finished operation that was issued while times were kept. `base` is a finished event of this device.
  virtual TransferTimes times(const Ticket& ticket, const ClockEvent& base) = 0;

  /// The group of the ranks with the same color, ordered by (key, rank). Collective; color < 0 stays out (null).
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  /// Bytes that this rank has sent to other ranks since the start (to be exact after wait_host on all tickets).
  virtual uint64_t bytes_sent() const = 0;

 protected:
  Communicator(Control control, std::string name) : control_(std::move(control)), name_(std::move(name)) {}

  /// Creates what the backend needs for the links; called on all ranks with the same checked list.
  virtual void connect(const std::vector<Link>& links) = 0;

  /// `receive of 4096 bytes from rank 1 on link 3 (world), number 17`
  std::string describe(const OperationText& text) const {
    static const char* const kNames[] = {"send", "receive", "all_to_all", "all_gather", "broadcast"};
    std::string where;
    if (text.link >= 0) {
      where = format_text(" %s rank %d on link %d", text.kind == Transfer::kSend ? "to" : "from", text.peer, text.link);
    }
    return format_text("%s of %zu bytes%s (%s), number %llu", kNames[static_cast<int>(text.kind)], text.bytes,
                       where.c_str(), name_.c_str(), static_cast<unsigned long long>(text.sequence));
  }

  Control control_;
  std::string name_;
  bool keep_times_ = false;
};

inline void Communicator::open_links(const std::vector<Link>& links) {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a over all numbers
  for (const Link& link : links) {
    assert(link.from != link.to && std::min(link.from, link.to) >= 0 && std::max(link.from, link.to) < size());
    for (int value : {link.from, link.to, link.id}) hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211ull;
  }
  const std::vector<uint64_t> hashes = control_.gathered(hash, "open_links");
  for (int r = 0; r < size(); ++r) {
    if (hashes[static_cast<size_t>(r)] == hashes[0]) continue;
    environment_error("ranks %d and %d want different links: are all ranks the same program with the same options?",
                      control_.job_rank(0), control_.job_rank(r));
  }
  connect(links);
}

/// Whether everything before the event's last record is finished. CUDA keeps "not ready" as this thread's last error,
/// which the next launch check would take for its own, so it is cleared.
inline bool event_done(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  CUDA_CHECK(status);
  return true;
}

/// Events to reuse: creating one can cost more than a short message. `timing`: with cudaEventElapsedTime. Any thread.
class EventPool {
 public:
  explicit EventPool(bool timing = false) : flags_(timing ? cudaEventDefault : cudaEventDisableTiming) {}
  EventPool(const EventPool&) = delete;
  ~EventPool() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  bool timing() const { return flags_ == cudaEventDefault; }
  /// An event recorded on `stream`.
  cudaEvent_t record(cudaStream_t stream) {
    cudaEvent_t event = take();
    CUDA_CHECK(cudaEventRecord(event, stream));
    return event;
  }
  void give_back(cudaEvent_t event) {
    std::lock_guard<std::mutex> hold(lock_);
    free_.push_back(event);
  }

 private:
  cudaEvent_t take() {
    std::lock_guard<std::mutex> hold(lock_);
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      CUDA_CHECK(cudaEventCreateWithFlags(&event, flags_));
    } else {
      event = free_.back();
      free_.pop_back();
    }
    return event;
  }
  const unsigned flags_;
  std::mutex lock_;
  std::vector<cudaEvent_t> free_;
};

/// An operation that runs on a stream of its backend; finished when its event is. With `start`, an event of the same
/// pool (then one with timing) that was recorded before the operation's own work.
struct StreamOperation : Operation {
  StreamOperation(const OperationText& t, std::shared_ptr<EventPool> p, cudaStream_t stream,
                  cudaEvent_t start_event = nullptr)
      : Operation(t), pool(std::move(p)), start(start_event), event(pool->record(stream)) {}
  ~StreamOperation() override {
    if (start != nullptr) pool->give_back(start);
    pool->give_back(event);
  }
  const std::shared_ptr<EventPool> pool;
  const cudaEvent_t start;
  const cudaEvent_t event;
};

/// The event's time on the host's clock. Both events are finished and have timing.
inline double event_seconds(cudaEvent_t event, const ClockEvent& base) {
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, base.event, event));
  return base.seconds + 1e-3 * static_cast<double>(milliseconds);
}

inline TransferTimes stream_times(const Ticket& ticket, const ClockEvent& base) {
  const auto* operation = dynamic_cast<const StreamOperation*>(ticket.get());
  assert(operation != nullptr && operation->start != nullptr && "issued without keep_times(true)");
  return {event_seconds(operation->start, base), event_seconds(operation->event, base)};
}

/// `stream` goes on after everything issued to `after` so far (null: nothing) and after the operation (null: none).
inline void stream_waits(cudaStream_t stream, EventPool& pool, cudaStream_t after, const Ticket& also_after) {
  if (after != nullptr) {
    cudaEvent_t event = pool.record(after);
    CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
    pool.give_back(event);  // the wait refers to this record, not to later ones of the same event
  }
  if (also_after != nullptr) {
    const auto* operation = dynamic_cast<const StreamOperation*>(also_after.get());
    assert(operation != nullptr && "a ticket of another backend");
    CUDA_CHECK(cudaStreamWaitEvent(stream, operation->event, 0));
  }
}

/// A group of one rank: nobody to send to, collectives are copies on a stream of their own. Needs no MPI and no thread.
class SelfCommunicator : public Communicator {
 public:
  SelfCommunicator(Control control, std::string name) : Communicator(std::move(control), std::move(name)) {
    assert(size() == 1);
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~SelfCommunicator() override {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  const char* backend() const override { return "self"; }

  Ticket send(const void*, size_t, int, int, cudaStream_t, Ticket) override { return no_link(); }
  Ticket receive(void*, size_t, int, int, cudaStream_t, Ticket) override { return no_link(); }
  Ticket all_to_all(const void* from, void* to, size_t bytes_each, cudaStream_t after) override {
    return copy(Transfer::kAllToAll, to, from, bytes_each, after);
  }
  Ticket all_gather(void* data, size_t bytes_each, cudaStream_t after) override {
    return copy(Transfer::kAllGather, data, data, bytes_each, after);
  }
  Ticket broadcast(void* data, size_t bytes, int root, cudaStream_t after) override {
    assert(root == 0);
    return copy(Transfer::kBroadcast, data, data, bytes, after);
  }

  void wait(const Ticket& ticket, cudaStream_t stream) override { stream_waits(stream, *pool_, nullptr, ticket); }
  bool done(const Ticket& ticket) override {
    return ticket == nullptr || event_done(static_cast<StreamOperation&>(*ticket).event);
  }
  void wait_host(const Ticket& ticket) override {
    if (ticket != nullptr) CUDA_CHECK(cudaEventSynchronize(static_cast<StreamOperation&>(*ticket).event));
  }
  TransferTimes times(const Ticket& ticket, const ClockEvent& base) override { return stream_times(ticket, base); }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    Control group = control_.split(color, key);
    return color < 0 ? nullptr : std::make_unique<SelfCommunicator>(std::move(group), name);
  }
  uint64_t bytes_sent() const override { return 0; }

 protected:
  void connect(const std::vector<Link>&) override {}

 private:
  Ticket no_link() {
    assert(!"a group of one rank has no links");
    return nullptr;
  }
  Ticket copy(Transfer kind, void* to, const void* from, size_t bytes, cudaStream_t after) {
    stream_waits(stream_, *pool_, after, nullptr);
    const std::shared_ptr<EventPool>& pool = keep_times_ ? timed_pool_ : pool_;
    cudaEvent_t start = pool->timing() ? pool->record(stream_) : nullptr;
    if (to != from && bytes > 0) CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
    return std::make_shared<StreamOperation>(OperationText{kind, -1, -1, bytes, ++issued_}, pool, stream_, start);
  }

  std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>();
  std::shared_ptr<EventPool> timed_pool_ = std::make_shared<EventPool>(true);
  cudaStream_t stream_ = nullptr;
  uint64_t issued_ = 0;
};
