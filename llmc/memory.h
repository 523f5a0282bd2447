// memory.h -- arrays on the device and pinned arrays on the host, with a name, an owner and a count of bytes.
//
//   DeviceArray<float> dwte("dwte", Vp * C, &ledger);      allocated here, freed with the object, uninitialised
//   launch<kernel>(..., dwte.data(), ...);
//
// The ledger adds up what was allocated under each name and compares it with what was predicted before anything was
// allocated (a plan's memory must be known before the run, and the prediction must be right: design note C7).
// device_memory_in_use() and device_memory_peak() count the bytes of all DeviceArrays of the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llmc/device.h"

struct DeviceMemoryCount {
  std::atomic<size_t> in_use{0}, peak{0};
};
inline DeviceMemoryCount& device_memory_count() {
  static DeviceMemoryCount count;
  return count;
}
/// Bytes of all DeviceArrays that are alive, and the most there ever were (reset_device_memory_peak starts anew).
inline size_t device_memory_in_use() { return device_memory_count().in_use; }
inline size_t device_memory_peak() { return device_memory_count().peak; }
inline void reset_device_memory_peak() { device_memory_count().peak = device_memory_count().in_use.load(); }

/// name -> bytes: allocated now, and predicted. Not thread-safe: one per trainer.
class MemoryLedger {
 public:
  void predict(const std::string& name, size_t bytes) { entries_[name].predicted += bytes; }
  void add(const std::string& name, size_t bytes) { entries_[name].allocated += bytes; }
  void remove(const std::string& name, size_t bytes) {
    assert(entries_[name].allocated >= bytes && "MemoryLedger: more removed than added");
    entries_[name].allocated -= bytes;
  }
  size_t allocated(const std::string& name) const { return find(name).allocated; }
  size_t predicted(const std::string& name) const { return find(name).predicted; }
  size_t total_allocated() const {
    size_t total = 0;
    for (const auto& entry : entries_) total += entry.second.allocated;
    return total;
  }
  size_t total_predicted() const {
    size_t total = 0;
    for (const auto& entry : entries_) total += entry.second.predicted;
    return total;
  }
  /// Names whose allocation is not what was predicted.
  std::vector<std::string> differences() const {
    std::vector<std::string> names;
    for (const auto& entry : entries_) {
      if (entry.second.predicted != entry.second.allocated) names.push_back(entry.first);
    }
    return names;
  }
  /// A table, largest first, with a mark where the prediction is wrong.
  void print(FILE* out) const {
    std::vector<std::pair<std::string, Bytes>> rows(entries_.begin(), entries_.end());
    std::stable_sort(rows.begin(), rows.end(),
                     [](const auto& a, const auto& b) { return a.second.allocated > b.second.allocated; });
    fprintf(out, "%-24s %16s %16s\n", "device memory", "allocated", "predicted");
    for (const auto& row : rows) print_row(out, row.first, row.second);
    print_row(out, "total", {total_allocated(), total_predicted()});
  }

 private:
  struct Bytes {
    size_t allocated = 0, predicted = 0;
  };
  Bytes find(const std::string& name) const {
    const auto entry = entries_.find(name);
    return entry == entries_.end() ? Bytes{} : entry->second;
  }
  static void print_row(FILE* out, const std::string& name, const Bytes& bytes) {
    fprintf(out, "%-24s %16zu %16zu%s\n", name.c_str(), bytes.allocated, bytes.predicted,
            bytes.allocated == bytes.predicted ? "" : "  differs");
  }
  std::map<std::string, Bytes> entries_;
};

/// `count` elements of T in device memory, uninitialised. Movable, not copyable. With a ledger, its bytes are entered
/// there under `name` while the array lives. Throws an environment error when the device has not enough memory. The
/// destructor waits for the device (cudaFree), so free large arrays outside the training loop.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(std::string name, size_t count, MemoryLedger* ledger = nullptr)
      : name_(std::move(name)), count_(count), ledger_(ledger) {
    if (count == 0) return;
    const cudaError_t status = cudaMalloc(&data_, bytes());
    if (status != cudaSuccess) {
      cudaGetLastError();
      size_t free_bytes = 0, total_bytes = 0;
      cudaMemGetInfo(&free_bytes, &total_bytes);
      environment_error("%s needs %.1f MiB of device memory, but only %.1f of %.1f MiB are free (%s)", name_.c_str(),
                        mebibytes(bytes()), mebibytes(free_bytes), mebibytes(total_bytes), cudaGetErrorString(status));
    }
    DeviceMemoryCount& memory = device_memory_count();
    const size_t now = memory.in_use += bytes();
    size_t peak = memory.peak;
    while (now > peak && !memory.peak.compare_exchange_weak(peak, now)) {
    }
    if (ledger_ != nullptr) ledger_->add(name_, bytes());
  }
  ~DeviceArray() { release(); }
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    if (this != &other) {
      release();
      swap(other);
    }
    return *this;
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  const std::string& name() const { return name_; }

 private:
  static double mebibytes(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }
  void swap(DeviceArray& other) {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(name_, other.name_);
    std::swap(ledger_, other.ledger_);
  }
  void release() {
    if (data_ == nullptr) return;
    // cudaFree waits for the device. While an exception ends the program, a stream may be waiting for a rank that is
    // gone: then the memory is left to the end of the process, or the message of the exception would never be printed.
    if (std::uncaught_exceptions() > 0) return;
    // A destructor must not throw, and an error here is an earlier kernel's: the next synchronisation reports it.
    cudaFree(data_);
    device_memory_count().in_use -= bytes();
    if (ledger_ != nullptr) ledger_->remove(name_, bytes());
    data_ = nullptr;
    count_ = 0;
  }

  T* data_ = nullptr;
  std::string name_;
  size_t count_ = 0;
  MemoryLedger* ledger_ = nullptr;
};

/// `count` elements of T in pinned host memory: the only host memory that a GPU copies to and from asynchronously.
template <class T>
class PinnedArray {
 public:
  PinnedArray() = default;
  explicit PinnedArray(size_t count) : count_(count) {
    if (count > 0) CUDA_CHECK(cudaMallocHost(&data_, count * sizeof(T)));
  }
  ~PinnedArray() { release(); }
  PinnedArray(PinnedArray&& other) noexcept { swap(other); }
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    if (this != &other) {
      release();
      swap(other);
    }
    return *this;
  }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  T& operator[](size_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + count_; }

 private:
  void swap(PinnedArray& other) {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }
  void release() {
    if (data_ != nullptr) cudaFreeHost(data_);
    data_ = nullptr;
    count_ = 0;
  }

  T* data_ = nullptr;
  size_t count_ = 0;
};

/// device[0..count) = host[0..count), in the stream's order. The host array must stay as it is until the stream is
/// there.
template <class T>
inline void copy_to_device(T* device, const T* host, size_t count, cudaStream_t stream) {
  CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(T), cudaMemcpyHostToDevice, stream));
}
/// host[0..count) = device[0..count), in the stream's order: synchronise before reading.
template <class T>
inline void copy_to_host(T* host, const T* device, size_t count, cudaStream_t stream) {
  CUDA_CHECK(cudaMemcpyAsync(host, device, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
}
/// The array as a vector; waits for the stream.
template <class T>
inline std::vector<T> download(const T* device, size_t count, cudaStream_t stream) {
  std::vector<T> host(count);
  copy_to_host(host.data(), device, count, stream);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  return host;
}
template <class T>
inline std::vector<T> download(const DeviceArray<T>& array, cudaStream_t stream) {
  return download(array.data(), array.size(), stream);
}
