// model_options.h -- the sizes of the model: from --load, a preset or a file, or from --layers ... --seq-max.
#pragma once

#include <optional>

#include "llmc/gpt2_config.h"
#include "llmc/llmc_file.h"
#include "llmc/train_options.h"

/// Fills in the sizes that --load gives and checks the options again with them, for `ranks` processes. Returns the open
/// model file, if --load names one. User error where an option contradicts the file; a preset may be changed.
inline std::optional<LlmcModelFile> resolve_model_options(TrainOptions& options, int ranks) {
  std::optional<LlmcModelFile> file;
  const std::optional<GPT2Config> preset = options.load.empty() ? std::nullopt : gpt2_preset(options.load);
  if (!options.load.empty() && !preset) file = LlmcModelFile::open(options.load);
  if (!preset && !file) return file;
  const GPT2Config loaded = preset ? *preset : file->config();
  const auto fill = [&](int& option, int value, const char* name) {
    if (option != 0 && option != value && !preset) {
      user_error("--%s %d differs from %s, which has %d; leave the option out", name, option, options.load.c_str(),
                 value);
    }
    if (option == 0) option = value;
  };
  fill(options.layers, loaded.layers, "layers");
  fill(options.channels, loaded.channels, "channels");
  fill(options.heads, loaded.heads, "heads");
  fill(options.vocab, loaded.vocab, "vocab");
  fill(options.seq_max, loaded.max_seq_len, "seq-max");
  resolve_train_options(options, ranks);
  return file;
}

/// The configuration that resolved options describe.
inline GPT2Config model_config(const TrainOptions& options) {
  return make_gpt2_config(options.layers, options.heads, options.channels, options.vocab, options.seq_max);
}
