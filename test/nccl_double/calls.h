// calls.h -- what the NCCL test double checks at each call, groups, and how the ranks of a communicator find each
// other. Included by nccl.h, after the types.
#pragma once

namespace nccl_double {

inline std::string& thread_error() {
  static thread_local std::string text;
  return text;
}

/// A refused call: the text is for ncclGetLastError. The communicator stays as it is.
inline ncclResult_t refuse(ncclComm* comm, ncclResult_t result, const std::string& text) {
  (void)comm;
  thread_error() = text;
  return result;
}

/// All communicators that ever were.
class Registry {
 public:
  void add(ncclComm* comm) {
    std::lock_guard<std::mutex> hold(lock_);
    known_.insert(comm);
  }
  bool knows(ncclComm* comm) {
    std::lock_guard<std::mutex> hold(lock_);
    return known_.count(comm) > 0;
  }

 private:
  std::mutex lock_;
  std::set<ncclComm*> known_;
};
inline Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

inline ncclResult_t state_of(ncclComm& comm) {
  std::lock_guard<std::mutex> hold(comm.lock);
  if (comm.failure != 0) return static_cast<ncclResult_t>(comm.failure);
  const bool flushing = comm.finalized && comm.completed != comm.issued;
  return !comm.ready || comm.polls_until_launch > 0 || flushing ? ncclInProgress : ncclSuccess;
}

enum Allowed { kReadyOnly = 0, kAlsoUnready = 1, kAlsoFinalized = 2 };

/// Why the communicator may not be used now; null if it may.
inline const char* reason_against(ncclComm& comm, int allowed) {
  if (comm.aborted) return "after ncclCommAbort";
  std::lock_guard<std::mutex> hold(comm.lock);
  if (comm.group_owner != std::thread::id() && comm.group_owner != std::this_thread::get_id()) {
    return "by two threads at once: another has the communicator in a group";
  }
  if (comm.destroyed) return "after ncclCommDestroy";
  if (allowed & kAlsoUnready) return nullptr;
  if (comm.finalized && !(allowed & kAlsoFinalized)) return "after ncclCommFinalize";
  if (!comm.ready || comm.polls_until_launch > 0) return "while an earlier call is in progress";
  return comm.failure != 0 ? "after a failure" : nullptr;
}

/// One call on a communicator: checks that it may be made, and that nobody else makes one at the same time.
class Use {
 public:
  Use(ncclComm* comm, const char* call, int allowed = kReadyOnly) {
    const char* reason = nullptr;
    if (!registry().knows(comm)) {
      reason = "on no communicator";
    } else if (comm->in_call.exchange(true)) {
      reason = "by two threads at once";
    } else {
      comm_ = comm;
      reason = reason_against(*comm, allowed);
    }
    refused_ = reason != nullptr;
    if (refused_) thread_error() = format_text("%s %s", call, reason);
  }
  ~Use() {
    if (comm_ != nullptr) comm_->in_call = false;
  }
  Use(const Use&) = delete;
  bool refused() const { return refused_; }

 private:
  ncclComm* comm_ = nullptr;
  bool refused_ = false;
};

/// The open group of a thread.
struct Group {
  struct Item {
    ncclComm* comm;
    cudaStream_t stream;
    Call call;
  };
  int depth = 0;
  ncclResult_t first_error = ncclSuccess;
  std::vector<Item> items;
};
inline Group& group() {
  static thread_local Group instance;
  return instance;
}

inline ncclResult_t group_start() {
  ++group().depth;
  return ncclSuccess;
}

/// Numbers a unit and launches it, or (non-blocking) keeps it until it is asked for twice.
inline ncclResult_t accept(ncclComm& comm, std::vector<Call> calls, cudaStream_t stream) {
  Unit unit = {std::move(calls), stream, 0};
  std::unique_lock<std::mutex> hold(comm.lock);
  comm.group_owner = std::thread::id();
  unit.number = ++comm.issued;
  if (!comm.blocking) {
    comm.accepted.push_back(std::move(unit));
    comm.polls_until_launch = 2;
    return ncclInProgress;
  }
  hold.unlock();
  launch_unit(comm, std::move(unit));
  return ncclSuccess;
}

inline ncclResult_t check_arguments(ncclComm& comm, cudaStream_t stream, const Call& call) {
  const bool collective = call.kind == Kind::kAllGather || call.kind == Kind::kBroadcast;
  const size_t ranks = static_cast<size_t>(comm.size), me = static_cast<size_t>(comm.rank);
  const size_t received = call.kind == Kind::kAllGather ? call.bytes * ranks : call.bytes;
  auto on_device = [](const void* data, size_t bytes) { return bytes == 0 || cpu_device::range_is(true, data, bytes); };
  if (stream == nullptr) return refuse(&comm, ncclInvalidArgument, "the null stream");
  if (call.peer < 0 || call.peer >= comm.size) return refuse(&comm, ncclInvalidArgument, "no such peer or root");
  if (!collective && call.peer == comm.rank) return refuse(&comm, ncclInvalidUsage, "a message to the own rank");
  const bool reads = call.kind != Kind::kReceive && (call.kind != Kind::kBroadcast || call.peer == comm.rank);
  if ((reads && !on_device(call.send, call.bytes)) ||
      (call.kind != Kind::kSend && !on_device(call.receive, received))) {
    return refuse(&comm, ncclInvalidArgument, std::string(kind_name(call.kind)) + ": not device memory");
  }
  const char* send = static_cast<const char*>(call.send);
  const char* receive = static_cast<char*>(call.receive);
  if (call.kind == Kind::kAllGather && call.bytes > 0 && send < receive + received && receive < send + call.bytes &&
      send != receive + me * call.bytes) {
    return refuse(&comm, ncclInvalidArgument, "ncclAllGather: in place means send = receive + rank * count");
  }
  return ncclSuccess;
}

inline ncclResult_t issue(ncclComm* comm, cudaStream_t stream, const Call& call) {
  Use use(comm, kind_name(call.kind));
  ncclResult_t result = use.refused() ? ncclInvalidUsage : check_arguments(*comm, stream, call);
  Group& open = group();
  if (open.depth == 0) return result == ncclSuccess ? accept(*comm, {call}, stream) : result;
  const bool message = call.kind == Kind::kSend || call.kind == Kind::kReceive;
  for (const Group::Item& item : open.items) {
    if (item.comm != comm || result != ncclSuccess) continue;
    const bool other_message = item.call.kind == Kind::kSend || item.call.kind == Kind::kReceive;
    if (item.stream != stream) result = refuse(comm, ncclInvalidUsage, "a group uses a communicator on two streams");
    if (!message || !other_message) result = refuse(comm, ncclInvalidUsage, "the double groups messages only");
  }
  if (result == ncclSuccess) {
    std::lock_guard<std::mutex> hold(comm->lock);
    comm->group_owner = std::this_thread::get_id();
    open.items.push_back({comm, stream, call});
  } else if (open.first_error == ncclSuccess) {
    open.first_error = result;
  }
  return result;
}

inline ncclResult_t group_end() {
  Group& open = group();
  if (open.depth == 0) return refuse(nullptr, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--open.depth > 0) return ncclSuccess;
  std::vector<Group::Item> items;
  items.swap(open.items);
  ncclResult_t result = open.first_error;
  open.first_error = ncclSuccess;
  std::set<ncclComm*> seen;
  for (const Group::Item& first : items) {
    if (!seen.insert(first.comm).second) continue;
    if (result != ncclSuccess && result != ncclInProgress) {
      std::lock_guard<std::mutex> hold(first.comm->lock);
      first.comm->group_owner = std::thread::id();
      continue;
    }
    std::vector<Call> calls;
    for (const Group::Item& item : items) {
      if (item.comm == first.comm) calls.push_back(item.call);
    }
    if (accept(*first.comm, std::move(calls), first.stream) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

/// The ranks of a new communicator tell the process that made the id where they are, and hear of the others.
inline void meet(ncclComm& comm, int meeting_place) {
  struct Seat {
    int ranks, rank, job_rank;
  };
  const Seat mine = {comm.size, comm.rank, world().process->rank()};
  std::vector<int> table(static_cast<size_t>(comm.size), -1);
  const size_t table_bytes = table.size() * sizeof(int);
  std::string problem;
  try {
    if (mine.job_rank == meeting_place) {
      table[static_cast<size_t>(comm.rank)] = mine.job_rank;
      for (int i = 1; i < comm.size; ++i) {
        Seat seat = {};
        transfer(comm, {{false, MPI_ANY_SOURCE, header_tag(comm), &seat, sizeof(seat)}});
        if (seat.ranks != comm.size || table[static_cast<size_t>(seat.rank)] >= 0) problem = "sizes or ranks differ";
        table[static_cast<size_t>(seat.rank)] = seat.job_rank;
      }
      for (int job_rank : table) {
        if (job_rank != mine.job_rank) transfer(comm, {{true, job_rank, answer_tag(comm), table.data(), table_bytes}});
      }
    } else {
      Seat seat = mine;
      transfer(comm, {{true, meeting_place, header_tag(comm), &seat, sizeof(seat)}});
      transfer(comm, {{false, meeting_place, answer_tag(comm), table.data(), table_bytes}});
    }
  } catch (const Stopped&) {
    return;
  }
  std::lock_guard<std::mutex> hold(comm.lock);
  comm.job_ranks = table;
  comm.failure = problem.empty() ? 0 : ncclInvalidUsage;
  comm.failure_text = problem;
  comm.ready = true;
}

}  // namespace nccl_double
