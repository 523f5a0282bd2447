// learning_rate.h -- the learning rate as a pure function of the step, so that a resumed run needs no state.
//
// Step s counts from 0 (s steps are done). peak = --lr, W = --warmup, S = all steps, f = --lr-final.
//   s < W        peak * (s + 1) / W                                      linear warm-up, every schedule
//   constant     peak
//   linear       peak * (1 - (1 - f) * r)                                r = (s - W) / (S - W)
//   cosine       peak * (f + (1 - f) * (1 + cos(pi r)) / 2)
//   wsd          peak, then over the last fifth of all steps             r = (s - D) / (S - D), D = max(W, floor(0.8
//   S))
//                peak * (f + (1 - f) * (1 - sqrt(r)))
// Same formulas as llm.c, in double (llm.c: float; there the constant schedule has no warm-up).
// wsd: warm-up, stable, decay with 1 - sqrt, the best of the shapes tried by Haegele et al. 2024 (arXiv 2405.18392).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "llmc/check.h"

enum class LearningRateShape { kConstant, kLinear, kCosine, kWsd };

struct LearningRateSchedule {
  LearningRateShape shape = LearningRateShape::kCosine;
  double peak = 3e-4;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double final_fraction = 1.0;
};

/// "constant", "linear", "cosine", "wsd" -> shape. User error for another name.
inline LearningRateShape parse_learning_rate_shape(const std::string& name) {
  if (name == "constant") return LearningRateShape::kConstant;
  if (name == "linear") return LearningRateShape::kLinear;
  if (name == "cosine") return LearningRateShape::kCosine;
  if (name == "wsd") return LearningRateShape::kWsd;
  user_error("--lr-schedule %s is not known; use constant, linear, cosine or wsd", name.c_str());
}

/// Learning rate of step `step` (0-based), see the header. Steps at or after total_steps give the final rate
/// (peak * final_fraction; peak for the constant shape). Never divides by zero. Deterministic.
inline double learning_rate_at(const LearningRateSchedule& schedule, int64_t step) {
  assert(step >= 0);
  const double peak = schedule.peak;
  if (step < schedule.warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.shape == LearningRateShape::kConstant) return peak;

  int64_t decay_start = schedule.warmup_steps;
  if (schedule.shape == LearningRateShape::kWsd) {
    // 4/5 in integers: 0.8 * S in floating point is below the whole number for some S
    decay_start = std::max(decay_start, schedule.total_steps / 5 * 4 + schedule.total_steps % 5 * 4 / 5);
  }
  if (step < decay_start) return peak;
  double ratio = 1.0;
  if (step < schedule.total_steps) {
    ratio = static_cast<double>(step - decay_start) / static_cast<double>(schedule.total_steps - decay_start);
  }
  double height = 0.0;  // 1 at the start of the decay, 0 at its end
  if (schedule.shape == LearningRateShape::kLinear) height = 1.0 - ratio;
  if (schedule.shape == LearningRateShape::kCosine) height = 0.5 * (1.0 + std::cos(M_PI * ratio));
  if (schedule.shape == LearningRateShape::kWsd) height = 1.0 - std::sqrt(ratio);
  const double lowest = peak * schedule.final_fraction;
  return lowest + height * (peak - lowest);
}
