// select_device.h -- the device of one of several ranks on a host. Part of the device layer.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

#include "llmc/device.h"

#ifndef __CUDACC__
#include <omp.h>

#include <thread>
#endif

/// Rank number `place` of the `ranks_here` ranks of this host takes its device: ranks take turns over the GPUs; on the
/// CPU device every rank gets its share of the cores, at least one thread, unless OMP_NUM_THREADS says otherwise
/// (results do not depend on it). Returns what to print. Environment error when there is no usable device.
inline std::string select_device(int place, int ranks_here) {
  require_device();
#ifdef __CUDACC__
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  CUDA_CHECK(cudaSetDevice(place % count));
  return device_name() + (ranks_here > count ? ", shared by several ranks" : "");
#else
  (void)place;
  if (getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    omp_set_num_threads(std::max(1, cores / ranks_here));
  }
  return device_name() + format_text(", %d threads a rank", omp_get_max_threads());
#endif
}
