// race.h -- ThreadSanitizer as a race detector for CUDA threads.
//
// Every CUDA thread of a block is one TSan fiber with its own clock, kept from block to block. What orders them:
//   the launch       orders all threads behind what the stream did before
//   a barrier        orders all threads of the block (fiber.h), a collective those of the warp (warp.h)
//   the end of the kernel orders what the stream does next behind all threads
// Blocks are dealt in turn to two OS threads. Nothing orders blocks on different OS threads, so a race between blocks
// is seen. Blocks on the same OS thread share its __shared__ variables one after the other, so for a kernel that has a
// barrier they must be ordered; a kernel without one is spared that (each step costs a microsecond per CUDA thread).
#pragma once

#include <cstdio>

#include "llmc/cpu/fiber.h"

namespace cpu_device {

/// `threads` fibers, and which one the OS thread itself is.
LLMC_NO_TSAN inline void prepare_fibers(Block* block, unsigned threads) {
  block->threads = threads;
  block->tsan_main = __tsan_get_current_fiber();
  for (; block->tsan_fibers < threads; block->tsan_fibers++) {
    block->tsan_fiber[block->tsan_fibers] = __tsan_create_fiber(0);
    char name[32];
    snprintf(name, sizeof name, "CUDA thread %u", block->tsan_fibers);
    __tsan_set_fiber_name(block->tsan_fiber[block->tsan_fibers], name);
  }
}

/// The CUDA threads see everything that this OS thread has done or seen so far.
LLMC_NO_TSAN inline void order_threads_after_now(Block* block) {
  __tsan_release(&block->start_order);
  for (unsigned t = 0; t < block->threads; t++) {
    __tsan_switch_to_fiber(block->tsan_fiber[t], 1);
    __tsan_acquire(&block->start_order);
  }
  __tsan_switch_to_fiber(block->tsan_main, 1);
}

/// This OS thread sees everything that the CUDA threads have done.
LLMC_NO_TSAN inline void order_now_after_threads(Block* block) {
  for (unsigned t = 0; t < block->threads; t++) {
    __tsan_switch_to_fiber(block->tsan_fiber[t], 1);
    __tsan_release(&block->end_order);
  }
  __tsan_switch_to_fiber(block->tsan_main, 1);
  __tsan_acquire(&block->end_order);
}

/// Runs one block, each thread on its own stack; the OS thread itself only starts the first one.
LLMC_NO_TSAN inline void run_block_on_fibers(Block* block) {
  const unsigned first = block->current;
  void* pointer = start_stack(block, first);
  set_thread_index(block, first);
  __tsan_switch_to_fiber(block->tsan_fiber[first], 1);
  change_stack(&block->main_pointer, nullptr, block->stack_of[first], pointer);
}

}  // namespace cpu_device
