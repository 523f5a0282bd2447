// warp.h -- warp collectives: shuffles, votes, reductions.
//
// kWarpSize 32: every lane writes its operand to its column of the warp's table (fiber.h) and sleeps; the last lane to
// arrive computes the results of all lanes in one vectorised loop. One suspension per collective, so warp_sum costs one
// where the shuffles of a GPU's butterfly would cost five; it adds in the butterfly's order, so the bits are the same.
// kWarpSize 1: a warp is one thread, every collective is the identity and vanishes.
//
// Checked: the caller is in its mask, all lanes of a mask meet in the same collective with the same mask, and warp_sum
// and warp_max get all 32 lanes. Reading a lane that has returned or is not in the mask ends the program.
#pragma once

#include "llmc/cpu/fiber.h"

namespace cpu_device {

LLMC_NO_TSAN inline uint32_t* column_of_lane(Block* block) {
  return &block->warp[block->current / kLanes].column[0][block->current % kLanes];
}

/// The last lane has arrived: check, compute, wake the others.
__attribute__((noinline)) LLMC_NO_TSAN inline void complete_collective(Block* block, uint32_t mask, uint32_t lanes,
                                                                       const Collective* collective) {
  const unsigned w = block->current / kLanes;
  Warp& warp = block->warp[w];
  bool different = false;
  for (unsigned i = 0; i < kLanes; i++) {
    different |= (lanes >> i & 1) && (warp.mask[i] != mask || warp.collective[i] != collective);
  }
  if (different) {
    fatal("kernel %s: lanes of one warp meet in different collectives, or with different masks, at %s", block->kernel,
          collective->name);
  }
  collective->run(warp, lanes);
  block->arrived[w] &= ~lanes;
  mark_runnable(block, w, lanes);
  block->warp_phase[w]++;
}

/// The caller has written its operands to its column; on return its results are there.
__attribute__((noinline)) LLMC_NO_TSAN inline void meet(Block* block, uint32_t mask, const Collective* collective,
                                                        SourcePlace place) {
  const unsigned w = block->current / kLanes, lane = block->current % kLanes;
  const uint32_t bit = 1u << lane;
  if (__builtin_expect(!(mask & bit), 0)) {
    fatal("kernel %s: %s called by a lane that is not in its mask %08x", block->kernel, collective->name, mask);
  }
  block->warp[w].collective[lane] = collective;
  block->warp[w].mask[lane] = mask;
  block->arrived[w] |= bit;
  const uint32_t lanes = mask & block->alive[w];
  char* order = &block->warp_order[w][block->warp_phase[w] & 1];
  order_release(order);
  threads_met = true;
  if ((block->arrived[w] & lanes) == lanes) {
    complete_collective(block, mask, lanes, collective);
  } else {
    block->place[block->current] = place;
    mark_suspended(block, w, bit);
    suspend(block);
  }
  order_acquire(order);
}

/// column[0] and column[1]: the two halves of the value; column[2]: the lane to read.
LLMC_NO_TSAN inline void run_shuffle(Warp& warp, uint32_t lanes) {
  uint32_t low[kLanes], high[kLanes];
  for (unsigned i = 0; i < kLanes; i++) {
    const uint32_t source = warp.column[2][i] % kLanes;
    if ((lanes >> i & 1) && !(lanes >> source & 1)) {
      fatal("kernel %s: lane %u shuffles from lane %u, which has returned or is not in the mask",
            block_of_os_thread->kernel, i, source);
    }
    low[i] = warp.column[0][source];
    high[i] = warp.column[1][source];
  }
  for (unsigned i = 0; i < kLanes; i++) {
    if (lanes >> i & 1) warp.column[0][i] = low[i], warp.column[1][i] = high[i];
  }
}

LLMC_NO_TSAN inline void run_ballot(Warp& warp, uint32_t lanes) {
  uint32_t result = 0;
  for (unsigned i = 0; i < kLanes; i++) result |= (lanes >> i & 1) && warp.column[0][i] != 0 ? 1u << i : 0;
  for (unsigned i = 0; i < kLanes; i++) warp.column[0][i] = lanes >> i & 1 ? result : warp.column[0][i];
}

inline void run_nothing(Warp&, uint32_t) {}

struct Sum {
  static constexpr const char* kName = "wait in warp_sum";
  template <class T>
  static T combine(T a, T b) {
    return a + b;
  }
};
struct Max {
  static constexpr const char* kName = "wait in warp_max";
  template <class T>
  static T combine(T a, T b) {
    return a > b ? a : b;
  }
};

/// The butterfly v += shuffle_xor(v, 16), 8, 4, 2, 1 leaves the same bits in every lane: those of this half tree.
template <class Operation, class T>
LLMC_NO_TSAN inline void run_reduction(Warp& warp, uint32_t lanes) {
  if (lanes != ~0u)
    fatal("kernel %s: only lanes %08x of a warp %s", block_of_os_thread->kernel, lanes, Operation::kName);
  T value[kLanes];
  for (unsigned i = 0; i < kLanes; i++) {
    if constexpr (sizeof(T) == 4) {
      value[i] = from_bits<T>(warp.column[0][i]);
    } else {
      const uint64_t both = warp.column[0][i] | static_cast<uint64_t>(warp.column[1][i]) << 32;
      memcpy(&value[i], &both, sizeof both);
    }
  }
  for (unsigned offset = kLanes / 2; offset > 0; offset /= 2) {
    for (unsigned i = 0; i < offset; i++) value[i] = Operation::combine(value[i], value[i + offset]);
  }
  uint64_t result = 0;
  memcpy(&result, &value[0], sizeof(T));
  for (unsigned i = 0; i < kLanes; i++) warp.column[0][i] = static_cast<uint32_t>(result);
  for (unsigned i = 0; i < kLanes; i++) warp.column[1][i] = static_cast<uint32_t>(result >> 32);
}

inline constexpr Collective kShuffle{run_shuffle, "wait in a shuffle"};
inline constexpr Collective kBallot{run_ballot, "wait in a vote"};
inline constexpr Collective kSyncWarp{run_nothing, "wait at __syncwarp"};
template <class Operation, class T>
inline constexpr Collective kReduction{run_reduction<Operation, T>, Operation::kName};

template <class T>
LLMC_NO_TSAN inline T exchange(uint32_t mask, T value, uint32_t source, const Collective* collective,
                               SourcePlace place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "values of 4 or 8 bytes");
  Block* block = block_of_os_thread;
  uint32_t* column = column_of_lane(block);
  uint64_t all = 0;
  memcpy(&all, &value, sizeof(T));
  column[0] = static_cast<uint32_t>(all);
  column[kLanes] = static_cast<uint32_t>(all >> 32);
  column[2 * kLanes] = source;
  meet(block, mask, collective, place);
  all = column[0] | static_cast<uint64_t>(column[kLanes]) << 32;
  memcpy(&value, &all, sizeof(T));
  return value;
}

template <class Operation, class T>
inline T reduce_warp(T value, SourcePlace place) {
  if constexpr (kWarpSize == 1) {
    return value;
  } else {
    return exchange(~0u, value, 0, &kReduction<Operation, T>, place);
  }
}

/// Shuffle within sections of `width` lanes; outside its section a lane reads itself.
template <class T>
inline T shuffle(uint32_t mask, T value, int source, bool inside, SourcePlace place) {
  if constexpr (kWarpSize == 1) {
    return value;
  } else {
    const uint32_t lane = linear_thread() % kLanes;
    return exchange(mask, value, inside ? static_cast<uint32_t>(source) : lane, &kShuffle, place);
  }
}

inline int lane_in_warp() { return static_cast<int>(linear_thread() % kWarpSize); }

inline uint32_t vote(uint32_t mask, bool predicate, SourcePlace place) {
  if constexpr (kWarpSize == 1) {
    return predicate ? 1 : 0;
  } else {
    return exchange(mask, static_cast<uint32_t>(predicate), 0, &kBallot, place);
  }
}

}  // namespace cpu_device

#define LLMC_PLACE_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()

/// Sum or maximum over the warp, in every lane; all lanes take part.
inline float warp_sum(float value, LLMC_PLACE_PARAMETERS) {
  return cpu_device::reduce_warp<cpu_device::Sum>(value, {file, line});
}
inline double warp_sum(double value, LLMC_PLACE_PARAMETERS) {
  return cpu_device::reduce_warp<cpu_device::Sum>(value, {file, line});
}
inline float warp_max(float value, LLMC_PLACE_PARAMETERS) {
  return cpu_device::reduce_warp<cpu_device::Max>(value, {file, line});
}

inline void __syncwarp(unsigned mask = ~0u, LLMC_PLACE_PARAMETERS) {
  if constexpr (kWarpSize == 1) {
    (void)mask, (void)file, (void)line;
  } else {
    cpu_device::meet(cpu_device::block_of_os_thread, mask, &cpu_device::kSyncWarp, {file, line});
  }
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = kWarpSize, LLMC_PLACE_PARAMETERS) {
  const int lane = cpu_device::lane_in_warp();
  return cpu_device::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), true, {file, line});
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = kWarpSize, LLMC_PLACE_PARAMETERS) {
  const int lane = cpu_device::lane_in_warp(), source = lane ^ bits;
  return cpu_device::shuffle(mask, value, source, (source & ~(width - 1)) <= (lane & ~(width - 1)), {file, line});
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = kWarpSize, LLMC_PLACE_PARAMETERS) {
  const int lane = cpu_device::lane_in_warp(), source = lane + static_cast<int>(by);
  return cpu_device::shuffle(mask, value, source, (lane & (width - 1)) + static_cast<int>(by) < width, {file, line});
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = kWarpSize, LLMC_PLACE_PARAMETERS) {
  const int lane = cpu_device::lane_in_warp(), source = lane - static_cast<int>(by);
  return cpu_device::shuffle(mask, value, source, (lane & (width - 1)) >= static_cast<int>(by), {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, LLMC_PLACE_PARAMETERS) {
  return cpu_device::vote(mask, predicate != 0, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, LLMC_PLACE_PARAMETERS) {
  return cpu_device::vote(mask, predicate != 0, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, LLMC_PLACE_PARAMETERS) {
  return cpu_device::vote(mask, predicate == 0, {file, line}) == 0;
}
#undef LLMC_PLACE_PARAMETERS
