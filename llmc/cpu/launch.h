// launch.h -- a kernel launch: a grid of blocks as one task of a stream.
//
// launch<kernel>(grid, block, shared_bytes, stream, arguments...): the kernel is a template argument, not a function
// pointer, so that it is inlined into the loop over the threads of a block and vectorised with it (as a pointer: 5
// times slower). The arguments are converted to the kernel's own parameter types and copied into the task.
//
// The stream's team takes blocks in increasing order, in chunks (the test modes of LLMC_ORDER permute blocks as well as
// threads). Blocks run to completion: no block may wait for another.
//
// A block runs in one of two ways, and a kernel always in the same one:
//   plain loop   the kernel cannot reach a barrier or a collective: run_thread_loop, vectorised over the threads
//   scheduled    it may: every thread is a lazy fiber (fiber.h)
// The compiler decides, see run_thread_loop. Trying the loop first and switching at the first suspension would be
// simpler, but then two machine codes of the kernel would share the work, one for the blocks before and one for those
// after: they may contract a * b + c differently, and results would depend on which block happened to be first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <numeric>
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
#pragma clang diagnostic ignored "-Wpass-failed"  // not every kernel can be vectorised
#define LLMC_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#define LLMC_ONE_MACHINE_CODE __attribute__((noinline, flatten))
#else
#define LLMC_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#define LLMC_ONE_MACHINE_CODE __attribute__((noinline, noclone, flatten))
#endif

namespace cpu_device {

constexpr size_t kDefaultSharedBytes = 48 * 1024, kMaxSharedBytes = 227 * 1024;

/// One per kernel (with its template arguments).
struct Kernel {
  std::string name;
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
    if (settings().order == ThreadOrder::kShuffle) {
      step_ = std::max<long>(1, blocks_ * 5 / 8);
      while (std::gcd(step_, blocks_) != 1) step_++;
    }
  }

  void run(cudaStream_t) override {
    OpenDeviceMemory open;
    run_team(workers_, [this](int worker) { run_blocks(worker); });
  }

 protected:
  /// run_thread_loop of the kernel: all threads of the block as blockDim says. True: the kernel may suspend threads.
  virtual bool run_all_threads() const = 0;
  virtual void (*one_thread() const)(const void* arguments) = 0;
  virtual const void* arguments() const = 0;

 private:
  void run_blocks(int worker);
  void run_block(Block* block, long number, bool plain) const;
  bool prepare(Block* block) const;
  void prepare_shared(Block* block) const;
  /// The k-th block to be run.
  long block_at(long k) const {
    if (settings().order == ThreadOrder::kForward) return k;
    if (settings().order == ThreadOrder::kReverse) return blocks_ - 1 - k;
    return static_cast<long>((static_cast<uint64_t>(k) * static_cast<uint64_t>(step_) + settings().order_seed) %
                             static_cast<uint64_t>(blocks_));
  }
  void poison_shared(Block* block) const {
    if (settings().poison && shape_.shared_bytes != 0) memset(block->dynamic_shared, 0xff, shape_.shared_bytes);
  }

  Shape shape_;
  Kernel* kernel_;
  long blocks_;
  int workers_;
  long chunk_;
  long step_ = 1;  // shuffled order of blocks: a number without common divisor with blocks_
  std::atomic<long> next_block_{0};
};

LLMC_NO_TSAN inline void KernelTask::prepare_shared(Block* block) const {
  if (shape_.shared_bytes > block->dynamic_shared_capacity || kAddressSanitizer) {
    allow(block->dynamic_shared, block->dynamic_shared_capacity);
    free(block->dynamic_shared);
    block->dynamic_shared_capacity = (shape_.shared_bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
    block->dynamic_shared = static_cast<char*>(aligned_alloc(kAlignment, block->dynamic_shared_capacity));
    if (block->dynamic_shared == nullptr) {
      fatal("no memory for %zu bytes of dynamic shared memory", shape_.shared_bytes);
    }
    forbid(block->dynamic_shared + shape_.shared_bytes, block->dynamic_shared_capacity - shape_.shared_bytes);
  }
  block->dynamic_shared_bytes = shape_.shared_bytes;
}

/// Once per OS thread and launch. True: the kernel runs as a plain loop.
LLMC_NO_TSAN inline bool KernelTask::prepare(Block* block) const {
  block->kernel = kernel_->name.c_str();
  block->call = one_thread();
  block->arguments = arguments();
  block->forward = settings().order == ThreadOrder::kForward;
  block->random = TestRandom(settings().order_seed);
  prepare_shared(block);
  gridDim.x = shape_.grid.x, gridDim.y = shape_.grid.y, gridDim.z = shape_.grid.z;
  blockDim.x = blockDim.y = blockDim.z = 0;
  const bool may_suspend = run_all_threads();  // a block without threads: runs nothing, answers the question
  blockDim.x = shape_.block.x, blockDim.y = shape_.block.y, blockDim.z = shape_.block.z;
  threads_met = false;
  return !kThreadSanitizer && block->forward && !may_suspend;
}

LLMC_NO_TSAN inline void KernelTask::run_block(Block* block, long number, bool plain) const {
  blockIdx.x = static_cast<unsigned>(number % shape_.grid.x);
  blockIdx.y = static_cast<unsigned>(number / shape_.grid.x % shape_.grid.y);
  blockIdx.z = static_cast<unsigned>(number / shape_.grid.x / shape_.grid.y);
  block->block_number++;
  if (plain) {
    run_all_threads();
    return;
  }
  begin_scheduling();
  const unsigned first = block->forward ? 0 : pick(block);
  block->current = first;
  if constexpr (kThreadSanitizer) {
    run_block_on_fibers(block);
  } else {
    block->stack_of[first] = &block->main_stack;
    start_thread(block, first);
    for (unsigned t = finish_thread(); t < block->threads; t = finish_thread()) start_thread(block, t);
  }
}

LLMC_NO_TSAN inline void KernelTask::run_blocks(int worker) {
  Block* block = this_block();
  const bool plain = prepare(block);
  if constexpr (kThreadSanitizer) {
    prepare_fibers(block, shape_.block.x * shape_.block.y * shape_.block.z);
    for (long k = worker; k < blocks_; k += workers_) {
      const bool shared = threads_met || shape_.shared_bytes != 0;
      if (shared) order_now_after_threads(block);
      poison_shared(block);
      if (shared || k == worker) order_threads_after_now(block);
      run_block(block, block_at(k), plain);
    }
    order_now_after_threads(block);
  } else {
    for (;;) {
      const long begin = next_block_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= blocks_) break;
      for (long k = begin; k < std::min(begin + chunk_, blocks_); k++) {
        poison_shared(block);
        run_block(block, block_at(k), plain);
      }
    }
  }
}

/// The plain loop over the threads of a block. `call` is a copy in a local variable: nothing the kernel stores can
/// change the kernel's arguments.
///
/// The result answers: may a thread of this kernel be suspended? Every barrier and collective sets threads_met. If the
/// compiler, with the whole kernel inlined here, still knows threads_met to be false at the end, no thread can have met
/// another. It knows that or it does not, at compile time; where it does not (a call that it does not see through, no
/// optimisation), the kernel is scheduled: always correct, only slower.
template <class Call>
LLMC_ONE_MACHINE_CODE bool run_thread_loop(const Call call) {
  threads_met = false;
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
      }
    }
  }
  return !__builtin_constant_p(threads_met);
}

template <class Call>
LLMC_ONE_MACHINE_CODE void run_one_thread(const void* call) {
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
