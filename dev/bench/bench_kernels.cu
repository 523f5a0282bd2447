// bench_kernels.cu -- every kernel of a GPT-2 step at the shapes of a preset: time, GB/s beside a stream over memory,
// GFLOP/s beside the fastest matrix product of this run.
//   make bench   or   build/.../bench_kernels [B T]        GPT-2 124M shapes, default B=4 T=256
// Bytes are the least that the computation must move, once each; a kernel whose arrays stay in the cache can exceed the
// stream.
#include <cstdio>
#include <cstdlib>

#include "dev/cuda/ladder.h"
#include "llmc/accumulate.cuh"
#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/classifier.cuh"
#include "llmc/embedding.cuh"
#include "llmc/gelu.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/memory.h"

namespace {

constexpr int kRepeats = 7;
constexpr float kX = sizeof(floatX);

__global__ void copy_kernel(float* out, const float* in, size_t n) {
  for_each_element(n, [=](size_t i) { out[i] = in[i] + 1.0f; });
}

/// GB/s (read + written) of out = in + 1 over 128 MiB, from one array to another or in place, whichever is faster: a
/// write to memory that was not read first costs a read as well on most CPUs.
double memory_ceiling(cudaStream_t stream) {
  constexpr size_t kElements = size_t{1} << 25;
  DeviceArray<float> from("ceiling", kElements), to("ceiling", kElements);
  for (auto* array : {&from, &to}) CUDA_CHECK(cudaMemsetAsync(array->data(), 0, array->bytes(), stream));
  const auto bandwidth = [&](const float* source) {
    const auto run = [&] {
      launch<copy_kernel>(element_grid(kElements), element_block(), 0, stream, to.data(), source, kElements);
    };
    return 8.0 * kElements / fastest_ms(run, kRepeats, stream) * 1e-6;
  };
  return std::max(bandwidth(from.data()), bandwidth(to.data()));
}

/// One line of the table: what runs, the bytes it must move, the FLOPs it must do (0: bound by memory).
struct Row {
  const char* name;
  double bytes, flop;
  std::function<void()> run;
};

template <class T>
DeviceArray<T> filled(const char* name, size_t n, cudaStream_t stream) {
  DeviceArray<T> array(name, n);
  const std::vector<T> values = ladder_values<T>(n, 3, 0.02);
  CUDA_CHECK(cudaMemcpyAsync(array.data(), values.data(), array.bytes(), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  return array;
}

void print(const std::vector<Row>& rows, const char* title, double copy, double product, cudaStream_t stream) {
  printf("%s\n  %-34s %9s %9s %7s %10s %7s\n", title, "kernel", "ms", "GB/s", "% mem", "GFLOP/s", "% peak");
  for (const Row& row : rows) {
    const double ms = fastest_ms(row.run, kRepeats, stream);
    printf("  %-34s %9.3f %9.1f %6.0f%%", row.name, ms, row.bytes / ms * 1e-6, 100.0 * row.bytes / ms * 1e-6 / copy);
    if (row.flop > 0) printf(" %10.1f %6.0f%%", row.flop / ms * 1e-6, 100.0 * row.flop / ms * 1e-6 / product);
    printf("\n");
  }
}

/// The kernels of blocks and head for N = B*T rows.
class Bench {
 public:
  Bench(int B, int T, cudaStream_t stream)
      : B_(B),
        T_(T),
        N_(B * T),
        stream_(stream),
        wide_(filled<floatX>("wide", size_t(N_) * 4 * C_, stream)),
        wide2_(filled<floatX>("wide", size_t(N_) * 4 * C_, stream)),
        narrow_(filled<floatX>("narrow", size_t(N_) * C_, stream)),
        narrow2_(filled<floatX>("narrow", size_t(N_) * C_, stream)),
        narrow3_(filled<floatX>("narrow", size_t(N_) * C_, stream)),
        weight_(filled<floatX>("weight", size_t(4 * C_) * C_, stream)),
        bias_(filled<floatX>("bias", 4 * C_, stream)),
        gradient_("gradient", size_t(4 * C_) * C_),
        statistics_("statistics", 4 * N_),
        lse_("lse", size_t(N_) * NH_),
        scratch_("scratch", scratch_floats()),
        wte_(filled<floatX>("wte", size_t(Vp_) * C_, stream)),
        logits_(filled<floatX>("logits", size_t(rows()) * Vp_, stream)),
        losses_("losses", N_),
        dwte_("dwte", size_t(Vp_) * C_),
        tokens_("tokens", 3 * size_t(N_) + 2 * N_ + 1) {
    upload_tokens();
  }

  double product_peak() { return 2.0 * N_ * C_ * 4 * C_ / fastest_ms(fc_forward(), kRepeats, stream_) * 1e-6; }

  std::vector<Row> block_rows() {
    const double NC = double(N_) * C_, products = 2.0 * NC * 4 * C_, weights = 4.0 * C_ * C_;
    const double pairs = double(B_) * NH_ * T_ * (T_ + 1) / 2 * (C_ / NH_);
    float *mean = statistics_.data(), *rstd = mean + N_;
    return {
        {"layernorm_forward", 2 * NC * kX, 0,
         [=] {
           layernorm_forward(narrow2_.data(), mean, rstd, narrow_.data(), bias_.data(), bias_.data(), N_, C_, stream_);
         }},
        {"residual_layernorm_forward", 4 * NC * kX, 0,
         [=] {
           residual_layernorm_forward(narrow3_.data(), narrow2_.data(), mean, rstd, narrow_.data(), wide_.data(),
                                      bias_.data(), bias_.data(), N_, C_, stream_);
         }},
        {"layernorm_backward", 4 * NC * kX, 0,
         [=] {
           layernorm_backward({narrow3_.data(), gradient_.data(), gradient_.data() + C_, scratch_.data(),
                               narrow2_.data(), narrow_.data(), bias_.data(), mean, rstd, wide_.data(), N_, C_, false},
                              stream_);
         }},
        {"matmul_forward 768 -> 3072", (5 * NC + weights) * kX, products, fc_forward()},
        {"matmul_backward_input 3072 -> 768", (5 * NC + weights) * kX, products,
         [=] {
           matmul_backward_input(*blas_, narrow2_.data(), wide_.data(), weight_.data(), N_, C_, 4 * C_, stream_);
         }},
        {"matmul_backward_weight", 5 * NC * kX + 4 * weights, products,
         [=] {
           matmul_backward_weight(*blas_, gradient_.data(), wide_.data(), narrow_.data(), N_, C_, 4 * C_, false,
                                  stream_);
         }},
        {"matmul_backward_bias", 4 * NC * kX, 0,
         [=] { matmul_backward_bias(gradient_.data(), scratch_.data(), wide_.data(), N_, 4 * C_, false, stream_); }},
        {"attention_forward", 4 * NC * kX, 4 * pairs,
         [=] { attention_forward(narrow2_.data(), lse_.data(), wide_.data(), B_, T_, C_, NH_, stream_); }},
        {"attention_backward", 8 * NC * kX, 14 * pairs,
         [=] {
           attention_backward({wide2_.data(), scratch_.data(), narrow3_.data(), wide_.data(), narrow2_.data(),
                               lse_.data(), B_, T_, C_, NH_},
                              stream_);
         }},
        {"gelu_forward", 8 * NC * kX, 0,
         [=] { gelu_forward(wide2_.data(), wide_.data(), size_t(4) * N_ * C_, stream_); }},
        {"gelu_backward", 12 * NC * kX, 0,
         [=] { gelu_backward(wide2_.data(), wide2_.data(), wide_.data(), size_t(4) * N_ * C_, stream_); }},
        {"residual_forward", 3 * NC * kX, 0,
         [=] { residual_forward(narrow3_.data(), narrow_.data(), narrow2_.data(), size_t(N_) * C_, stream_); }},
    };
  }

  std::vector<Row> head_rows() {
    const double NC = double(N_) * C_, table = double(Vp_) * C_, scores = double(rows()) * Vp_;
    int* tokens = tokens_.data();
    const EmbeddingSegments order{tokens + N_, tokens + 2 * N_, tokens + 3 * N_ + 1, segments_};
    return {
        {"embedding_forward", 3 * NC * kX, 0,
         [=] { embedding_forward(narrow2_.data(), tokens, wte_.data(), wte_.data(), B_, T_, C_, stream_); }},
        {"embedding_backward_token", NC * kX + 4 * table, 0,
         [=] { embedding_backward_token(dwte_.data(), narrow_.data(), order, Vp_, C_, false, stream_); }},
        {"classifier, training", 2 * scores * kX, 0,
         [=] { fused_classifier(losses_.data(), logits_.data(), tokens, rows(), V_, Vp_, true, stream_); }},
        {"classifier, validation", scores * kX, 0,
         [=] { fused_classifier(losses_.data(), logits_.data(), tokens, rows(), V_, Vp_, false, stream_); }},
        {"square_sum_blocks (38.6M)", 4 * table, 0,
         [=] {
           square_sum_blocks(reinterpret_cast<double*>(scratch_.data()), dwte_.data(), size_t(Vp_) * C_, stream_);
         }},
        {"add in place (38.6M)", 8 * table, 0,
         [=] { add(dwte_.data(), dwte_.data(), dwte_.data(), size_t(Vp_) * C_, stream_); }},
    };
  }

  /// AdamW on arrays of its own: 38.6M parameters.
  void adamw_row(double copy) {
    const size_t n = size_t(Vp_) * C_;
    DeviceArray<float> m("m", n), v("v", n), master("master", kHasMasterWeights ? n : 0);
    for (auto* array : {&m, &v, &master}) {
      if (array->size()) CUDA_CHECK(cudaMemsetAsync(array->data(), 0, array->bytes(), stream_));
    }
    const auto run = [&] {
      adamw_update(wte_.data(), kHasMasterWeights ? master.data() : nullptr, m.data(), v.data(), dwte_.data(), n, 0,
                   {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1e-3f, 1}, stream_);
    };
    print({{"adamw_update (38.6M)", n * (kHasMasterWeights ? 30.0 : 28.0), 0, run}}, "optimizer", copy, 1, stream_);
  }

 private:
  static constexpr int C_ = 768, NH_ = 12, V_ = 50257, Vp_ = 50304;
  int rows() const { return std::min(N_, 256); }
  size_t scratch_floats() const {
    return std::max({layernorm_backward_scratch_floats(N_, C_), matmul_backward_bias_scratch_floats(N_, 4 * C_),
                     attention_backward_scratch_floats(B_, T_, C_, NH_), 2 * norm_blocks_of_table()});
  }
  size_t norm_blocks_of_table() const { return ceil_div(size_t(Vp_) * C_, kNormBlock); }
  std::function<void()> fc_forward() {
    return [this] {
      matmul_forward(*blas_, wide2_.data(), narrow_.data(), weight_.data(), bias_.data(), N_, C_, 4 * C_, stream_);
    };
  }
  void upload_tokens() {
    std::vector<int> tokens(N_);
    for (int i = 0; i < N_; ++i) tokens[i] = static_cast<int>(random_u32x4(1, 0, uint64_t(i)).x % V_);
    const EmbeddingOrder order = embedding_order(tokens.data(), N_);
    segments_ = order.segments();
    std::vector<int> all = tokens;
    all.insert(all.end(), order.positions.begin(), order.positions.end());
    all.insert(all.end(), order.segment_starts.begin(), order.segment_starts.end());
    all.resize(3 * N_ + 1);
    all.insert(all.end(), order.segment_tokens.begin(), order.segment_tokens.end());
    CUDA_CHECK(cudaMemcpyAsync(tokens_.data(), all.data(), all.size() * sizeof(int), cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    CUDA_CHECK(cudaMemsetAsync(dwte_.data(), 0, dwte_.bytes(), stream_));
  }

  int B_, T_, N_;
  cudaStream_t stream_;
  std::unique_ptr<Blas> blas_ = std::make_unique<Blas>();
  DeviceArray<floatX> wide_, wide2_, narrow_, narrow2_, narrow3_, weight_, bias_;
  DeviceArray<float> gradient_, statistics_, lse_, scratch_;
  DeviceArray<floatX> wte_, logits_;
  DeviceArray<float> losses_, dwte_;
  DeviceArray<int> tokens_;
  int segments_ = 0;
};

void bench(int argc, char** argv) {
  if (argc != 1 && argc != 3) user_error("usage: bench_kernels [B T], e.g. bench_kernels 4 256");
  const int B = argc == 3 ? atoi(argv[1]) : 4, T = argc == 3 ? atoi(argv[2]) : 256;
  if (B < 1 || T < 1 || T > 1024) user_error("B must be at least 1, T from 1 to 1024");
  require_device();
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    Bench bench(B, T, stream);
    const double copy = memory_ceiling(stream), product = bench.product_peak();
    printf("GPT-2 124M kernels, B=%d T=%d, %s, %s; memory %.1f GB/s, matrix product %.1f GFLOP/s\n", B, T,
           kPrecisionName, device_name().c_str(), copy, product);
    print(bench.block_rows(), "a block", copy, product, stream);
    print(bench.head_rows(), "embedding, head, norm", copy, product, stream);
    bench.adamw_row(copy);
    printf("drift: memory %.1f GB/s, matrix product %.1f GFLOP/s at the end\n", memory_ceiling(stream),
           bench.product_peak());
  }
  CUDA_CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    bench(argc, argv);
    return 0;
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
