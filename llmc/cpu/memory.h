// memory.h -- device memory: arrays that only kernels and copies may touch.
//
// It is ordinary memory, 256-byte aligned, but kept apart from the host's by what we check:
//   every copy        source and destination must lie inside one array, on the side that the copy's kind names
//   poison            fresh arrays are 0xff...: NaN as float, double and bf16, -1 as an integer
//   AddressSanitizer  4 KiB of forbidden bytes before and behind every array, starting at its exact end
//   LLMC_GUARD=1      the pages are inaccessible except while a task runs: a host access faults with a clear message
// Allocation fails with cudaErrorMemoryAllocation when the arrays would exceed the device's memory (settings.h).
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "llmc/cpu/settings.h"

namespace cpu_device {

constexpr size_t kAlignment = 256, kPage = 4096;
constexpr size_t kRedZone = kAddressSanitizer ? 4096 : 0;

struct Allocation {
  char* base;     // what was really allocated: red zone, array, padding, red zone
  size_t extent;  // of it
  size_t bytes;   // what was asked for
};

/// All device arrays by address, and the counters. One object for the whole program, never destroyed: streams may
/// still be at work while the program ends.
struct DeviceMemory {
  std::mutex mutex;
  std::map<char*, Allocation> arrays;
  size_t in_use = 0, peak = 0;
  int open_tasks = 0;  // LLMC_GUARD: the pages are accessible while this is not 0
};

void handle_fault(int signal_number, siginfo_t* info, void*);

inline DeviceMemory& device_memory() {
  static DeviceMemory* const instance = [] {
    if (settings().guard) {
      struct sigaction action = {};
      action.sa_sigaction = handle_fault;
      action.sa_flags = SA_SIGINFO | SA_NODEFER;
      sigaction(SIGSEGV, &action, nullptr);
      sigaction(SIGBUS, &action, nullptr);
    }
    return new DeviceMemory;
  }();
  return *instance;
}

/// The array that contains the address, or null. The caller holds the mutex.
inline const std::pair<char* const, Allocation>* find_array(const void* address) {
  const auto& arrays = device_memory().arrays;
  char* const wanted = static_cast<char*>(const_cast<void*>(address));
  auto next = arrays.upper_bound(wanted);
  if (next == arrays.begin()) return nullptr;
  --next;
  return wanted < next->first + next->second.bytes || wanted == next->first ? &*next : nullptr;
}

/// LLMC_GUARD: says which array the host touched, then ends the program as the signal would have.
inline void handle_fault(int signal_number, siginfo_t* info, void*) {
  signal(signal_number, SIG_DFL);
  DeviceMemory& memory = device_memory();
  if (memory.mutex.try_lock()) {
    const char* address = static_cast<const char*>(info->si_addr);
    char text[256];
    int length = 0;
    if (const auto* array = find_array(address)) {
      length = snprintf(text, sizeof text,
                        "error: CPU device: host code accessed device memory: byte %zu of an array of %zu bytes; "
                        "copy it with cudaMemcpyAsync instead\n",
                        static_cast<size_t>(address - array->first), array->second.bytes);
    } else {
      for (const auto& entry : memory.arrays) {
        if (address < entry.second.base || address >= entry.second.base + entry.second.extent) continue;
        length = snprintf(text, sizeof text,
                          "error: CPU device: access %zu bytes past the end of a device array of %zu bytes\n",
                          static_cast<size_t>(address - entry.first) - entry.second.bytes, entry.second.bytes);
      }
    }
    memory.mutex.unlock();
    if (length > 0 && write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) _exit(1);
  }
  raise(signal_number);
}

inline void protect_all(int protection) {
  for (const auto& entry : device_memory().arrays) {
    if (entry.second.extent > kPage) mprotect(entry.second.base, entry.second.extent - kPage, protection);
  }
}

/// While one of these lives, this process may touch device memory (matters under LLMC_GUARD only).
class OpenDeviceMemory {
 public:
  OpenDeviceMemory() { change(+1); }
  ~OpenDeviceMemory() { change(-1); }
  OpenDeviceMemory(const OpenDeviceMemory&) = delete;
  OpenDeviceMemory& operator=(const OpenDeviceMemory&) = delete;

 private:
  static void change(int difference) {
    if (!settings().guard) return;
    DeviceMemory& memory = device_memory();
    std::lock_guard<std::mutex> lock(memory.mutex);
    const bool was_open = memory.open_tasks > 0;
    memory.open_tasks += difference;
    if (was_open != (memory.open_tasks > 0)) protect_all(was_open ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
};

/// Fills in base and extent, and returns the array's address or null.
inline char* reserve(Allocation* allocation) {
  const size_t rounded = (allocation->bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (settings().guard) {
    // The array ends (to within its alignment) where an inaccessible page begins.
    const size_t pages = (rounded + kPage - 1) / kPage * kPage;
    allocation->extent = pages + kPage;
    void* base =
        mmap(nullptr, allocation->extent, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    allocation->base = static_cast<char*>(base);
    mprotect(allocation->base + pages, kPage, PROT_NONE);
    return allocation->base + (pages - rounded);
  }
  allocation->extent = rounded + 2 * kRedZone;
  allocation->base = static_cast<char*>(aligned_alloc(kAlignment, allocation->extent));
  return allocation->base == nullptr ? nullptr : allocation->base + kRedZone;
}

/// False: not enough memory.
inline bool allocate_array(void** result, size_t bytes) {
  *result = nullptr;
  if (bytes == 0) return true;
  DeviceMemory& memory = device_memory();
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (bytes > settings().device_memory || memory.in_use > settings().device_memory - bytes) return false;
  Allocation allocation{nullptr, 0, bytes};
  char* array = reserve(&allocation);
  if (array == nullptr) return false;
  if (settings().poison) memset(array, 0xff, bytes);
  if (!settings().guard) {
    forbid(allocation.base, kRedZone);
    forbid(array + bytes, static_cast<size_t>(allocation.base + allocation.extent - (array + bytes)));
  }
  memory.arrays[array] = allocation;
  memory.in_use += bytes;
  if (memory.in_use > memory.peak) memory.peak = memory.in_use;
  if (settings().guard && memory.open_tasks == 0) mprotect(allocation.base, allocation.extent - kPage, PROT_NONE);
  *result = array;
  return true;
}

/// False: not the address of a device array.
inline bool free_array(void* address) {
  if (address == nullptr) return true;
  DeviceMemory& memory = device_memory();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto entry = memory.arrays.find(static_cast<char*>(address));
  if (entry == memory.arrays.end()) return false;
  const Allocation allocation = entry->second;
  memory.arrays.erase(entry);
  memory.in_use -= allocation.bytes;
  if (settings().guard) {
    munmap(allocation.base, allocation.extent);
  } else {
    allow(allocation.base, allocation.extent);
    free(allocation.base);
  }
  return true;
}

/// Is [address, address + bytes) inside one device array (on_device), or outside all of them (not on_device)?
inline bool range_is(bool on_device, const void* address, size_t bytes) {
  if (bytes == 0) return true;
  DeviceMemory& memory = device_memory();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto* array = find_array(address);
  if (!on_device) return array == nullptr;
  return array != nullptr &&
         bytes <= array->second.bytes - static_cast<size_t>(static_cast<const char*>(address) - array->first);
}

}  // namespace cpu_device
