// bench.cu -- the classifier ladder: verifies every rung against float64, then times it.
//
//   make build/cpu-fp32-w1/ladder_classifier && build/cpu-fp32-w1/ladder_classifier [--rows N] [--vocab V] [--repeats
//   R]
//
// A timed run works on what the run before it left (gradients instead of logits): the same traffic and the same
// operations.
#include "dev/cuda/classifier/1_three_kernels.cuh"
#include "dev/cuda/classifier/2_fused_block.cuh"
#include "dev/cuda/classifier/3_online.cuh"
#include "dev/cuda/classifier/4_production.cuh"
#include "dev/cuda/ladder.h"

// Inputs on the host and the results in float64.
struct ClassifierCase {
  int N, V, Vp;
  std::vector<floatX> logits;
  std::vector<int> targets;
  std::vector<double> losses, dlogits;

  ClassifierCase(int rows, int vocabulary) : N(rows), V(vocabulary), Vp(round_up(vocabulary, 128)) {
    logits = ladder_values<floatX>(static_cast<size_t>(N) * Vp, 1, 3.0);
    dlogits.resize(logits.size());
    for (int row = 0; row < N; row++) {
      targets.push_back(static_cast<int>(random_u32x4(7, 2, row).x % V));
      compute_row(static_cast<size_t>(row) * Vp, targets.back());
    }
  }

 private:
  void compute_row(size_t row, int target) {
    double largest = -INFINITY, sum = 0;
    for (int i = 0; i < V; i++) largest = std::max<double>(largest, (float)logits[row + i]);
    for (int i = 0; i < V; i++) sum += std::exp((float)logits[row + i] - largest);
    for (int i = 0; i < V; i++) dlogits[row + i] = std::exp((float)logits[row + i] - largest) / sum - (i == target);
    losses.push_back(std::log(sum) - ((float)logits[row + target] - largest));
  }
};

using Classify = void (*)(float*, floatX*, float*, const int*, int, int, int, cudaStream_t);

static int climb_classifier(const ClassifierCase& data, int repeats, cudaStream_t stream) {
  LadderArray<floatX> logits(stream, data.logits.size());
  LadderArray<float> losses(stream, data.N), probabilities(stream, data.logits.size());
  LadderArray<int> targets(stream, data.N);
  targets.write(data.targets);
  const auto rung = [&](const char* name, const char* adds, Classify classify) {
    return Rung{name, adds, [&, classify] {
                  classify(losses.data(), logits.data(), probabilities.data(), targets.data(), data.N, data.V, data.Vp,
                           stream);
                }};
  };
  const LadderCheck check = {[&] {
                               logits.write(data.logits);
                               losses.poison();
                               probabilities.poison();
                             },
                             [&] {
                               return std::vector<std::vector<double>>{losses.read(), logits.read()};
                             },
                             {data.losses, data.dlogits},
                             data.V};
  return climb({rung("1 three kernels", "softmax, loss and gradient as in a textbook", three_kernels::classify),
                rung("2 fused block", "one kernel, a block per row, no array of probabilities", fused_block::classify),
                rung("3 online", "maximum and sum in one pass", online::classify),
                rung("4 production", "two passes over a cached row, no branches", production::classify)},
               check, 2 * data.logits.size() * sizeof(floatX), repeats, stream);
}

int main(int argc, char** argv) {
  try {
    require_device();
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const ClassifierCase data(option(argc, argv, "--rows", kIsCpuDevice ? 64 : 2048),
                              option(argc, argv, "--vocab", 50257));
    printf("classifier of %d rows, vocabulary %d padded to %d\n", data.N, data.V, data.Vp);
    return climb_classifier(data, option(argc, argv, "--repeats", 11), stream);
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
