// device_test.h -- what test_device.cu and test_device_warps.cu share.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "llmc/device.h"
#include "llmc/memory.h"

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    require_device();
    CUDA_CHECK(cudaStreamCreate(&stream_));
  }
  void TearDown() override { CUDA_CHECK(cudaStreamDestroy(stream_)); }

  template <class T>
  DeviceArray<T> upload(const std::vector<T>& values) {
    DeviceArray<T> array("test", values.size());
    copy_to_device(array.data(), values.data(), values.size(), stream_);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    return array;
  }
  template <class T>
  DeviceArray<T> zeros(size_t count) {
    return upload(std::vector<T>(count, T(0)));
  }

  cudaStream_t stream_ = nullptr;
};

inline std::vector<float> random_floats(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}
