// doorbell.h -- wakes a thread that sleeps: rung by another thread, or by a stream when it gets there.
//
// The communication thread sleeps most of the time. To look every 200 us whether the compute stream has reached an
// event costs up to a seventh of a core in a virtual machine, where every timer is an exit to the hypervisor; so on the
// CPU device the stream rings. A GPU would stop its stream for the host function, and has host cores to spare: there
// the bell is not hung up, and the thread looks often. Nor under ThreadSanitizer: the bell's lock would order the
// thread behind the stream and so hide a missing event.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "llmc/device.h"

class Doorbell : public std::enable_shared_from_this<Doorbell> {
 public:
#if defined(__SANITIZE_THREAD__)
  static constexpr bool kStreamsRing = false;
#else
  static constexpr bool kStreamsRing = kIsCpuDevice;
#endif

  /// Ends the present or the next sleep. Any thread.
  void ring() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      rung_ = true;
    }
    wake_.notify_one();
  }

  /// Rings when `stream` has done everything issued to it so far, where kStreamsRing. The bell lives until then; it
  /// must be owned by a std::shared_ptr. Some 5 us of the stream's time.
  void ring_after(cudaStream_t stream) {
    if (!kStreamsRing) return;
    const auto ring = [](void* argument) {
      auto* self = static_cast<std::shared_ptr<Doorbell>*>(argument);
      (*self)->ring();
      delete self;
    };
    CUDA_CHECK(cudaLaunchHostFunc(stream, ring, new std::shared_ptr<Doorbell>(shared_from_this())));
  }

  /// Sleeps until the bell rings, at most `time`; returns at once if it has rung since the last sleep. One thread.
  void sleep(std::chrono::microseconds time) {
    std::unique_lock<std::mutex> hold(lock_);
    wake_.wait_for(hold, time, [this] { return rung_; });
    rung_ = false;
  }
  void sleep() {
    std::unique_lock<std::mutex> hold(lock_);
    wake_.wait(hold, [this] { return rung_; });
    rung_ = false;
  }

 private:
  std::mutex lock_;
  std::condition_variable wake_;
  bool rung_ = false;
};
