// launch.h -- a kernel launch: a grid of blocks as one task of a stream.
//
// launch<kernel>(grid, block, shared_bytes, stream, arguments...): the kernel is a template argument, not a function
// pointer, so that it is inlined into the loop over the threads of a block and vectorised with it (as a pointer: 5
// times slower). The arguments are converted to the kernel's own parameter types and copied into the task.
//
// The stream's team takes blocks in increasing order, in chunks. Blocks run to completion: no block may wait for a
// later one. A block first runs as the plain loop run_all_threads; if a thread is suspended there, the block goes on
// under the scheduler of fiber.h, and later blocks of this kernel start there at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "llmc/check.h"
#include "llmc/cpu/fiber.h"
#include "llmc/cpu/race.h"
#include "llmc/cpu/stream.h"

// The iterations of the thread loop are CUDA threads: the program itself promises that they do not depend on each
// other.
#ifdef __clang__
#define LLMC_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define LLMC_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace cpu_device {

constexpr size_t kDefaultSharedBytes = 48 * 1024, kMaxSharedBytes = 227 * 1024;

/// One per kernel (with its template arguments).
struct Kernel {
  std::string name;
  std::atomic<bool> suspends{false};  // has a thread of it ever been suspended?
  std::atomic<size_t> max_shared_bytes{kDefaultSharedBytes};
};

/// `Kernel` objects by function pointer, for cudaFuncSetAttribute.
struct Kernels {
  std::mutex mutex;
  std::map<const void*, Kernel*> by_address;
};
inline Kernels& kernels() {
  static Kernels* const instance = new Kernels;
  return *instance;
}

inline Kernel& register_kernel(const void* address, const char* pretty_function) {
  // gcc and clang: "... [with auto K = name<T>; ...]" or "... [K = &name]"
  std::string name = pretty_function;
  const size_t start = name.find("K = ");
  if (start != std::string::npos) name = name.substr(start + 4);
  name = name.substr(0, name.find_first_of(";]"));
  if (!name.empty() && name[0] == '&') name = name.substr(1);
  std::lock_guard<std::mutex> lock(kernels().mutex);
  Kernel*& kernel = kernels().by_address[address];
  if (kernel == nullptr) kernel = new Kernel;
  kernel->name = name;
  return *kernel;
}

template <auto K>
inline Kernel& kernel_of() {
  static Kernel& kernel = register_kernel(reinterpret_cast<const void*>(K), __PRETTY_FUNCTION__);
  return kernel;
}

/// What a launch asks for. The limits are those of an H100 (compute capability 9.0).
struct Shape {
  dim3 grid, block;
  size_t shared_bytes;
};

/// Null if the shape is allowed, else why not.
inline const char* invalid_shape(const Shape& shape, const Kernel& kernel) {
  const size_t threads = static_cast<size_t>(shape.block.x) * shape.block.y * shape.block.z;
  if (threads == 0 || threads > kMaxThreads || shape.block.z > 64) return "a block has 1 to 1024 threads";
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return "the grid is empty";
  if (shape.grid.x > 0x7fffffffu || shape.grid.y > 65535 || shape.grid.z > 65535) {
    return "the grid is larger than 2^31-1 x 65535 x 65535";
  }
  if (shape.shared_bytes > kernel.max_shared_bytes) {
    return "more dynamic shared memory than allowed (48 KiB; allow_dynamic_shared raises it to 227 KiB)";
  }
  return nullptr;
}

class KernelTask : public Task {
 public:
  KernelTask(const Shape& shape, Kernel* kernel, int workers)
      : shape_(shape),
        kernel_(kernel),
        blocks_(static_cast<long>(shape.grid.x) * shape.grid.y * shape.grid.z),
        workers_(static_cast<int>(std::min<long>(workers, blocks_))) {
    // Chunks large enough to keep the counter cheap, small enough to share the work evenly.
    const long threads = static_cast<long>(shape.block.x) * shape.block.y * shape.block.z;
    chunk_ = std::max<long>(1, std::min<long>(blocks_ / (workers_ * 8), 65536 / threads));
  }

  void run(cudaStream_t) override {
    OpenDeviceMemory open;
    run_team(workers_, [this](int worker) { run_blocks(worker); });
  }

 protected:
  /// All threads of the block one after another; true as soon as one of them has been suspended.
  virtual bool run_all_threads() const = 0;
  virtual void (*one_thread() const)(const void* arguments) = 0;
  virtual const void* arguments() const = 0;

 private:
  void run_blocks(int worker);
  void run_block(Block* block, long number) const;
  void prepare(Block* block) const;
  void poison_shared(Block* block) const {
    if (settings().poison && shape_.shared_bytes != 0) memset(block->dynamic_shared, 0xff, shape_.shared_bytes);
  }

  Shape shape_;
  Kernel* kernel_;
  long blocks_;
  int workers_;
  long chunk_;
  std::atomic<long> next_block_{0};
};

/// Once per OS thread and launch.
LLMC_NO_TSAN inline void KernelTask::prepare(Block* block) const {
  gridDim.x = shape_.grid.x, gridDim.y = shape_.grid.y, gridDim.z = shape_.grid.z;
  blockDim.x = shape_.block.x, blockDim.y = shape_.block.y, blockDim.z = shape_.block.z;
  block->kernel = kernel_->name.c_str();
  block->call = one_thread();
  block->arguments = arguments();
  block->forward = settings().order == ThreadOrder::kForward;
  block->random = TestRandom(settings().order_seed);
  block->met = false;
  if (shape_.shared_bytes > block->dynamic_shared_capacity || kAddressSanitizer) {
    allow(block->dynamic_shared, block->dynamic_shared_capacity);
    free(block->dynamic_shared);
    block->dynamic_shared_capacity = (shape_.shared_bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
    block->dynamic_shared = static_cast<char*>(aligned_alloc(kAlignment, block->dynamic_shared_capacity));
    if (block->dynamic_shared == nullptr)
      fatal("no memory for %zu bytes of dynamic shared memory", shape_.shared_bytes);
    forbid(block->dynamic_shared + shape_.shared_bytes, block->dynamic_shared_capacity - shape_.shared_bytes);
  }
  block->dynamic_shared_bytes = shape_.shared_bytes;
}

LLMC_NO_TSAN inline void KernelTask::run_block(Block* block, long number) const {
  blockIdx.x = static_cast<unsigned>(number % shape_.grid.x);
  blockIdx.y = static_cast<unsigned>(number / shape_.grid.x % shape_.grid.y);
  blockIdx.z = static_cast<unsigned>(number / shape_.grid.x / shape_.grid.y);
  block->block_number++;
  if constexpr (kThreadSanitizer) {
    run_block_on_fibers(block);
  } else {
    if (!block->forward || kernel_->suspends.load(std::memory_order_relaxed)) {
      begin_scheduling(0);
      const unsigned first = block->forward ? 0 : pick(block);
      block->current = first;
      block->stack_of[first] = &block->main_stack;
      start_thread(block, first);
    } else {
      if (!run_all_threads()) return;
      kernel_->suspends.store(true, std::memory_order_relaxed);
    }
    for (unsigned t = finish_thread(); t < block->threads; t = finish_thread()) start_thread(block, t);
  }
  block_suspended = false;
}

LLMC_NO_TSAN inline void KernelTask::run_blocks(int worker) {
  Block* block = this_block();
  prepare(block);
  if constexpr (kThreadSanitizer) {
    prepare_fibers(block, shape_.block.x * shape_.block.y * shape_.block.z);
    for (long number = worker; number < blocks_; number += workers_) {
      const bool shared = block->met || shape_.shared_bytes != 0;
      if (shared) order_now_after_threads(block);
      poison_shared(block);
      if (shared || number == worker) order_threads_after_now(block);
      run_block(block, number);
    }
    order_now_after_threads(block);
  } else {
    for (;;) {
      const long begin = next_block_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= blocks_) break;
      for (long number = begin; number < std::min(begin + chunk_, blocks_); number++) {
        poison_shared(block);
        run_block(block, number);
      }
    }
  }
}

/// The thread loop. `call` is a copy in a local variable: nothing the kernel stores can change the kernel's arguments.
template <class Call>
__attribute__((noinline, flatten)) bool run_thread_loop(const Call call) {
  const int size_x = static_cast<int>(blockDim.x);
  const unsigned size_y = blockDim.y, size_z = blockDim.z;
  for (unsigned z = 0; z < size_z; z++) {
    for (unsigned y = 0; y < size_y; y++) {
      threadIdx.z = z;
      threadIdx.y = y;
      LLMC_INDEPENDENT_ITERATIONS
      for (int x = 0; x < size_x; x++) {
        threadIdx.x = static_cast<unsigned>(x);
        signed_thread_x = x;
        call();
        if (__builtin_expect(block_suspended, 0)) return true;
      }
    }
  }
  return false;
}

template <class Call>
__attribute__((noinline)) void run_one_thread(const void* call) {
  (*static_cast<const Call*>(call))();
}

template <class Call>
class CallTask : public KernelTask {
 public:
  CallTask(const Shape& shape, Kernel* kernel, int workers, Call call)
      : KernelTask(shape, kernel, workers), call_(call) {}

 protected:
  bool run_all_threads() const override { return run_thread_loop<Call>(call_); }
  void (*one_thread() const)(const void*) override { return run_one_thread<Call>; }
  const void* arguments() const override { return &call_; }

 private:
  Call call_;
};

template <auto K>
struct Launcher;
template <class... P, void (*K)(P...)>
struct Launcher<K> {
  static void launch(const Shape& shape, cudaStream_t stream, typename Same<P>::type... arguments) {
    Kernel& kernel = kernel_of<K>();
    if (const char* reason = invalid_shape(shape, kernel)) {
      environment_error("launch of %s (grid %u x %u x %u, block %u x %u x %u, %zu bytes of shared memory) failed: %s",
                        kernel.name.c_str(), shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x, shape.block.y,
                        shape.block.z, shape.shared_bytes, reason);
    }
    const auto call = [=] { K(arguments...); };
    append(stream, new CallTask<decltype(call)>(shape, &kernel, team_size(), call));
  }
};

LLMC_NO_TSAN inline char* dynamic_shared() { return block_of_os_thread->dynamic_shared; }

}  // namespace cpu_device

/// Queues kernel K on the stream and returns. Throws an environment error for a shape that no GPU would run.
template <auto K, class... Arguments>
inline void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cpu_device::Launcher<K>::launch({grid, block, shared_bytes}, stream, std::forward<Arguments>(arguments)...);
}

#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(cpu_device::dynamic_shared())
