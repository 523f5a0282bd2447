// start_device.h -- the device of this rank: chosen, checked, with its compute stream and matrix-product library.
#pragma once

#include <memory>
#include <string>

#include "llmc/blas.h"
#include "llmc/control.h"
#include "llmc/select_device.h"

class Device {
 public:
  /// Picks a device for this rank: ranks of one host take turns over its GPUs; on the CPU device they share its cores
  /// (a thread for each core of the rank's share, unless OMP_NUM_THREADS says otherwise). Environment error when there
  /// is no usable device.
  explicit Device(Control& control) {
    description_ = select_device(control.local_rank(), control.local_size());
    CUDA_CHECK(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    blas_ = std::make_unique<Blas>();
  }
  ~Device() {
    cudaStreamSynchronize(compute_);
    blas_.reset();
    cudaStreamDestroy(compute_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t compute() const { return compute_; }
  Blas& blas() { return *blas_; }
  const std::string& description() const { return description_; }

  /// Returns when everything issued to the compute stream is done.
  void synchronize() { CUDA_CHECK(cudaStreamSynchronize(compute_)); }
  /// Copies after everything issued to the compute stream; returns when the host has the bytes.
  void copy_to_host(void* host, const void* device, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, compute_));
    synchronize();
  }

 private:
  std::string description_;
  cudaStream_t compute_ = nullptr;
  std::unique_ptr<Blas> blas_;
};
