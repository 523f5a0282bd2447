// stream.h -- streams and events: real asynchronous queues.
//
// A stream is one ordered queue of tasks (kernels, copies, event records, waits, host functions) and one OS thread that
// runs them. The host only appends, so a launch costs it about a microsecond, and a host or another stream that does
// not wait reads old data here as on a GPU. Nothing orders two streams but an event.
//
// An event names its newest record. cudaEventRecord makes a new Record and queues its completion; cudaStreamWaitEvent
// captures the record that is newest *at that call*, as CUDA does: recording again later does not move the wait.
//
// ThreadSanitizer shall see exactly CUDA's order: a task is behind what the host did before it queued it, and what
// waits for a record is behind the tasks before it. A queue with an ordinary mutex would order much more (the host
// behind finished tasks, a task behind what the host did after queueing it) and so hide the race of a missing event.
// Hence the lock-free list, futexes for sleeping (which ThreadSanitizer does not see), and one release/acquire pair per
// task.
#pragma once

#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/cpu/memory.h"
#include "llmc/cpu/settings.h"
#include "llmc/cpu/team.h"

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

namespace cpu_device {

/// Sleeps while `word` holds `expected`; may return early. Elsewhere than on Linux: a nap.
inline void sleep_while_equal(std::atomic<uint32_t>* word, uint32_t expected) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
#else
  (void)word, (void)expected;
  usleep(50);
#endif
}

inline void wake_all(std::atomic<uint32_t>* word) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

/// A short wait that does not give the core away; sleeping and waking up costs 5 to 50 us instead.
template <class Condition>
inline bool spin_until(const Condition& condition) {
  static const int rounds = omp_get_num_procs() > 1 ? 200 : 1;
  for (int i = 0; i < rounds; i++) {
    if (condition()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return condition();
}

inline double monotonic_seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// One moment of one stream, waited for by anybody.
class Record {
 public:
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  double seconds() const { return seconds_; }
  void complete() {
    seconds_ = monotonic_seconds();
    if (state_.exchange(kDone, std::memory_order_release) == kSomebodySleeps) wake_all(&state_);
  }
  void wait() {
    if (spin_until([this] { return done(); })) return;
    for (;;) {
      uint32_t state = kPending;
      if (!state_.compare_exchange_strong(state, kSomebodySleeps, std::memory_order_acquire) && state == kDone) return;
      sleep_while_equal(&state_, kSomebodySleeps);
    }
  }

 private:
  enum : uint32_t { kPending, kSomebodySleeps, kDone };
  std::atomic<uint32_t> state_{kPending};
  double seconds_ = 0;
};

class Task {
 public:
  virtual ~Task() = default;
  virtual void run(cudaStream_t stream) = 0;
  virtual void counted() {}  // after the task has been counted as complete
  Task* next = nullptr;
};

/// All streams; never destroyed, since streams may still be at work while the program ends.
struct Streams {
  std::mutex mutex;
  std::set<cudaStream_t> alive;
  std::atomic<bool> exiting{false};
  unsigned created = 0;
};
inline Streams& streams() {
  static Streams* const instance = new Streams;
  return *instance;
}

}  // namespace cpu_device

struct CUstream_st {
  std::atomic<cpu_device::Task*> incoming{nullptr};  // newest first
  std::atomic<uint32_t> signal{0};                   // +2 for every task; bit 0: the stream's thread sleeps
  std::atomic<uint64_t> submitted{0}, completed{0};
  std::atomic<bool> busy{false};
  bool with_null_stream = true;  // ordered with cudaMemcpy: created without cudaStreamNonBlocking
  bool destroyed = false;
  cpu_device::TestRandom delays{0};
};

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<cpu_device::Record> newest;
  bool timing = true;
};

namespace cpu_device {

// The stream whose thread this is; null in the host's threads.
[[maybe_unused]] static __thread cudaStream_t stream_of_os_thread;

/// The program is ending: no further task starts, this thread stays where it is until the process is gone.
inline void stop_here_if_exiting(cudaStream_t stream) {
  if (!streams().exiting.load()) return;
  stream->busy.store(false);
  for (;;) pause();
}

inline void random_delay(cudaStream_t stream) {
  const uint32_t random = stream->delays.next();
  if (random % 4 == 0) usleep(random / 4 % 1000);
}

// The order of the queue itself. Under ThreadSanitizer the task's own pair stands for it (its calls are full barriers).
constexpr std::memory_order kQueueRelease = kThreadSanitizer ? std::memory_order_relaxed : std::memory_order_release;
constexpr std::memory_order kQueueAcquire = kThreadSanitizer ? std::memory_order_relaxed : std::memory_order_acquire;

/// Takes everything queued so far, oldest first.
LLMC_NO_TSAN inline Task* take_queued(cudaStream_t stream) {
  Task* newest_first = stream->incoming.exchange(nullptr, kQueueAcquire);
  Task* oldest_first = nullptr;
  while (newest_first != nullptr) {
    Task* const task = newest_first;
    newest_first = task->next;
    task->next = oldest_first;
    oldest_first = task;
  }
  return oldest_first;
}

/// The same; sleeps while there is nothing.
LLMC_NO_TSAN inline Task* take_tasks(cudaStream_t stream) {
  const auto any = [stream] { return stream->incoming.load(std::memory_order_relaxed) != nullptr; };
  while (!spin_until(any)) {
    const uint32_t asleep = stream->signal.fetch_or(1, kQueueAcquire) | 1;
    if (!any()) sleep_while_equal(&stream->signal, asleep);
    stream->signal.fetch_and(~1u, kQueueAcquire);
  }
  return take_queued(stream);
}

inline void run_task(cudaStream_t stream, Task* task) {
  order_acquire(task);
  if (settings().stream_delay) random_delay(stream);
  task->run(stream);
  stream->completed.fetch_add(1, std::memory_order_release);
  task->counted();
  delete task;
}

LLMC_NO_TSAN inline Task* task_after(const Task* task) { return task->next; }

/// The life of a stream's thread.
inline void serve(cudaStream_t stream) {
  stream_of_os_thread = stream;
  while (!stream->destroyed) {
    Task* task = take_tasks(stream);
    while (task != nullptr) {
      Task* const following = task_after(task);
      stream->busy.store(true);
      stop_here_if_exiting(stream);
      run_task(stream, task);
      stream->busy.store(false);
      task = following;
    }
  }
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().alive.erase(stream);
  }
  // A cudaDeviceSynchronize may have come in between; from here on nobody can add a task.
  for (Task* task = take_queued(stream); task != nullptr;) {
    Task* const following = task_after(task);
    run_task(stream, task);
    task = following;
  }
  delete stream;
}

/// Appends a task. Under LLMC_GUARD it runs here and now, so that memory can be open for it and closed for the host.
LLMC_NO_TSAN inline void append(cudaStream_t stream, Task* task) {
  if (stream == nullptr) fatal("work on the null stream: create a stream with cudaStreamCreate and pass it");
  stream->submitted.fetch_add(1, std::memory_order_relaxed);
  order_release(task);
  if (settings().guard) {
    run_task(stream, task);
    return;
  }
  Task* newest = stream->incoming.load(std::memory_order_relaxed);
  do {
    task->next = newest;
  } while (!stream->incoming.compare_exchange_weak(newest, task, kQueueRelease, std::memory_order_relaxed));
  if (stream->signal.fetch_add(2, kQueueRelease) & 1) wake_all(&stream->signal);
}

/// A task that calls function(), with device memory open for it or not.
template <class Function>
class FunctionTask : public Task {
 public:
  FunctionTask(Function function, bool opens_memory) : function_(std::move(function)), opens_memory_(opens_memory) {}
  void run(cudaStream_t) override {
    if (opens_memory_) {
      OpenDeviceMemory open;
      function_();
    } else {
      function_();
    }
  }

 private:
  Function function_;
  bool opens_memory_;
};

/// Queues function() as device work (it may touch device memory): how library calls such as cublasLtMatmul are made.
template <class Function>
inline void enqueue(cudaStream_t stream, Function function) {
  append(stream, new FunctionTask<Function>(std::move(function), true));
}

/// Queues function() as host work (no device memory).
template <class Function>
inline void enqueue_host(cudaStream_t stream, Function function) {
  append(stream, new FunctionTask<Function>(std::move(function), false));
}

/// Completes a record, when it is itself counted: after a synchronisation cudaStreamQuery says "done".
class RecordTask : public Task {
 public:
  explicit RecordTask(std::shared_ptr<Record> record) : record_(std::move(record)) {}
  void run(cudaStream_t) override {}
  void counted() override { record_->complete(); }

 private:
  std::shared_ptr<Record> record_;
};

/// Queues the completion of a new record. cudaStreamWaitEvent and every synchronisation are built from it.
inline std::shared_ptr<Record> append_record(cudaStream_t stream) {
  auto record = std::make_shared<Record>();
  append(stream, new RecordTask(record));
  return record;
}

inline void append_wait(cudaStream_t stream, std::shared_ptr<Record> record) {
  enqueue_host(stream, [stream, record = std::move(record)] {
    if (record->done()) return;
    stream->busy.store(false);
    record->wait();
    stream->busy.store(true);
    stop_here_if_exiting(stream);
  });
}

/// CUDA forbids API calls in host functions; waiting for the own stream there would never end.
inline void require_host_thread(const char* function) {
  if (stream_of_os_thread != nullptr)
    fatal("%s called on a stream (from cudaLaunchHostFunc): CUDA forbids it", function);
}

/// Waits for everything queued so far in all streams, or in those that are ordered with the null stream.
inline void wait_for_streams(bool only_with_null_stream) {
  std::vector<std::shared_ptr<Record>> records;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (cudaStream_t stream : streams().alive) {
      if (!only_with_null_stream || stream->with_null_stream) records.push_back(append_record(stream));
    }
  }
  for (const auto& record : records) record->wait();
}

/// At exit: lets running tasks end (2 s at most), starts no others, so that nothing runs while the program is torn
/// down.
inline void stop_streams_at_exit() {
  streams().exiting.store(true);
  const double deadline = monotonic_seconds() + 2.0;
  std::lock_guard<std::mutex> lock(streams().mutex);
  for (cudaStream_t stream : streams().alive) {
    while (stream->busy.load() && stream != stream_of_os_thread && monotonic_seconds() < deadline) usleep(100);
  }
}

inline cudaStream_t create_stream(bool with_null_stream) {
  cudaStream_t stream = new CUstream_st;
  stream->with_null_stream = with_null_stream;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    if (streams().created++ == 0) atexit(stop_streams_at_exit);
    stream->delays = TestRandom(settings().stream_delay_seed * 1000003 + streams().created);
    streams().alive.insert(stream);
  }
  if (!settings().guard) std::thread(serve, stream).detach();
  return stream;
}

/// Returns at once; the stream goes when its work is done.
inline void destroy_stream(cudaStream_t stream) {
  // The stream's thread needs this lock before it deletes the stream: not while append still uses it.
  std::lock_guard<std::mutex> lock(streams().mutex);
  if (settings().guard) {
    streams().alive.erase(stream);
    delete stream;
  } else {
    enqueue_host(stream, [stream] { stream->destroyed = true; });
  }
}

}  // namespace cpu_device
