// measure_costs.h -- what one micro-batch costs on the devices of this run: measured, before the model is built.
//
// Every rank times three tiny stages at the shape of the real micro-batches: embedding alone, one block at each
// recompute level that may be used, loss head alone; forward, input gradient and weight gradient apart, with events
// around them. All ranks measure at the same time, as they will compute. Then neighbours in the pipeline pass one
// boundary message to and fro. The numbers are gathered, and each median over the ranks is the cost: the same on all
// ranks, so that all come to the same plan. Values are small random numbers, not zeros, which some devices multiply at
// a higher clock rate. The timed micro-batch is the second of its step: like most, it adds its gradients to those
// before it, which for the loss head of a GPT-2 and short micro-batches is a good part of the time. Cost: the first of
// two rounds warms up; GPT-2 124M, B=4 T=64, on one core: about 3 s, most of it in the head. Memory: one stage at a
// time, freed before the next.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "llmc/comm.h"
#include "llmc/gpt2_stage.h"
#include "llmc/grid.h"
#include "llmc/model_cost.h"
#include "llmc/together.h"

/// The step whose micro-batches are measured.
struct MeasuredRun {
  BatchShape shape;       // of a micro-batch
  int micro_batches = 1;  // of a replica
  bool exact = true;      // how their gradients are summed
};

namespace measure_costs_detail {

/// One rank's numbers, in milliseconds.
struct Sample {
  StageCost embedding, blocks[kRecomputeLevels], head;
  double transfer = 0;
};

/// Fills device memory with a pattern of small random numbers that repeats every 64 Ki elements.
template <class T>
void fill_with_noise(T* data, size_t count, cudaStream_t stream) {
  constexpr size_t kPattern = size_t{1} << 16;
  std::mt19937 random(1);
  std::vector<T> pattern(std::min(count, kPattern));
  for (T& value : pattern) value = static_cast<T>((static_cast<float>(random() % 2001) - 1000.0f) * 3e-5f);
  copy_to_device(data, pattern.data(), pattern.size(), stream);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  for (size_t done = pattern.size(); done < count;) {
    const size_t next = std::min(done, count - done);
    CUDA_CHECK(cudaMemcpyAsync(data + done, data, next * sizeof(T), cudaMemcpyDeviceToDevice, stream));
    done += next;
  }
}

/// A stage with all that it needs, and its times.
class TimedStage {
 public:
  TimedStage(const GPT2Config& config, const ParameterTable& table, const MeasuredRun& run, const StageRange& range,
             Blas& blas, cudaStream_t stream)
      : stream_(stream),
        shape_(run.shape),
        leaves_(std::min(run.micro_batches, 2)),
        layout_(make_stage_layout(table, {range}, 1)),
        parameters_("parameters", layout_.parameter_elements, &ledger_),
        gradients_(ledger_, layout_, leaves_, run.exact, stream),
        workspace_(ledger_, config, run.shape, {range}),
        stage_({config, table, layout_, 0, ledger_, blas, workspace_, &gradients_, parameters_.data(), run.shape, 1, 1,
                stream}) {
    for (cudaEvent_t& event : events_) CUDA_CHECK(cudaEventCreate(&event));
    if (parameters_.size() > 0) fill_with_noise(parameters_.data(), parameters_.size(), stream);
    fill_with_noise(stage_.input(0), stage_.boundary_bytes() / sizeof(floatX), stream);
    vocab_ = config.vocab;
  }
  ~TimedStage() {
    cudaStreamSynchronize(stream_);
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  TimedStage(const TimedStage&) = delete;
  TimedStage& operator=(const TimedStage&) = delete;

  /// The least of some rounds, after one of a single sequence that warms up: disturbances only ever add.
  StageCost measure() {
    round({1, shape_.T});
    StageCost best = round(shape_);
    double spent = total_cost(best);
    for (int k = 1; k < kMostRounds && spent < kEnoughMilliseconds; k++) {
      const StageCost next = round(shape_);
      spent += total_cost(next);
      best.forward = std::min(best.forward, next.forward);
      best.backward_input = std::min(best.backward_input, next.backward_input);
      best.backward_weight = std::min(best.backward_weight, next.backward_weight);
    }
    return best;
  }

 private:
  static constexpr int kMostRounds = 6;
  static constexpr double kEnoughMilliseconds = 200;

  StageCost round(const BatchShape& shape) {
    std::mt19937 random(2);
    std::vector<int> tokens(static_cast<size_t>(shape.rows()));
    for (int& token : tokens) token = static_cast<int>(random() % static_cast<unsigned>(vocab_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    stage_.set_shape(shape);
    stage_.load_tokens(0, tokens.data(), tokens.data());
    gradients_.begin_step(leaves_, stream_);
    for (int phase = 0; leaves_ > 1 && phase < kGradientPhases; phase++) {  // as if the first had been there
      gradients_.finish_leaf(0, static_cast<GradientPhase>(phase), stream_);
    }
    CUDA_CHECK(cudaEventRecord(events_[0], stream_));
    stage_.forward(0, 0, true);
    CUDA_CHECK(cudaEventRecord(events_[1], stream_));
    stage_.backward_input(0, 0);
    CUDA_CHECK(cudaEventRecord(events_[2], stream_));
    stage_.backward_weight(0, 0);
    CUDA_CHECK(cudaEventRecord(events_[3], stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    return {elapsed(0), elapsed(1), elapsed(2)};
  }
  double elapsed(int from) const {
    float milliseconds = 0;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events_[from], events_[from + 1]));
    return milliseconds;
  }

  cudaStream_t stream_;
  BatchShape shape_;
  int leaves_;
  int vocab_ = 1;
  MemoryLedger ledger_;
  StageLayout layout_;
  DeviceArray<floatX> parameters_;
  GradientTree gradients_;
  GPT2Workspace workspace_;
  GPT2Stage stage_;
  cudaEvent_t events_[4];
};

/// Milliseconds of a message of `bytes` between neighbours in the pipeline, to and fro; 0 where there is no neighbour.
/// Collective.
inline double ping_pong(Communicator& world, const Grid& grid, size_t bytes, cudaStream_t stream) {
  constexpr int kTurns = 6;
  const std::unique_ptr<Communicator> pairs = world.split(0, grid.rank, "measuring");
  std::vector<Link> links;
  for (int place = 0; place + 1 < grid.pipeline; place += 2) {
    for (int replica = 0; replica < grid.replicas; replica++) {
      const int a = grid.rank_of(place, replica), b = grid.rank_of(place + 1, replica);
      links.push_back({a, b, 0});
      links.push_back({b, a, 1});
    }
  }
  pairs->open_links(links);
  const bool first = grid.place() % 2 == 0;
  const int other = grid.place() + (first ? 1 : -1);
  if (other >= grid.pipeline) return 0;
  const int peer = grid.rank_of(other, grid.replica()), out = first ? 0 : 1;
  DeviceArray<char> sent("message", bytes), received("message", bytes);
  double least = 0;
  for (int turn = 0; turn < kTurns; turn++) {  // the first turns open connections
    const Clock::time_point start = Clock::now();
    if (first) pairs->wait_host(pairs->send(sent.data(), bytes, peer, out, stream));
    pairs->wait_host(pairs->receive(received.data(), bytes, peer, 1 - out, stream));
    if (!first) pairs->wait_host(pairs->send(sent.data(), bytes, peer, out, stream));
    const double milliseconds = 1e3 * seconds_since(start) / 2;
    if (turn == 0 || milliseconds < least) least = milliseconds;
  }
  return least;
}

inline double median_over_ranks(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Each number is the median over the ranks, the transfer over those that have a neighbour.
inline Sample median_sample(const std::vector<Sample>& ranks) {
  static_assert(sizeof(Sample) % sizeof(double) == 0, "a sample is a row of numbers");
  Sample result;
  double* numbers = reinterpret_cast<double*>(&result);
  for (size_t k = 0; k < sizeof(Sample) / sizeof(double); k++) {
    std::vector<double> column;
    for (const Sample& rank : ranks) {
      const double value = reinterpret_cast<const double*>(&rank)[k];
      if (&numbers[k] != &result.transfer || value > 0) column.push_back(value);
    }
    numbers[k] = column.empty() ? 0 : median_over_ranks(column);
  }
  return result;
}

}  // namespace measure_costs_detail

/// Costs in milliseconds for the micro-batches of `run`. `levels`: recompute levels that the search may use; the others
/// are given the cost of level 0. `world` may be null for one rank. Collective; the same numbers on all ranks.
/// Environment error if a device has not even the memory for one block or the head.
inline ModelCost measure_costs(const GPT2Config& config, const MeasuredRun& run, const std::vector<int>& levels,
                               const Grid& grid, Control& control, Communicator* world, Blas& blas,
                               cudaStream_t stream) {
  using namespace measure_costs_detail;
  const ParameterTable table = gpt2_parameter_table(config);
  const int L = config.layers;
  Sample mine;
  run_together(control, [&] {
    const auto time = [&](const StageRange& range) {
      return TimedStage(config, table, run, range, blas, stream).measure();
    };
    mine.embedding = time({0, 0, true, false, 0});
    mine.blocks[0] = time({0, 1, false, false, 0});
    for (int level : levels) {
      if (level > 0) mine.blocks[level] = time({0, 1, false, false, level});
    }
    mine.head = time({L, L, false, true, 0});
  });
  const size_t bytes = static_cast<size_t>(run.shape.rows()) * config.channels * sizeof(floatX);
  if (world != nullptr && grid.pipeline > 1) mine.transfer = ping_pong(*world, grid, bytes, stream);
  const Sample all = median_sample(control.gathered(mine, "measured costs"));
  ModelCost cost;
  cost.unit = "ms";
  cost.embedding = all.embedding;
  cost.blocks.assign(static_cast<size_t>(L), all.blocks[0]);
  const double third = all.head.forward / 3;  // logits, input and weight gradient: one product each, all in F
  cost.head = {third, third, all.head.forward - 2 * third};
  for (int level : levels) {
    if (level == 0) continue;
    cost.recompute[level] = all.blocks[level];
    add_cost(&cost.recompute[level], all.blocks[0], -1);
    // who recomputes more never takes less time: a difference of two short times may say otherwise
    const double missing = total_cost(cost.recompute[level - 1]) - total_cost(cost.recompute[level]);
    cost.recompute[level].backward_input += std::max(0.0, missing);
  }
  cost.transfer = all.transfer;
  return cost;
}
