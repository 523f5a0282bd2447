// communicator.h -- the inside of the NCCL test double: what a communicator is, and how its operations meet those of
// the other ranks, over MPI, on the CPU device.
//
// Launched operations (a "unit": one call, or one group) run on the stream that they were issued to and keep it busy
// until they are matched. Every pair of ranks says what it is about to do before any data moves:
//   send       header to the peer, waits for its acknowledgement, data        (so two mutual sends wait for ever)
//   receive    waits for the header, compares, acknowledges, data
//   collective header to all, header from all, compares, data
// A difference in operation, size or root makes the communicator fail (ncclInvalidUsage) on all ranks that wait in it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "llmc/device.h"
#include "llmc/process.h"

namespace nccl_double {

enum class Kind : int { kSend = 1, kReceive, kAllGather, kBroadcast, kPoison };

inline const char* kind_name(Kind kind) {
  static const char* const kNames[] = {"?", "ncclSend", "ncclRecv", "ncclAllGather", "ncclBroadcast", "a failure"};
  return kNames[static_cast<int>(kind)];
}

struct Call {
  Kind kind;
  const void* send;
  void* receive;
  size_t bytes;
  int peer;  // or the root
};

/// What travels before the data.
struct Header {
  Kind kind;
  int root;
  uint64_t bytes;
};

/// One launch.
struct Unit {
  std::vector<Call> calls;
  cudaStream_t stream;
  uint64_t number;  // 1-based, in the order of issue on its communicator
};

/// Thrown inside a unit when its communicator has failed or was aborted.
struct Stopped {};

/// The double's way to the other processes: its own MPI communicator, every call under the lock of Process.
struct World {
  std::shared_ptr<Process> process;
  MPI_Comm comm = MPI_COMM_NULL;
  std::atomic<int> ids{0};
};
inline World& world() {
  static World* const instance = new World;
  return *instance;
}

/// Collective over all processes; before the first NCCL call.
inline void start(const std::shared_ptr<Process>& process) {
  world().process = process;
  std::lock_guard<std::mutex> hold(process->lock());
  MPI_Comm_dup(MPI_COMM_WORLD, &world().comm);
}
inline void stop() {
  std::lock_guard<std::mutex> hold(world().process->lock());
  MPI_Comm_free(&world().comm);
  world().process.reset();
}

}  // namespace nccl_double

/// Never freed, so that a use after its end is found.
struct ncclComm {
  int size = 0, rank = -1, tag = 0;
  bool blocking = true;
  std::vector<int> job_ranks;

  std::mutex lock;  // of all below, to the blank line
  std::condition_variable changed;
  int failure = 0;  // ncclResult_t
  std::string failure_text;
  uint64_t issued = 0, completed = 0;
  std::vector<nccl_double::Unit> accepted;  // non-blocking: taken, not launched yet
  int polls_until_launch = 0;
  bool ready = false, finalized = false, destroyed = false;
  std::deque<nccl_double::Header> kept;  // headers that MPI may still read
  std::thread::id group_owner;           // the thread that has it in an open group

  std::atomic<bool> aborted{false};
  std::atomic<bool> in_call{false};

  bool dead() {
    if (aborted) return true;
    std::lock_guard<std::mutex> hold(lock);
    return failure != 0;
  }
};

namespace nccl_double {

constexpr int kInvalidUsage = 5;  // ncclInvalidUsage

/// One message of a meeting.
struct Part {
  bool is_send;
  int job_rank;  // MPI_ANY_SOURCE for any
  int tag;
  void* data;
  size_t bytes;
};

inline MPI_Request post(const Part& part) {
  std::lock_guard<std::mutex> hold(world().process->lock());
  MPI_Request request = MPI_REQUEST_NULL;
  const int count = narrow<int>(part.bytes);
  if (part.is_send) {
    MPI_Isend(part.data, count, MPI_BYTE, part.job_rank, part.tag, world().comm, &request);
  } else {
    MPI_Irecv(part.data, count, MPI_BYTE, part.job_rank, part.tag, world().comm, &request);
  }
  return request;
}

/// Returns when all parts are through; throws Stopped when the communicator dies first.
inline void transfer(ncclComm& comm, const std::vector<Part>& parts) {
  std::vector<MPI_Request> requests;
  for (const Part& part : parts) requests.push_back(post(part));
  Backoff backoff;
  for (;;) {
    int done = 0;
    {
      std::lock_guard<std::mutex> hold(world().process->lock());
      MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
      for (size_t i = 0; !done && comm.dead() && i < parts.size(); ++i) {
        if (requests[i] == MPI_REQUEST_NULL) continue;
        if (!parts[i].is_send) MPI_Cancel(&requests[i]);
        MPI_Request_free(&requests[i]);
      }
    }
    if (done) return;
    if (comm.dead()) throw Stopped();
    backoff.pause();
  }
}

// Three conversations for each pair of ranks, so that data never passes for a header.
inline int header_tag(const ncclComm& comm) { return comm.tag; }
inline int answer_tag(const ncclComm& comm) { return comm.tag + 1; }
inline int data_tag(const ncclComm& comm) { return comm.tag + 2; }

inline Header* keep(ncclComm& comm, const Header& header) {
  std::lock_guard<std::mutex> hold(comm.lock);
  comm.kept.push_back(header);
  return &comm.kept.back();
}

/// The communicator fails; `tell`: the others hear of it, whatever they wait for.
inline void fail(ncclComm& comm, const std::string& text, bool tell) {
  {
    std::lock_guard<std::mutex> hold(comm.lock);
    if (comm.failure != 0) return;
    comm.failure = kInvalidUsage;
    comm.failure_text = text;
    comm.changed.notify_all();
  }
  for (int r = 0; r < comm.size && tell; ++r) {
    if (r == comm.rank) continue;
    for (int tag : {header_tag(comm), answer_tag(comm)}) {
      Header* poison = keep(comm, {Kind::kPoison, 0, 0});
      MPI_Request request = post({true, comm.job_ranks[static_cast<size_t>(r)], tag, poison, sizeof(Header)});
      std::lock_guard<std::mutex> hold(world().process->lock());
      MPI_Request_free(&request);
    }
  }
}

/// Throws unless `theirs`, from `peer`, is what `call` expects (of `expected` kind).
inline void compare(ncclComm& comm, const Call& call, const Header& theirs, Kind expected, int peer) {
  const bool same_root = expected != Kind::kBroadcast || theirs.root == call.peer;
  if (theirs.kind == expected && theirs.bytes == call.bytes && same_root) return;
  if (theirs.kind == Kind::kPoison) {
    fail(comm, format_text("rank %d has found that the ranks do different things", peer), false);
  } else {
    fail(comm,
         format_text("rank %d issued %s of %zu bytes (peer or root %d), rank %d issued %s of %zu bytes (root %d)",
                     comm.rank, kind_name(call.kind), call.bytes, call.peer, peer, kind_name(theirs.kind),
                     static_cast<size_t>(theirs.bytes), theirs.root),
         true);
  }
  throw Stopped();
}

inline void run_send(ncclComm& comm, const Call& call) {
  const int to = comm.job_ranks[static_cast<size_t>(call.peer)];
  Header* mine = keep(comm, {Kind::kSend, -1, call.bytes});
  Header* answer = keep(comm, {});
  transfer(comm,
           {{true, to, header_tag(comm), mine, sizeof(Header)}, {false, to, answer_tag(comm), answer, sizeof(Header)}});
  compare(comm, call, *answer, Kind::kReceive, call.peer);
  transfer(comm, {{true, to, data_tag(comm), const_cast<void*>(call.send), call.bytes}});
}

inline void run_receive(ncclComm& comm, const Call& call) {
  const int from = comm.job_ranks[static_cast<size_t>(call.peer)];
  Header* theirs = keep(comm, {});
  transfer(comm, {{false, from, header_tag(comm), theirs, sizeof(Header)}});
  compare(comm, call, *theirs, Kind::kSend, call.peer);
  Header* answer = keep(comm, {Kind::kReceive, -1, call.bytes});
  transfer(comm, {{true, from, answer_tag(comm), answer, sizeof(Header)},
                  {false, from, data_tag(comm), call.receive, call.bytes}});
}

inline void run_collective(ncclComm& comm, const Call& call) {
  const size_t ranks = static_cast<size_t>(comm.size), me = static_cast<size_t>(comm.rank);
  const int root = call.kind == Kind::kBroadcast ? call.peer : -1;
  Header* mine = keep(comm, {call.kind, root, call.bytes});
  std::vector<Header*> theirs(ranks);
  std::vector<Part> headers, data;
  for (size_t r = 0; r < ranks; ++r) {
    if (r == me) continue;
    theirs[r] = keep(comm, {});
    headers.push_back({true, comm.job_ranks[r], header_tag(comm), mine, sizeof(Header)});
    headers.push_back({false, comm.job_ranks[r], header_tag(comm), theirs[r], sizeof(Header)});
  }
  transfer(comm, headers);
  for (size_t r = 0; r < ranks; ++r) {
    if (r != me) compare(comm, call, *theirs[r], call.kind, static_cast<int>(r));
  }
  char* receive = static_cast<char*>(call.receive);
  for (size_t r = 0; r < ranks; ++r) {
    if (r == me) continue;
    const bool sends = root < 0 || comm.rank == root, receives = root < 0 || static_cast<int>(r) == root;
    char* into = root < 0 ? receive + r * call.bytes : receive;
    if (sends) data.push_back({true, comm.job_ranks[r], data_tag(comm), const_cast<void*>(call.send), call.bytes});
    if (receives) data.push_back({false, comm.job_ranks[r], data_tag(comm), into, call.bytes});
  }
  transfer(comm, data);
  if (root < 0) memmove(receive + me * call.bytes, call.send, call.bytes);
  if (root == comm.rank && receive != call.send) memmove(receive, call.send, call.bytes);
}

/// Calls of a group go on together; those to the same peer in the same direction in their order.
inline void run_calls(ncclComm& comm, const std::vector<Call>& calls) {
  auto run = [&comm, &calls](Kind kind, int peer) {
    try {
      for (const Call& call : calls) {
        if (call.kind != kind || call.peer != peer) continue;
        if (kind == Kind::kSend) run_send(comm, call);
        if (kind == Kind::kReceive) run_receive(comm, call);
        if (kind == Kind::kAllGather || kind == Kind::kBroadcast) run_collective(comm, call);
      }
    } catch (const Stopped&) {
    }
  };
  std::set<std::pair<Kind, int>> lines;
  for (const Call& call : calls) lines.insert({call.kind, call.peer});
  std::vector<std::thread> threads;
  for (const auto& [kind, peer] : lines) {
    if (lines.size() == 1) {
      run(kind, peer);
    } else {
      threads.emplace_back(run, kind, peer);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

/// Puts a unit on its stream: after what is there, and after the units issued before on this communicator.
inline void launch_unit(ncclComm& comm, Unit unit) {
  cpu_device::enqueue(unit.stream, [&comm, unit = std::move(unit)] {
    {
      std::unique_lock<std::mutex> hold(comm.lock);
      while (comm.completed + 1 != unit.number && comm.failure == 0 && !comm.aborted) {
        comm.changed.wait_for(hold, std::chrono::milliseconds(10));
      }
    }
    run_calls(comm, unit.calls);
    std::lock_guard<std::mutex> hold(comm.lock);
    ++comm.completed;
    comm.changed.notify_all();
  });
}

}  // namespace nccl_double
