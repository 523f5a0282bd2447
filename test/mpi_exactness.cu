// mpi_exactness.cu -- contract C3: every layout computes the bits of one device. Run under mpirun -np 1..4.
//
// For the given number of ranks, every pipeline x replicas split, schedule, number of micro-batches, partition and ZeRO
// stage is trained for 20 AdamW steps with clipping active and compared with one rank that does everything: losses,
// norms, validation loss and all parameters, by their bits.
#include <cstring>

#include "llmc/comm_backend.h"
#include "llmc/parallel_gpt2.h"
#include "llmc/start_device.h"
#include "test/mpi_test.h"

namespace {

constexpr int kSteps = 20;
constexpr double kClip = 0.4;

struct Case {
  int pipeline = 1;
  int layers = 5;
  int micro_batches = 4;
  std::string schedule = "1f1b";
  std::string partition = "even";
  int zero_stage = 0;
  std::string text() const {
    return format_text("pp %d, L %d, m %d, %s, %s, ZeRO %d", pipeline, layers, micro_batches, schedule.c_str(),
                       partition.c_str(), zero_stage);
  }
};

/// What a run leaves behind: two numbers per step, validation loss, hash of the parameters.
struct Trace {
  std::vector<double> numbers;
  uint64_t hash = 0;
  bool clipped = false;
  bool operator==(const Trace& other) const {
    return hash == other.hash && numbers.size() == other.numbers.size() &&
           memcmp(numbers.data(), other.numbers.data(), numbers.size() * sizeof(double)) == 0;
  }
};

/// Tokens of micro-batches [share.first, ...) of a step: a function of (step, micro-batch), whoever asks. Some targets
/// are ignored, so that micro-batches count differently.
TokenBatch make_batch(int step, const Share& share, const BatchShape& shape, int vocab) {
  TokenBatch batch;
  batch.micro_batches = share.count;
  for (int j = 0; j < share.count * shape.rows(); ++j) {
    const uint64_t position = static_cast<uint64_t>(share.first) * shape.rows() + j;
    const RandomWords words = random_u32x4(1, static_cast<uint64_t>(step), position);
    batch.inputs.push_back(static_cast<int>(words.x % vocab));
    batch.targets.push_back(words.z % 8 == 0 ? -1 : static_cast<int>(words.x * 7 % vocab));
  }
  return batch;
}

Trace train(const Case& which, Control& group, Blas& blas, cudaStream_t stream) {
  ParallelSettings settings;
  settings.model = make_gpt2_config(which.layers, 2, 16, 61, 12);
  settings.shape = {2, 12};
  settings.micro_batches = which.micro_batches;
  settings.forward_micro_batches = 3;
  settings.schedule = which.schedule;
  settings.partition = which.partition;
  settings.zero_stage = which.zero_stage;
  const Grid grid = make_grid(group.size(), group.rank(), which.pipeline);
  const std::unique_ptr<Communicator> world = group.size() > 1 ? make_communicator(group, "auto") : nullptr;
  ParallelGPT2 model(settings, grid, group, world.get(), blas, stream);
  model.initialize(7);
  Trace trace;
  for (int step = 0; step < kSteps; ++step) {
    AdamW adamw{3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1, 0.0f, 7};
    const TokenBatch batch = make_batch(step, model.micro_batch_share(), settings.shape, settings.model.vocab);
    const StepResult result = model.train_step(batch, adamw, kClip);
    trace.numbers.insert(trace.numbers.end(), {result.loss, result.norm});
    trace.clipped |= result.norm > kClip;
  }
  const Share share = contiguous_share(3, grid.replicas, grid.replica());
  LossSum validation;
  model.evaluate(make_batch(1000, share, settings.shape, settings.model.vocab), share.first, 3, &validation);
  trace.numbers.push_back(validation.mean());
  trace.hash = model.parameter_hash();
  return trace;
}

class Exactness : public MpiTest {
 protected:
  Exactness() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Exactness() override {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  void compare(const Case& which) {
    Case alone = which;
    alone.pipeline = 1;
    alone.zero_stage = 0;
    alone.partition = "even";
    Control self = control().split(control().rank(), 0);
    const Trace reference = train(alone, self, blas_, stream_);
    const Trace parallel = train(which, control(), blas_, stream_);
    EXPECT_TRUE(reference.clipped) << "the norm never exceeded the clipping threshold";
    EXPECT_TRUE(parallel == reference) << which.text() << ": " << first_difference(parallel, reference);
  }
  static std::string first_difference(const Trace& a, const Trace& b) {
    for (size_t i = 0; i < a.numbers.size(); ++i) {
      if (memcmp(&a.numbers[i], &b.numbers[i], sizeof(double)) == 0) continue;
      const char* what = i + 1 == a.numbers.size() ? "validation loss" : i % 2 == 0 ? "loss" : "norm";
      return format_text("%s of step %zu: %.17g and %.17g", what, i / 2 + 1, a.numbers[i], b.numbers[i]);
    }
    return "only the parameters differ";
  }
  Blas blas_;
  cudaStream_t stream_ = nullptr;
};

std::vector<int> pipelines() {
  std::vector<int> result;
  for (int p = 1; p <= control().size(); ++p)
    if (control().size() % p == 0) result.push_back(p);
  return result;
}

/// Any number of micro-batches, but at least one per replica.
std::vector<int> micro_batches(int replicas) {
  std::vector<int> result;
  for (int m : {1, 2, 3, 5, 8})
    if (m >= replicas) result.push_back(m);
  return result;
}

// Every pipeline size, schedule, number of micro-batches and ZeRO stage; 5 blocks do not divide over 2, 3 or 4 stages.
TEST_F(Exactness, every_layout_gives_the_bits_of_one_device) {
  for (int pipeline : pipelines()) {
    const int replicas = control().size() / pipeline;
    if ((replicas & (replicas - 1)) != 0) continue;
    for (const char* schedule : {"gpipe", "1f1b"}) {
      for (int m : micro_batches(replicas)) {
        for (int zero = 0; zero <= (replicas > 1 ? 1 : 0); ++zero) {
          compare({pipeline, 5, m, schedule, "even", zero});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Stages without blocks: 1 block on up to 3 stages, 2 blocks on 4; uneven splits by hand, also with an empty stage in
// the middle, which has no parameters at all.
TEST_F(Exactness, empty_and_uneven_stages) {
  const int p = control().size();
  if (p <= 3) compare({p, 1, 4, "1f1b", "auto", 0});
  compare({p, 2, 3, "gpipe", "even", 0});
  const char* uneven[] = {"5", "4,1", "1,4,0", "0,2,3,0"};
  compare({p, 5, 5, "1f1b", uneven[p - 1], 0});
  if (p == 3) compare({p, 5, 3, "gpipe", "2,0,3", 0});
}

// Random pauses before actions and sends, and sends that end only when they are received, change nothing.
TEST_F(Exactness, delays_and_synchronous_sends) {
  setenv("LLMC_TEST_SSEND", "1", 1);
  for (const char* seed : {"1", "2"}) {
    setenv("LLMC_TEST_ACTION_DELAY", seed, 1);
    setenv("LLMC_TEST_SEND_DELAY", seed, 1);
    for (int pipeline : pipelines()) {
      const int replicas = control().size() / pipeline;
      if ((replicas & (replicas - 1)) == 0) compare({pipeline, 5, 4, "1f1b", "even", 1});
    }
  }
  for (const char* name : {"LLMC_TEST_SSEND", "LLMC_TEST_ACTION_DELAY", "LLMC_TEST_SEND_DELAY"}) unsetenv(name);
}

// Replica counts that are no power of two: repeatable, and equal for every pipeline size and ZeRO stage, though not
// equal to one device bit for bit.
TEST_F(Exactness, other_replica_counts_repeat) {
  if (control().size() != 3) return;
  const Case which{1, 3, 7, "1f1b", "even", 0};
  Case sharded = which;
  sharded.zero_stage = 1;
  const Trace first = train(which, control(), blas_, stream_);
  EXPECT_TRUE(first == train(which, control(), blas_, stream_));
  EXPECT_TRUE(first == train(sharded, control(), blas_, stream_));
  Control self = control().split(control().rank(), 0);
  const Trace alone = train(which, self, blas_, stream_);
  EXPECT_NEAR(first.numbers[0], alone.numbers[0], 1e-12);  // losses of step 1: the same doubles in the same order
  EXPECT_NEAR(first.numbers[1], alone.numbers[1], 1e-5 * alone.numbers[1]);
}

}  // namespace

int main(int argc, char** argv) { return run_mpi_tests(argc, argv); }
