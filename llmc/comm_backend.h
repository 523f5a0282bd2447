// comm_backend.h -- which backend carries the messages of this job.
//
// Decided from the devices of all ranks, gathered through the hosts before the first NCCL call: NCCL before 2.30
// refuses two ranks on one GPU (and later versions may hang), which only it would find out.
//
//   --comm auto   one rank: self;  CUDA build with NCCL and a device for each rank: nccl;  else mpi
//   --comm mpi    always possible;  --comm nccl: an error in words where it cannot be
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "llmc/comm.h"
#include "llmc/comm_mpi.h"
#include "llmc/comm_nccl.h"

enum class Backend { kSelf, kMpi, kNccl };

/// Tells devices apart, over all hosts.
struct DeviceIdentity {
  unsigned char uuid[16];
  bool operator==(const DeviceIdentity& other) const { return memcmp(uuid, other.uuid, sizeof(uuid)) == 0; }
};

/// What this build and library can do with NCCL.
struct NcclAbility {
  bool built = false;          // CUDA build with NCCL
  int version = 0;             // of the library, as in NCCL_VERSION_CODE
  bool shared_device = false;  // several ranks on one device are possible and wanted
};

/// Pure function of what all ranks know; throws a user error, the same on all ranks, for a wish that cannot be met.
inline Backend choose_backend(const std::string& wish, const std::vector<DeviceIdentity>& devices,
                              const NcclAbility& nccl) {
  if (wish != "auto" && wish != "mpi" && wish != "nccl") user_error("--comm %s: use auto, mpi or nccl", wish.c_str());
  if (wish == "mpi") return Backend::kMpi;
  if (wish == "auto" && devices.size() == 1) return Backend::kSelf;
  if (!nccl.built && wish == "nccl") user_error("--comm nccl needs a CUDA build with NCCL; use --comm mpi");
  if (!nccl.built) return Backend::kMpi;
  for (size_t b = 1; b < devices.size() && !(wish == "nccl" && nccl.shared_device); ++b) {
    for (size_t a = 0; a < b; ++a) {
      if (!(devices[a] == devices[b])) continue;
      if (wish == "auto") return Backend::kMpi;
      user_error(
          "--comm nccl: ranks %zu and %zu share one GPU, which NCCL %d.%d.%d refuses; use --comm mpi (or NCCL 2.30 and "
          "NCCL_MULTI_RANK_GPU_ENABLE=1)",
          a, b, nccl.version / 10000, nccl.version / 100 % 100, nccl.version % 100);
    }
  }
  return Backend::kNccl;
}

inline NcclAbility nccl_ability() {
  NcclAbility ability;
#if defined(NCCL_MAJOR) && defined(__CUDACC__)
  ability.built = true;
  NCCL_CHECK(ncclGetVersion(&ability.version));
  const char* text = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  ability.shared_device = ability.version >= 23000 && text != nullptr && atoi(text) == 1;
#endif
  return ability;
}

/// The current device. On the CPU every process is a device of its own.
inline DeviceIdentity this_device() {
  DeviceIdentity identity = {};
#ifdef __CUDACC__
  int device = 0;
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  memcpy(identity.uuid, &properties.uuid, sizeof(identity.uuid));
#else
  const long host = gethostid();
  const pid_t process = getpid();
  memcpy(identity.uuid, &host, sizeof(host));
  memcpy(identity.uuid + 8, &process, sizeof(process));
#endif
  return identity;
}

/// The communicator of all ranks of `control`. Collective; the device of this rank has been set.
inline std::unique_ptr<Communicator> make_communicator(const Control& control, const std::string& wish = "auto",
                                                       const std::string& name = "world") {
  Control group = control;
  const std::vector<DeviceIdentity> devices = group.gathered(this_device(), "comparing devices");
  Backend backend = Backend::kSelf;
  try {
    backend = choose_backend(wish, devices, nccl_ability());
  } catch (const Error& error) {
    throw Error(error.kind(), error.what(), true);  // every rank has decided from the same table
  }
  switch (backend) {
    case Backend::kNccl:
#ifdef NCCL_MAJOR
      return std::make_unique<NcclCommunicator>(std::move(group), name);
#endif
    case Backend::kMpi:
#ifdef LLMC_MPI
      return std::make_unique<MpiCommunicator>(std::move(group), name);
#endif
    case Backend::kSelf:
      break;
  }
  return std::make_unique<SelfCommunicator>(std::move(group), name);
}
