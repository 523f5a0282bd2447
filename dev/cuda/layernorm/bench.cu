// bench.cu -- the layernorm ladders: verifies every rung against float64, then times it.
//
//   make build/cpu-fp32-w1/ladder_layernorm && build/cpu-fp32-w1/ladder_layernorm [--rows N] [--channels C] [--repeats
//   R]
#include "dev/cuda/ladder.h"
#include "dev/cuda/layernorm/1_thread_per_row.cuh"
#include "dev/cuda/layernorm/2_block_per_row.cuh"
#include "dev/cuda/layernorm/3_warp_per_row.cuh"
#include "dev/cuda/layernorm/4_production.cuh"
#include "dev/cuda/layernorm/backward_1_atomics.cuh"
#include "dev/cuda/layernorm/backward_2_thread_per_column.cuh"
#include "dev/cuda/layernorm/backward_3_production.cuh"

// Inputs on the host and the results in float64.
struct LayernormCase {
  int N, C;
  std::vector<floatX> inp, dout, weight, bias;
  std::vector<double> out, mean, rstd, dinp, dweight, dbias;

  LayernormCase(int rows, int channels) : N(rows), C(channels) {
    const size_t n = static_cast<size_t>(N) * C;
    inp = ladder_values<floatX>(n, 1, 2.0, 0.5);
    dout = ladder_values<floatX>(n, 2);
    weight = ladder_values<floatX>(C, 3, 0.5, 1.0);
    bias = ladder_values<floatX>(C, 4);
    out.resize(n);
    dinp.resize(n);
    dweight.resize(C);
    dbias.resize(C);
    for (int row = 0; row < N; row++) compute_row(static_cast<size_t>(row) * C);
  }

 private:
  void compute_row(size_t row) {
    double m = 0, variance = 0, average = 0, average_xhat = 0;
    for (int i = 0; i < C; i++) m += (float)inp[row + i] / static_cast<double>(C);
    for (int i = 0; i < C; i++) variance += ((float)inp[row + i] - m) * ((float)inp[row + i] - m) / C;
    const double r = 1 / std::sqrt(variance + 1e-5);
    for (int i = 0; i < C; i++) {
      const double xhat = ((float)inp[row + i] - m) * r, d = (float)dout[row + i];
      out[row + i] = xhat * (float)weight[i] + (float)bias[i];
      dweight[i] += d * xhat;
      dbias[i] += d;
      average += (float)weight[i] * d / C;
      average_xhat += (float)weight[i] * d * xhat / C;
    }
    for (int i = 0; i < C; i++) {
      const double xhat = ((float)inp[row + i] - m) * r;
      dinp[row + i] =
          r * ((float)weight[i] * static_cast<double>((float)dout[row + i]) - average - xhat * average_xhat);
    }
    mean.push_back(m);
    rstd.push_back(r);
  }
};

// The same on the device.
struct LayernormArrays {
  LadderArray<floatX> inp, dout, weight, bias, out, dinp;
  LadderArray<float> mean, rstd, dweight, dbias, scratch;

  LayernormArrays(const LayernormCase& data, cudaStream_t s)
      : inp(s, data.inp.size()),
        dout(s, data.inp.size()),
        weight(s, data.C),
        bias(s, data.C),
        out(s, data.inp.size()),
        dinp(s, data.inp.size()),
        mean(s, data.N),
        rstd(s, data.N),
        dweight(s, data.C),
        dbias(s, data.C),
        scratch(s, layernorm_backward_scratch_floats(data.N, data.C)) {
    inp.write(data.inp);
    dout.write(data.dout);
    weight.write(data.weight);
    bias.write(data.bias);
  }
};

using Forward = void (*)(floatX*, float*, float*, const floatX*, const floatX*, const floatX*, int, int, cudaStream_t);
using Backward = void (*)(const LayernormBackward&, cudaStream_t);

static int climb_forward(const LayernormCase& data, LayernormArrays& a, int repeats, cudaStream_t stream) {
  const auto rung = [&](const char* name, const char* adds, Forward forward) {
    return Rung{name, adds, [&a, &data, stream, forward] {
                  forward(a.out.data(), a.mean.data(), a.rstd.data(), a.inp.data(), a.weight.data(), a.bias.data(),
                          data.N, data.C, stream);
                }};
  };
  const LadderCheck check = {[&] {
                               a.out.poison();
                               a.mean.poison();
                               a.rstd.poison();
                             },
                             [&] {
                               return std::vector<std::vector<double>>{a.out.read(), a.mean.read(), a.rstd.read()};
                             },
                             {data.out, data.mean, data.rstd},
                             data.C};
  return climb(
      {rung("1 thread per row", "the formula, as it is written", thread_per_row::forward),
       rung("2 block per row", "coalesced loads, many threads; sums through shared memory", block_per_row::forward),
       rung("3 warp per row", "sums through registers: no barriers", warp_per_row::forward),
       rung("4 production", "loops that also vectorise on a CPU", production::forward)},
      check, 2 * data.inp.size() * sizeof(floatX), repeats, stream);
}

static int climb_backward(const LayernormCase& data, LayernormArrays& a, int repeats, cudaStream_t stream) {
  layernorm_forward(a.out.data(), a.mean.data(), a.rstd.data(), a.inp.data(), a.weight.data(), a.bias.data(), data.N,
                    data.C, stream);
  const LayernormBackward arguments = {a.dinp.data(), a.dweight.data(), a.dbias.data(), a.scratch.data(), a.dout.data(),
                                       a.inp.data(),  a.weight.data(),  a.mean.data(),  a.rstd.data(),    nullptr,
                                       data.N,        data.C,           false};
  const auto rung = [&](const char* name, const char* adds, Backward backward) {
    return Rung{name, adds, [=] { backward(arguments, stream); }};
  };
  const LadderCheck check = {[&] {
                               a.dinp.poison();
                               a.dweight.poison();
                               a.dbias.poison();
                             },
                             [&] {
                               return std::vector<std::vector<double>>{a.dinp.read(), a.dweight.read(), a.dbias.read()};
                             },
                             {data.dinp, data.dweight, data.dbias},
                             std::max(data.N, data.C)};
  return climb(
      {rung("backward 1 atomics", "the formula; rows add to the weight gradients in any order",
            backward_atomics::backward),
       rung("backward 2 columns", "one thread per column: a fixed order, but few threads", backward_columns::backward),
       rung("backward 3 production", "chunks of rows, added in order: many threads, the same bits every time",
            backward_production::backward)},
      check, 3 * data.inp.size() * sizeof(floatX), repeats, stream);
}

int main(int argc, char** argv) {
  try {
    require_device();
    const int repeats = option(argc, argv, "--repeats", 11);
    const LayernormCase data(option(argc, argv, "--rows", kIsCpuDevice ? 1024 : 32768),
                             option(argc, argv, "--channels", 768));
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    LayernormArrays arrays(data, stream);
    printf("layernorm of %d rows of %d channels\n", data.N, data.C);
    const int forward = climb_forward(data, arrays, repeats, stream);
    return climb_backward(data, arrays, repeats, stream) | forward;
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
