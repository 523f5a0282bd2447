// atomic.h -- atomic operations on global and shared memory, and memory fences.
//
// Relaxed, as on a GPU: they make one address consistent and order nothing else. Several OS threads may run blocks of
// the same grid, and several streams run at once, so they are real atomic instructions; only in dynamic shared memory,
// which one OS thread has for itself, a plain read and write will do.
#pragma once

#include <type_traits>

#include "llmc/cpu/fiber.h"

namespace cpu_device {

/// Old value of *address, which becomes update(old value).
template <class T, class Update>
inline T atomic_update(T* address, const Update& update) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic operations on 4 or 8 bytes");
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  if constexpr (!kThreadSanitizer) {
    const Block* block = block_of_os_thread;
    const size_t offset = static_cast<size_t>(reinterpret_cast<char*>(address) - block->dynamic_shared);
    if (offset < block->dynamic_shared_bytes) {
      const T old = *address;
      *address = update(old);
      return old;
    }
  }
  Word* word = reinterpret_cast<Word*>(address);
  Word old_word = __atomic_load_n(word, __ATOMIC_RELAXED), new_word;
  T old;
  do {
    memcpy(&old, &old_word, sizeof(T));
    const T updated = update(old);
    memcpy(&new_word, &updated, sizeof(T));
  } while (!__atomic_compare_exchange_n(word, &old_word, new_word, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

inline char threadfence_order;

}  // namespace cpu_device

template <class T>
inline T atomicAdd(T* address, typename cpu_device::Same<T>::type value) {
  return cpu_device::atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
inline T atomicMax(T* address, typename cpu_device::Same<T>::type value) {
  return cpu_device::atomic_update(address, [=](T old) { return old > value ? old : value; });
}
template <class T>
inline T atomicMin(T* address, typename cpu_device::Same<T>::type value) {
  return cpu_device::atomic_update(address, [=](T old) { return old < value ? old : value; });
}
template <class T>
inline T atomicExch(T* address, typename cpu_device::Same<T>::type value) {
  return cpu_device::atomic_update(address, [=](T) { return value; });
}
template <class T>
inline T atomicCAS(T* address, typename cpu_device::Same<T>::type compare, typename cpu_device::Same<T>::type value) {
  return cpu_device::atomic_update(address, [=](T old) { return old == compare ? value : old; });
}
/// Counts up to `limit`, then starts again at 0: the "last block" counter.
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cpu_device::atomic_update(address, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}

/// What this thread wrote before is seen by all blocks before what it writes next.
inline void __threadfence() {
  if constexpr (cpu_device::kThreadSanitizer) {
    cpu_device::order_release(&cpu_device::threadfence_order);
    cpu_device::order_acquire(&cpu_device::threadfence_order);
  } else {
    __sync_synchronize();
  }
}
inline void __threadfence_block() {}
