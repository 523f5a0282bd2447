// process.h -- this process among the processes of the job: start-up, the one way into MPI, time-outs, the emergency
// exit.
//
// MPI is initialised for MPI_THREAD_SERIALIZED: every call is made under Process::lock() and none of them blocks, so
// the training thread (control.h) and the communication thread (comm_mpi_engine.h) never keep each other from progress.
// One communicator, a duplicate of MPI_COMM_WORLD, carries everything; groups and links differ by tag, so nothing after
// the start is collective inside MPI. Who waits polls, and sleeps between polls: four ranks on two cores must leave the
// cores to those that compute (a blocking MPI_Recv in three waiting ranks slowed the fourth from 1.8 to 6.9 s).
//
// A process that no launcher has started is alone and leaves MPI out, which saves a second. Without MPI (make MPI=0)
// being started as one of several is an error, not N times rank 0.
#pragma once

#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/check.h"

#ifdef LLMC_MPI
#define OMPI_SKIP_MPICXX 1  // the old C++ interface: unused, and not free of warnings
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// How long to pause between polls: yields at first, then sleeps of 50 us, after some 20 ms of 200 us.
class Backoff {
 public:
  void reset() { pauses_ = 0; }
  std::chrono::microseconds next() {
    ++pauses_;
    return std::chrono::microseconds(pauses_ <= 8 ? 0 : pauses_ <= 200 ? 50 : 200);
  }
  void pause() {
    const std::chrono::microseconds time = next();
    if (time.count() == 0) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(time);
    }
  }

 private:
  int pauses_ = 0;
};

/// One message to or from another process. `peer` is a rank of the job.
struct Message {
  bool is_send;
  int peer;
  void* data;
  size_t bytes;
};

/// Number of ranks that the launcher says it started, as far as its environment tells; 1 without a launcher.
inline int launched_ranks() {
  int ranks = 1;
  auto consider = [&ranks](const char* name) {
    const char* text = getenv(name);
    if (text != nullptr && atoi(text) > ranks) ranks = atoi(text);
  };
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    consider(name);
  }
  if (getenv("SLURM_SRUN_COMM_HOST") != nullptr) consider("SLURM_NTASKS");  // set by srun only, not inside sbatch
  return ranks;
}

/// Whether an MPI or batch launcher has started this process, as far as its environment tells. Only names are looked
/// at, so that a launcher whose number of ranks we cannot read still counts: MPI is then started, and knows.
inline bool started_by_launcher() {
  for (char** entry = environ; *entry != nullptr; entry++) {
    for (const char* prefix : {"OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_", "MPI_LOCALRANKID", "ALPS_APP_",
                               "PALS_", "FLUX_TASK_", "JSM_NAMESPACE_", "SLURM_SRUN_COMM_HOST"}) {
      if (strncmp(*entry, prefix, strlen(prefix)) == 0) return true;
    }
  }
  return launched_ranks() > 1;
}

/// See the top of the file. Shared (std::shared_ptr) by all that communicate; MPI is finalised when the last one is
/// gone.
class Process {
 public:
  Process(int* argc, char*** argv);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Seconds without progress after which a wait ends the job (default 600; 0 = for ever). Any thread.
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  double timeout() const { return timeout_s_; }
  bool is_late(Clock::time_point last_progress) const {
    return timeout_s_ > 0 && seconds_since(last_progress) > timeout_s_;
  }

  /// Ends all processes of the job with `exit_code`, from any thread. Does not return and does not hang: should
  /// MPI_Abort block, a signal ends this process, and the launcher then the others.
  [[noreturn]] void abort(int exit_code);

  /// From now on the process ends within some seconds, whatever hangs.
  void end_soon() {
    signal(SIGALRM, SIG_DFL);
    alarm(5);
  }

  /// Prints `error: rank R: <message>` in one line and aborts with exit code 1: for threads that have nobody to throw
  /// to.
  [[noreturn]] void die(const std::string& message) {
    fprintf(stderr, "error: rank %d: %s\n", rank_, message.c_str());
    abort(1);
  }

  /// A failure found by another thread: the first one is kept, and thrown by check_failure() in whoever waits.
  void fail(const std::string& message);
  bool has_failed() const { return failed_; }
  void check_failure();

  /// Transfers the messages and returns when all are through. `operation` names it in messages. Blocking, host memory.
  /// Throws an environment error that names operation, rank and peer; ends the job when late().
  void transfer(const std::vector<Message>& messages, int tag, const char* operation);

  /// Next free tag on this process (control.h agrees on one with the others).
  int next_tag() const { return next_tag_; }
  void set_next_tag(int tag);

#ifdef LLMC_MPI
  std::mutex& lock() { return lock_; }
  /// Posts a message of at most kLargestPiece bytes. The caller holds lock(). `synchronous`: a send that cannot be done
  /// before its receive has started, which no program may rely on not being the case.
  MPI_Request post(const Message& message, int tag, bool synchronous, const char* operation);
  /// Throws for a failed MPI call. `peer` < 0: none.
  void check(int result, const char* operation, int peer) const;
#endif
  /// MPI counts are int: larger messages go in pieces.
  static constexpr size_t kLargestPiece = size_t{1} << 30;

 private:
  int rank_ = 0;
  int size_ = 1;
  int next_tag_ = 1;
  std::atomic<double> timeout_s_{600};
  std::atomic<bool> failed_{false};
  std::mutex failure_lock_;
  std::string failure_;
#ifdef LLMC_MPI
  std::mutex lock_;
  MPI_Comm world_ = MPI_COMM_NULL;
  int largest_tag_ = 32767;
#endif
};

inline void Process::fail(const std::string& message) {
  std::lock_guard<std::mutex> hold(failure_lock_);
  if (!failed_) failure_ = message;
  failed_ = true;
}

inline void Process::check_failure() {
  if (!failed_) return;
  std::lock_guard<std::mutex> hold(failure_lock_);
  environment_error("%s", failure_.c_str());
}

#ifdef LLMC_MPI

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// Open MPI never frees some of its memory, and its plug-ins take their own locks in different orders.
extern "C" {
__attribute__((used, weak)) const char* __asan_default_options() { return "detect_leaks=0"; }
__attribute__((used, weak)) const char* __tsan_default_suppressions() { return "deadlock:mca_\ndeadlock:libopen-\n"; }
}
#endif

/// Read once, by MPI_Init and by the first CUDA call; what the user has set stays.
/// Yield while waiting: without it a barrier of 4 ranks on 2 cores takes 16 ms instead of 8 us. Single copy through
/// process_vm_readv: where a container forbids the call (seccomp), large messages fail, so it is tried first. Hardware
/// queues: with the default 8, streams of several links share one and wait for each other.
inline void prepare_environment() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
  char from = 1, to = 0;
  const iovec local = {&to, 1}, remote = {&from, 1};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != 1) {
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
  }
}

inline Process::Process(int* argc, char*** argv) {
  prepare_environment();
  if (!started_by_launcher()) return;
  int provided = 0;
  if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) {
    environment_error("MPI_Init_thread failed");
  }
  MPI_Comm_dup(MPI_COMM_WORLD, &world_);
  for (MPI_Comm comm : {MPI_COMM_WORLD, MPI_COMM_SELF, world_}) MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &size_);
  int* bound = nullptr;
  int found = 0;
  MPI_Comm_get_attr(world_, MPI_TAG_UB, &bound, &found);
  if (found) largest_tag_ = *bound;
  if (provided < MPI_THREAD_SERIALIZED) {
    environment_error("this MPI offers thread level %d; %d (MPI_THREAD_SERIALIZED) is needed", provided,
                      MPI_THREAD_SERIALIZED);
  }
  if (size_ == 1 && launched_ranks() > 1) {
    user_error("started as one of %d ranks, but the launcher is not the one of the MPI this program is built with",
               launched_ranks());
  }
}

inline Process::~Process() {
  // After a failure the other ranks may wait in something else; the launcher then ends the job.
  if (world_ == MPI_COMM_NULL || failed_ || std::uncaught_exceptions() > 0) return;
  MPI_Comm_free(&world_);
  MPI_Finalize();
}

inline void Process::abort(int exit_code) {
  fflush(nullptr);
  end_soon();
  if (world_ != MPI_COMM_NULL) MPI_Abort(MPI_COMM_WORLD, exit_code);
  _exit(exit_code);
}

inline void Process::set_next_tag(int tag) {
  if (tag > largest_tag_) environment_error("this MPI has only %d message tags", largest_tag_);
  next_tag_ = tag;
}

inline void Process::check(int result, const char* operation, int peer) const {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  const std::string with = peer >= 0 ? format_text(" with rank %d", peer) : std::string();
  environment_error("rank %d: %s%s failed: %s", rank_, operation, with.c_str(), text);
}

inline MPI_Request Process::post(const Message& message, int tag, bool synchronous, const char* operation) {
  assert(message.bytes <= kLargestPiece && message.peer >= 0 && message.peer < size_);
  MPI_Request request = MPI_REQUEST_NULL;
  const int count = static_cast<int>(message.bytes);
  const auto send = synchronous ? MPI_Issend : MPI_Isend;
  const int result = message.is_send ? send(message.data, count, MPI_BYTE, message.peer, tag, world_, &request)
                                     : MPI_Irecv(message.data, count, MPI_BYTE, message.peer, tag, world_, &request);
  check(result, operation, message.peer);
  return request;
}

inline void Process::transfer(const std::vector<Message>& messages, int tag, const char* operation) {
  struct Pending {
    MPI_Request request;
    Message piece;
  };
  std::vector<Pending> pending;
  std::unique_lock<std::mutex> hold(lock_);
  for (const Message& message : messages) {
    for (size_t begin = 0; begin == 0 || begin < message.bytes; begin += kLargestPiece) {
      const Message piece = {message.is_send, message.peer, static_cast<char*>(message.data) + begin,
                             std::min(kLargestPiece, message.bytes - begin)};
      pending.push_back({post(piece, tag, false, operation), piece});
    }
  }
  Backoff backoff;
  Clock::time_point last_progress = Clock::now();
  while (!pending.empty()) {
    const size_t before = pending.size();
    for (size_t i = 0; i < pending.size();) {
      int done = 0, count = 0;
      MPI_Status status;
      check(MPI_Test(&pending[i].request, &done, &status), operation, pending[i].piece.peer);
      if (!done) {
        ++i;
        continue;
      }
      if (!pending[i].piece.is_send) MPI_Get_count(&status, MPI_BYTE, &count);
      if (!pending[i].piece.is_send && static_cast<size_t>(count) != pending[i].piece.bytes) {
        environment_error("rank %d: %s with rank %d: %d bytes arrived, %zu expected", rank_, operation,
                          pending[i].piece.peer, count, pending[i].piece.bytes);
      }
      pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (pending.empty()) break;
    hold.unlock();
    check_failure();
    if (pending.size() != before) {
      backoff.reset();
      last_progress = Clock::now();
    } else if (is_late(last_progress)) {
      die(format_text("%s waits for rank %d since %.1f s (--comm-timeout %g)", operation, pending[0].piece.peer,
                      seconds_since(last_progress), timeout()));
    }
    backoff.pause();
    hold.lock();
  }
}

#else  // one process

inline Process::Process(int*, char***) {
  if (launched_ranks() > 1) {
    user_error("started as one of %d ranks, but built without MPI: install Open MPI and build with make MPI=1",
               launched_ranks());
  }
}
inline Process::~Process() {}
inline void Process::abort(int exit_code) {
  fflush(nullptr);
  _exit(exit_code);
}
inline void Process::set_next_tag(int tag) { next_tag_ = tag; }
inline void Process::transfer(const std::vector<Message>& messages, int, const char*) { assert(messages.empty()); }

#endif
