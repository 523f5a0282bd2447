// bench_step.cu -- one optimizer step of a GPT-2: time, CPU-seconds, GFLOP/s beside the matrix-product ceiling of the
// same run, and peak memory beside the planned bytes.
//   make bench   or   build/.../bench_step MODEL B T STEPS      e.g. bench_step 124M 4 64 5
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "llmc/parallel_gpt2.h"
#include "llmc/start_device.h"

namespace {

struct Clock {
  double wall = 0.0, cpu = 0.0;
  static Clock now() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return {wall, seconds(usage.ru_utime) + seconds(usage.ru_stime)};
  }
  Clock operator-(const Clock& other) const { return {wall - other.wall, cpu - other.cpu}; }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// GFLOP per wall second and per CPU second of out(N,OC) = inp(N,C) weight(OC,C)^T, the largest product of a block.
Clock matmul_ceiling(Device& device, int N, int C, int OC) {
  DeviceArray<floatX> out("ceiling", static_cast<size_t>(N) * OC), inp("ceiling", static_cast<size_t>(N) * C),
      weight("ceiling", static_cast<size_t>(OC) * C);
  for (DeviceArray<floatX>* array : {&inp, &weight}) {
    std::vector<floatX> values(array->size());
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<floatX>(static_cast<float>(random_normal(1, 0, i)));
    CUDA_CHECK(cudaMemcpyAsync(array->data(), values.data(), array->bytes(), cudaMemcpyHostToDevice, device.compute()));
    device.synchronize();
  }
  std::vector<double> wall, cpu;
  for (int i = 0; i < 8; ++i) {
    const Clock start = Clock::now();
    matmul_forward(device.blas(), out.data(), inp.data(), weight.data(), nullptr, N, C, OC, device.compute());
    device.synchronize();
    const Clock time = Clock::now() - start;
    if (i > 0) wall.push_back(time.wall), cpu.push_back(time.cpu);
  }
  const double gflop = 2e-9 * N * C * OC;
  return {gflop / median(wall), gflop / std::max(1e-9, median(cpu))};
}

TokenBatch random_batch(int step, const BatchShape& shape, int vocab) {
  TokenBatch batch;
  batch.micro_batches = 1;
  for (int i = 0; i < shape.rows(); ++i) {
    const RandomWords words = random_u32x4(2, static_cast<uint64_t>(step), static_cast<uint64_t>(i));
    batch.inputs.push_back(static_cast<int>(words.x % vocab));
    batch.targets.push_back(static_cast<int>(words.y % vocab));
  }
  return batch;
}

/// Matrix products and causal attention of a training step: what has to be computed, without the padding of the
/// vocabulary.
double step_gflop(const GPT2Config& c, const BatchShape& shape) {
  const double tokens = shape.rows(), C = c.channels;
  const double weights = 12.0 * c.layers * C * C + C * c.vocab;
  const double attention = 2.0 * c.layers * C * (shape.T + 1) * (1.0 + 2.5);
  return 1e-9 * tokens * (6.0 * weights + attention);
}

int bench(int argc, char** argv) {
  if (argc != 5) user_error("usage: bench_step MODEL B T STEPS, e.g. bench_step 124M 4 64 5");
  const std::optional<GPT2Config> model = gpt2_preset(argv[1]);
  if (!model) user_error("%s is no model; use %s", argv[1], gpt2_preset_names());
  ParallelSettings settings;
  settings.model = *model;
  settings.shape = {atoi(argv[2]), atoi(argv[3])};
  const int steps = atoi(argv[4]);
  if (settings.shape.B < 1 || settings.shape.T < 1 || settings.shape.T > model->max_seq_len || steps < 1) {
    user_error("B and STEPS must be at least 1, T from 1 to %d", model->max_seq_len);
  }
  settings.layout = one_stage_layout(gpt2_model_cost(*model, settings.shape.B, settings.shape.T));
  Control control(&argc, &argv);
  Device device(control);
  const Clock before = matmul_ceiling(device, settings.shape.rows(), model->channels, 4 * model->channels);
  ParallelGPT2 trained(settings, Grid{}, control, nullptr, device.blas(), device.compute());
  trained.initialize(1);
  std::vector<double> wall, cpu;
  for (int step = 0; step <= steps; ++step) {
    const TokenBatch batch = random_batch(step, settings.shape, model->vocab);
    const Clock start = Clock::now();
    trained.train_step(batch, {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1, 0.0f, 1}, 1.0);
    device.synchronize();
    const Clock time = Clock::now() - start;
    if (step > 0)
      wall.push_back(time.wall), cpu.push_back(time.cpu);  // the first step touches its memory for the first time
  }
  const Clock after = matmul_ceiling(device, settings.shape.rows(), model->channels, 4 * model->channels);
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const double gflop = step_gflop(*model, settings.shape), ceiling_wall = std::max(before.wall, after.wall),
               ceiling_cpu = std::max(before.cpu, after.cpu);
  printf("GPT-2 %s, B=%d T=%d, %s, %s\n", argv[1], settings.shape.B, settings.shape.T, kPrecisionName,
         device.description().c_str());
  printf("  step          %.3f s wall, %.3f CPU-seconds (median of %d), %.1f GFLOP\n", median(wall), median(cpu), steps,
         gflop);
  printf("  rate          %.1f GFLOP/s, %.1f GFLOP per CPU-second, %.0f tokens/s\n", gflop / median(wall),
         gflop / median(cpu), settings.shape.rows() / median(wall));
  printf("  ceiling       matrix product of the same rows: %.1f GFLOP/s, %.1f per CPU-second -> %.0f %% and %.0f %%\n",
         ceiling_wall, ceiling_cpu, 100.0 * gflop / median(wall) / ceiling_wall,
         100.0 * gflop / median(cpu) / ceiling_cpu);
  printf("  memory        %.1f MiB planned, %.1f MiB allocated, process peak %.1f MiB\n",
         trained.forecast().total() / 1048576.0, trained.ledger().total_allocated() / 1048576.0,
         usage.ru_maxrss / 1024.0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return bench(argc, argv);
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
