// comm_mpi_wire.h -- how one message gets from the device of one process to that of another.
//
// Messages travel in chunks through two slots. On the CPU device a chunk is the user's memory. On a GPU it is pinned
// host memory, and copies and wire overlap:  device -> slot -> MPI -> slot -> device, 4 MiB each. Slots belong to the
// channel, so a receive that waits for its message keeps nothing from the other channels.
#pragma once

#include <cstring>

#include "llmc/comm.h"

/// How the MPI backend works: as the device asks for, and as tests want it (environment).
struct EngineOptions {
  bool staged = !kIsCpuDevice;           // through pinned host memory
  size_t chunk_bytes = size_t{4} << 20;  // size of a slot when staged
  bool synchronous = false;              // LLMC_TEST_SSEND=1: MPI_Issend, no buffering in MPI
  uint64_t delay_seed = 0;               // LLMC_TEST_SEND_DELAY=SEED: operations start up to 3 ms late, at random
};

inline EngineOptions engine_options() {
  EngineOptions options;
  auto number = [](const char* name) {
    const char* text = getenv(name);
    return text == nullptr ? 0ull : strtoull(text, nullptr, 10);
  };
  // With LLMC_GUARD the CPU device's memory opens for its own copies only. LLMC_TEST_STAGING=N: chunks of N bytes.
  if (number("LLMC_GUARD") != 0 || number("LLMC_TEST_STAGING") != 0) options.staged = true;
  if (number("LLMC_TEST_STAGING") > 1) options.chunk_bytes = number("LLMC_TEST_STAGING");
  options.synchronous = number("LLMC_TEST_SSEND") != 0;
  options.delay_seed = number("LLMC_TEST_SEND_DELAY");
  return options;
}

class MessagePump;

/// All messages of this process that are under way. Used by the communication thread alone.
class Wire {
 public:
  Wire(Process& process, const EngineOptions& options);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  const EngineOptions& options() const { return options_; }
  int rank() const { return process_.rank(); }
  /// Posts a chunk; `pump` hears of its end through on_wire_done(slot).
  void post(const Message& chunk, int tag, const std::string& description, MessagePump* pump, int slot);
  /// One MPI_Testsome over everything: MPI moves data only while it is called. True if anything ended.
  bool test();
  /// Starts a copy and records `copied` behind it. Copies to, from and on the device have a stream each.
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaEvent_t copied);

 private:
  struct Owner {
    MessagePump* pump;
    int slot;
  };
  Process& process_;
  const EngineOptions options_;
  cudaStream_t out_ = nullptr, in_ = nullptr, local_ = nullptr;
  std::vector<MPI_Request> requests_;
  std::vector<Owner> owners_;
  std::vector<int> indices_, counts_;
  std::vector<MPI_Status> statuses_;
};

/// Moves one message at a time through the two slots of a channel's side.
class MessagePump {
 public:
  ~MessagePump();
  void start(Wire& wire, const Message& message, int tag, const std::string& description);
  bool busy() const { return finished_ < chunks_; }
  int peer() const { return message_.peer; }
  const std::string& description() const { return *description_; }
  /// Starts and finishes copies, posts chunks in their order. True if anything moved.
  bool advance(Wire& wire);
  /// The request of a slot is through; `count` bytes arrived.
  void on_wire_done(Wire& wire, int slot, int count);

 private:
  enum class State { kFree, kCopying, kOnWire };
  struct Slot {
    State state = State::kFree;
    char* host = nullptr;  // where MPI reads or writes
    size_t begin = 0, bytes = 0;
    char* pinned = nullptr;
    size_t capacity = 0;
    cudaEvent_t copied = nullptr;
  };
  void begin_chunk(Wire& wire, int index);
  void post(Wire& wire, int index);
  void copy(Wire& wire, Slot& slot);
  void use_pinned(Slot& slot, size_t bytes);

  Slot slots_[2];
  Message message_ = {};
  int tag_ = 0;
  const std::string* description_ = nullptr;
  size_t chunk_bytes_ = 0, chunks_ = 0;
  size_t begun_ = 0, posted_ = 0, finished_ = 0;  // chunks
};

inline Wire::Wire(Process& process, const EngineOptions& options) : process_(process), options_(options) {
  for (cudaStream_t* stream : {&out_, &in_, &local_}) {
    CUDA_CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  }
}

inline Wire::~Wire() {
  for (cudaStream_t stream : {out_, in_, local_}) cudaStreamDestroy(stream);
}

inline void Wire::post(const Message& chunk, int tag, const std::string& description, MessagePump* pump, int slot) {
  std::lock_guard<std::mutex> hold(process_.lock());
  requests_.push_back(process_.post(chunk, tag, options_.synchronous, description.c_str()));
  owners_.push_back({pump, slot});
}

inline bool Wire::test() {
  if (requests_.empty()) return false;
  const size_t total = requests_.size();
  indices_.resize(total);
  counts_.resize(total);
  statuses_.resize(total);
  int completed = 0;
  {
    std::lock_guard<std::mutex> hold(process_.lock());
    const int result =
        MPI_Testsome(static_cast<int>(total), requests_.data(), &completed, indices_.data(), statuses_.data());
    if (result != MPI_ERR_IN_STATUS) process_.check(result, "MPI_Testsome", -1);
    for (size_t i = 0; static_cast<int>(i) < completed; ++i) {
      const Owner& owner = owners_[static_cast<size_t>(indices_[i])];
      if (result == MPI_ERR_IN_STATUS) {
        process_.check(statuses_[i].MPI_ERROR, owner.pump->description().c_str(), owner.pump->peer());
      }
      MPI_Get_count(&statuses_[i], MPI_BYTE, &counts_[i]);
    }
  }
  for (size_t i = 0; static_cast<int>(i) < completed; ++i) {
    const Owner owner = owners_[static_cast<size_t>(indices_[i])];
    owner.pump->on_wire_done(*this, owner.slot, counts_[i]);
  }
  size_t kept = 0;  // MPI has set the finished requests to null
  for (size_t i = 0; i < total; ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    owners_[kept++] = owners_[i];
  }
  requests_.resize(kept);
  owners_.resize(kept);
  return completed > 0;
}

inline void Wire::copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaEvent_t copied) {
  cudaStream_t stream = kind == cudaMemcpyDeviceToHost ? out_ : kind == cudaMemcpyHostToDevice ? in_ : local_;
  if (bytes > 0) CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream));
  CUDA_CHECK(cudaEventRecord(copied, stream));
}

inline MessagePump::~MessagePump() {
  for (Slot& slot : slots_) {
    if (slot.pinned != nullptr) cudaFreeHost(slot.pinned);
    if (slot.copied != nullptr) cudaEventDestroy(slot.copied);
  }
}

inline void MessagePump::start(Wire& wire, const Message& message, int tag, const std::string& description) {
  assert(!busy());
  message_ = message;
  tag_ = tag;
  description_ = &description;
  chunk_bytes_ = wire.options().staged ? wire.options().chunk_bytes : Process::kLargestPiece;
  chunks_ = std::max<size_t>(1, (message.bytes + chunk_bytes_ - 1) / chunk_bytes_);
  begun_ = posted_ = finished_ = 0;
}

inline bool MessagePump::advance(Wire& wire) {
  bool moved = false;
  for (Slot& slot : slots_) {  // arrived and copied to the device
    if (message_.is_send || slot.state != State::kCopying || !event_done(slot.copied)) continue;
    slot.state = State::kFree;
    ++finished_;
    moved = true;
  }
  while (begun_ < chunks_ && slots_[begun_ % 2].state == State::kFree) {
    begin_chunk(wire, static_cast<int>(begun_ % 2));
    moved = true;
  }
  while (message_.is_send && posted_ < begun_) {  // copied from the device: posted in the order of the chunks
    const int index = static_cast<int>(posted_ % 2);
    if (slots_[index].state != State::kCopying || !event_done(slots_[index].copied)) break;
    post(wire, index);
    moved = true;
  }
  return moved;
}

inline void MessagePump::begin_chunk(Wire& wire, int index) {
  Slot& slot = slots_[index];
  slot.begin = begun_++ * chunk_bytes_;
  slot.bytes = std::min(chunk_bytes_, message_.bytes - slot.begin);
  if (!wire.options().staged) {
    slot.host = static_cast<char*>(message_.data) + slot.begin;
    post(wire, index);
    return;
  }
  use_pinned(slot, slot.bytes);
  if (message_.is_send) {
    copy(wire, slot);
  } else {
    post(wire, index);
  }
}

inline void MessagePump::post(Wire& wire, int index) {
  Slot& slot = slots_[index];
  wire.post({message_.is_send, message_.peer, slot.host, slot.bytes}, tag_, *description_, this, index);
  slot.state = State::kOnWire;
  ++posted_;
}

inline void MessagePump::on_wire_done(Wire& wire, int index, int count) {
  Slot& slot = slots_[index];
  assert(slot.state == State::kOnWire);
  if (!message_.is_send && static_cast<size_t>(count) != slot.bytes) {
    environment_error("rank %d: %s: a message of %d bytes arrived: the sender sends another size", wire.rank(),
                      description_->c_str(), count);
  }
  if (wire.options().staged && !message_.is_send) {
    copy(wire, slot);
  } else {
    slot.state = State::kFree;
    ++finished_;
  }
}

inline void MessagePump::copy(Wire& wire, Slot& slot) {
  char* device = static_cast<char*>(message_.data) + slot.begin;
  if (message_.is_send) {
    wire.copy(slot.host, device, slot.bytes, cudaMemcpyDeviceToHost, slot.copied);
  } else {
    wire.copy(device, slot.host, slot.bytes, cudaMemcpyHostToDevice, slot.copied);
  }
  slot.state = State::kCopying;
}

inline void MessagePump::use_pinned(Slot& slot, size_t bytes) {
  if (slot.copied == nullptr) CUDA_CHECK(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming));
  if (slot.capacity < bytes || slot.pinned == nullptr) {
    if (slot.pinned != nullptr) CUDA_CHECK(cudaFreeHost(slot.pinned));
    slot.pinned = nullptr;
    slot.capacity = std::max<size_t>(bytes, 4096);
    void* memory = nullptr;
    CUDA_CHECK(cudaMallocHost(&memory, slot.capacity));
    slot.pinned = static_cast<char*>(memory);
  }
  slot.host = slot.pinned;
}
