// adamw.cuh -- one AdamW step over a range of parameters.
//
//   g = gradient_scale * gradient      m = b1 m + (1-b1) g      v = b2 v + (1-b2) g^2
//   p = p - lr * ( (m / (1-b1^step)) / (sqrt(v / (1-b2^step)) + eps) + weight_decay * p )
// fp32 build: p is `params`. bf16 build: p is the fp32 `master` copy, and `params` gets it stochastically rounded:
// rounding to nearest would lose every update below 1/512 of a weight, stochastic rounding keeps them in the mean.
// The random bits are a function of (seed, step, global element), so the result does not depend on how the parameters
// are cut into calls, ranks or threads.
//
// Bytes per element: fp32 28 (read p, m, v, g; write p, m, v), bf16 30. 15 FLOP; 110 more for the random bits.
// Source: Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101, algorithm 2.
#pragma once

#include "llmc/random.h"
#include "llmc/reduce.cuh"

/// What is the same for every element of a step.
struct AdamW {
  float learning_rate;
  float beta1;
  float beta2;
  float epsilon;
  float weight_decay;
  int step;  // 1 for the first
  float gradient_scale;
  uint64_t seed;  // of the stochastic rounding; unused in fp32
};

// high half of the random stream: keeps the rounding apart from other uses of the same seed
constexpr uint64_t kRoundingStream = 0x726f756eull << 32;

constexpr bool kHasMasterWeights = sizeof(floatX) < sizeof(float);

// The hyperparameters in the form in which an element uses them.
struct AdamWFactors {
  float learning_rate, beta1, beta2, epsilon, weight_decay, gradient_scale;
  float correction1, correction2;  // 1 - b1^step, 1 - b2^step
};

__global__ void adamw_kernel(floatX* params, float* master, float* m_values, float* v_values, const float* gradients,
                             size_t n, AdamWFactors factors, uint64_t seed, uint64_t stream_key,
                             uint64_t first_element) {
  for_each_element(n, [=](size_t i) {
    const float g = factors.gradient_scale * gradients[i];
    const float m = factors.beta1 * m_values[i] + (1.0f - factors.beta1) * g;
    const float v = factors.beta2 * v_values[i] + (1.0f - factors.beta2) * (g * g);
    m_values[i] = m;
    v_values[i] = v;
    const float direction = (m / factors.correction1) / (sqrtf(v / factors.correction2) + factors.epsilon);
    if constexpr (kHasMasterWeights) {
      const float p = master[i];
      const float updated = p - factors.learning_rate * (direction + factors.weight_decay * p);
      master[i] = updated;
      params[i] = (floatX)stochastic_round_bf16(updated, random_u32x4(seed, stream_key, first_element + i).x);
    } else {
      const float p = (float)params[i];
      params[i] = (floatX)(p - factors.learning_rate * (direction + factors.weight_decay * p));
    }
  });
}

/// One step for n consecutive parameters, the first of which has the global index first_element.
/// Updates params (n) floatX, master (n) float (bf16 build; must be null in fp32), m, v (n) float; reads gradient (n)
/// float. In bf16 the old value of params is not read. step >= 1. Bias corrections are computed on the host in double.
/// Asynchronous on `stream`; deterministic; one call over [0,n) equals calls over its parts. 28 n bytes (fp32), 30 n
/// (bf16).
inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* gradient, size_t n,
                         uint64_t first_element, const AdamW& adamw, cudaStream_t stream) {
  assert(adamw.step >= 1);
  assert((master != nullptr) == kHasMasterWeights || n == 0);
  if (n == 0) return;
  AdamWFactors factors;
  factors.learning_rate = adamw.learning_rate;
  factors.beta1 = adamw.beta1;
  factors.beta2 = adamw.beta2;
  factors.epsilon = adamw.epsilon;
  factors.weight_decay = adamw.weight_decay;
  factors.gradient_scale = adamw.gradient_scale;
  factors.correction1 = static_cast<float>(1.0 - std::pow(static_cast<double>(adamw.beta1), adamw.step));
  factors.correction2 = static_cast<float>(1.0 - std::pow(static_cast<double>(adamw.beta2), adamw.step));
  const uint64_t stream_key = kRoundingStream | static_cast<uint32_t>(adamw.step);
  launch<adamw_kernel>(element_grid(n), element_block(), 0, stream, params, master, m, v, gradient, n, factors,
                       adamw.seed, stream_key, first_element);
}

__global__ void round_parameters_kernel(floatX* params, const float* master, size_t n, uint64_t seed,
                                        uint64_t stream_key, uint64_t first_element) {
  for_each_element(n, [=](size_t i) {
    params[i] = (floatX)stochastic_round_bf16(master[i], random_u32x4(seed, stream_key, first_element + i).x);
  });
}

/// params = what adamw_update of step `step` made of `master`: the same random bits. For parameters that come from a
/// file (step = steps done) or are fresh (0). Asynchronous on `stream`; deterministic; 6 n bytes.
inline void round_parameters(floatX* params, const float* master, size_t n, uint64_t first_element, uint64_t seed,
                             int step, cudaStream_t stream) {
  if (n == 0) return;
  const uint64_t stream_key = kRoundingStream | static_cast<uint32_t>(step);
  launch<round_parameters_kernel>(element_grid(n), element_block(), 0, stream, params, master, n, seed, stream_key,
                                  first_element);
}
