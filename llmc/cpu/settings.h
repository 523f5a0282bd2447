// settings.h -- test modes of the CPU device, read once from the environment.
//
//   LLMC_ORDER=forward|reverse|shuffle:SEED   order in which the threads of a block run (default forward)
//   LLMC_POISON=1           fresh device and dynamic shared memory is 0xff... = NaN (always on in debug builds)
//   LLMC_LATE_ASYNC=1       cp.async copies as late as it may: at the wait, not at the call
//   LLMC_GUARD=1            host access to device memory faults; stream tasks then run inside the calling thread
//   LLMC_STREAM_DELAY=SEED  random sleeps before the tasks of a stream
//   LLMC_DEVICE_MEMORY=N    bytes of device memory (default: the memory of the machine)
//
// A correct program gives the same bits in every mode; a wrong one usually does not.
#pragma once

#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "llmc/cpu/sanitizer.h"

namespace cpu_device {

/// A broken rule of CUDA, found in a kernel or on a stream's thread: nobody could catch an exception there.
[[noreturn]] __attribute__((format(printf, 1, 2), cold, noinline)) inline void fatal(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fflush(stdout);
  fprintf(stderr, "error: CPU device: ");
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  abort();
}

enum class ThreadOrder { kForward, kReverse, kShuffle };

struct Settings {
  ThreadOrder order = ThreadOrder::kForward;
  uint64_t order_seed = 0;
  bool poison = kDebugBuild;
  bool late_async = false;
  bool guard = false;
  bool stream_delay = false;
  uint64_t stream_delay_seed = 0;
  size_t device_memory = 0;
};

inline bool flag_from_environment(const char* name, bool otherwise) {
  const char* value = getenv(name);
  if (value == nullptr || *value == '\0') return otherwise;
  if (strcmp(value, "0") != 0 && strcmp(value, "1") != 0) fatal("%s=%s: must be 0 or 1", name, value);
  return *value == '1';
}

/// False where the variable is not set.
inline bool number_from_environment(const char* name, uint64_t* result) {
  const char* value = getenv(name);
  if (value == nullptr || *value == '\0') return false;
  char* end = nullptr;
  *result = strtoull(value, &end, 10);
  if (*end != '\0') fatal("%s=%s: must be a whole number", name, value);
  return true;
}

inline Settings read_settings() {
  Settings settings;
  const char* order = getenv("LLMC_ORDER");
  if (order != nullptr && strncmp(order, "shuffle:", 8) == 0) {
    settings.order = ThreadOrder::kShuffle;
    settings.order_seed = strtoull(order + 8, nullptr, 10);
  } else if (order != nullptr && strcmp(order, "reverse") == 0) {
    settings.order = ThreadOrder::kReverse;
  } else if (order != nullptr && *order != '\0' && strcmp(order, "forward") != 0) {
    fatal("LLMC_ORDER=%s: must be forward, reverse or shuffle:SEED", order);
  }
  settings.poison = flag_from_environment("LLMC_POISON", kDebugBuild);
  settings.late_async = flag_from_environment("LLMC_LATE_ASYNC", false);
  settings.guard = flag_from_environment("LLMC_GUARD", false);
  settings.stream_delay = number_from_environment("LLMC_STREAM_DELAY", &settings.stream_delay_seed);
  uint64_t memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  number_from_environment("LLMC_DEVICE_MEMORY", &memory);
  settings.device_memory = memory;
  return settings;
}

inline const Settings& settings() {
  static const Settings instance = read_settings();
  return instance;
}

/// A small generator for orders and delays (xorshift64*): never zero, no state shared between its users.
struct TestRandom {
  uint64_t state;
  explicit TestRandom(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull | 1) {}
  LLMC_NO_TSAN uint32_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545F4914F6CDD1Dull) >> 32);
  }
};

}  // namespace cpu_device
