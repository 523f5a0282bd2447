// mpi_comm.cu -- control.h, the MPI backend and the choice of a backend. Run: mpirun -np N mpi_comm, N = 1 to 4.
// Jobs that must fail are started by the run with one rank.
#include "llmc/comm_backend.h"
#include "test/comm_tests.h"

#ifdef LLMC_MPI

namespace {

std::unique_ptr<Communicator> make(const EngineOptions& options) {
  return std::make_unique<MpiCommunicator>(*test_control(), "world", options);
}

EngineOptions with(bool staged, bool synchronous, uint64_t delay_seed) {
  EngineOptions options = engine_options();
  options.staged |= staged;
  if (staged) options.chunk_bytes = 96;  // many chunks, the last one short
  options.synchronous = synchronous;
  options.delay_seed = delay_seed;
  return options;
}

}  // namespace

// A sum keeps a NaN of any rank, is exact where one rank contributes, and adds integers; max and min see every rank.
TEST(Control, AgreesOnNumbers) {
  Control& control = *test_control();
  const int size = control.size(), rank = control.rank();
  for (int owner = 0; owner < size; ++owner) {
    double values[3] = {owner == rank ? 0.1 : 0.0, owner == rank ? NAN : 1.0, 0.25};
    control.sum(values, 3);
    EXPECT_EQ(values[0], 0.1);
    EXPECT_TRUE(std::isnan(values[1]));
    EXPECT_EQ(values[2], 0.25 * size);
    EXPECT_EQ(control.max(rank == owner ? 7 : -7), 7);
    EXPECT_EQ(control.min(rank == owner ? -7 : 7), -7);
  }
  std::vector<uint64_t> counts(5, uint64_t{1} << 60);
  control.sum(counts.data(), counts.size());
  EXPECT_EQ(counts[4], (uint64_t{1} << 60) * static_cast<uint64_t>(size));
  // In rank order: another order would give 0.
  double order[1] = {rank == 0 ? 1e300 : rank == 1 ? -1e300 : 1.0};
  control.sum(order, 1);
  EXPECT_EQ(order[0], size > 1 ? size - 2.0 : 1e300);
}

// broadcast from every root and all_gather give every rank the same bytes, also none and many.
TEST(Control, MovesBytes) {
  Control& control = *test_control();
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{300001}}) {
    for (int root = 0; root < control.size(); ++root) {
      std::vector<unsigned char> data = pattern(bytes, control.rank() == root ? 5 : 6, 0, 0);
      control.broadcast(data.data(), bytes, root);
      EXPECT_EQ(data, pattern(bytes, 5, 0, 0));
    }
  }
  const std::vector<int> ranks = control.gathered(control.rank());
  for (int r = 0; r < control.size(); ++r) EXPECT_EQ(ranks[static_cast<size_t>(r)], r);
  EXPECT_EQ(control.local_size(), control.size());
  EXPECT_EQ(control.local_rank(), control.rank());
}

// A message goes from one rank to another and leaves the rest alone; texts of any length come to rank 0 in order.
TEST(Control, MovesMessagesAndTexts) {
  Control& control = *test_control();
  for (int from = 0; from < control.size(); ++from) {
    for (int to = 0; to < control.size(); ++to) {
      int value = control.rank() == from ? 7 + from : -1;
      control.move(&value, sizeof(value), from, to);
      EXPECT_EQ(value, control.rank() == from || control.rank() == to ? 7 + from : -1);
    }
  }
  auto text = [](int rank) { return std::string(static_cast<size_t>(rank * 1000), static_cast<char>('a' + rank)); };
  const std::vector<std::string> all = control.gather_texts(text(control.rank()));
  ASSERT_EQ(all.size(), control.rank() == 0 ? static_cast<size_t>(control.size()) : 0u);
  for (size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], text(static_cast<int>(r)));
}

// split() orders by key, then rank; the groups agree among themselves only.
TEST(Control, Splits) {
  Control& control = *test_control();
  Control group = control.split(control.rank() / 2, 0);
  EXPECT_EQ(group.rank(), control.rank() % 2);
  EXPECT_EQ(group.max(control.rank()), std::min(control.rank() / 2 * 2 + 1, control.size() - 1));
  EXPECT_EQ(group.job_rank(group.rank()), control.rank());
}

TEST(MpiBackend, DirectMemory) { all_backend_tests(*make(with(false, false, 0)), 1); }
TEST(MpiBackend, DirectMemorySynchronousSendsAndDelays) { all_backend_tests(*make(with(false, true, 11)), 2); }
TEST(MpiBackend, StagedMemory) { all_backend_tests(*make(with(true, false, 0)), 3); }
TEST(MpiBackend, StagedMemorySynchronousSendsAndDelays) { all_backend_tests(*make(with(true, true, 12)), 4); }

// The communicator of one rank copies, on streams, and counts no bytes.
TEST(SelfBackend, Copies) {
  SelfCommunicator self(test_control()->split(test_control()->rank(), 0), "self");
  collectives(self);
  ordered_with_streams(self);
  split_groups(self);
}

// Waiting leaves the processor to others: 1 s in which a receive is open costs less than a quarter of a core.
TEST(MpiBackend, WaitingCostsLittle) {
  auto comm = make(engine_options());
  if (comm->size() == 1) return;
  comm->open_links({{1, 0, 0}});
  TestBuffer buffer(64);
  Ticket ticket;
  if (comm->rank() == 0) ticket = comm->receive(buffer.data(), 64, 1, 0, nullptr);
  const double before = cpu_seconds();
  if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
  comm->control().barrier();
  EXPECT_LT(cpu_seconds() - before, 0.25);
  if (comm->rank() == 1) ticket = comm->send(buffer.data(), 64, 0, 0, nullptr);
  comm->wait_host(ticket);
}

// The choice is a function of the devices; what cannot be is refused in words, the ranks named.
TEST(Backend, Choice) {
  const DeviceIdentity a = {{1}}, b = {{2}};
  NcclAbility with_nccl, shared;
  with_nccl.built = shared.built = true;
  with_nccl.version = 22809;
  shared.version = 23000;
  shared.shared_device = true;
  EXPECT_EQ(choose_backend("auto", {a}, with_nccl), Backend::kSelf);
  EXPECT_EQ(choose_backend("auto", {a, b}, {}), Backend::kMpi);
  EXPECT_EQ(choose_backend("auto", {a, b}, with_nccl), Backend::kNccl);
  EXPECT_EQ(choose_backend("auto", {b, a, b}, with_nccl), Backend::kMpi);
  EXPECT_EQ(choose_backend("auto", {a, a}, shared), Backend::kMpi);
  EXPECT_EQ(choose_backend("mpi", {a, b}, with_nccl), Backend::kMpi);
  EXPECT_EQ(choose_backend("nccl", {a, b}, with_nccl), Backend::kNccl);
  EXPECT_EQ(choose_backend("nccl", {a, a}, shared), Backend::kNccl);
  auto message = [](const std::string& wish, const std::vector<DeviceIdentity>& devices, const NcclAbility& ability) {
    try {
      choose_backend(wish, devices, ability);
    } catch (const Error& error) {
      return std::to_string(error.exit_code()) + " " + error.what();
    }
    return std::string("no error");
  };
  EXPECT_EQ(message("nccl", {b, a, b}, with_nccl).find("2 --comm nccl: ranks 0 and 2 share one GPU, which NCCL 2.28.9"),
            0u);
  EXPECT_EQ(message("nccl", {a, b}, {}), "2 --comm nccl needs a CUDA build with NCCL; use --comm mpi");
  EXPECT_EQ(message("gloo", {a}, {}), "2 --comm gloo: use auto, mpi or nccl");
}

// ------------------------------------------------------------------------------------------- jobs that must fail

void receive_without_send(Control& control) {
  control.set_timeout(1);
  auto comm = make_communicator(control, "mpi");
  comm->open_links({{1, 0, 3}});
  TestBuffer buffer(64);
  if (comm->rank() == 0) comm->wait_host(comm->receive(buffer.data(), 64, 1, 3, nullptr));
  sleep(30);
}
void send_without_receive(Control& control) {
  control.set_timeout(1);
  auto comm = make_communicator(control, "mpi");
  comm->open_links({{1, 0, 3}});
  TestBuffer buffer(64);
  if (comm->rank() == 1) comm->wait_host(comm->send(buffer.data(), 64, 0, 3, nullptr));
  sleep(30);
}
void collective_without_one(Control& control) {
  control.set_timeout(1);
  auto comm = make_communicator(control, "mpi");
  TestBuffer buffer(64 * 3);
  for (int i = 0; i < 2 - (comm->rank() == 1); ++i) comm->wait_host(comm->all_gather(buffer.data(), 64, nullptr));
  sleep(30);
}
void barrier_without_one(Control& control) {
  control.set_timeout(1);
  if (control.rank() == 1) sleep(30);
  control.barrier();
}
void rank_is_killed(Control& control) {
  auto comm = make_communicator(control, "mpi");
  TestBuffer buffer(64 * 3);
  if (comm->rank() == 1) raise(SIGKILL);
  comm->wait_host(comm->all_gather(buffer.data(), 64, nullptr));
}
void sizes_differ(Control& control) {
  auto comm = make_communicator(control, "mpi");
  comm->open_links({{1, 0, 3}});
  TestBuffer buffer(64);
  comm->wait_host(comm->rank() == 0 ? comm->receive(buffer.data(), 64, 1, 3, nullptr)
                                    : comm->send(buffer.data(), 32, 0, 3, nullptr));
  sleep(30);
}
void nothing(Control& control) { control.barrier(); }
void links_differ(Control& control) {
  auto comm = make_communicator(control, "mpi");
  comm->open_links({{1, 0, control.rank()}});
}
void slow_work_never_ends(Control& control) {
  control.set_timeout(1);
  auto comm = make_communicator(control, "mpi");
  TestStream stream;
  CUDA_CHECK(cudaLaunchHostFunc(
      stream, [](void*) { std::this_thread::sleep_for(std::chrono::seconds(30)); }, nullptr));
  TestBuffer buffer(64 * 2);
  comm->wait_host(comm->all_gather(buffer.data(), 64, stream));
}

// No operation hangs: each is named, with rank, peer, link, bytes and number, and ends the job.
TEST(Job, TimeOutNamesTheOperation) {
  if (test_control()->size() > 1) return;
  expect_failure(run_job(2, "receive_without_send"),
                 "error: rank 0: receive of 64 bytes from rank 1 on link 3 (world), number 1 has waited 1.", 20);
  expect_failure(run_job(2, "send_without_receive", "LLMC_TEST_SSEND=1"),
                 "error: rank 1: send of 64 bytes to rank 0 on link 3 (world), number 1 has waited 1.", 20);
  const JobResult job = run_job(3, "collective_without_one");
  expect_failure(job, "all_gather of 64 bytes (world), number 2 has waited 1.", 20);
  EXPECT_TRUE(job.prints("last completed 1, last started 2")) << job.output;
  expect_failure(run_job(2, "barrier_without_one"), "error: rank 0: barrier waits for rank 1 since 1.", 20);
  expect_failure(run_job(2, "slow_work_never_ends"), "the work before it has not finished", 20);
}

// A killed rank ends the job within 10 s.
TEST(Job, KilledRankEndsTheOthers) {
  if (test_control()->size() > 1) return;
  expect_failure(run_job(3, "rank_is_killed"), "signal 9", 10);
}

// Ranks that do not mean the same thing are told so.
TEST(Job, DisagreementIsAnError) {
  if (test_control()->size() > 1) return;
  expect_failure(run_job(2, "sizes_differ"),
                 "receive of 64 bytes from rank 1 on link 3 (world), number 1: a message of 32", 20);
  expect_failure(run_job(2, "links_differ"), "ranks 0 and 1 want different links", 20);
}

// One of several ranks of a launcher that this MPI does not understand is an error, not one more rank 0.
TEST(Job, ForeignLauncherIsAnError) {
  if (test_control()->size() > 1) return;
  const JobResult job = run_job(0, "nothing", "MV2_COMM_WORLD_SIZE=4");
  expect_failure(job, "error: started as one of 4 ranks, but the launcher is not", 20);
  EXPECT_EQ(job.exit_code, 2);
  EXPECT_EQ(run_job(0, "nothing").exit_code, 0);  // alone
}

int main(int argc, char** argv) {
  const std::map<std::string, JobMode> modes = {{"receive_without_send", receive_without_send},
                                                {"send_without_receive", send_without_receive},
                                                {"collective_without_one", collective_without_one},
                                                {"barrier_without_one", barrier_without_one},
                                                {"rank_is_killed", rank_is_killed},
                                                {"sizes_differ", sizes_differ},
                                                {"links_differ", links_differ},
                                                {"nothing", nothing},
                                                {"slow_work_never_ends", slow_work_never_ends}};
  return is_job_mode(argc, argv) ? run_job_mode(argc, argv, modes) : run_mpi_tests(argc, argv);
}

#else
int main() { return 0; }
#endif
