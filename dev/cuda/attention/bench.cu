// bench.cu -- the attention ladder: verifies every rung against float64, then times it, forward and backward.
//
//   make build/cpu-fp32-w1/ladder_attention
//   build/cpu-fp32-w1/ladder_attention [--batch B] [--length T] [--channels C] [--heads NH] [--repeats R]
// FLOPs are those of causal attention without recomputation: 2 B T^2 C forward, 5 B T^2 C backward. The tensor-core
// rung is there with PRECISION=bf16 on a GPU, or WARP=32 on the CPU device.
#include "dev/cuda/attention/1_materialised.cuh"
#include "dev/cuda/attention/2_warp_per_row.cuh"
#include "dev/cuda/attention/3_online_softmax.cuh"
#include "dev/cuda/attention/4_production.cuh"
#include "dev/cuda/attention/reference.h"
#if defined(PRECISION_BF16) && (defined(__CUDACC__) || LLMC_WARP == 32)
#define LADDER_TENSOR_CORES
#include "dev/cuda/attention/5_tensor_cores.cuh"
#endif
#include "dev/cuda/ladder_products.h"

// A layer on the device.
struct AttentionArrays {
  LadderArray<floatX> qkv, dout, out, dqkv;
  LadderArray<float> lse, delta, p, dp;
  AttentionRun run;

  AttentionArrays(const AttentionShape& s, const std::vector<floatX>& host_qkv, const std::vector<floatX>& host_dout,
                  cudaStream_t stream)
      : qkv(stream, 3 * s.elements()),
        dout(stream, s.elements()),
        out(stream, s.elements()),
        dqkv(stream, 3 * s.elements()),
        lse(stream, s.rows()),
        delta(stream, s.rows()),
        p(stream, s.rows() * s.T),
        dp(stream, s.rows() * s.T) {
    qkv.write(host_qkv);
    dout.write(host_dout);
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.HS));
    run = {s.B,        s.T,         s.C(),      s.NH,         s.HS,     qkv.data(), dout.data(),
           out.data(), dqkv.data(), lse.data(), delta.data(), p.data(), dp.data(),  scale};
  }
  void poison() {
    out.poison();
    dqkv.poison();
    lse.poison();
    delta.poison();
    p.poison();
    dp.poison();
  }
};

using Pass = void (*)(const AttentionRun&, cudaStream_t);
struct AttentionRung {
  const char *name, *adds;
  Pass forward, backward;
};

static std::vector<AttentionRung> all_rungs(int HS) {
  std::vector<AttentionRung> rungs = {
      {"1 materialised", "one thread per element; T x T arrays", materialised::forward, materialised::backward},
      {"2 warp per row", "coalesced loads, sums in registers, one kernel", warp_per_row::forward,
       warp_per_row::backward},
      {"3 online softmax", "no T x T array", online_softmax_rung::forward, online_softmax_rung::backward},
      {"4 production", "tiles in shared memory, micro-tiles in registers", production::forward, production::backward}};
#ifdef LADDER_TENSOR_CORES
  if (HS == tensor_cores::kHead) {
    rungs.push_back({"5 tensor cores", "tensor cores and asynchronous copies (backward: production)",
                     tensor_cores::forward, production::backward});
  }
#endif
  (void)HS;
  return rungs;
}

static int climb_attention(const AttentionShape& s, int repeats, cudaStream_t stream) {
  const auto qkv = ladder_values<floatX>(3 * s.elements(), 1), dout = ladder_values<floatX>(s.elements(), 2);
  const AttentionReference<double> exact(s, std::vector<double>(qkv.begin(), qkv.end()),
                                         std::vector<double>(dout.begin(), dout.end()));
  AttentionArrays a(s, qkv, dout, stream);
  const double ceiling = library_gflops(1024, repeats, stream);
  print_product_head(ceiling);
  const double flops = 2.0 * s.elements() * s.T;
  bool right = true;
  for (const AttentionRung& rung : all_rungs(s.HS)) {
    const auto forward = [&, rung] { rung.forward(a.run, stream); };
    const auto backward = [&, rung] { rung.backward(a.run, stream); };
    const LadderCheck forward_check = {[&] { a.poison(); },
                                       [&] {
                                         return std::vector<std::vector<double>>{a.out.read(), a.lse.read()};
                                       },
                                       {exact.out, exact.lse},
                                       s.T};
    const LadderCheck backward_check = {
        [&] { a.dqkv.poison(); }, [&] { return std::vector<std::vector<double>>{a.dqkv.read()}; }, {exact.dqkv}, s.T};
    const Rung forward_rung = {std::string(rung.name) + " forward", rung.adds, forward};
    const Rung backward_rung = {std::string(rung.name) + " backward", "", backward};
    right &= climb_product(forward_rung, forward_check, flops, ceiling, repeats, stream);
    right &= climb_product(backward_rung, backward_check, 2.5 * flops, ceiling, repeats, stream);
  }
  return right ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    require_device();
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const int C = option(argc, argv, "--channels", 768), NH = option(argc, argv, "--heads", 12);
    if (C % NH != 0 || C / NH > kMaxHead) {
      user_error("--heads %d must divide --channels %d into heads of at most %d", NH, C, kMaxHead);
    }
    const AttentionShape shape = {option(argc, argv, "--batch", kIsCpuDevice ? 2 : 16),
                                  option(argc, argv, "--length", kIsCpuDevice ? 256 : 1024), NH, C / NH};
    printf("causal attention of %d sequences of %d tokens, %d heads of %d\n", shape.B, shape.T, NH, C / NH);
    return climb_attention(shape, option(argc, argv, "--repeats", 5), stream);
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
