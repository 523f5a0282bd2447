// comm_mpi.h -- the MPI backend: device memory moves through host memory, by the communication thread of this process.
//
// For the CPU device, and for several ranks that share one GPU (NCCL before 2.30 refuses that). wait() blocks the host
// until the operation is done. Collectives are written here as steps of one message out and one in (N ranks, b bytes a
// block):
//   all_to_all   step s = 1..N-1: block to rank+s, block from rank-s            N-1 steps, (N-1) b out
//   all_gather   ring: to rank+1 goes what came in the step before from rank-1  N-1 steps, (N-1) b out
//   broadcast    binomial tree: in step k the first 2^k ranks (from the root on) send to the next 2^k
//                                                                               log2 N steps, (N-1) b over all ranks
// No reduction: sums are the caller's, in an order that it chooses (zero.h), or results would depend on N and timing.
#pragma once

#ifdef LLMC_MPI

#include "llmc/comm_mpi_engine.h"

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator(Control control, std::string name)
      : MpiCommunicator(std::move(control), std::move(name), nullptr, engine_options()) {}
  /// Tests: other options than those of the device and the environment.
  MpiCommunicator(Control control, std::string name, const EngineOptions& options)
      : MpiCommunicator(std::move(control), std::move(name), nullptr, options) {}

  const char* backend() const override { return "mpi"; }

  Ticket send(const void* data, size_t bytes, int peer, int link, cudaStream_t after, Ticket also_after) override {
    const Step step = {{{true, control_.job_rank(peer), mutable_bytes(data), bytes}}};
    return issue(channel(rank(), peer, link), {Transfer::kSend, control_.job_rank(peer), link, bytes, 0}, {step}, after,
                 std::move(also_after));
  }

  Ticket receive(void* data, size_t bytes, int peer, int link, cudaStream_t after, Ticket also_after) override {
    const Step step = {{{false, control_.job_rank(peer), data, bytes}}};
    return issue(channel(peer, rank(), link), {Transfer::kReceive, control_.job_rank(peer), link, bytes, 0}, {step},
                 after, std::move(also_after));
  }

  Ticket all_to_all(const void* from, void* to, size_t bytes_each, cudaStream_t after) override {
    assert((from != to || bytes_each == 0) && "all_to_all: not in place");
    std::vector<Step> steps;
    for (int s = 0; s < size() && bytes_each > 0; ++s) {
      const int target = (rank() + s) % size(), source = (rank() - s + size()) % size();
      char* out = mutable_bytes(from) + static_cast<size_t>(target) * bytes_each;
      char* in = static_cast<char*>(to) + static_cast<size_t>(source) * bytes_each;
      if (s == 0) {
        steps.push_back({{}, out, in, bytes_each});
      } else {
        steps.push_back(
            {{{true, control_.job_rank(target), out, bytes_each}, {false, control_.job_rank(source), in, bytes_each}}});
      }
    }
    return issue(collectives_, {Transfer::kAllToAll, -1, -1, bytes_each, 0}, steps, after, nullptr);
  }

  Ticket all_gather(void* data, size_t bytes_each, cudaStream_t after) override {
    std::vector<Step> steps;
    const int next = (rank() + 1) % size(), previous = (rank() - 1 + size()) % size();
    for (int s = 1; s < size() && bytes_each > 0; ++s) {
      const size_t out = static_cast<size_t>((rank() - s + 1 + size()) % size());
      const size_t in = static_cast<size_t>((rank() - s + size()) % size());
      char* blocks = static_cast<char*>(data);
      steps.push_back({{{true, control_.job_rank(next), blocks + out * bytes_each, bytes_each},
                        {false, control_.job_rank(previous), blocks + in * bytes_each, bytes_each}}});
    }
    return issue(collectives_, {Transfer::kAllGather, -1, -1, bytes_each, 0}, steps, after, nullptr);
  }

  Ticket broadcast(void* data, size_t bytes, int root, cudaStream_t after) override {
    assert(root >= 0 && root < size());
    std::vector<Step> steps;
    const int place = (rank() - root + size()) % size();  // the root is 0
    for (int have = 1; have < size() && bytes > 0; have *= 2) {
      const bool sends = place < have && place + have < size();
      const bool receives = place >= have && place < 2 * have;
      if (!sends && !receives) continue;
      const int peer = (root + (sends ? place + have : place - have)) % size();
      steps.push_back({{{sends, control_.job_rank(peer), data, bytes}}});
    }
    return issue(collectives_, {Transfer::kBroadcast, -1, -1, bytes, 0}, steps, after, nullptr);
  }

  void wait(const Ticket& ticket, cudaStream_t stream) override {
    if (ticket != nullptr) engine_->wait(own(ticket), stream);
  }
  void wait_host(const Ticket& ticket) override { wait(ticket, nullptr); }
  bool done(const Ticket& ticket) override {
    if (ticket == nullptr || own(ticket).done) return true;
    engine_->process().check_failure();
    return false;
  }
  TransferTimes times(const Ticket& ticket, const ClockEvent&) override {
    const MpiOperation& operation = own(ticket);
    assert(operation.done && operation.times.ready > 0 && "not finished, or issued without keep_times(true)");
    return operation.times;
  }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    Control group = control_.split(color, key);
    if (color < 0) return nullptr;
    if (group.size() == 1) return std::make_unique<SelfCommunicator>(std::move(group), name);
    return std::unique_ptr<Communicator>(new MpiCommunicator(std::move(group), name, engine_, engine_->options()));
  }

  uint64_t bytes_sent() const override { return *bytes_sent_; }

 protected:
  void connect(const std::vector<Link>& links) override {
    const int first = control_.reserve_tags(static_cast<int>(links.size()));
    for (size_t i = 0; i < links.size(); ++i) {
      const auto key = std::make_tuple(links[i].from, links[i].to, links[i].id);
      assert(channels_.count(key) == 0 && "the link exists already");
      if (links[i].from == rank() || links[i].to == rank()) channels_[key] = new_channel(first + static_cast<int>(i));
    }
  }

 private:
  MpiCommunicator(Control control, std::string name, std::shared_ptr<MpiEngine> engine, const EngineOptions& options)
      : Communicator(std::move(control), std::move(name)),
        engine_(engine ? std::move(engine) : std::make_shared<MpiEngine>(control_.process(), options)),
        collectives_(new_channel(control_.reserve_tags(1))) {}

  static char* mutable_bytes(const void* data) { return const_cast<char*>(static_cast<const char*>(data)); }
  static const MpiOperation& own(const Ticket& ticket) {
    const auto* operation = dynamic_cast<const MpiOperation*>(ticket.get());
    assert(operation != nullptr && "a ticket of another backend");
    return *operation;
  }

  std::shared_ptr<Channel> new_channel(int tag) {
    auto channel = std::make_shared<Channel>(tag);
    channel->bytes_sent = bytes_sent_;
    return channel;
  }
  const std::shared_ptr<Channel>& channel(int from, int to, int id) {
    const auto found = channels_.find(std::make_tuple(from, to, id));
    assert(found != channels_.end() && "send or receive on a link that open_links has not made");
    return found->second;
  }

  Ticket issue(const std::shared_ptr<Channel>& channel, OperationText text, std::vector<Step> steps, cudaStream_t after,
               Ticket also_after) {
    text.sequence = ++channel->issued;
    auto operation = std::make_shared<MpiOperation>(text, describe(text));
    operation->steps = std::move(steps);
    operation->keeps_times = keep_times_;
    if (after != nullptr) operation->after = engine_->events().record(after);
    if (also_after != nullptr) {
      (void)own(also_after);
      operation->also_after = std::static_pointer_cast<MpiOperation>(also_after);
    }
    const uint64_t seed = engine_->options().delay_seed;
    if (seed != 0) operation->not_before = Clock::now() + random_delay(seed);
    engine_->issue(channel, operation, after);
    return operation;
  }

  /// 0 to 3 ms, from the seed, the rank and the number of operations so far (splitmix64).
  std::chrono::microseconds random_delay(uint64_t seed) {
    uint64_t z = seed * 1000003 + static_cast<uint64_t>(control_.job_rank(rank())) * 0x9e3779b97f4a7c15ull + ++delays_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return std::chrono::microseconds((z ^ (z >> 31)) % 3000);
  }

  std::shared_ptr<std::atomic<uint64_t>> bytes_sent_ = std::make_shared<std::atomic<uint64_t>>(0);
  const std::shared_ptr<MpiEngine> engine_;
  const std::shared_ptr<Channel> collectives_;
  std::map<std::tuple<int, int, int>, std::shared_ptr<Channel>> channels_;
  uint64_t delays_ = 0;
};

#endif
