// fiber.h -- the threads of one block as lazy fibers on one OS thread.
//
// The threads of a block are plain calls of the kernel, one after another, on the stack of the OS thread. Only a thread
// that reaches a barrier or a warp collective is suspended: its stack is kept as it is, and the next thread starts on a
// fresh stack from a pool. A barrier costs one change of stacks (context.h), 6 to 12 ns. Kernels that cannot reach
// one do not come here at all: they are a plain loop that the compiler vectorises (run_thread_loop in launch.h).
//
// Scheduling. For every group of 32 threads (a warp, when kWarpSize is 32) four bit sets: runnable, alive, at the block
// barrier, arrived at a collective. The lanes of a group run one after another, then the next group: good locality, and
// "the next lane" is a branch that the processor predicts. The last thread to arrive releases the others. Threads that
// have returned no longer count, as on hardware. Nobody runnable while somebody is alive = deadlock: who waits where is
// printed, and the program aborts. Test modes start the threads in reverse or in random order (settings.h).
//
// A thread that returns hands its stack to the next one that has not started yet. Under ThreadSanitizer thread t has
// stack t for itself, or the same address used by two threads in turn would look like a race.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "llmc/cpu/context.h"
#include "llmc/cpu/settings.h"
#include "llmc/cpu/types.h"

namespace cpu_device {

constexpr unsigned kMaxThreads = 1024, kLanes = 32, kMaxWarps = kMaxThreads / kLanes;
constexpr size_t kStackBytes = (kAddressSanitizer || kThreadSanitizer ? 256 : 64) * 1024;
// Not a multiple of 4 KiB: with such a stride the tops of all stacks would share a few cache sets (10.5 instead of 5.6
// ns).
constexpr size_t kStackStride = kStackBytes + 5 * 64;
constexpr uint64_t kCanary = 0x5afe57ac5afe57acull;

struct Stack {
  char* low;
  size_t size;
  Stack* next_free;
};

/// Operands and results of a warp collective, one column per lane; who has arrived with which collective and mask.
struct Warp;
struct Collective {
  void (*run)(Warp& warp, uint32_t lanes);
  const char* name;
};
struct Warp {
  alignas(64) uint32_t column[10][kLanes];
  const Collective* collective[kLanes];
  uint32_t mask[kLanes];
};

/// Where in the kernel a thread waits, for the deadlock report.
struct SourcePlace {
  const char* file;
  int line;
};

struct PendingCopies;

/// The block that this OS thread runs now.
struct Block {
  uint32_t runnable[kMaxWarps], alive[kMaxWarps], at_barrier[kMaxWarps], arrived[kMaxWarps];  // sets of lanes
  void* stack_pointer[kMaxThreads];  // of each suspended thread; null: not started yet
  Stack* stack_of[kMaxThreads];      // of each started thread
  struct {
    uint16_t x, y, z;
  } index[kMaxThreads];
  SourcePlace place[kMaxThreads];
  Warp warp[kMaxWarps];
  unsigned current, threads, warps, live, waiting, ready_warps, barrier_phase, favourite_warp;
  bool flat, forward;
  dim3 index_shape;
  const char* kernel;
  void (*call)(const void* arguments);  // one thread of the kernel
  const void* arguments;
  Stack main_stack;  // the OS thread's own
  void *main_pointer, *dead_pointer;
  Stack* free_stacks;
  Stack stacks[kMaxThreads];
  char* slab;
  unsigned stacks_used;
  char* dynamic_shared;
  size_t dynamic_shared_bytes, dynamic_shared_capacity;
  TestRandom random{0};
  uint64_t block_number;                            // blocks run so far
  PendingCopies* pending_copies;                    // cp.async under way, of every thread (mma.h)
  void *fake_stack[kMaxThreads], *main_fake_stack;  // AddressSanitizer
  void *tsan_fiber[kMaxThreads], *tsan_main;        // ThreadSanitizer from here on
  unsigned tsan_fibers, warp_phase[kMaxWarps];
  char start_order, end_order, barrier_order[2], warp_order[kMaxWarps][2];
};

// Written by the runtime only; like threadIdx never by address, so that the thread loop can keep them in registers.
[[maybe_unused]] static __thread bool threads_met;  // set by every barrier and every collective
[[maybe_unused]] static __thread Block* block_of_os_thread;

inline void free_block(Block* block) {
  if constexpr (kThreadSanitizer) {
    for (unsigned t = 0; t < block->tsan_fibers; t++) __tsan_destroy_fiber(block->tsan_fiber[t]);
  }
  if (block->slab != nullptr) munmap(block->slab, kStackStride * kMaxThreads);
  free(block->dynamic_shared);
  free(block->pending_copies);
  free(block);
}

struct BlockOwner {
  Block* block = nullptr;
  ~BlockOwner() {
    if (block != nullptr) free_block(block);
  }
};

/// The state of this OS thread, created at its first block and freed when the OS thread ends.
inline Block* this_block() {
  if (block_of_os_thread == nullptr) {
    static thread_local BlockOwner owner;
    const size_t bytes = (sizeof(Block) + 63) / 64 * 64;
    void* memory = aligned_alloc(64, bytes);
    if (memory == nullptr) fatal("no memory for the state of an OS thread");
    memset(memory, 0, bytes);
    owner.block = static_cast<Block*>(memory);
    block_of_os_thread = owner.block;
  }
  return block_of_os_thread;
}

LLMC_NO_TSAN inline unsigned linear_thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

LLMC_NO_TSAN inline void set_thread_index(const Block* block, unsigned thread) {
  if (block->flat) {
    threadIdx.x = thread;
  } else {
    threadIdx.x = block->index[thread].x;
    threadIdx.y = block->index[thread].y;
    threadIdx.z = block->index[thread].z;
  }
  signed_thread_x = static_cast<int>(threadIdx.x);
}

/// Ends the program with who waits where.
[[noreturn]] __attribute__((cold, noinline)) LLMC_NO_TSAN inline void report_deadlock(const Block* block) {
  fflush(stdout);
  fprintf(
      stderr,
      "error: CPU device: deadlock in kernel %s, block (%u,%u,%u): %u of %u threads have not returned, and all wait:\n",
      block->kernel, blockIdx.x, blockIdx.y, blockIdx.z, block->live, block->threads);
  for (unsigned t = 0; t < block->threads;) {
    const auto waits_for = [&](unsigned thread) -> const char* {
      const unsigned w = thread / kLanes, bit = 1u << (thread % kLanes);
      if (block->at_barrier[w] & bit) return "wait at __syncthreads";
      if (block->arrived[w] & bit) return block->warp[w].collective[thread % kLanes]->name;
      return "have returned";
    };
    const char* what = waits_for(t);
    const SourcePlace place = block->place[t];
    const bool returned = !(block->alive[t / kLanes] >> (t % kLanes) & 1);
    unsigned last = t;
    while (last + 1 < block->threads && waits_for(last + 1) == what &&
           (returned || block->place[last + 1].line == place.line)) {
      last++;
    }
    fprintf(stderr, "  threads %u-%u: %s", t, last, what);
    if (block->arrived[t / kLanes] >> (t % kLanes) & 1)
      fprintf(stderr, " (lanes %08x)", block->warp[t / kLanes].mask[t % kLanes]);
    if (!returned) fprintf(stderr, " at %s:%d", place.file, place.line);
    fputc('\n', stderr);
    t = last + 1;
  }
  abort();
}

LLMC_NO_TSAN inline void fill_thread_indices(Block* block) {
  block->index_shape.x = blockDim.x;
  block->index_shape.y = blockDim.y;
  block->index_shape.z = blockDim.z;
  for (unsigned t = 0; t < block->threads; t++) {
    block->index[t].x = static_cast<uint16_t>(t % blockDim.x);
    block->index[t].y = static_cast<uint16_t>(t / blockDim.x % blockDim.y);
    block->index[t].z = static_cast<uint16_t>(t / blockDim.x / blockDim.y);
  }
}

/// The start of a block: every thread is alive and runnable, none has been started.
__attribute__((noinline)) LLMC_NO_TSAN inline void begin_scheduling() {
  Block* block = block_of_os_thread;
  block->threads = blockDim.x * blockDim.y * blockDim.z;
  block->warps = (block->threads + kLanes - 1) / kLanes;
  block->live = block->threads;
  block->waiting = block->ready_warps = block->barrier_phase = 0;
  block->flat = blockDim.y * blockDim.z == 1;
  if (block->flat) {
    threadIdx.y = threadIdx.z = 0;
  } else if (block->index_shape.x != blockDim.x || block->index_shape.y != blockDim.y ||
             block->index_shape.z != blockDim.z) {
    fill_thread_indices(block);
  }
  for (unsigned w = 0; w < block->warps; w++) {
    const uint32_t lanes = (w + 1) * kLanes <= block->threads ? ~0u : (1u << (block->threads % kLanes)) - 1;
    block->alive[w] = block->runnable[w] = lanes;
    block->at_barrier[w] = block->arrived[w] = 0;
    block->warp_phase[w] = 0;
    block->ready_warps |= 1u << w;
  }
  memset(block->stack_pointer, 0, block->threads * sizeof(void*));
}

/// Reverse: the last runnable thread. Shuffle: a random lane of a favourite warp, which stays the favourite for a
/// while, so that warps run far ahead of each other (lanes chosen evenly from the whole block hardly ever show a race
/// of warps).
__attribute__((noinline)) LLMC_NO_TSAN inline unsigned pick_unordered(Block* block) {
  if (block->ready_warps == 0) report_deadlock(block);
  if (settings().order == ThreadOrder::kReverse) {
    const unsigned w = 31 - __builtin_clz(block->ready_warps);
    return w * kLanes + 31 - __builtin_clz(block->runnable[w]);
  }
  unsigned& w = block->favourite_warp;
  if (!(block->ready_warps >> w & 1) || block->random.next() % 128 == 0) {
    do {
      w = block->random.next() % block->warps;
    } while (!(block->ready_warps >> w & 1));
  }
  uint32_t lanes = block->runnable[w];
  for (unsigned skip = block->random.next() % __builtin_popcount(lanes); skip > 0; skip--) lanes &= lanes - 1;
  return w * kLanes + __builtin_ctz(lanes);
}

/// The next thread to run: the next runnable lane of this warp, else the next warp that has one.
LLMC_NO_TSAN inline unsigned pick(Block* block) {
  if (__builtin_expect(!block->forward, 0)) return pick_unordered(block);
  unsigned w = block->current / kLanes;
  const uint32_t lanes = block->runnable[w];
  if (lanes != 0) {
    const uint32_t higher = lanes & (0xfffffffeu << (block->current % kLanes));
    return w * kLanes + __builtin_ctz(higher != 0 ? higher : lanes);
  }
  const uint32_t ready = block->ready_warps;
  if (__builtin_expect(ready == 0, 0)) report_deadlock(block);
  const uint32_t higher = ready & (0xfffffffeu << w);
  w = __builtin_ctz(higher != 0 ? higher : ready);
  return w * kLanes + __builtin_ctz(block->runnable[w]);
}

LLMC_NO_TSAN inline void run_threads_on_stack(void* stack);

/// A stack for a thread that starts now.
__attribute__((noinline)) LLMC_NO_TSAN inline void* start_stack(Block* block, unsigned thread) {
  if (block->slab == nullptr) {
    void* slab = mmap(nullptr, kStackStride * kMaxThreads, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (slab == MAP_FAILED) fatal("no address space for the stacks of a block");
    block->slab = static_cast<char*>(slab);
  }
  Stack* stack = block->free_stacks;
  if (kThreadSanitizer || stack == nullptr) {
    const unsigned number = kThreadSanitizer ? thread : block->stacks_used++;
    stack = &block->stacks[number];
    stack->low = block->slab + kStackStride * number;
    stack->size = kStackStride;
    *reinterpret_cast<uint64_t*>(stack->low) = kCanary;
  } else {
    block->free_stacks = stack->next_free;
  }
  block->stack_of[thread] = stack;
  return new_stack(stack->low + stack->size, stack->size, run_threads_on_stack, stack);
}

/// The change of stacks itself. `fake` is where AddressSanitizer keeps what belongs to the stack that is left; null
/// when that stack is not needed any more.
__attribute__((always_inline)) LLMC_NO_TSAN inline void change_stack(void** save, void** fake, const Stack* stack,
                                                                     void* pointer) {
  if constexpr (kAddressSanitizer) __sanitizer_start_switch_fiber(fake, stack->low, stack->size);
  switch_stack(save, pointer);
  if constexpr (kAddressSanitizer) __sanitizer_finish_switch_fiber(fake != nullptr ? *fake : nullptr, nullptr, nullptr);
  (void)fake, (void)stack;
}

/// The running thread stops, another one goes on; returns when this one is picked again.
__attribute__((noinline)) LLMC_NO_TSAN inline void suspend(Block* block) {
  const unsigned from = block->current;
  const bool next_lane_runs = block->runnable[from / kLanes] >> (from % kLanes) & 2;
  // As a branch: once predicted, the loads below need not wait for the scheduler's chain of loads.
  const unsigned to = __builtin_expect(next_lane_runs && block->forward, 1) ? from + 1 : pick(block);
  void* pointer = block->stack_pointer[to];
  if (pointer == nullptr) pointer = start_stack(block, to);
  block->current = to;
  set_thread_index(block, to);
  if constexpr (kThreadSanitizer) __tsan_switch_to_fiber(block->tsan_fiber[to], 1);
  change_stack(&block->stack_pointer[from], &block->fake_stack[from], block->stack_of[to], pointer);
}

LLMC_NO_TSAN inline void mark_suspended(Block* block, unsigned warp, uint32_t bit) {
  block->runnable[warp] &= ~bit;
  if (block->runnable[warp] == 0) block->ready_warps &= ~(1u << warp);
}

LLMC_NO_TSAN inline void mark_runnable(Block* block, unsigned warp, uint32_t lanes) {
  block->runnable[warp] |= lanes;
  block->ready_warps |= 1u << warp;
}

LLMC_NO_TSAN inline void release_barrier(Block* block) {
  block->waiting = 0;
  block->barrier_phase++;
  for (unsigned w = 0; w < block->warps; w++) {
    if (block->at_barrier[w] != 0) mark_runnable(block, w, block->at_barrier[w]);
    block->at_barrier[w] = 0;
  }
}

__attribute__((noinline)) LLMC_NO_TSAN inline void synchronize_block(const char* file, int line) {
  Block* block = block_of_os_thread;
  threads_met = true;
  // Two addresses in turn: a thread that runs ahead to the next barrier must not be ordered before this one's end.
  char* order = &block->barrier_order[block->barrier_phase & 1];
  order_release(order);
  if (++block->waiting == block->live) {
    release_barrier(block);
  } else {
    const unsigned warp = block->current / kLanes, bit = 1u << (block->current % kLanes);
    block->place[block->current] = {file, line};
    mark_suspended(block, warp, bit);
    block->at_barrier[warp] |= bit;
    suspend(block);
  }
  order_acquire(order);
}

/// A thread has returned: it no longer counts where others wait for it.
LLMC_NO_TSAN inline void leave(Block* block, unsigned warp, uint32_t bit) {
  block->alive[warp] &= ~bit;
  mark_suspended(block, warp, bit);
  block->live--;
  for (uint32_t open = block->arrived[warp]; open != 0;) {
    const unsigned lane = __builtin_ctz(open);
    const uint32_t lanes = block->warp[warp].mask[lane] & block->alive[warp];
    open &= open - 1;
    if ((block->arrived[warp] & lanes) != lanes) continue;
    block->warp[warp].collective[lane]->run(block->warp[warp], lanes);
    block->arrived[warp] &= ~lanes;
    open &= ~lanes;
    mark_runnable(block, warp, lanes);
  }
  if (block->waiting != 0 && block->waiting == block->live) release_barrier(block);
}

/// Called when the running thread has returned. The result is the thread to start next on this very stack; or the
/// number of threads, when the block is complete and this is the OS thread's own stack. On any other stack that is not
/// needed any more it does not return.
__attribute__((noinline)) LLMC_NO_TSAN inline unsigned finish_thread() {
  Block* block = block_of_os_thread;
  const unsigned from = block->current;
  Stack* stack = block->stack_of[from];
  const bool on_main = stack == &block->main_stack;
  leave(block, from / kLanes, 1u << (from % kLanes));
  if (!on_main && *reinterpret_cast<uint64_t*>(stack->low) != kCanary) {
    fatal("kernel %s needs more than %zu KiB of stack for one thread", block->kernel, kStackBytes / 1024);
  }
  void* pointer = block->main_pointer;
  const Stack* to_stack = &block->main_stack;
  if (block->live != 0) {
    const unsigned to = pick(block);
    pointer = block->stack_pointer[to];
    block->current = to;
    set_thread_index(block, to);
    if constexpr (kThreadSanitizer) {
      if (pointer == nullptr) pointer = start_stack(block, to);
      __tsan_switch_to_fiber(block->tsan_fiber[to], 1);
    } else if (pointer == nullptr) {
      block->stack_of[to] = stack;
      return to;
    }
    to_stack = block->stack_of[to];
  } else {
    if constexpr (kThreadSanitizer) __tsan_switch_to_fiber(block->tsan_main, 1);
    if (on_main) return block->threads;
  }
  if (on_main) {
    change_stack(&block->main_pointer, &block->main_fake_stack, to_stack, pointer);
    return block->threads;
  }
  stack->next_free = block->free_stacks;
  block->free_stacks = stack;
  change_stack(&block->dead_pointer, nullptr, to_stack, pointer);
  __builtin_unreachable();
}

LLMC_NO_TSAN inline void start_thread(Block* block, unsigned thread) {
  set_thread_index(block, thread);
  block->call(block->arguments);
}

/// What runs on a stack from the pool.
LLMC_NO_TSAN inline void run_threads_on_stack(void*) {
  Block* block = block_of_os_thread;
  if constexpr (kAddressSanitizer) {
    // The first stack ever is entered from the OS thread's own: this is how we learn where that one lies.
    const void* low;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &low, &size);
    if (block->main_stack.low == nullptr) {
      block->main_stack.low = static_cast<char*>(const_cast<void*>(low));
      block->main_stack.size = size;
    }
  }
  for (unsigned thread = block->current;; thread = finish_thread()) start_thread(block, thread);
}

}  // namespace cpu_device

/// All threads of the block that have not returned wait for each other; what they wrote is then visible to the others.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cpu_device::synchronize_block(file, line);
}
