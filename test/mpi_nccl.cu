// mpi_nccl.cu -- the NCCL backend. Run: mpirun -np N mpi_nccl, N = 1 to 4.
//
// CPU build: against the strict test double of nccl_double/, which is tested here too. CUDA build: against NCCL, where
// each rank has a GPU of its own; skipped where it has not.
#include "llmc/device.h"
#ifndef __CUDACC__
#define LLMC_NCCL_DOUBLE
#ifdef LLMC_MPI
#include "test/nccl_double/nccl.h"
#endif
#endif
#include "llmc/comm_backend.h"
#include "test/comm_tests.h"

#if defined(LLMC_MPI) && defined(NCCL_MAJOR)

// Everything that a backend must do.
TEST(NcclBackend, DoesWhatCommunicatorsDo) {
  NcclCommunicator comm(*test_control(), "world");
  all_backend_tests(comm, 5);
}

// Two families of communicators live side by side; the second does not disturb the first.
TEST(NcclBackend, TwoFamilies) {
  NcclCommunicator first(*test_control(), "first"), second(*test_control(), "second");
  collectives(second);
  collectives(first);
}

#ifdef LLMC_NCCL_DOUBLE

namespace {

/// A communicator of the double among all ranks, ready to use, with a stream.
struct Raw {
  explicit Raw(bool blocking = true) {
    Control& control = *test_control();
    ncclUniqueId id = {};
    if (control.rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    control.broadcast(&id, sizeof(id), 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    const ncclResult_t result = ncclCommInitRankConfig(&comm, control.size(), id, control.rank(), &config);
    EXPECT_EQ(result, blocking ? ncclSuccess : ncclInProgress);
    while (state() == ncclInProgress) usleep(100);
    EXPECT_EQ(state(), ncclSuccess);
  }
  ~Raw() { (void)ncclCommAbort(comm); }
  ncclResult_t state() {
    ncclResult_t result = ncclInternalError;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &result), ncclSuccess);
    return result;
  }
  /// The state when it is no longer `success`, or after `seconds`.
  ncclResult_t state_within(double seconds) {
    const Clock::time_point start = Clock::now();
    while (state() == ncclSuccess && seconds_since(start) < seconds) usleep(1000);
    return state();
  }
  bool idle_within(double seconds) {
    const Clock::time_point start = Clock::now();
    while (cudaStreamQuery(stream) != cudaSuccess && seconds_since(start) < seconds) usleep(1000);
    return cudaStreamQuery(stream) == cudaSuccess;
  }
  std::string error() { return ncclGetLastError(comm); }

  ncclComm_t comm = nullptr;
  TestStream stream;
  TestBuffer data{4096};
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
bool alone() { return test_control()->size() < 2; }
int partner() { return test_control()->rank() == 0 ? 1 : 0; }

ncclResult_t send(Raw& raw, size_t bytes) {
  return ncclSend(raw.data.data(), bytes, ncclUint8, partner(), raw.comm, raw.stream);
}
ncclResult_t receive(Raw& raw, size_t bytes) {
  return ncclRecv(raw.data.data() + 1024, bytes, ncclUint8, partner(), raw.comm, raw.stream);
}

}  // namespace

// Collectives in another order on one rank: an error on every rank that says who issued what.
TEST(NcclDouble, RefusesAnotherOrderOfCollectives) {
  if (alone()) return;
  Raw raw;
  unsigned char* data = raw.data.data();
  auto gather = [&] { ncclAllGather(data + raw.comm->rank * 64, data, 64, ncclUint8, raw.comm, raw.stream); };
  auto broadcast = [&] { ncclBroadcast(data, data, 64, ncclUint8, 0, raw.comm, raw.stream); };
  if (raw.comm->rank == 1) broadcast();
  gather();
  if (raw.comm->rank != 1) broadcast();
  EXPECT_EQ(raw.state_within(10), ncclInvalidUsage);
  EXPECT_TRUE(contains(raw.error(), "rank 1 issued ncclBroadcast of 64 bytes") || contains(raw.error(), "has found"));
  EXPECT_TRUE(raw.idle_within(10));
  test_control()->barrier();
}

// Other sizes and other roots in one collective, and messages of two sizes, are found.
TEST(NcclDouble, RefusesOtherSizesAndRoots) {
  if (alone()) return;
  {
    Raw raw;
    const size_t bytes = raw.comm->rank == 1 ? 64 : 65;
    ncclAllGather(raw.data.data() + 2048, raw.data.data(), bytes, ncclUint8, raw.comm, raw.stream);
    EXPECT_EQ(raw.state_within(10), ncclInvalidUsage);
    EXPECT_TRUE(raw.idle_within(10));
    test_control()->barrier();
  }
  {
    Raw raw;
    ncclBroadcast(raw.data.data(), raw.data.data(), 8, ncclUint8, raw.comm->rank == 1, raw.comm, raw.stream);
    EXPECT_EQ(raw.state_within(10), ncclInvalidUsage);
    EXPECT_TRUE(raw.idle_within(10));
    test_control()->barrier();
  }
  Raw raw;
  if (raw.comm->rank == 0) send(raw, 64);
  if (raw.comm->rank == 1) receive(raw, 63);
  EXPECT_EQ(raw.comm->rank < 2 ? raw.state_within(10) : ncclInvalidUsage, ncclInvalidUsage);
  EXPECT_TRUE(raw.idle_within(10));
  test_control()->barrier();
}

// A send, however small, keeps its stream until its receive is there.
TEST(NcclDouble, SendsAreRendezvous) {
  if (alone()) return;
  Raw raw;
  if (raw.comm->rank == 0) {
    EXPECT_EQ(send(raw, 1), ncclSuccess);
    EXPECT_FALSE(raw.idle_within(0.1));
  }
  test_control()->barrier();
  EXPECT_EQ(raw.comm->rank == 1 ? receive(raw, 1) : ncclSuccess, ncclSuccess);
  EXPECT_TRUE(raw.idle_within(10));
  test_control()->barrier();
}

// Two ranks that send to each other before they receive wait for ever, unless they say so in a group.
TEST(NcclDouble, MutualSendsNeedAGroup) {
  if (alone()) return;
  if (test_control()->rank() > 1) {
    Raw together, apart;
    test_control()->barrier();
    return;
  }
  Raw together, apart;
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(send(together, 100), ncclSuccess);
  EXPECT_EQ(receive(together, 100), ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_TRUE(together.idle_within(10));
  EXPECT_EQ(send(apart, 100), ncclSuccess);
  EXPECT_EQ(receive(apart, 100), ncclSuccess);
  EXPECT_FALSE(apart.idle_within(0.3));
  test_control()->barrier();
  EXPECT_EQ(ncclCommAbort(apart.comm), ncclSuccess);
  EXPECT_TRUE(apart.idle_within(10));
}

// Operations of one communicator run in the order of issue, also on different streams: a send behind a receive that is
// not matched stays there, although its partner is waiting for it.
TEST(NcclDouble, OneOperationAtATime) {
  if (alone()) return;
  Raw raw;
  TestStream other;
  EXPECT_EQ(raw.comm->rank < 2 ? receive(raw, 8) : ncclSuccess, ncclSuccess);
  if (raw.comm->rank == 0) {
    EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, 1, raw.comm, other), ncclSuccess);
    usleep(200000);
    EXPECT_EQ(cudaStreamQuery(other), cudaErrorNotReady);
  }
  test_control()->barrier();
  EXPECT_EQ(raw.idle_within(0.1), raw.comm->rank >= 2);
  test_control()->barrier();
  EXPECT_EQ(ncclCommAbort(raw.comm), ncclSuccess);
  EXPECT_TRUE(raw.idle_within(10));
  other.synchronize();
}

// A non-blocking call has taken place only when the state says so: an event recorded earlier comes too early, and
// another call before is refused.
TEST(NcclDouble, NonBlockingCallsTakePlaceLater) {
  if (alone()) return;
  Raw raw(false);
  if (raw.comm->rank == 0) {
    EXPECT_EQ(send(raw, 8), ncclInProgress);
    EXPECT_EQ(send(raw, 8), ncclInvalidUsage);
    EXPECT_TRUE(contains(raw.error(), "while an earlier call is in progress")) << raw.error();
    EXPECT_TRUE(raw.idle_within(0.1));
    while (raw.state() == ncclInProgress) continue;
    EXPECT_FALSE(raw.idle_within(0.1));
  }
  test_control()->barrier();
  if (raw.comm->rank == 1) {
    EXPECT_EQ(receive(raw, 8), ncclInProgress);
    while (raw.state() == ncclInProgress) continue;
  }
  EXPECT_TRUE(raw.idle_within(10));
  test_control()->barrier();
}

// Uses that NCCL leaves undefined are refused: from two threads, after an abort, after a destroy, host memory, own
// rank.
TEST(NcclDouble, RefusesMisuse) {
  Raw raw;
  const int rank = raw.comm->rank, other = alone() ? 0 : partner();
  EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, rank, raw.comm, raw.stream), ncclInvalidUsage);
  EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, 99, raw.comm, raw.stream), ncclInvalidArgument);
  std::vector<unsigned char> host(64 * static_cast<size_t>(raw.comm->size));
  EXPECT_EQ(ncclAllGather(raw.data.data(), host.data(), 64, ncclUint8, raw.comm, raw.stream), ncclInvalidArgument);
  EXPECT_EQ(ncclAllGather(raw.data.data() + rank * 64 + 1, raw.data.data(), 64, ncclUint8, raw.comm, raw.stream),
            ncclInvalidArgument);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  if (!alone()) {
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, other, raw.comm, raw.stream), ncclSuccess);
    std::thread([&] {
      EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, other, raw.comm, raw.stream), ncclInvalidUsage);
      EXPECT_TRUE(contains(raw.error(), "two threads at once")) << raw.error();
    }).join();
    TestStream second;
    EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, other, raw.comm, second), ncclInvalidUsage);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  }
  EXPECT_EQ(ncclCommAbort(raw.comm), ncclSuccess);
  ncclResult_t state;
  EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, other, raw.comm, raw.stream), ncclInvalidUsage);
  EXPECT_EQ(ncclCommGetAsyncError(raw.comm, &state), ncclInvalidUsage);
  EXPECT_TRUE(contains(raw.error(), "after ncclCommAbort")) << raw.error();
  Raw gone;
  EXPECT_EQ(ncclCommFinalize(gone.comm), ncclSuccess);
  EXPECT_EQ(ncclBroadcast(gone.data.data(), gone.data.data(), 8, ncclUint8, 0, gone.comm, gone.stream),
            ncclInvalidUsage);
  EXPECT_EQ(ncclCommDestroy(gone.comm), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(gone.comm), ncclInvalidUsage);
  EXPECT_EQ(ncclSend(raw.data.data(), 8, ncclUint8, other, nullptr, raw.stream), ncclInvalidUsage);
}

// ------------------------------------------------------------------------------------------- jobs that must fail

void receive_without_send(Control& control) {
  control.set_timeout(1);
  NcclCommunicator nccl(control, "world");
  Communicator& comm = nccl;
  comm.open_links({{1, 0, 3}});
  TestBuffer buffer(64);
  if (comm.rank() == 0) {
    TestStream compute;
    comm.wait(comm.receive(buffer.data(), 64, 1, 3, nullptr), compute);
    compute.synchronize();  // the host sees nothing but a stream that never ends
  }
  sleep(30);
}
void other_collective(Control& control) {
  NcclCommunicator comm(control, "world");
  TestBuffer buffer(64 * 2);
  comm.wait_host(comm.rank() == 0 ? comm.all_gather(buffer.data(), 64, nullptr)
                                  : comm.broadcast(buffer.data(), 64, 0, nullptr));
  sleep(30);
}
void mutual_sends(Control& control) {  // what comm_nccl.h avoids with a lane for each direction
  control.set_timeout(1);
  NcclLanes lanes(control.process());
  auto pool = std::make_shared<EventPool>();
  ncclUniqueId id = {};
  if (control.rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
  control.broadcast(&id, sizeof(id), 0);
  auto lane = lanes.open("both ways", id, 2, control.rank(), 1);
  TestBuffer buffer(128);
  const int peer = 1 - control.rank();
  lanes.issue(*lane, {Transfer::kSend, peer, 0, 64, 1}, "send without a group", pool,
              [&] { return ncclSend(buffer.data(), 64, ncclUint8, peer, lane->comm, lane->stream); });
  lanes.issue(*lane, {Transfer::kReceive, peer, 0, 64, 2}, "receive without a group", pool,
              [&] { return ncclRecv(buffer.data() + 64, 64, ncclUint8, peer, lane->comm, lane->stream); });
  sleep(30);
}
void rank_stays_away(Control& control) {
  control.set_timeout(1);
  Control group = control;
  ncclUniqueId id = {};
  if (control.rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
  control.broadcast(&id, sizeof(id), 0);
  if (control.rank() == 1) sleep(30);
  NcclLanes lanes(control.process());
  lanes.open("late", id, 2, control.rank(), 1);
}
void rank_is_killed(Control& control) {
  NcclCommunicator comm(control, "world");
  TestBuffer buffer(64 * 3);
  if (comm.rank() == 1) raise(SIGKILL);
  comm.wait_host(comm.all_gather(buffer.data(), 64, nullptr));
}

// The watching thread ends what would hang or corrupt, and names it.
TEST(Job, FailuresAreNamed) {
  if (test_control()->size() > 1) return;
  expect_failure(run_job(2, "receive_without_send"),
                 "error: rank 0: receive of 64 bytes from rank 1 on link 3 (world), number 2 has waited 1.", 20);
  const JobResult job = run_job(2, "other_collective");
  expect_failure(job, "(world), number 2 failed: invalid usage: rank ", 20);
  EXPECT_TRUE(job.prints("rank 0 issued ncclAllGather of 64 bytes") || job.prints("rank 0 issued ncclBroadcast"))
      << job.output;
  expect_failure(run_job(2, "mutual_sends"), "send without a group has waited 1.", 20);
  expect_failure(run_job(2, "rank_stays_away"), "ncclCommInitRankConfig (late) has waited 1.", 20);
  expect_failure(run_job(3, "rank_is_killed"), "signal 9", 10);
}

/// Starts the double with MPI, and ends it before MPI ends.
class DoubleEnvironment : public testing::Environment {
  void SetUp() override { nccl_double::start(test_control()->process()); }
  void TearDown() override { nccl_double::stop(); }
};

int main(int argc, char** argv) {
  const std::map<std::string, JobMode> modes = {{"receive_without_send", receive_without_send},
                                                {"other_collective", other_collective},
                                                {"mutual_sends", mutual_sends},
                                                {"rank_stays_away", rank_stays_away},
                                                {"rank_is_killed", rank_is_killed}};
  if (is_job_mode(argc, argv)) {
    return run_job_mode(argc, argv, modes, [](Control& control) { nccl_double::start(control.process()); });
  }
  testing::AddGlobalTestEnvironment(new DoubleEnvironment);
  return run_mpi_tests(argc, argv);
}

#else  // NCCL itself

/// Gives each rank a GPU, or skips the tests.
class GpuEnvironment : public testing::Environment {
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    const int place = test_control()->local_rank();
    if (!test_control()->min(test_control()->local_size() <= devices)) GTEST_SKIP() << "needs a GPU for each rank";
    CUDA_CHECK(cudaSetDevice(place));
  }
};

int main(int argc, char** argv) {
  testing::AddGlobalTestEnvironment(new GpuEnvironment);
  return run_mpi_tests(argc, argv);
}

#endif
#else
int main() { return 0; }
#endif
