// test_streams.cu -- streams and events: order within a stream, none between streams, events with CUDA's meaning.
//
// A Gate is a host function in a stream that does not end until the test opens it: with it a test decides what has run
// and what has not, without sleeping. The same tests hold on a GPU. On the CPU device they are skipped under
// LLMC_GUARD=1, where every task runs inside the call that queues it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "llmc/device.h"
#include "llmc/memory.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Holds a stream until open() is called (or the Gate dies, so that a failing test ends).
class Gate {
 public:
  explicit Gate(cudaStream_t stream) { CUDA_CHECK(cudaLaunchHostFunc(stream, wait, this)); }
  ~Gate() {
    open();
    while (!left_.load()) std::this_thread::yield();
  }
  void open() { open_.store(true); }

 private:
  static void wait(void* gate) {
    Gate* self = static_cast<Gate*>(gate);
    while (!self->open_.load()) std::this_thread::yield();
    self->left_.store(true);
  }
  std::atomic<bool> open_{false}, left_{false};
};

class StreamTest : public testing::Test {
 protected:
  void SetUp() override {
    require_device();
#ifndef __CUDACC__
    if (cpu_device::settings().guard) GTEST_SKIP() << "LLMC_GUARD=1 runs every task at once";
#endif
    for (cudaStream_t& stream : streams_) CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  void TearDown() override {
    for (cudaStream_t stream : streams_) {
      if (stream != nullptr) CUDA_CHECK(cudaStreamDestroy(stream));
    }
    for (cudaEvent_t event : events_) {
      if (event != nullptr) CUDA_CHECK(cudaEventDestroy(event));
    }
  }
  cudaStream_t streams_[4] = {};
  cudaEvent_t events_[4] = {};
};

__global__ void append_digit(unsigned long long* number, unsigned digit) { *number = *number * 10 + digit; }

__global__ void store(int* where, int value) { *where = value; }

// ---------------------------------------------------------------- one stream

// Tasks of one stream run in the order in which they were queued: kernels, copies and memsets.
TEST_F(StreamTest, TasksRunInOrder) {
  DeviceArray<unsigned long long> number("number", 2);
  for (int round = 0; round < 200; round++) {
    CUDA_CHECK(cudaMemsetAsync(number.data(), 0, number.bytes(), streams_[0]));
    for (unsigned digit : {3u, 1u, 4u, 1u, 5u, 9u, 2u, 6u})
      launch<append_digit>(1, 1, 0, streams_[0], number.data(), digit);
    CUDA_CHECK(cudaMemcpyAsync(number.data() + 1, number.data(), 8, cudaMemcpyDeviceToDevice, streams_[0]));
    launch<append_digit>(1, 1, 0, streams_[0], number.data(), 7u);
  }
  const std::vector<unsigned long long> result = download(number, streams_[0]);
  EXPECT_EQ(result[0], 314159267ull);
  EXPECT_EQ(result[1], 31415926ull);
}

// The host does not wait: calls return while the stream is held, and a query says "not ready".
TEST_F(StreamTest, CallsReturnAtOnce) {
  DeviceArray<int> value("value", 1);
  PinnedArray<int> host(1);
  host[0] = -1;
  Gate gate(streams_[0]);
  launch<store>(1, 1, 0, streams_[0], value.data(), 42);
  copy_to_host(host.data(), value.data(), 1, streams_[0]);
  CUDA_CHECK(cudaEventRecord(events_[0], streams_[0]));
  EXPECT_EQ(cudaStreamQuery(streams_[0]), cudaErrorNotReady);
  EXPECT_EQ(cudaEventQuery(events_[0]), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // "not ready" is an answer, not an error
  gate.open();
  CUDA_CHECK(cudaStreamSynchronize(streams_[0]));
  EXPECT_EQ(cudaStreamQuery(streams_[0]), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(events_[0]), cudaSuccess);
  EXPECT_EQ(host[0], 42);
}

// Nothing orders two streams: the second one finishes while the first one is held.
TEST_F(StreamTest, StreamsAreIndependent) {
  DeviceArray<int> value("value", 1);
  Gate gate(streams_[0]);
  launch<store>(1, 1, 0, streams_[1], value.data(), 7);
  EXPECT_EQ(download(value, streams_[1])[0], 7);
  EXPECT_EQ(cudaStreamQuery(streams_[0]), cudaErrorNotReady);
}

// ---------------------------------------------------------------- events

// A stream that waits for an event stays behind what was queued before the record, and only that.
TEST_F(StreamTest, WaitEventOrdersStreams) {
  DeviceArray<int> value("value", 1);
  CUDA_CHECK(cudaMemsetAsync(value.data(), 0, 4, streams_[0]));
  Gate before(streams_[0]);
  launch<store>(1, 1, 0, streams_[0], value.data(), 1);
  CUDA_CHECK(cudaEventRecord(events_[0], streams_[0]));
  Gate after(streams_[0]);
  CUDA_CHECK(cudaStreamWaitEvent(streams_[1], events_[0]));
  launch<store>(1, 1, 0, streams_[1], value.data(), 2);
  EXPECT_EQ(cudaStreamQuery(streams_[1]), cudaErrorNotReady);
  before.open();
  CUDA_CHECK(cudaStreamSynchronize(streams_[1]));  // although `after` still holds the first stream
  EXPECT_EQ(download(value, streams_[1])[0], 2);
  EXPECT_EQ(cudaStreamQuery(streams_[0]), cudaErrorNotReady);
}

// A wait captures the record that is newest when cudaStreamWaitEvent is called; recording again does not move it.
TEST_F(StreamTest, WaitCapturesNewestRecordAtTheCall) {
  Gate first(streams_[0]);
  CUDA_CHECK(cudaEventRecord(events_[0], streams_[0]));
  CUDA_CHECK(cudaStreamWaitEvent(streams_[1], events_[0]));
  Gate second(streams_[0]);
  CUDA_CHECK(cudaEventRecord(events_[0], streams_[0]));
  CUDA_CHECK(cudaStreamWaitEvent(streams_[2], events_[0]));
  first.open();
  CUDA_CHECK(cudaStreamSynchronize(streams_[1]));
  EXPECT_EQ(cudaStreamQuery(streams_[2]), cudaErrorNotReady);
  EXPECT_EQ(cudaEventQuery(events_[0]), cudaErrorNotReady);
  second.open();
  CUDA_CHECK(cudaStreamSynchronize(streams_[2]));
  EXPECT_EQ(cudaEventQuery(events_[0]), cudaSuccess);
}

// Waiting for an event that was never recorded holds nobody up; its query says "done".
TEST_F(StreamTest, UnrecordedEventIsComplete) {
  CUDA_CHECK(cudaStreamWaitEvent(streams_[0], events_[0]));
  CUDA_CHECK(cudaStreamSynchronize(streams_[0]));
  EXPECT_EQ(cudaEventQuery(events_[0]), cudaSuccess);
  CUDA_CHECK(cudaEventSynchronize(events_[0]));
}

// cudaEventSynchronize returns when the record is complete, not when the stream is.
TEST_F(StreamTest, EventSynchronize) {
  DeviceArray<int> value("value", 1);
  PinnedArray<int> host(1);
  launch<store>(1, 1, 0, streams_[0], value.data(), 5);
  copy_to_host(host.data(), value.data(), 1, streams_[0]);
  CUDA_CHECK(cudaEventRecord(events_[0], streams_[0]));
  Gate gate(streams_[0]);
  CUDA_CHECK(cudaEventSynchronize(events_[0]));
  EXPECT_EQ(host[0], 5);
}

// An event may be destroyed while a stream waits for its record.
TEST_F(StreamTest, EventMayBeDestroyedWhileWaitedFor) {
  Gate gate(streams_[0]);
  CUDA_CHECK(cudaEventRecord(events_[0], streams_[0]));
  CUDA_CHECK(cudaStreamWaitEvent(streams_[1], events_[0]));
  CUDA_CHECK(cudaEventDestroy(events_[0]));
  events_[0] = nullptr;
  EXPECT_EQ(cudaStreamQuery(streams_[1]), cudaErrorNotReady);
  gate.open();
  CUDA_CHECK(cudaStreamSynchronize(streams_[1]));
}

// Elapsed time is that between the two records as the stream reached them.
TEST_F(StreamTest, ElapsedTime) {
  cudaEvent_t start, stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  float milliseconds = -1;
  EXPECT_NE(cudaEventElapsedTime(&milliseconds, start, stop), cudaSuccess);  // not recorded yet
  cudaGetLastError();
  CUDA_CHECK(cudaEventRecord(start, streams_[0]));
  {
    Gate gate(streams_[0]);
    CUDA_CHECK(cudaEventRecord(stop, streams_[0]));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, stop), cudaErrorNotReady);
    CUDA_CHECK(cudaEventSynchronize(start));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CUDA_CHECK(cudaEventSynchronize(stop));
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
  EXPECT_GE(milliseconds, 19.0f);
  CUDA_CHECK(cudaEventDestroy(start));
  CUDA_CHECK(cudaEventDestroy(stop));
}

// ---------------------------------------------------------------- the whole device, the null stream

// cudaMemcpy is ordered with streams made by cudaStreamCreate and not with non-blocking ones.
TEST_F(StreamTest, SynchronousCopyAndBlockingStreams) {
  cudaStream_t blocking;
  CUDA_CHECK(cudaStreamCreate(&blocking));
  DeviceArray<int> value("value", 2);
  int host[2] = {};
  CUDA_CHECK(cudaMemset(value.data(), 0, value.bytes()));
  Gate held(streams_[0]);
  launch<store>(1, 1, 0, streams_[0], value.data(), 1);
  CUDA_CHECK(cudaLaunchHostFunc(
      blocking, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }, nullptr));
  launch<store>(1, 1, 0, blocking, value.data() + 1, 1);
  CUDA_CHECK(cudaMemcpy(host, value.data(), sizeof host, cudaMemcpyDeviceToHost));
  EXPECT_EQ(host[0], 0);
  EXPECT_EQ(host[1], 1);
  held.open();
  CUDA_CHECK(cudaStreamSynchronize(streams_[0]));
  CUDA_CHECK(cudaStreamDestroy(blocking));
}

// cudaDeviceSynchronize waits for every stream.
TEST_F(StreamTest, DeviceSynchronizeWaitsForAll) {
  std::atomic<int> done{0};
  for (cudaStream_t stream : streams_) {
    CUDA_CHECK(cudaLaunchHostFunc(
        stream,
        [](void* count) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          ++*static_cast<std::atomic<int>*>(count);
        },
        &done));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  EXPECT_EQ(done.load(), 4);
}

// A destroyed stream still finishes its work; many streams come and go.
TEST_F(StreamTest, DestroyedStreamsFinishTheirWork) {
  DeviceArray<int> values("values", 100);
  for (int i = 0; i < 100; i++) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    launch<store>(1, 1, 0, stream, values.data() + i, i);
    CUDA_CHECK(cudaStreamDestroy(stream));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  const std::vector<int> result = download(values, streams_[0]);
  for (int i = 0; i < 100; i++) EXPECT_EQ(result[i], i);
}

// ---------------------------------------------------------------- everything at once

__global__ void mix(unsigned* out, const unsigned* a, const unsigned* b, unsigned salt, size_t n) {
  if (thread_outside(n)) return;
  const size_t i = thread_index();
  out[i] = (a[i] * 2654435761u) ^ (b[(i + 1) % n] + salt);
}

/// A random program over `count` buffers and four streams; every read and write is ordered by events, as a careful
/// programmer would: a writer waits for all readers and the writer before it, a reader for the last writer.
class RandomProgram {
 public:
  RandomProgram(unsigned seed, cudaStream_t* streams) : generator_(seed), streams_(streams) {
    for (unsigned b = 0; b < kBuffers; b++) {
      device_.emplace_back("buffer", kSize);
      host_.emplace_back(kSize);
      for (unsigned& value : host_.back()) value = generator_();
      CUDA_CHECK(cudaMemcpy(device_.back().data(), host_.back().data(), kSize * 4, cudaMemcpyHostToDevice));
      for (int s = 0; s < 4; s++) CUDA_CHECK(cudaEventCreateWithFlags(&used_[b][s], cudaEventDisableTiming));
    }
  }
  ~RandomProgram() {
    for (auto& events : used_) {
      for (cudaEvent_t event : events) cudaEventDestroy(event);
    }
  }
  void step() {
    const unsigned out = generator_() % kBuffers, a = generator_() % kBuffers, salt = generator_();
    const unsigned b = (out + 1 + generator_() % (kBuffers - 1)) % kBuffers;  // not `out`: it is read at i + 1
    const int s = generator_() % 4;
    for (unsigned buffer : {out, a, b}) {
      for (int other = 0; other < 4; other++) {
        if (other != s) CUDA_CHECK(cudaStreamWaitEvent(streams_[s], used_[buffer][other]));
      }
    }
    launch<mix>(elementwise_grid(kSize), kElementwiseBlock, 0, streams_[s], device_[out].data(), device_[a].data(),
                device_[b].data(), salt, kSize);
    for (unsigned buffer : {out, a, b}) CUDA_CHECK(cudaEventRecord(used_[buffer][s], streams_[s]));
    std::vector<unsigned> result(kSize);
    for (size_t i = 0; i < kSize; i++) result[i] = (host_[a][i] * 2654435761u) ^ (host_[b][(i + 1) % kSize] + salt);
    host_[out] = result;
  }
  bool device_equals_host() {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (unsigned b = 0; b < kBuffers; b++) {
      if (download(device_[b], streams_[0]) != host_[b]) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned kBuffers = 5;
  static constexpr size_t kSize = 700;
  std::mt19937 generator_;
  cudaStream_t* streams_;
  std::vector<DeviceArray<unsigned>> device_;
  std::vector<std::vector<unsigned>> host_;
  cudaEvent_t used_[kBuffers][4] = {};
};

// A random program over four streams, ordered by events only, computes what the host computes in sequence.
TEST_F(StreamTest, RandomProgramsAgreeWithTheHost) {
  for (unsigned seed = 0; seed < 4; seed++) {
    RandomProgram program(seed, streams_);
    for (int i = 0; i < 60; i++) program.step();
    EXPECT_TRUE(program.device_equals_host()) << "seed " << seed;
  }
}

// ---------------------------------------------------------------- cost

// A launch costs the host a few microseconds at most (the best of many batches: the machine may be busy).
TEST_F(StreamTest, LaunchIsCheapForTheHost) {
  DeviceArray<int> value("value", 1);
  double best = 1e9;
  for (int batch = 0; batch < 50; batch++) {
    const auto start = Clock::now();
    for (int i = 0; i < 100; i++) launch<store>(1, 1, 0, streams_[0], value.data(), i);
    best = std::min(best, seconds_since(start) / 100);
    CUDA_CHECK(cudaStreamSynchronize(streams_[0]));
  }
  RecordProperty("launch_nanoseconds", static_cast<int>(best * 1e9));
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  EXPECT_LT(best, 100e-6);
#else
  EXPECT_LT(best, 10e-6);
#endif
}

// ---------------------------------------------------------------- misuse and the end of the program

#ifndef __CUDACC__

using StreamDeathTest = StreamTest;

void with_new_stream(void (*action)(cudaStream_t)) {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  action(stream);
}

// A launch on the null stream ends the program with a clear message.
TEST_F(StreamDeathTest, NullStreamIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(launch<store>(1, 1, 0, nullptr, nullptr, 1), "work on the null stream: create a stream");
}

// CUDA forbids API calls in host functions: here they would wait for themselves.
TEST_F(StreamDeathTest, HostFunctionsMustNotCallTheDevice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(with_new_stream([](cudaStream_t stream) {
                 cudaLaunchHostFunc(
                     stream, [](void*) { cudaDeviceSynchronize(); }, nullptr);
                 cudaStreamSynchronize(stream);
               }),
               "CUDA forbids it");
}

// A program may end with streams alive and work queued: exit code as given, nothing hangs, queued tasks are dropped.
TEST_F(StreamDeathTest, ExitWithWorkQueued) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end_program = [](cudaStream_t stream) {
    cudaLaunchHostFunc(
        stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }, nullptr);
    cudaLaunchHostFunc(
        stream, [](void*) { abort(); }, nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    exit(3);
  };
  EXPECT_EXIT(with_new_stream(end_program), testing::ExitedWithCode(3), "");
}

// A stream that waits for ever (a lost peer) does not keep the program from ending.
TEST_F(StreamDeathTest, ExitWithAStuckStream) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end_program = [](cudaStream_t stream) {
    cudaLaunchHostFunc(
        stream, [](void*) { std::this_thread::sleep_for(std::chrono::hours(1)); }, nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    exit(4);
  };
  const auto start = Clock::now();
  EXPECT_EXIT(with_new_stream(end_program), testing::ExitedWithCode(4), "");
  EXPECT_LT(seconds_since(start), 30.0);
}

#endif

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
