// team.h -- several OS threads for one kernel or one matrix product.
//
// run_team(n, body) calls body(worker) on n OS threads and returns when all are done. Each stream has its own team: the
// OpenMP threads of the stream's thread. With n == 1 there is no parallel region at all. The size is that of
// omp_get_max_threads() in the thread that launches (OMP_NUM_THREADS, omp_set_num_threads).
//
// ThreadSanitizer does not understand the locks of libgomp and would report the team's own hand-over as races, so there
// the team is made of std::thread, and always of two, so that two blocks really run side by side.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "llmc/cpu/sanitizer.h"

namespace cpu_device {

/// OS threads for what the calling thread launches now.
inline int team_size() { return kThreadSanitizer ? 2 : std::max(1, omp_get_max_threads()); }

/// Two std::threads that stay between calls; used under ThreadSanitizer only.
class ThreadTeam {
 public:
  explicit ThreadTeam(int size) {
    for (int worker = 0; worker < size; worker++) threads_.emplace_back([this, worker] { serve(worker); });
  }
  ~ThreadTeam() {
    post(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  void run(const std::function<void(int)>& body) {
    post(&body);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void post(const std::function<void(int)>* body) {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = body;
    running_ = static_cast<int>(threads_.size());
    round_++;
    changed_.notify_all();
  }
  void serve(int worker) {
    for (long round = 1;; round++) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return round_ == round; });
      const std::function<void(int)>* body = body_;
      if (body == nullptr) return;
      lock.unlock();
      (*body)(worker);
      lock.lock();
      if (--running_ == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int)>* body_ = nullptr;
  long round_ = 0;
  int running_ = 0;
  std::vector<std::thread> threads_;
};

/// body(worker) for worker = 0..workers-1 at the same time (fewer, if OpenMP grants fewer: do not count on all).
template <class Body>
inline void run_team(int workers, const Body& body) {
  if (workers <= 1) {
    body(0);
  } else if constexpr (kThreadSanitizer) {
    static thread_local ThreadTeam team(2);
    team.run(body);
  } else {
#pragma omp parallel num_threads(workers)
    body(omp_get_thread_num());
  }
}

/// body(i) for i = 0..count-1, handed out one at a time in increasing order: results must not depend on who runs what.
template <class Body>
inline void parallel_for(int workers, size_t count, const Body& body) {
  std::atomic<size_t> next{0};
  run_team(static_cast<int>(std::min<size_t>(static_cast<size_t>(workers), count)), [&](int) {
    for (size_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      body(i);
    }
  });
}

}  // namespace cpu_device
