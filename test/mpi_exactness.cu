// mpi_exactness.cu -- contract C3: every layout computes the bits of one device. Run under mpirun -np 1..4 and 6.
//
// For the given number of ranks, pipelines x replicas, schedules, chunks, numbers of micro-batches and blocks,
// partitions, recompute levels and ZeRO stages are trained for 20 AdamW steps with clipping active and compared with
// one rank that does everything without recomputation: losses, norms, validation loss, all parameters and all moments,
// by their bits. Every combination is run with LLMC_TEST_FULL=1 (3 to 5 minutes for each number of ranks); else a part
// that has each value of each dimension.
#include <cstring>
#include <map>

#include "llmc/comm_backend.h"
#include "llmc/element_hash.h"
#include "llmc/parallel_gpt2.h"
#include "llmc/partition.h"
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
  int chunks = 0;
  std::string partition = "even";
  int zero_stage = 0;
  std::vector<int> recompute;  // of stage 0, 1, ...; repeated
  bool exact = true;
  std::string text() const {
    std::string levels;
    for (int level : recompute) levels += std::to_string(level);
    return format_text("pp %d, L %d, m %d, %s, chunks %d, %s, ZeRO %d, recompute %s", pipeline, layers, micro_batches,
                       schedule.c_str(), chunks, partition.c_str(), zero_stage, levels.c_str());
  }
};

/// What a run leaves behind: two numbers per step, validation loss, hashes of the parameters and the moments.
struct Trace {
  std::vector<double> numbers;
  std::vector<uint64_t> hashes;
  bool clipped = false;
  bool operator==(const Trace& other) const {
    return hashes == other.hashes && numbers.size() == other.numbers.size() &&
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

const BatchShape kShape{2, 6};
GPT2Config model_of(const Case& which) { return make_gpt2_config(which.layers, 2, 16, 61, kShape.T); }

PipelineLayout make_layout(const Case& which) {
  PipelineLayout layout;
  layout.schedule = which.schedule;
  layout.ranks = which.pipeline;
  layout.chunks = which.chunks > 0 ? which.chunks : find_schedule_kind(which.schedule).natural_chunks;
  layout.cost = gpt2_model_cost(model_of(which), kShape.B, kShape.T);
  const int stages = layout.ranks * layout.chunks;
  layout.cuts = make_partition(which.partition, stages, layout.cost);
  for (int s = 0; s < stages; ++s) {
    layout.recompute.push_back(which.recompute.empty() ? 0 : which.recompute[s % which.recompute.size()]);
  }
  return layout;
}

/// Layout-independent hash of one of the two moments.
uint64_t moment_hash(StageOptimizer& optimizer, bool second, Control& group, cudaStream_t stream) {
  uint64_t hash = 0;
  for (const OwnedRange& range : optimizer.accountable()) {
    std::vector<float> host(range.count);
    const float* moment = second ? optimizer.second_moment(range) : optimizer.first_moment(range);
    CUDA_CHECK(cudaMemcpyAsync(host.data(), moment, range.count * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    hash += element_hash(host.data(), range.count, optimizer.global_element(range));
  }
  group.sum(&hash, 1);
  return hash;
}

ParallelSettings settings_of(const Case& which) {
  ParallelSettings settings;
  settings.model = model_of(which);
  settings.shape = kShape;
  settings.micro_batches = which.micro_batches;
  settings.forward_micro_batches = 3;
  settings.layout = make_layout(which);
  settings.zero_stage = which.zero_stage;
  settings.exact = which.exact;
  return settings;
}

Trace train(const Case& which, Control& group, Blas& blas, cudaStream_t stream) {
  const ParallelSettings settings = settings_of(which);
  const Grid grid = make_grid(group.size(), group.rank(), which.pipeline);
  const std::unique_ptr<Communicator> world = group.size() > 1 ? make_communicator(group, "auto") : nullptr;
  ParallelGPT2 model(settings, grid, group, world.get(), blas, stream);
  EXPECT_EQ(model.ledger().total_allocated(), model.forecast().total()) << which.text();
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
  trace.hashes = {model.parameter_hash(), moment_hash(model.optimizer(), false, group, stream),
                  moment_hash(model.optimizer(), true, group, stream)};
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
    const Trace& alone = reference(which);
    const Trace parallel = train(which, control(), blas_, stream_);
    EXPECT_TRUE(alone.clipped) << "the norm never exceeded the clipping threshold";
    EXPECT_TRUE(parallel == alone) << which.text() << ": " << first_difference(parallel, alone);
    ++compared_;
  }
  /// Trained by rank 0 alone, once for each number of blocks and micro-batches, and sent to all.
  const Trace& reference(const Case& which) {
    static std::map<std::pair<int, int>, Trace> known;
    const auto key = std::make_pair(which.layers, which.micro_batches);
    if (known.count(key)) return known[key];
    Trace& trace = known[key];
    Control self = control().split(control().rank(), 0);
    Case alone;
    alone.layers = which.layers;
    alone.micro_batches = which.micro_batches;
    if (control().rank() == 0) trace = train(alone, self, blas_, stream_);
    trace.numbers.resize(2 * kSteps + 1);
    trace.hashes.resize(3);
    control().broadcast(trace.numbers.data(), trace.numbers.size() * sizeof(double), 0);
    control().broadcast(trace.hashes.data(), trace.hashes.size() * sizeof(uint64_t), 0);
    control().broadcast(&trace.clipped, sizeof(trace.clipped), 0);
    return trace;
  }
  static std::string first_difference(const Trace& a, const Trace& b) {
    for (size_t i = 0; i < a.numbers.size(); ++i) {
      if (memcmp(&a.numbers[i], &b.numbers[i], sizeof(double)) == 0) continue;
      const char* what = i + 1 == a.numbers.size() ? "validation loss" : i % 2 == 0 ? "loss" : "norm";
      return format_text("%s of step %zu: %.17g and %.17g", what, i / 2 + 1, a.numbers[i], b.numbers[i]);
    }
    return a.hashes[0] != b.hashes[0] ? "only the parameters differ" : "only the moments differ";
  }
  Blas blas_;
  cudaStream_t stream_ = nullptr;
  int compared_ = 0;
};

bool full() { return getenv("LLMC_TEST_FULL") != nullptr; }

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

/// Schedules with the numbers of chunks that they can have, up to 3.
std::vector<std::pair<std::string, int>> schedules_and_chunks() {
  std::vector<std::pair<std::string, int>> all;
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int chunks = kind.min_chunks; chunks <= std::min(3, kind.max_chunks); ++chunks) {
      all.push_back({kind.name, chunks});
    }
  }
  return all;
}

// One pipeline over all ranks: every schedule and number of chunks with m = 1..16 micro-batches and L = 1..12 blocks,
// as far as there are no more stages than blocks + 2; empty stages, and a recompute level for each stage.
TEST_F(Exactness, every_schedule_gives_the_bits_of_one_device) {
  const int p = control().size();
  int turn = 0;
  for (const auto& [schedule, chunks] : schedules_and_chunks()) {
    for (int layers : {1, 5, 7, 12}) {
      if (p * chunks > layers + 2) continue;
      for (int m : {1, 2, 3, 5, 8, 9, 16}) {
        ++turn;
        if (!full() && turn % 11 != 0) continue;
        Case which{p, layers, m, schedule, chunks, turn % 2 ? "even" : "auto", 0, {}, true};
        if (turn % 3 != 0) which.recompute = {turn % 4, (turn + 1) % 4, 0, 3};
        compare(which);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GE(compared_, p <= 3 ? 30 : 10);
}

// Pipelines x replicas with and without sharded optimizer state; 5 blocks do not divide over 2, 3 or 4 stages.
TEST_F(Exactness, replicas_and_sharded_state) {
  for (int pipeline : pipelines()) {
    const int replicas = control().size() / pipeline;
    if (replicas == 1 || (replicas & (replicas - 1)) != 0) continue;
    for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}) {
      for (int m : micro_batches(replicas)) {
        if (!full() && m == 2) continue;
        for (int zero = 0; zero <= 1; ++zero) compare({pipeline, 5, m, schedule, 0, "even", zero, {}, true});
      }
    }
  }
}

// Activations do not grow with the number of micro-batches where the schedule promises it, and are what was planned;
// gpipe's do grow.
TEST_F(Exactness, activations_do_not_grow_with_the_step) {
  const int p = control().size();
  if (2 * p > 7) return;
  for (const std::string schedule : {"1f1b", "zb-h1", "zb-v", "gpipe"}) {
    std::vector<size_t> bytes;
    for (int m : {4 * p, 12 * p}) {
      Case which{p, 5, m, schedule, 0, "even", 0, {}, true};
      const std::unique_ptr<Communicator> world = p > 1 ? make_communicator(control(), "auto") : nullptr;
      ParallelGPT2 model(settings_of(which), make_grid(p, control().rank(), p), control(), world.get(), blas_, stream_);
      EXPECT_EQ(model.ledger().allocated("activations"), model.forecast().activations) << which.text();
      bytes.push_back(model.ledger().allocated("activations"));
    }
    EXPECT_EQ(bytes[0] == bytes[1], schedule != "gpipe") << schedule << " rank " << control().rank();
  }
}

// Stages without blocks: 1 block on up to 3 stages, 2 blocks on 4; uneven splits by hand, also with empty stages in the
// middle, which have no parameters at all.
TEST_F(Exactness, empty_and_uneven_stages) {
  const int p = control().size();
  if (p <= 3) compare({p, 1, 4, "1f1b", 0, "auto", 0, {}, true});
  if (p <= 4) compare({p, 2, 3, "gpipe", 0, "even", 0, {}, true});
  const char* uneven[] = {"5", "4,1", "1,4,0", "0,2,3,0", "", "2,0,0,0,3,0"};
  compare({p, 5, 5, "1f1b", 0, uneven[p - 1], 0, {1, 3}, true});
  if (p == 3) compare({p, 5, 3, "gpipe", 0, "2,0,3", 0, {}, true});
}

// Random pauses before actions and sends, and sends that end only when they are received, change nothing.
TEST_F(Exactness, delays_and_synchronous_sends) {
  setenv("LLMC_TEST_SSEND", "1", 1);
  for (const char* seed : {"1", "2"}) {
    setenv("LLMC_TEST_ACTION_DELAY", seed, 1);
    setenv("LLMC_TEST_SEND_DELAY", seed, 1);
    for (int pipeline : pipelines()) {
      const int replicas = control().size() / pipeline;
      if ((replicas & (replicas - 1)) != 0) continue;
      for (const char* schedule : {"1f1b", "interleaved", "zb-v", "dualpipe-v", "greedy-v"}) {
        if (find_schedule_kind(schedule).natural_chunks * pipeline > 7) continue;
        compare({pipeline, 5, 4, schedule, 0, "even", 1, {0, 2, 3, 1}, true});
      }
    }
  }
  for (const char* name : {"LLMC_TEST_SSEND", "LLMC_TEST_ACTION_DELAY", "LLMC_TEST_SEND_DELAY"}) unsetenv(name);
}

// Replica counts that are no power of two: repeatable, and equal for every pipeline size and ZeRO stage, though not
// equal to one device bit for bit.
TEST_F(Exactness, other_replica_counts_repeat) {
  if (control().size() != 3) return;
  const Case which{1, 3, 7, "1f1b", 0, "even", 0, {}, true};
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
