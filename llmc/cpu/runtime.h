// runtime.h -- the part of the CUDA runtime API that the program uses, under its own names.
//
// Memory calls act at once (memory.h); the Async calls, records, waits and host functions are tasks of a stream
// (stream.h). Stricter than CUDA where that finds errors: asynchronous copies are asynchronous for pageable host memory
// too, so a program that reuses the host buffer without synchronising is wrong here at once, not only on some systems.
#pragma once

#include <cstring>

#include "llmc/cpu/launch.h"
#include "llmc/cpu/memory.h"
#include "llmc/cpu/stream.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600
};
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum : unsigned { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef void (*cudaHostFn_t)(void* argument);

struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount;
};

namespace cpu_device {

inline cudaError_t& last_error() {
  static thread_local cudaError_t error = cudaSuccess;
  return error;
}
inline cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error() = error;
  return error;
}
inline cudaError_t result(bool valid) { return result(valid ? cudaSuccess : cudaErrorInvalidValue); }

inline bool valid_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return range_is(kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, to, bytes) &&
         range_is(kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, from, bytes);
}

inline cudaError_t allocation_result(bool enough) { return result(enough ? cudaSuccess : cudaErrorMemoryAllocation); }

}  // namespace cpu_device

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
  }
  return "unknown error";
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cpu_device::last_error();
  cpu_device::last_error() = cudaSuccess;
  return error;
}

// ---------------------------------------------------------------- memory

template <class T>
inline cudaError_t cudaMalloc(T** result, size_t bytes) {
  return cpu_device::allocation_result(cpu_device::allocate_array(reinterpret_cast<void**>(result), bytes));
}
/// Waits for all streams first, as CUDA does: no task may still use the array.
inline cudaError_t cudaFree(void* array) {
  if (array == nullptr) return cudaSuccess;
  cpu_device::require_host_thread("cudaFree");
  cpu_device::wait_for_streams(false);
  return cpu_device::result(cpu_device::free_array(array));
}
/// Host memory for copies. On a GPU it is pinned; here it is ordinary, aligned memory.
template <class T>
inline cudaError_t cudaMallocHost(T** result, size_t bytes) {
  const size_t rounded = (bytes + cpu_device::kAlignment - 1) / cpu_device::kAlignment * cpu_device::kAlignment;
  *result = bytes == 0 ? nullptr : static_cast<T*>(aligned_alloc(cpu_device::kAlignment, rounded));
  if (*result != nullptr) cpu_device::forbid(reinterpret_cast<char*>(*result) + bytes, rounded - bytes);
  return cpu_device::allocation_result(bytes == 0 || *result != nullptr);
}
inline cudaError_t cudaFreeHost(void* array) {
  free(array);
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  cpu_device::DeviceMemory& memory = cpu_device::device_memory();
  std::lock_guard<std::mutex> lock(memory.mutex);
  *total_bytes = cpu_device::settings().device_memory;
  *free_bytes = *total_bytes - memory.in_use;
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (!cpu_device::valid_copy(to, from, bytes, kind)) return cpu_device::result(cudaErrorInvalidValue);
  cpu_device::enqueue(stream, [=] { memmove(to, from, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* array, int value, size_t bytes, cudaStream_t stream) {
  if (!cpu_device::range_is(true, array, bytes)) return cpu_device::result(cudaErrorInvalidValue);
  cpu_device::enqueue(stream, [=] { memset(array, value, bytes); });
  return cudaSuccess;
}
/// Now, in this thread; ordered with streams that were created without cudaStreamNonBlocking, and with no others.
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cpu_device::require_host_thread("cudaMemcpy");
  if (!cpu_device::valid_copy(to, from, bytes, kind)) return cpu_device::result(cudaErrorInvalidValue);
  cpu_device::wait_for_streams(true);
  cpu_device::OpenDeviceMemory open;
  memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* array, int value, size_t bytes) {
  cpu_device::require_host_thread("cudaMemset");
  if (!cpu_device::range_is(true, array, bytes)) return cpu_device::result(cudaErrorInvalidValue);
  cpu_device::wait_for_streams(true);
  cpu_device::OpenDeviceMemory open;
  memset(array, value, bytes);
  return cudaSuccess;
}

// ---------------------------------------------------------------- streams

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = cpu_device::create_stream(flags != cudaStreamNonBlocking);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return cpu_device::result(cudaErrorInvalidResourceHandle);
  cpu_device::destroy_stream(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cpu_device::require_host_thread("cudaStreamSynchronize");
  cpu_device::append_record(stream)->wait();
  return cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const uint64_t submitted = stream->submitted.load(std::memory_order_relaxed);
  return stream->completed.load(std::memory_order_acquire) >= submitted ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaDeviceSynchronize() {
  cpu_device::require_host_thread("cudaDeviceSynchronize");
  cpu_device::wait_for_streams(false);
  return cudaSuccess;
}
/// function(argument) on the stream's thread, in its order. It must not touch device memory nor call this API.
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  cpu_device::enqueue_host(stream, [=] { function(argument); });
  return cudaSuccess;
}

// ---------------------------------------------------------------- events

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->timing = !(flags & cudaEventDisableTiming);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
namespace cpu_device {
inline std::shared_ptr<Record> newest_record(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->newest;
}
}  // namespace cpu_device

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(event->mutex);
  event->newest = cpu_device::append_record(stream);
  return cudaSuccess;
}
/// The stream goes on when the record that is newest now is complete; an event that was never recorded holds nobody up.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  std::shared_ptr<cpu_device::Record> record = cpu_device::newest_record(event);
  if (record != nullptr) cpu_device::append_wait(stream, std::move(record));
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::shared_ptr<cpu_device::Record> record = cpu_device::newest_record(event);
  return record == nullptr || record->done() ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  cpu_device::require_host_thread("cudaEventSynchronize");
  const std::shared_ptr<cpu_device::Record> record = cpu_device::newest_record(event);
  if (record != nullptr) record->wait();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  const auto first = cpu_device::newest_record(start), second = cpu_device::newest_record(stop);
  if (first == nullptr || second == nullptr || !start->timing || !stop->timing) {
    return cpu_device::result(cudaErrorInvalidResourceHandle);
  }
  if (!first->done() || !second->done()) return cudaErrorNotReady;
  *milliseconds = static_cast<float>((second->seconds() - first->seconds()) * 1e3);
  return cudaSuccess;
}

// ---------------------------------------------------------------- device

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return cpu_device::result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "CPU, warps of %d", kWarpSize);
  properties->totalGlobalMem = cpu_device::settings().device_memory;
  properties->multiProcessorCount = cpu_device::team_size();
  return cudaSuccess;
}
template <class Function>
inline cudaError_t cudaFuncSetAttribute(Function* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > cpu_device::kMaxSharedBytes) {
    return cpu_device::result(cudaErrorInvalidValue);
  }
  std::lock_guard<std::mutex> lock(cpu_device::kernels().mutex);
  cpu_device::Kernel*& entry = cpu_device::kernels().by_address[reinterpret_cast<const void*>(kernel)];
  if (entry == nullptr) entry = new cpu_device::Kernel;
  entry->max_shared_bytes = static_cast<size_t>(bytes);
  return cudaSuccess;
}
