// comm_nccl.h -- the NCCL backend: one GPU for each rank, everything on streams, the host never waits.
//
// A lane is one NCCL communicator with a stream of its own: one lane of two ranks for each directed link, one for the
// collectives of the group. So lanes progress independently, although ncclSend and ncclRecv block their stream until
// they are matched. Rules that this file keeps (pipeline.md 2.9, dataparallel.md 4):
//   - communicators are made, and send a first message, at the start in one global order: a lazy connection inside a
//     schedule can deadlock; few CTAs for links, or a receive that waits keeps the multiprocessors from compute;
//   - one thread issues; NCCL is not thread-safe, so the watching thread takes turns with it by a lock;
//   - communicators are non-blocking: each call may answer "in progress" and has taken place only when the asynchronous
//     state says success (an event recorded earlier would be too early); only so is ncclCommAbort safe;
//   - a dead peer gives no error, its partner's kernel spins for ever: the watching thread has a deadline.
// CI runs this file against test/nccl_double; two GPUs have not been available to it.
#pragma once

#if defined(__CUDACC__) && !defined(NCCL_MAJOR) && __has_include(<nccl.h>)
#include <nccl.h>
#endif

#ifdef NCCL_MAJOR

#include <condition_variable>
#include <deque>
#include <thread>

#include "llmc/comm.h"

/// One NCCL communicator and its stream.
struct NcclLane {
  std::string name;  // NCCL keeps the pointer
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  uint64_t issued = 0, completed = 0;
  struct Pending {
    Ticket ticket;
    std::string description;
  };
  std::deque<Pending> pending;     // in the order of the stream
  std::string newest = "nothing";  // description of the newest finished operation
  Clock::time_point last_progress;
};

/// The lanes of all communicators of this process, and the thread that watches them.
class NcclLanes {
 public:
  explicit NcclLanes(std::shared_ptr<Process> process) : process_(std::move(process)) {
    CUDA_CHECK(cudaGetDevice(&device_));
    thread_ = std::thread([this] { watch(); });
  }

  /// Waits for all operations (the watching thread has the deadline), then destroys the communicators; after a failure
  /// aborts them.
  ~NcclLanes() {
    const bool orderly = std::uncaught_exceptions() == 0 && !process_->has_failed();
    try {
      Backoff backoff;
      while (orderly && unfinished() > 0) backoff.pause();
      {
        std::lock_guard<std::mutex> hold(lock_);
        stop_ = true;
      }
      wake_.notify_all();
      thread_.join();
      for (auto& lane : lanes_) close(*lane, orderly);
    } catch (const Error& error) {
      process_->die(error.what());
    }
  }

  /// A new communicator of `ranks` ranks, in which this process is `rank`. Same order on all its ranks.
  std::shared_ptr<NcclLane> open(const std::string& name, ncclUniqueId id, int ranks, int rank, int most_ctas) {
    auto lane = std::make_shared<NcclLane>();
    lane->name = name;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = 1;
    config.maxCTAs = most_ctas;
    config.commName = lane->name.c_str();
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, greatest));
    std::lock_guard<std::mutex> hold(lock_);
    const ncclResult_t result = ncclCommInitRankConfig(&lane->comm, ranks, id, rank, &config);
    settle(*lane, result, "ncclCommInitRankConfig");
    lanes_.push_back(lane);
    return lane;
  }

  /// Issues what `calls` (returning ncclResult_t) issues to the lane and returns its ticket, which has times if the
  /// pool's events have.
  template <class Calls>
  Ticket issue(NcclLane& lane, const OperationText& text, const std::string& description,
               const std::shared_ptr<EventPool>& pool, Calls calls) {
    process_->check_failure();
    std::lock_guard<std::mutex> hold(lock_);
    cudaEvent_t start = pool->timing() ? pool->record(lane.stream) : nullptr;
    settle(lane, calls(), description.c_str());
    Ticket ticket = std::make_shared<StreamOperation>(text, pool, lane.stream, start);
    if (lane.pending.empty()) lane.last_progress = Clock::now();
    lane.pending.push_back({ticket, description});
    return ticket;
  }

  Process& process() { return *process_; }

 private:
  size_t unfinished() {
    std::lock_guard<std::mutex> hold(lock_);
    size_t count = 0;
    for (auto& lane : lanes_) {
      retire(*lane);
      count += lane->pending.size();
    }
    return count;
  }

  /// Waits until the call has taken place. The caller holds the lock.
  void settle(NcclLane& lane, ncclResult_t result, const char* what) {
    const Clock::time_point start = Clock::now();
    Backoff backoff;
    while (result == ncclInProgress) {
      NCCL_CHECK(ncclCommGetAsyncError(lane.comm, &result));
      if (result != ncclInProgress) break;
      if (process_->is_late(start)) {
        end(format_text("%s (%s) has waited %.1f s (--comm-timeout %g): are all ranks at it?", what, lane.name.c_str(),
                        seconds_since(start), process_->timeout()));
      }
      backoff.pause();
    }
    if (result != ncclSuccess) {
      environment_error("rank %d: %s (%s) failed: %s: %s", process_->rank(), what, lane.name.c_str(),
                        ncclGetErrorString(result), ncclGetLastError(lane.comm));
    }
  }

  /// Forgets what is finished.
  void retire(NcclLane& lane) {
    while (!lane.pending.empty() && event_done(static_cast<StreamOperation&>(*lane.pending.front().ticket).event)) {
      lane.completed = lane.pending.front().ticket->text.sequence;
      lane.newest = std::move(lane.pending.front().description);
      lane.pending.pop_front();
      lane.last_progress = Clock::now();
    }
  }

  void watch() {
    try {
      CUDA_CHECK(cudaSetDevice(device_));
      std::unique_lock<std::mutex> hold(lock_);
      while (!stop_) {
        for (auto& lane : lanes_) check(*lane);
        wake_.wait_for(hold, std::chrono::milliseconds(50));
      }
    } catch (const Error& error) {
      process_->die(error.what());
    }
  }

  void check(NcclLane& lane) {
    ncclResult_t state = ncclSuccess;
    NCCL_CHECK(ncclCommGetAsyncError(lane.comm, &state));
    retire(lane);  // a failed operation may look finished: then it is the newest
    const char* what = (lane.pending.empty() ? lane.newest : lane.pending.front().description).c_str();
    if (state != ncclSuccess && state != ncclInProgress) {
      end(format_text("%s failed: %s: %s", what, ncclGetErrorString(state), ncclGetLastError(lane.comm)));
    }
    if (lane.pending.empty() || !process_->is_late(lane.last_progress)) return;
    end(format_text("%s has waited %.1f s (--comm-timeout %g); last completed %llu, last issued %llu", what,
                    seconds_since(lane.last_progress), process_->timeout(),
                    static_cast<unsigned long long>(lane.completed), static_cast<unsigned long long>(lane.issued)));
  }

  /// Says why, stops the kernels that spin, ends the job.
  [[noreturn]] void end(const std::string& message) {
    fprintf(stderr, "error: rank %d: %s\n", process_->rank(), message.c_str());
    process_->end_soon();
    for (auto& lane : lanes_) (void)ncclCommAbort(lane->comm);
    process_->abort(1);
  }

  void close(NcclLane& lane, bool orderly) {
    if (orderly) {
      settle(lane, ncclCommFinalize(lane.comm), "ncclCommFinalize");
      NCCL_CHECK(ncclCommDestroy(lane.comm));
    } else {
      (void)ncclCommAbort(lane.comm);
    }
    cudaStreamDestroy(lane.stream);
  }

  const std::shared_ptr<Process> process_;
  int device_ = 0;
  std::mutex lock_;  // of every NCCL call and all below
  std::condition_variable wake_;
  bool stop_ = false;
  std::vector<std::shared_ptr<NcclLane>> lanes_;
  std::thread thread_;
};

class NcclCommunicator : public Communicator {
 public:
  /// Collective over `control`; every rank has its own device (comm_backend.h decides).
  NcclCommunicator(Control control, std::string name)
      : NcclCommunicator(std::move(control), std::move(name), nullptr) {}
  ~NcclCommunicator() override { cudaFree(first_message_); }

  const char* backend() const override { return "nccl"; }

  Ticket send(const void* data, size_t bytes, int peer, int link, cudaStream_t after, Ticket also_after) override {
    NcclLane& lane = link_lane(rank(), peer, link);
    bytes_sent_ += bytes;
    return issue(lane, {Transfer::kSend, control_.job_rank(peer), link, bytes, 0}, after, also_after,
                 [&] { return ncclSend(data, bytes, ncclUint8, kTo, lane.comm, lane.stream); });
  }

  Ticket receive(void* data, size_t bytes, int peer, int link, cudaStream_t after, Ticket also_after) override {
    NcclLane& lane = link_lane(peer, rank(), link);
    return issue(lane, {Transfer::kReceive, control_.job_rank(peer), link, bytes, 0}, after, also_after,
                 [&] { return ncclRecv(data, bytes, ncclUint8, kFrom, lane.comm, lane.stream); });
  }

  Ticket all_to_all(const void* from, void* to, size_t bytes_each, cudaStream_t after) override {
    assert((from != to || bytes_each == 0) && "all_to_all: not in place");
    bytes_sent_ += bytes_each * static_cast<size_t>(size() - 1);
    return issue(*collectives_, {Transfer::kAllToAll, -1, -1, bytes_each, 0}, after, nullptr,
                 [&] { return exchange(static_cast<const char*>(from), static_cast<char*>(to), bytes_each); });
  }

  Ticket all_gather(void* data, size_t bytes_each, cudaStream_t after) override {
    NcclLane& lane = *collectives_;
    bytes_sent_ += bytes_each * static_cast<size_t>(size() - 1);
    const char* mine = static_cast<char*>(data) + static_cast<size_t>(rank()) * bytes_each;
    return issue(lane, {Transfer::kAllGather, -1, -1, bytes_each, 0}, after, nullptr, [&] {
      return bytes_each == 0 ? ncclSuccess : ncclAllGather(mine, data, bytes_each, ncclUint8, lane.comm, lane.stream);
    });
  }

  /// NCCL's ring: every rank but the last hands the data on once.
  Ticket broadcast(void* data, size_t bytes, int root, cudaStream_t after) override {
    NcclLane& lane = *collectives_;
    if ((rank() + 1) % size() != root) bytes_sent_ += bytes;
    return issue(lane, {Transfer::kBroadcast, -1, -1, bytes, 0}, after, nullptr, [&] {
      return bytes == 0 ? ncclSuccess : ncclBroadcast(data, data, bytes, ncclUint8, root, lane.comm, lane.stream);
    });
  }

  void wait(const Ticket& ticket, cudaStream_t stream) override { stream_waits(stream, *pool_, nullptr, ticket); }
  bool done(const Ticket& ticket) override {
    lanes_->process().check_failure();
    return ticket == nullptr || event_done(static_cast<StreamOperation&>(*ticket).event);
  }
  void wait_host(const Ticket& ticket) override {
    Backoff backoff;  // the watching thread ends the job when this takes too long
    while (!done(ticket)) backoff.pause();
  }
  TransferTimes times(const Ticket& ticket, const ClockEvent& base) override { return stream_times(ticket, base); }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    Control group = control_.split(color, key);
    if (color < 0) return nullptr;
    if (group.size() == 1) return std::make_unique<SelfCommunicator>(std::move(group), name);
    return std::unique_ptr<Communicator>(new NcclCommunicator(std::move(group), name, lanes_));
  }
  uint64_t bytes_sent() const override { return bytes_sent_; }

 protected:
  /// The first message of each link goes at once, one link after the other in the order of the list.
  void connect(const std::vector<Link>& links) override {
    for (const Link& link : links) {
      const ncclUniqueId id = shared_id(link.from);
      if (link.from != rank() && link.to != rank()) continue;
      const auto key = std::make_tuple(link.from, link.to, link.id);
      assert(links_.count(key) == 0 && "the link exists already");
      const std::string name = format_text("%s %d-%d.%d", name_.c_str(), link.from, link.to, link.id);
      links_[key] = lanes_->open(name, id, 2, link.from == rank() ? kFrom : kTo, kLinkCtas);
      wait_host(link.from == rank() ? send(first_message_, 1, link.to, link.id, nullptr, nullptr)
                                    : receive(first_message_, 1, link.from, link.id, nullptr, nullptr));
    }
    bytes_sent_ = 0;
  }

 private:
  static constexpr int kFrom = 0, kTo = 1;  // ranks in the communicator of a link
  static constexpr int kLinkCtas = 4, kCollectiveCtas = 16;

  NcclCommunicator(Control control, std::string name, std::shared_ptr<NcclLanes> lanes)
      : Communicator(std::move(control), std::move(name)),
        lanes_(lanes ? std::move(lanes) : std::make_shared<NcclLanes>(control_.process())) {
    CUDA_CHECK(cudaMalloc(&first_message_, 256));
    CUDA_CHECK(cudaMemset(first_message_, 0, 256));
    CUDA_CHECK(cudaDeviceSynchronize());
    collectives_ = lanes_->open(name_, shared_id(0), size(), rank(), kCollectiveCtas);
    wait_host(broadcast(first_message_, 1, 0, nullptr));
    bytes_sent_ = 0;
  }

  /// An id made by rank `owner` of the group, on all ranks.
  ncclUniqueId shared_id(int owner) {
    ncclUniqueId id = {};
    if (rank() == owner) NCCL_CHECK(ncclGetUniqueId(&id));
    control_.broadcast(&id, sizeof(id), owner);
    return id;
  }

  NcclLane& link_lane(int from, int to, int id) {
    const auto found = links_.find(std::make_tuple(from, to, id));
    assert(found != links_.end() && "send or receive on a link that open_links has not made");
    return *found->second;
  }

  /// Own block by a copy, the others in one group: their order does not matter then.
  ncclResult_t exchange(const char* from, char* to, size_t bytes) {
    if (bytes == 0) return ncclSuccess;
    NcclLane& lane = *collectives_;
    auto block = [bytes](auto* base, int r) { return base + static_cast<size_t>(r) * bytes; };
    CUDA_CHECK(cudaMemcpyAsync(block(to, rank()), block(from, rank()), bytes, cudaMemcpyDeviceToDevice, lane.stream));
    NCCL_CHECK(ncclGroupStart());
    ncclResult_t first_error = ncclSuccess;
    auto keep = [&first_error](ncclResult_t result) {
      if (first_error == ncclSuccess && result != ncclInProgress) first_error = result;
    };
    for (int s = 1; s < size(); ++s) {
      const int target = (rank() + s) % size(), source = (rank() - s + size()) % size();
      keep(ncclSend(block(from, target), bytes, ncclUint8, target, lane.comm, lane.stream));
      keep(ncclRecv(block(to, source), bytes, ncclUint8, source, lane.comm, lane.stream));
    }
    const ncclResult_t end = ncclGroupEnd();
    return first_error != ncclSuccess ? first_error : end;
  }

  template <class Calls>
  Ticket issue(NcclLane& lane, OperationText text, cudaStream_t after, const Ticket& also_after, Calls calls) {
    stream_waits(lane.stream, *pool_, after, also_after);
    text.sequence = ++lane.issued;
    return lanes_->issue(lane, text, describe(text), keep_times_ ? timed_pool_ : pool_, calls);
  }

  const std::shared_ptr<NcclLanes> lanes_;
  const std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>();
  const std::shared_ptr<EventPool> timed_pool_ = std::make_shared<EventPool>(true);
  std::shared_ptr<NcclLane> collectives_;
  std::map<std::tuple<int, int, int>, std::shared_ptr<NcclLane>> links_;
  char* first_message_ = nullptr;
  uint64_t bytes_sent_ = 0;
};

#endif
