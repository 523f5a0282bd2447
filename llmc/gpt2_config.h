// gpt2_config.h -- sizes of a GPT-2: presets, checks, parameter table, and the arithmetic that follows from them.
//
// Shape letters: L layers, NH heads, C channels, HS = C / NH head size, V vocabulary, Vp = V rounded up to 128, maxT
// positions. Parameters: (Vp + maxT) C + L (12 C^2 + 13 C) + 2 C. The head is tied to the token embedding. FLOPs of a
// training step, as llm.c counts them: (6 N + 6 L C T) per token, N = all parameters with the padding. What the planner
// counts is in model_cost.h.
// Source: Radford et al. 2019; initialisation and presets as in llm.c.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "llmc/check.h"
#include "llmc/numeric.h"
#include "llmc/parameter_table.h"

struct GPT2Config {
  int layers = 12;
  int heads = 12;
  int channels = 768;
  int vocab = 50257;
  int padded_vocab = 50304;  // vocab rounded up to kVocabMultiple: rows beyond vocab are zero and never predicted
  int max_seq_len = 1024;
};

constexpr int kVocabMultiple = 128;  // whole matrix-product tiles, as in llm.c
constexpr int kMaxLayers = 4096;     // these limits catch nonsense in options and files; nothing depends on them
constexpr int kMaxChannels = 1 << 16;
constexpr int kMaxPositions = 1 << 24;
constexpr int kMaxVocab = 1 << 16;  // token files hold 16-bit ids

/// What is wrong with a configuration, in words with the remedy, or "" if nothing is. Cheap, pure.
inline std::string gpt2_config_problem(const GPT2Config& config) {
  struct Range {
    const char* what;
    int value, last;
  };
  const Range ranges[] = {{"layers", config.layers, kMaxLayers},
                          {"channels", config.channels, kMaxChannels},
                          {"heads", config.heads, kMaxChannels},
                          {"vocabulary", config.vocab, kMaxVocab},
                          {"longest sequence", config.max_seq_len, kMaxPositions}};
  for (const Range& range : ranges) {
    if (range.value < 1 || range.value > range.last) {
      return format_text("%s %d is outside 1..%d", range.what, range.value, range.last);
    }
  }
  if (config.channels % config.heads != 0) {
    int below = config.heads;
    while (config.channels % below != 0) --below;
    return format_text("%d heads do not divide %d channels; use for example %d heads or %d channels", config.heads,
                       config.channels, below, round_up(config.channels, config.heads));
  }
  if (config.padded_vocab != round_up(config.vocab, kVocabMultiple)) {
    return format_text("padded vocabulary %d is not %d rounded up to a multiple of %d (%d)", config.padded_vocab,
                       config.vocab, kVocabMultiple, round_up(config.vocab, kVocabMultiple));
  }
  return "";
}

/// Configuration from free sizes; a user error if they do not make a model.
inline GPT2Config make_gpt2_config(int layers, int heads, int channels, int vocab, int max_seq_len) {
  GPT2Config config{layers, heads, channels, vocab, 0, max_seq_len};
  if (vocab >= 1 && vocab <= kMaxVocab) config.padded_vocab = round_up(vocab, kVocabMultiple);
  const std::string problem = gpt2_config_problem(config);
  if (!problem.empty()) user_error("model: %s", problem.c_str());
  return config;
}

/// What gpt2_preset accepts, for help and messages.
inline const char* gpt2_preset_names() {
  return "124M, 350M, 774M, 1558M, or dN with depth N = 6, 12, 24, 36, 48, 60, 72, 84";
}

/// The preset of this name: "124M", "gpt2-124M", "d12", "gpt2:d12" (llm.c's spelling); none if there is no such preset.
/// Vocabulary 50257, 1024 positions, as GPT-2.
inline std::optional<GPT2Config> gpt2_preset(const std::string& name) {
  struct Preset {
    const char *depth, *size;
    int layers, heads, channels;
  };
  const Preset presets[] = {{"d6", "", 6, 6, 384},          {"d12", "124M", 12, 12, 768},
                            {"d24", "350M", 24, 16, 1024},  {"d36", "774M", 36, 20, 1280},
                            {"d48", "1558M", 48, 25, 1600}, {"d60", "", 60, 30, 1920},
                            {"d72", "", 72, 30, 2880},      {"d84", "", 84, 36, 3456}};
  for (const Preset& preset : presets) {
    const std::string depth = preset.depth, size = preset.size;
    const bool by_size = !size.empty() && (name == size || name == "gpt2-" + size);
    if (by_size || name == depth || name == "gpt2:" + depth) {
      return make_gpt2_config(preset.layers, preset.heads, preset.channels, 50257, 1024);
    }
  }
  return std::nullopt;
}

/// Number of tensors of a block, and row in the table of tensor k (canonical order below) of block l.
constexpr int kGpt2BlockTensors = 12;
constexpr int gpt2_block_tensor(int layer, int k) { return 2 + layer * kGpt2BlockTensors + k; }

/// All parameters in canonical order: wte, wpe, twelve tensors per block, final layernorm. 4 + 12 L rows.
/// Matrices start as normal(0, 0.02), the two projections back into the residual stream as normal(0, 0.02 / sqrt(2 L)),
/// so that the variance of the residual stream does not grow with depth; biases 0, layernorm weights 1. Only matrices
/// decay.
inline ParameterTable gpt2_parameter_table(const GPT2Config& config) {
  const std::string problem = gpt2_config_problem(config);
  assert(problem.empty() && "gpt2_parameter_table: invalid configuration");
  const int64_t C = config.channels;
  const int L = config.layers;
  const double kStd = 0.02;
  const double residual_std = kStd / std::sqrt(2.0 * L);
  ParameterTable table;
  const auto matrix = [&table](const std::string& name, int64_t rows, int64_t columns, double std, int block,
                               int64_t rows_used, int split_up_to = -1) {
    add_tensor(table, {name, {rows, columns}, 0, 0, Initialization::kNormal, std, true, block, 0, split_up_to},
               rows_used);
  };
  const auto vector = [&table](const std::string& name, int64_t size, Initialization init, int block) {
    add_tensor(table, {name, {size}, 0, 0, init, 0.0, false, block, 0, -1});
  };
  const auto layernorm = [&vector, C](const std::string& name, int block) {
    vector(name + ".weight", C, Initialization::kOnes, block);
    vector(name + ".bias", C, Initialization::kZeros, block);
  };
  const auto linear = [&](const std::string& name, int64_t rows, int64_t columns, double std, int block,
                          int split_up_to) {
    matrix(name + ".weight", rows, columns, std, block, -1, split_up_to);
    vector(name + ".bias", rows, Initialization::kZeros, block);
  };
  matrix("wte.weight", config.padded_vocab, C, kStd, -1, config.vocab);
  matrix("wpe.weight", config.max_seq_len, C, kStd, -1, -1);
  for (int l = 0; l < L; ++l) {
    const std::string block = "h." + std::to_string(l) + ".";
    layernorm(block + "ln_1", l);
    // their inputs are the layernorms (recomputed from level 2 on), attention (level 3) and GELU (level 1)
    linear(block + "attn.qkv", 3 * C, C, kStd, l, 1);
    linear(block + "attn.proj", C, C, residual_std, l, 2);
    layernorm(block + "ln_2", l);
    linear(block + "mlp.fc", 4 * C, C, kStd, l, 1);
    linear(block + "mlp.proj", C, 4 * C, residual_std, l, 0);
  }
  layernorm("ln_f", L);
  return table;
}

/// Number of parameters N, with the padding rows of wte (as llm.c prints it).
inline int64_t gpt2_parameter_count(const GPT2Config& config) {
  const int64_t C = config.channels;
  const int64_t per_block = 12 * C * C + 13 * C;
  return (static_cast<int64_t>(config.padded_vocab) + config.max_seq_len) * C + config.layers * per_block + 2 * C;
}

/// Training FLOPs per token, forward and backward, at sequence length T: 6 N + 6 L C T (llm.c's convention, for the
/// utilisation).
inline double gpt2_flops_per_token(const GPT2Config& config, int T) {
  return 6.0 * static_cast<double>(gpt2_parameter_count(config)) +
         6.0 * static_cast<double>(config.layers) * config.channels * T;
}
