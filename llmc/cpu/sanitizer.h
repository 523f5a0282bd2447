// sanitizer.h -- what AddressSanitizer and ThreadSanitizer must be told about fibers.
//
// AddressSanitizer tracks the current stack; it must hear of every switch (or it takes the other stack for corruption).
// ThreadSanitizer tracks who runs: each CUDA thread is one TSan "fiber" with its own clock, so that two CUDA threads
// that touch the same address with no barrier between them are reported like two OS threads, although they never run
// at the same time. Barriers and launches then have to be declared as release/acquire pairs.
//
// The functions are declared by hand (gcc and clang ship them in different headers) and called under `if constexpr`,
// so that an ordinary build refers to none of them.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define LLMC_ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define LLMC_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LLMC_ADDRESS_SANITIZER 1
#elif __has_feature(thread_sanitizer)
#define LLMC_THREAD_SANITIZER 1
#endif
#endif

extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
void __asan_poison_memory_region(void const volatile* address, size_t size);
void __asan_unpoison_memory_region(void const volatile* address, size_t size);
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

// Functions of the device itself, whose own memory accesses are not the program's: TSan must not look into them.
#ifdef LLMC_THREAD_SANITIZER
#define LLMC_NO_TSAN __attribute__((no_sanitize("thread")))
#else
#define LLMC_NO_TSAN
#endif

namespace cpu_device {

#ifdef LLMC_ADDRESS_SANITIZER
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif
#ifdef LLMC_THREAD_SANITIZER
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
#if defined(LLMC_DEBUG) || defined(LLMC_ADDRESS_SANITIZER) || defined(LLMC_THREAD_SANITIZER)
constexpr bool kDebugBuild = true;
#else
constexpr bool kDebugBuild = false;
#endif

/// "What happened before my release happens before your acquire of the same address."
inline void order_release(void* address) {
  if constexpr (kThreadSanitizer) __tsan_release(address);
  (void)address;
}
inline void order_acquire(void* address) {
  if constexpr (kThreadSanitizer) __tsan_acquire(address);
  (void)address;
}
/// Marks bytes that no program may touch (red zones), and takes the mark away.
inline void forbid(void* address, size_t bytes) {
  if constexpr (kAddressSanitizer) __asan_poison_memory_region(address, bytes);
  (void)address, (void)bytes;
}
inline void allow(void* address, size_t bytes) {
  if constexpr (kAddressSanitizer) __asan_unpoison_memory_region(address, bytes);
  (void)address, (void)bytes;
}

}  // namespace cpu_device
