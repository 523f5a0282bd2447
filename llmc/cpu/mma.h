// cpu/mma.h -- the instructions of llmc/mma.h on the CPU device.
//
// mma and ldmatrix are warp collectives (warp.h): each lane writes its registers to its column, the last lane computes
// all results. Products are summed in float in ascending k; a tensor core sums in another, undocumented order.
//
// cp.async copies at once, or (LLMC_LATE_ASYNC=1) as late as it may: in cp_async_wait. Then a missing wait leaves
// shared memory as it was (NaN where it is poisoned), and a missing barrier behind the wait is seen as well.
#pragma once

#include <cstdlib>

#include "llmc/cpu/warp.h"

namespace cpu_device {

constexpr unsigned kRegisterA = 0, kRegisterB = 4, kRegisterD = 6;  // columns of the warp's table

inline float lower_bf16(uint32_t pair) { return from_bits<float>(pair << 16); }
inline float upper_bf16(uint32_t pair) { return from_bits<float>(pair & 0xffff0000u); }

LLMC_NO_TSAN inline void run_mma(Warp& warp, uint32_t lanes) {
  if (lanes != ~0u) fatal("kernel %s: mma.sync with only lanes %08x", block_of_os_thread->kernel, lanes);
  float a[16][16], b[16][8], d[16][8];
  for (unsigned lane = 0; lane < kLanes; lane++) {
    const unsigned g = lane / 4, t = 2 * (lane % 4);
    for (unsigned r = 0; r < 4; r++) {
      const uint32_t pair = warp.column[kRegisterA + r][lane];
      const unsigned row = g + 8 * (r % 2), column = t + 8 * (r / 2);
      a[row][column] = lower_bf16(pair);
      a[row][column + 1] = upper_bf16(pair);
      d[g + 8 * (r / 2)][t + r % 2] = from_bits<float>(warp.column[kRegisterD + r][lane]);
    }
    for (unsigned r = 0; r < 2; r++) {
      const uint32_t pair = warp.column[kRegisterB + r][lane];
      b[t + 8 * r][g] = lower_bf16(pair);
      b[t + 8 * r + 1][g] = upper_bf16(pair);
    }
  }
  for (unsigned i = 0; i < 16; i++) {
    for (unsigned k = 0; k < 16; k++) {
      for (unsigned j = 0; j < 8; j++) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (unsigned lane = 0; lane < kLanes; lane++) {
    const unsigned g = lane / 4, t = 2 * (lane % 4);
    for (unsigned r = 0; r < 4; r++) warp.column[kRegisterD + r][lane] = bits(d[g + 8 * (r / 2)][t + r % 2]);
  }
}

/// column[0..3] of lane 8j+i: row i of matrix j (8 bf16), which that lane has read.
template <bool kTransposed>
LLMC_NO_TSAN inline void run_ldmatrix(Warp& warp, uint32_t lanes) {
  if (lanes != ~0u) fatal("kernel %s: ldmatrix with only lanes %08x", block_of_os_thread->kernel, lanes);
  uint16_t matrix[4][8][8];
  for (unsigned lane = 0; lane < kLanes; lane++) {
    for (unsigned k = 0; k < 4; k++) {
      matrix[lane / 8][lane % 8][2 * k] = static_cast<uint16_t>(warp.column[k][lane]);
      matrix[lane / 8][lane % 8][2 * k + 1] = static_cast<uint16_t>(warp.column[k][lane] >> 16);
    }
  }
  for (unsigned lane = 0; lane < kLanes; lane++) {
    const unsigned row = lane / 4, column = 2 * (lane % 4);
    for (unsigned j = 0; j < 4; j++) {
      const uint32_t first = kTransposed ? matrix[j][column][row] : matrix[j][row][column];
      const uint32_t second = kTransposed ? matrix[j][column + 1][row] : matrix[j][row][column + 1];
      warp.column[j][lane] = first | second << 16;
    }
  }
}

inline constexpr Collective kMma{run_mma, "wait in mma_m16n8k16"};
inline constexpr Collective kLdmatrix{run_ldmatrix<false>, "wait in ldmatrix_x4"};
inline constexpr Collective kLdmatrixTransposed{run_ldmatrix<true>, "wait in ldmatrix_x4_trans"};

inline void load_matrices(uint32_t (&r)[4], const void* row, const Collective* collective, SourcePlace place) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    fatal("kernel %s: ldmatrix from an address that is not 16-byte aligned", block_of_os_thread->kernel);
  }
  memcpy(r, row, 16);
  Block* block = block_of_os_thread;
  uint32_t* column = column_of_lane(block);
  for (unsigned j = 0; j < 4; j++) column[kLanes * j] = r[j];
  meet(block, ~0u, collective, place);
  for (unsigned j = 0; j < 4; j++) r[j] = column[kLanes * j];
}

struct Copy {
  void* to;
  const void* from;
};

/// Copies that one CUDA thread has started and not waited for; group_end[g]: where committed group g ends. Plain
/// arrays, touched only where ThreadSanitizer does not look; the copies themselves it sees.
struct PendingCopies {
  static constexpr unsigned kMaxCopies = 256, kMaxGroups = 64;
  Copy copy[kMaxCopies];
  unsigned group_end[kMaxGroups];
  unsigned copies, groups;
  uint64_t block_number;
};

/// Of the running CUDA thread. What it has not waited for when it returns is gone, like its shared memory.
LLMC_NO_TSAN inline PendingCopies* pending_copies() {
  Block* block = block_of_os_thread;
  if (block->pending_copies == nullptr) {
    block->pending_copies = static_cast<PendingCopies*>(calloc(kMaxThreads, sizeof(PendingCopies)));
    if (block->pending_copies == nullptr) fatal("no memory for pending copies");
  }
  PendingCopies* pending = &block->pending_copies[linear_thread()];
  if (pending->block_number != block->block_number) {
    pending->block_number = block->block_number;
    pending->copies = pending->groups = 0;
  }
  return pending;
}

LLMC_NO_TSAN inline void start_late_copy(void* to, const void* from) {
  PendingCopies* pending = pending_copies();
  if (pending->copies == PendingCopies::kMaxCopies) fatal("more than 256 cp.async under way in one thread");
  pending->copy[pending->copies].to = to;
  pending->copy[pending->copies++].from = from;
}

LLMC_NO_TSAN inline void end_copy_group() {
  PendingCopies* pending = pending_copies();
  if (pending->groups == PendingCopies::kMaxGroups) fatal("more than 64 cp.async groups under way in one thread");
  pending->group_end[pending->groups++] = pending->copies;
}

/// Takes out all groups but the newest `kept`; returns the number of copies.
LLMC_NO_TSAN inline unsigned take_copies(unsigned kept, Copy* result) {
  PendingCopies* pending = pending_copies();
  if (pending->groups <= kept) return 0;
  const unsigned groups = pending->groups - kept, count = pending->group_end[groups - 1];
  for (unsigned i = 0; i < count; i++) result[i].to = pending->copy[i].to, result[i].from = pending->copy[i].from;
  for (unsigned i = count; i < pending->copies; i++) pending->copy[i - count] = pending->copy[i];
  for (unsigned g = groups; g < pending->groups; g++) pending->group_end[g - groups] = pending->group_end[g] - count;
  pending->copies -= count;
  pending->groups -= groups;
  return count;
}

inline void wait_for_copies(unsigned groups_kept) {
  Copy copies[PendingCopies::kMaxCopies];
  const unsigned count = take_copies(groups_kept, copies);
  for (unsigned i = 0; i < count; i++) memcpy(copies[i].to, copies[i].from, 16);
}

}  // namespace cpu_device

#if LLMC_WARP == 32

#define LLMC_PLACE_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], LLMC_PLACE_PARAMETERS) {
  using namespace cpu_device;
  Block* block = block_of_os_thread;
  uint32_t* column = column_of_lane(block);
  for (unsigned r = 0; r < 4; r++) column[kLanes * (kRegisterA + r)] = a[r];
  for (unsigned r = 0; r < 2; r++) column[kLanes * (kRegisterB + r)] = b[r];
  for (unsigned r = 0; r < 4; r++) column[kLanes * (kRegisterD + r)] = bits(d[r]);
  meet(block, ~0u, &kMma, {file, line});
  for (unsigned r = 0; r < 4; r++) d[r] = from_bits<float>(column[kLanes * (kRegisterD + r)]);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, LLMC_PLACE_PARAMETERS) {
  cpu_device::load_matrices(r, row, &cpu_device::kLdmatrix, {file, line});
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, LLMC_PLACE_PARAMETERS) {
  cpu_device::load_matrices(r, row, &cpu_device::kLdmatrixTransposed, {file, line});
}
#undef LLMC_PLACE_PARAMETERS

inline void cp_async16(void* shared, const void* global) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0) {
    cpu_device::fatal("kernel %s: cp.async with an address that is not 16-byte aligned",
                      cpu_device::block_of_os_thread->kernel);
  }
  if (cpu_device::settings().late_async) {
    cpu_device::start_late_copy(shared, global);
  } else {
    memcpy(shared, global, 16);
  }
}
inline void cp_async_commit() {
  if (cpu_device::settings().late_async) cpu_device::end_copy_group();
}
template <int N>
inline void cp_async_wait() {
  if (cpu_device::settings().late_async) cpu_device::wait_for_copies(N);
}

#else

// Templates, so that the message appears only where a kernel really uses them.
template <class T>
struct NeedsWarpsOf32 {
  static constexpr bool kValue = false;
};
template <class D, class A, class B>
inline void mma_m16n8k16(D&, const A&, const B&) {
  static_assert(NeedsWarpsOf32<D>::kValue, "tensor-core instructions need warps of 32: build with WARP=32");
}
template <class R>
inline void ldmatrix_x4(R&, const void*) {
  static_assert(NeedsWarpsOf32<R>::kValue, "tensor-core instructions need warps of 32: build with WARP=32");
}
template <class R>
inline void ldmatrix_x4_trans(R&, const void*) {
  static_assert(NeedsWarpsOf32<R>::kValue, "tensor-core instructions need warps of 32: build with WARP=32");
}
template <class T>
inline void cp_async16(T*, const void*) {
  static_assert(NeedsWarpsOf32<T>::kValue, "cp.async needs warps of 32: build with WARP=32");
}
template <class T = void>
inline void cp_async_commit() {
  static_assert(NeedsWarpsOf32<T>::kValue, "cp.async needs warps of 32: build with WARP=32");
}
template <int N>
inline void cp_async_wait() {
  static_assert(NeedsWarpsOf32<char[N + 1]>::kValue, "cp.async needs warps of 32: build with WARP=32");
}

#endif
