// comm_tests.h -- what every backend of comm.h must do, as functions of a communicator. Used by mpi_comm.cu,
// mpi_nccl.cu.
#pragma once

#include <algorithm>
#include <random>

#include "llmc/comm.h"
#include "test/job_test.h"

/// Device memory with bytes; the host looks at it by copies on a stream of its own.
class TestBuffer {
 public:
  explicit TestBuffer(size_t bytes, unsigned char fill = 0xee) : bytes_(bytes) {
    CUDA_CHECK(cudaMalloc(&data_, std::max<size_t>(bytes, 1)));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    write(std::vector<unsigned char>(bytes, fill));
  }
  explicit TestBuffer(const std::vector<unsigned char>& content) : TestBuffer(content.size()) { write(content); }
  TestBuffer(TestBuffer&& other) : data_(other.data_), bytes_(other.bytes_), stream_(other.stream_) {
    other.data_ = nullptr;
    other.stream_ = nullptr;
  }
  ~TestBuffer() {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
    cudaFree(data_);
  }
  unsigned char* data() { return data_; }
  void write(const std::vector<unsigned char>& content) {
    if (!content.empty()) {
      CUDA_CHECK(cudaMemcpyAsync(data_, content.data(), content.size(), cudaMemcpyHostToDevice, stream_));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  std::vector<unsigned char> read() {
    std::vector<unsigned char> content(bytes_);
    if (bytes_ > 0) CUDA_CHECK(cudaMemcpyAsync(content.data(), data_, bytes_, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    return content;
  }

 private:
  unsigned char* data_ = nullptr;
  size_t bytes_;
  cudaStream_t stream_ = nullptr;
};

/// A stream that can be made slow.
class TestStream {
 public:
  TestStream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~TestStream() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  operator cudaStream_t() const { return stream_; }
  /// What is issued after this starts 30 ms later.
  void sleep() {
    CUDA_CHECK(cudaLaunchHostFunc(
        stream_, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }, nullptr));
  }
  void synchronize() { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Bytes that tell who made them, for what, and their place.
inline std::vector<unsigned char> pattern(size_t bytes, int a, int b, int c) {
  std::mt19937 random(static_cast<unsigned>(a * 1000003 + b * 1009 + c));
  std::vector<unsigned char> content(bytes);
  for (unsigned char& byte : content) byte = static_cast<unsigned char>(random());
  return content;
}

// Many links between the same neighbours in both directions (for 2 ranks, next and previous are the same rank), several
// messages on each, each rank issuing in its own random order: every message arrives in its link's order.
inline void links_in_random_order(Communicator& comm, int seed) {
  const int kLinks = 4, kMessages = 4, size = comm.size(), rank = comm.rank();
  if (size == 1) return;
  const size_t sizes[kMessages] = {64, 0, 1009, 1};
  std::vector<Link> links;
  for (int r = 0; r < size; ++r) {
    for (int id = 0; id < kLinks; ++id) {
      links.push_back({r, (r + 1) % size, 100 + id});
      links.push_back({(r + 1) % size, r, 200 + id});
    }
  }
  comm.open_links(links);
  const uint64_t before = comm.bytes_sent();

  struct Half {
    bool sends;
    int from, peer, id, next = 0;
  };
  std::vector<Half> halves;  // this rank's ends of links
  for (const Link& link : links) {
    if (link.from == rank) halves.push_back({true, rank, link.to, link.id});
    if (link.to == rank) halves.push_back({false, link.from, link.from, link.id});
  }
  std::vector<Ticket> tickets;
  std::vector<TestBuffer> buffers;
  std::vector<std::vector<unsigned char>> expected;
  std::mt19937 random(static_cast<unsigned>(seed + rank));
  uint64_t bytes_sent = 0;
  while (!halves.empty()) {
    const size_t i = random() % halves.size();
    Half& half = halves[i];
    const size_t bytes = sizes[half.next];
    expected.push_back(pattern(bytes, half.from, half.id, half.next));
    buffers.emplace_back(half.sends ? TestBuffer(expected.back()) : TestBuffer(bytes));
    unsigned char* data = buffers.back().data();
    tickets.push_back(half.sends ? comm.send(data, bytes, half.peer, half.id, nullptr)
                                 : comm.receive(data, bytes, half.peer, half.id, nullptr));
    if (half.sends) bytes_sent += bytes;
    if (++half.next == kMessages) halves.erase(halves.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (size_t i = 0; i < tickets.size(); ++i) {
    comm.wait_host(tickets[i]);
    EXPECT_TRUE(comm.done(tickets[i]));
    EXPECT_EQ(buffers[i].read(), expected[i]) << "operation " << i;
  }
  EXPECT_EQ(comm.bytes_sent() - before, bytes_sent);
}

// A receive whose message does not come stops neither another link between the same ranks, nor the collectives: the
// message comes only after they are through.
inline void blocked_link(Communicator& comm) {
  if (comm.size() == 1) return;
  comm.open_links({{1, 0, 300}, {0, 1, 301}, {1, 0, 302}});
  TestBuffer late(64), first(pattern(64, 1, 2, 3)), back(64), table(static_cast<size_t>(comm.size()) * 8);
  Ticket waits;
  if (comm.rank() == 0) waits = comm.receive(late.data(), 64, 1, 300, nullptr);
  if (comm.rank() == 0) comm.wait_host(comm.send(first.data(), 64, 1, 301, nullptr));
  if (comm.rank() == 1) comm.wait_host(comm.receive(back.data(), 64, 0, 301, nullptr));
  if (comm.rank() == 1) comm.wait_host(comm.send(back.data(), 64, 0, 302, nullptr));
  if (comm.rank() == 0) comm.wait_host(comm.receive(back.data(), 64, 1, 302, nullptr));
  comm.wait_host(comm.all_gather(table.data(), 8, nullptr));
  EXPECT_EQ(comm.done(waits), comm.rank() != 0);
  comm.control().barrier();
  if (comm.rank() == 1) comm.wait_host(comm.send(back.data(), 64, 0, 300, nullptr));
  comm.wait_host(waits);
  const bool received = comm.rank() == 0;
  EXPECT_EQ(late.read(), received ? pattern(64, 1, 2, 3) : std::vector<unsigned char>(64, 0xee));
}

// all_to_all, all_gather and broadcast from every root, all issued before the first is waited for, give the right bytes
// for empty, one-byte, prime and larger blocks; the bytes sent are those of the formulas.
inline void collectives(Communicator& comm) {
  const int size = comm.size(), rank = comm.rank();
  const size_t n = static_cast<size_t>(size);
  const uint64_t before = comm.bytes_sent();
  std::vector<Ticket> tickets;
  std::vector<TestBuffer> buffers;
  std::vector<std::vector<unsigned char>> expected;
  std::vector<TestBuffer> sources;
  uint64_t formula = 0, broadcast_bytes = 0;
  for (size_t bytes : {0, 1, 7, 1009, 65537}) {
    std::vector<unsigned char> out, in, table, gathered;
    for (int r = 0; r < size; ++r) {
      auto append = [](std::vector<unsigned char>& to, const std::vector<unsigned char>& what) {
        to.insert(to.end(), what.begin(), what.end());
      };
      append(out, pattern(bytes, rank, r, 1));
      append(in, pattern(bytes, r, rank, 1));
      append(gathered, pattern(bytes, r, 0, 2));
      append(table, r == rank ? pattern(bytes, r, 0, 2) : std::vector<unsigned char>(bytes, 0xee));
    }
    sources.emplace_back(out);
    buffers.emplace_back(n * bytes);
    expected.push_back(in);
    tickets.push_back(comm.all_to_all(sources.back().data(), buffers.back().data(), bytes, nullptr));
    buffers.emplace_back(table);
    expected.push_back(gathered);
    tickets.push_back(comm.all_gather(buffers.back().data(), bytes, nullptr));
    formula += 2 * bytes * (n - 1);
    for (int root = 0; root < size; ++root) {
      expected.push_back(pattern(bytes, root, 0, 3));
      buffers.emplace_back(rank == root ? TestBuffer(expected.back()) : TestBuffer(bytes));
      tickets.push_back(comm.broadcast(buffers.back().data(), bytes, root, nullptr));
      broadcast_bytes += bytes * (n - 1);
    }
  }
  for (size_t i = 0; i < tickets.size(); ++i) {
    comm.wait_host(tickets[i]);
    EXPECT_EQ(buffers[i].read(), expected[i]) << "collective " << i;
  }
  uint64_t sent[2] = {comm.bytes_sent() - before - formula, 0};
  comm.control().sum(sent, 2);
  EXPECT_EQ(sent[0], broadcast_bytes);
}

// A buffer is read only after the work issued to `after` has written it, and overwritten only after that work has read
// it; work issued after wait() sees what came. The work is made slow, so that a missing edge shows.
inline void ordered_with_streams(Communicator& comm) {
  if (comm.size() == 1) return;
  comm.open_links({{0, 1, 400}, {1, 0, 400}});
  const size_t bytes = 1000;
  TestStream compute;
  TestBuffer mine(bytes, 1), copy(bytes, 2);
  const std::vector<unsigned char> old(bytes, 1), made(bytes, 3), sent_late(bytes, 4);
  if (comm.rank() == 0) {
    compute.sleep();
    CUDA_CHECK(cudaMemsetAsync(mine.data(), 3, bytes, compute));
    Ticket sent = comm.send(mine.data(), bytes, 1, 400, compute);
    EXPECT_FALSE(comm.done(sent));
    comm.wait(sent, compute);
    CUDA_CHECK(cudaMemsetAsync(mine.data(), 9, bytes, compute));  // must not reach the message
    compute.synchronize();
  } else if (comm.rank() == 1) {
    compute.sleep();
    CUDA_CHECK(cudaMemcpyAsync(copy.data(), mine.data(), bytes, cudaMemcpyDeviceToDevice, compute));
    Ticket received = comm.receive(mine.data(), bytes, 0, 400, compute);
    compute.synchronize();
    EXPECT_EQ(copy.read(), old);  // the slow reader got what was there before
    comm.wait(received, compute);
    CUDA_CHECK(cudaMemcpyAsync(copy.data(), mine.data(), bytes, cudaMemcpyDeviceToDevice, compute));
    compute.synchronize();
    EXPECT_EQ(copy.read(), made);
  }
  // Collectives: the slow work writes this rank's block.
  const size_t n = static_cast<size_t>(comm.size());
  TestBuffer table(n * bytes, 5), exchanged(n * bytes, 5);
  compute.sleep();
  CUDA_CHECK(cudaMemsetAsync(table.data() + static_cast<size_t>(comm.rank()) * bytes, 4, bytes, compute));
  Ticket gathered = comm.all_gather(table.data(), bytes, compute);
  comm.wait(gathered, compute);
  CUDA_CHECK(cudaMemcpyAsync(exchanged.data(), table.data(), n * bytes, cudaMemcpyDeviceToDevice, compute));
  compute.synchronize();
  EXPECT_EQ(exchanged.read(), std::vector<unsigned char>(n * bytes, 4));
}

// A ticket orders an operation behind another one: what arrives (late) is sent on only then, and a buffer is received
// into again only when its last message has left. Messages go once round the ranks through two buffers each.
inline void ordered_with_operations(Communicator& comm) {
  const int size = comm.size(), rank = comm.rank(), kRounds = 6;
  if (size == 1) return;
  std::vector<Link> links;
  for (int r = 0; r < size; ++r) links.push_back({r, (r + 1) % size, 500});
  comm.open_links(links);
  const size_t bytes = 777;
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  TestStream compute;
  compute.sleep();
  std::vector<TestBuffer> buffers, back;
  std::vector<Ticket> sent, received;
  for (int k = 0; k < kRounds; ++k) {
    if (rank == 0) buffers.emplace_back(pattern(bytes, k, 0, 0));
    if (rank == 0) back.emplace_back(bytes);
    if (rank > 0 && k < 2) buffers.emplace_back(bytes);
  }
  for (int k = 0; k < kRounds; ++k) {
    const size_t i = static_cast<size_t>(k);
    if (rank == 0) {
      sent.push_back(comm.send(buffers[i].data(), bytes, next, 500, compute));
      received.push_back(comm.receive(back[i].data(), bytes, previous, 500, nullptr));
    } else {
      unsigned char* data = buffers[i % 2].data();
      received.push_back(comm.receive(data, bytes, previous, 500, nullptr, k < 2 ? nullptr : sent[i - 2]));
      sent.push_back(comm.send(data, bytes, next, 500, nullptr, received[i]));
    }
  }
  for (const Ticket& ticket : received) comm.wait_host(ticket);
  for (const Ticket& ticket : sent) comm.wait_host(ticket);
  for (size_t i = 0; i < back.size(); ++i) EXPECT_EQ(back[i].read(), pattern(bytes, static_cast<int>(i), 0, 0));
}

// Groups made by split() are numbered by (key, rank), talk among themselves, and do not mix with each other or the
// parent.
inline void split_groups(Communicator& comm) {
  const int size = comm.size(), rank = comm.rank();
  EXPECT_EQ(comm.split(-1, 0, "none"), nullptr);
  std::unique_ptr<Communicator> group = comm.split(rank % 2, -rank, "parity");
  const int members = (size + 1 - rank % 2) / 2;
  ASSERT_EQ(group->size(), members);
  ASSERT_EQ(group->rank(), members - 1 - rank / 2);
  EXPECT_EQ(group->name(), "parity");
  const size_t n = static_cast<size_t>(size);
  TestBuffer of_group(static_cast<size_t>(members) * 16), of_all(n * 16);
  of_group.write(std::vector<unsigned char>(static_cast<size_t>(members) * 16, static_cast<unsigned char>(rank)));
  of_all.write(std::vector<unsigned char>(n * 16, static_cast<unsigned char>(rank)));
  Ticket all = comm.all_gather(of_all.data(), 16, nullptr);
  Ticket mine = group->all_gather(of_group.data(), 16, nullptr);
  comm.wait_host(all);
  group->wait_host(mine);
  for (int r = 0; r < size; ++r) EXPECT_EQ(of_all.read()[static_cast<size_t>(r) * 16], r);
  for (int r = 0; r < members; ++r) {
    EXPECT_EQ(of_group.read()[static_cast<size_t>(r) * 16], rank % 2 + 2 * (members - 1 - r));
  }
  if (members < 2) return;
  group->open_links({{0, 1, 0}, {1, 0, 0}});
  if (group->rank() > 1) return;
  TestBuffer out(pattern(99, rank, 0, 0)), in(99);
  const int peer = 1 - group->rank();
  Ticket sent = group->send(out.data(), 99, peer, 0, nullptr),
         received = group->receive(in.data(), 99, peer, 0, nullptr);
  group->wait_host(received);
  group->wait_host(sent);
  EXPECT_EQ(in.read(), pattern(99, group->control().job_rank(peer), 0, 0));
}

// An operation's times: ready when the work before it was done, done when the data was there, on the clock of the host;
// a receive that waits for its sender is ready early.
inline void operations_keep_times(Communicator& comm) {
  if (comm.size() == 1) return;
  comm.open_links({{0, 1, 300}});
  TestStream stream;
  ClockEvent base;
  CUDA_CHECK(cudaEventCreate(&base.event));
  CUDA_CHECK(cudaEventRecord(base.event, stream));
  CUDA_CHECK(cudaEventSynchronize(base.event));
  base.seconds = host_seconds();
  TestBuffer buffer(64);
  comm.control().barrier();
  comm.keep_times(true);
  const double start = host_seconds();
  Ticket ticket;
  if (comm.rank() == 0) {
    stream.sleep();
    ticket = comm.send(buffer.data(), 64, 1, 300, stream);
  }
  if (comm.rank() == 1) ticket = comm.receive(buffer.data(), 64, 0, 300, stream);
  comm.keep_times(false);
  if (ticket != nullptr) {
    comm.wait_host(ticket);
    const TransferTimes times = comm.times(ticket, base);
    const double end = host_seconds(), clock = 2e-3;  // how exactly the test knows `base`
    EXPECT_GE(times.ready, start - clock + (comm.rank() == 0 ? 0.030 : 0));
    if (comm.rank() == 1) {
      EXPECT_LT(times.ready, start + 0.020);
    }
    EXPECT_GE(times.done, start + 0.030 - clock - (comm.rank() == 1 ? 5e-3 : 0));  // the ranks start together, nearly
    EXPECT_LE(times.ready, times.done);
    EXPECT_LE(times.done, end + clock);
  }
  comm.control().barrier();
  CUDA_CHECK(cudaEventDestroy(base.event));
}

inline void all_backend_tests(Communicator& comm, int seed) {
  operations_keep_times(comm);
  links_in_random_order(comm, seed);
  blocked_link(comm);
  collectives(comm);
  ordered_with_streams(comm);
  ordered_with_operations(comm);
  split_groups(comm);
}
