// nccl.h -- a strict test double of the part of NCCL that comm_nccl.h uses, on the CPU device, over MPI.
//
// Each process is one GPU. Same names, same meaning; where NCCL leaves a mistake undefined (it hangs, or corrupts), the
// double answers ncclInvalidUsage and says what is wrong (ncclGetLastError):
//   - ranks that issue different operations, sizes or roots on one communicator;
//   - a communicator used by two threads at once, before it is ready, after an abort, a finalize or a destroy;
//   - another call while a non-blocking call is in progress; a destroy with operations outstanding;
//   - buffers that are not device memory, a wrong in-place all-gather, messages to the own rank.
// Sends and receives block their stream until they are matched, also small ones; operations of one communicator run in
// the order of issue, whatever their streams. A non-blocking call answers ncclInProgress and takes place only at the
// second ncclCommGetAsyncError: who records an event before that is too early.
#pragma once

#include <climits>

#include "test/nccl_double/communicator.h"

#define NCCL_MAJOR 2
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_UNIQUE_ID_BYTES 128

typedef struct ncclComm* ncclComm_t;
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = nccl_double::kInvalidUsage,
  ncclRemoteError = 6,
  ncclInProgress = 7
} ncclResult_t;

typedef enum { ncclInt8 = 0, ncclUint8 = 1 } ncclDataType_t;

typedef struct {
  unsigned int magic;
  int blocking, minCTAs, maxCTAs;
  const char* commName;
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER \
  { 0xcafebeef, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, nullptr }

#include "test/nccl_double/calls.h"

inline ncclResult_t ncclGetVersion(int* version) {
  *version = 22809;
  return ncclSuccess;
}

inline const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const kTexts[] = {"no error",
                                       "unhandled cuda error",
                                       "unhandled system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error",
                                       "NCCL operation in progress"};
  return kTexts[result];
}

/// What the last failed call on the communicator (or of this thread) found.
inline const char* ncclGetLastError(ncclComm_t comm) {
  if (comm == nullptr) return nccl_double::thread_error().c_str();
  std::lock_guard<std::mutex> hold(comm->lock);
  if (comm->failure_text.empty()) return nccl_double::thread_error().c_str();
  return comm->failure_text.c_str();
}

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  nccl_double::World& world = nccl_double::world();
  const int number = world.ids++;
  const int content[3] = {0x6e63636c, world.process->rank(), ((world.process->rank() << 12) + number) * 4};
  if (number >= 1 << 12) return nccl_double::refuse(nullptr, ncclInternalError, "the double has no more ids");
  memcpy(id->internal, content, sizeof(content));
  return ncclSuccess;
}

/// Ranks meet at the process that made the id, which tells each where the others are.
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
  int content[3];
  memcpy(content, id.internal, sizeof(content));
  if (content[0] != 0x6e63636c || rank < 0 || rank >= ranks || config->magic != 0xcafebeef) {
    return nccl_double::refuse(nullptr, ncclInvalidArgument, "ncclCommInitRankConfig: id, rank or config");
  }
  *comm = new ncclComm;
  nccl_double::registry().add(*comm);
  (*comm)->size = ranks;
  (*comm)->rank = rank;
  (*comm)->tag = content[2];
  (*comm)->blocking = config->blocking != 0;
  const int meeting_place = content[1];
  if ((*comm)->blocking) {
    nccl_double::meet(**comm, meeting_place);
    return nccl_double::state_of(**comm);
  }
  std::thread([comm = *comm, meeting_place] { nccl_double::meet(*comm, meeting_place); }).detach();
  return ncclInProgress;
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  nccl_double::Use use(comm, "ncclCommGetAsyncError", nccl_double::kAlsoUnready);
  if (use.refused()) return ncclInvalidUsage;
  std::vector<nccl_double::Unit> launched;
  {
    std::lock_guard<std::mutex> hold(comm->lock);
    if (comm->polls_until_launch > 0 && --comm->polls_until_launch == 0) launched.swap(comm->accepted);
  }
  for (nccl_double::Unit& unit : launched) nccl_double::launch_unit(*comm, std::move(unit));
  *state = nccl_double::state_of(*comm);
  return ncclSuccess;
}

inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  nccl_double::Use use(comm, "ncclCommFinalize");
  if (use.refused()) return ncclInvalidUsage;
  {
    std::lock_guard<std::mutex> hold(comm->lock);
    comm->finalized = true;
  }
  return nccl_double::state_of(*comm);
}

inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  nccl_double::Use use(comm, "ncclCommDestroy", nccl_double::kAlsoFinalized);
  if (use.refused()) return ncclInvalidUsage;
  std::unique_lock<std::mutex> hold(comm->lock);
  if (comm->completed != comm->issued) {
    hold.unlock();
    return nccl_double::refuse(comm, ncclInvalidUsage, "ncclCommDestroy with operations outstanding");
  }
  comm->destroyed = true;
  return ncclSuccess;
}

/// Any time; what waits gives up.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr || comm->aborted.exchange(true)) return ncclInvalidUsage;
  comm->changed.notify_all();
  return ncclSuccess;
}

inline ncclResult_t ncclGroupStart() { return nccl_double::group_start(); }
inline ncclResult_t ncclGroupEnd() { return nccl_double::group_end(); }

inline ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return nccl_double::issue(comm, stream, {nccl_double::Kind::kSend, data, nullptr, count, peer});
}
inline ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t stream) {
  return nccl_double::issue(comm, stream, {nccl_double::Kind::kReceive, nullptr, data, count, peer});
}
inline ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t, ncclComm_t comm,
                                  cudaStream_t stream) {
  return nccl_double::issue(comm, stream, {nccl_double::Kind::kAllGather, send, receive, count, 0});
}
inline ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
  return nccl_double::issue(comm, stream, {nccl_double::Kind::kBroadcast, send, receive, count, root});
}

// Names that comm_nccl.h needs and the CPU device has no use for: streams with a priority.
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
