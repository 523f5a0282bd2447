// train_options.h -- every option of train_gpt2, its default, its range, and the rules between options.
//
// One row per option in train_option_table(); the aliases and, where they make sense, the defaults are llm.c's, so its
// run scripts work. Rules that need a file (sizes of a checkpoint, samples of a data set) are checked where the file is
// read. "Replica" = one whole model over --pp ranks; replicas = ranks / pp. A micro-batch is B = --micro-batch
// sequences of T = --seq-len tokens; a step takes --batch-tokens / (B * T) micro-batches over all replicas together.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/options.h"

struct TrainOptions {
  std::string train_data = "data/text";
  std::string val_data = "data/text";
  std::string load;
  std::string out;

  int micro_batch = 4;
  int seq_len = 1024;
  int64_t batch_tokens = 0;
  int steps = -1;
  double lr = 3e-4;
  std::string lr_schedule = "cosine";
  int64_t warmup = 0;
  double lr_final = 1.0;
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;
  int64_t seed = 42;
  bool shuffle = true;
  bool overfit = false;

  int64_t val_every = 20;
  int64_t val_batches = 20;
  int64_t sample_every = 20;
  int sample_tokens = 64;
  std::string sample_prompt;
  double temperature = 1.0;
  int top_k = 0;
  std::string tokenizer;

  int64_t checkpoint_every = 0;
  int keep = 0;
  int keep_major = 0;
  bool resume = false;
  bool save_model = false;

  int layers = 0;
  int channels = 0;
  int heads = 0;
  int vocab = 0;
  int seq_max = 0;

  int pp = 1;
  std::string schedule = "1f1b";
  std::string partition = "auto";
  int zero = 0;
  bool exact = true;
  std::string comm = "auto";
  int64_t comm_timeout = 600;
};

namespace train_option_rows {

using Row = Option<TrainOptions>;
using O = TrainOptions;

constexpr OptionRange kNoRange{};  // texts and switches
inline OptionRange at_least(double minimum) { return OptionRange::at_least(minimum); }

inline std::vector<Row> data_and_files() {
  const char* group = "Data and files";
  return {
      {group, "train-data", "i", &O::train_data, "FILES", kNoRange, "",
       "token shards to train on: a file, a quoted glob, or a folder (its *train*.bin)"},
      {group, "val-data", "j", &O::val_data, "FILES", kNoRange, "",
       "token shards for validation: a file, a quoted glob, or a folder (its *val*.bin)"},
      {group, "load", "e", &O::load, "MODEL", kNoRange, "",
       "start from an llm.c checkpoint file, or a fresh model of a preset size: 124M, 350M, 774M, 1558M or dN (d12 = "
       "124M); none: a fresh model from --layers ... --seq-max"},
      {group, "out", "o", &O::out, "FOLDER", kNoRange, "",
       "run folder for config.txt, main.log, metrics.jsonl and checkpoints"},
      {group, "tokenizer", "", &O::tokenizer, "FILE", kNoRange, "",
       "llm.c tokenizer file that turns tokens into text; none: bytes when the vocabulary is 256, else token numbers"},
  };
}

inline std::vector<Row> batch_and_optimizer() {
  const char* group = "Training";
  const OptionRange fraction = OptionRange::between(0, 1), beta = OptionRange::from_to_below(0, 1);
  return {
      {group, "micro-batch", "b", &O::micro_batch, "B", at_least(1), "", "sequences of one micro-batch"},
      {group, "seq-len", "t", &O::seq_len, "T", at_least(1), "", "tokens of one sequence"},
      {group, "batch-tokens", "d", &O::batch_tokens, "N", at_least(0), "",
       "tokens of one optimizer step over all replicas, a multiple of B x T; 0: one micro-batch per replica"},
      {group, "steps", "x", &O::steps, "N", at_least(-1), "", "optimizer steps; -1: one epoch"},
      {group, "lr", "l", &O::lr, "X", at_least(0), "", "highest learning rate"},
      {group, "lr-schedule", "k", &O::lr_schedule, "NAME", kNoRange, "constant|linear|cosine|wsd",
       "shape after the warm-up: constant, linear, cosine or wsd (stable, then 1-sqrt decay over the last 20 %)"},
      {group, "warmup", "u", &O::warmup, "N", at_least(0), "", "steps of linear warm-up"},
      {group, "lr-final", "q", &O::lr_final, "X", fraction, "",
       "final learning rate as a fraction of the highest; 1: no decay, 0: down to zero"},
      {group, "weight-decay", "c", &O::weight_decay, "X", at_least(0), "", "AdamW weight decay of the matrices"},
      {group, "beta1", "", &O::beta1, "X", beta, "", "AdamW decay of the mean gradient"},
      {group, "beta2", "", &O::beta2, "X", beta, "", "AdamW decay of the mean squared gradient"},
      {group, "eps", "", &O::eps, "X", OptionRange::above(0), "", "AdamW epsilon"},
      {group, "clip", "", &O::clip, "X", at_least(0), "", "largest norm of the whole gradient; 0: no clipping"},
      {group, "seed", "", &O::seed, "N", at_least(0), "", "key of initialisation, data order and sampling"},
      {group, "shuffle", "", &O::shuffle, "0|1", kNoRange, "",
       "1: a new random order of the samples each epoch; 0: as in the files"},
      {group, "overfit", "a", &O::overfit, "0|1", kNoRange, "",
       "1: train on the first batch for ever (a test of the machinery)"},
  };
}

inline std::vector<Row> evaluation() {
  const char* group = "Validation and samples";
  return {
      {group, "val-every", "v", &O::val_every, "N", at_least(0), "", "validate every N steps and at the end; 0: never"},
      {group, "val-batches", "m", &O::val_batches, "N", at_least(-1), "",
       "validate on at most N batches of an optimizer step's size; -1: on all data"},
      {group, "sample-every", "s", &O::sample_every, "N", at_least(0), "",
       "print a sample every N steps and at the end; 0: never"},
      {group, "sample-tokens", "g", &O::sample_tokens, "N", at_least(1), "", "tokens of a sample"},
      {group, "sample-prompt", "", &O::sample_prompt, "TEXT", kNoRange, "", "text that a sample continues"},
      {group, "temperature", "", &O::temperature, "X", at_least(0), "",
       "sampling: logits are divided by X; 0: always the likeliest token"},
      {group, "top-k", "", &O::top_k, "K", at_least(0), "", "sampling: only the K likeliest tokens; 0: all"},
  };
}

inline std::vector<Row> checkpoints() {
  const char* group = "Checkpoints";
  return {
      {group, "checkpoint-every", "n", &O::checkpoint_every, "N", at_least(0), "",
       "write a checkpoint every N steps; 0: never"},
      {group, "keep", "nk", &O::keep, "N", at_least(0), "", "keep the newest N checkpoints; 0: all"},
      {group, "keep-major", "nm", &O::keep_major, "N", at_least(0), "",
       "never delete a checkpoint whose step is a multiple of N; 0: no such step"},
      {group, "resume", "y", &O::resume, "0|1", kNoRange, "",
       "1: go on from the newest complete checkpoint in --out, from the start when there is none"},
      {group, "save-model", "", &O::save_model, "0|1", kNoRange, "",
       "1: write the final model as an llm.c checkpoint into --out"},
  };
}

inline std::vector<Row> model_and_parallel() {
  const char* model = "Model (0: from --load)";
  const char* parallel = "Parallel";
  return {
      {model, "layers", "", &O::layers, "L", OptionRange::between(0, 4096), "", "transformer blocks; without --load 4"},
      {model, "channels", "", &O::channels, "C", OptionRange::between(0, 65536), "", "width; without --load 128"},
      {model, "heads", "", &O::heads, "NH", OptionRange::between(0, 65536), "", "attention heads; without --load 4"},
      {model, "vocab", "", &O::vocab, "V", OptionRange::between(0, 65536), "",
       "token ids 0..V-1; without --load 256, the bytes"},
      {model, "seq-max", "", &O::seq_max, "T", OptionRange::between(0, 1 << 24), "",
       "longest sequence that the model has positions for; without --load that of --seq-len"},
      {parallel, "pp", "", &O::pp, "P", at_least(1), "", "pipeline stages; replicas = ranks / P"},
      {parallel, "schedule", "", &O::schedule, "NAME", kNoRange, "gpipe|1f1b",
       "order of the micro-batches: gpipe or 1f1b"},
      {parallel, "partition", "", &O::partition, "HOW", kNoRange, "",
       "blocks per stage: even, auto (equal cost, counting the loss head), or a list such as 3,4,4,1"},
      {parallel, "zero", "z", &O::zero, "0|1", OptionRange::between(0, 1), "",
       "1: replicas share the optimizer state (ZeRO stage 1); 0: each has all of it"},
      {parallel, "exact", "", &O::exact, "0|1", kNoRange, "",
       "1: micro-batches and replicas are summed as one tree, equal bits for every layout; 0: left to right, less "
       "memory"},
      {parallel, "comm", "", &O::comm, "NAME", kNoRange, "auto|mpi|nccl",
       "transport: mpi (through host memory), nccl (one GPU per rank), or auto"},
      {parallel, "comm-timeout", "", &O::comm_timeout, "SECONDS", at_least(1), "",
       "end the run when a rank waits longer than this for another"},
  };
}

}  // namespace train_option_rows

/// The table of all options of train_gpt2, in the order of --help.
inline const OptionTable<TrainOptions>& train_option_table() {
  static const OptionTable<TrainOptions> table = [] {
    std::vector<Option<TrainOptions>> rows;
    for (const auto& group :
         {train_option_rows::data_and_files(), train_option_rows::batch_and_optimizer(),
          train_option_rows::evaluation(), train_option_rows::checkpoints(), train_option_rows::model_and_parallel()}) {
      rows.insert(rows.end(), group.begin(), group.end());
    }
    return OptionTable<TrainOptions>(
        "usage: train_gpt2 [--option value]...          one process\n"
        "       mpirun -np RANKS train_gpt2 --pp P ...  P pipeline stages x RANKS / P replicas\n"
        "Trains a GPT-2. Short names are those of llm.c. [..] shows the default.\n",
        rows);
  }();
  return table;
}

/// The blocks of each stage of a --partition list; empty for even and auto. User error when it is none of these.
inline std::vector<int> partition_blocks(const TrainOptions& options) {
  std::vector<int> blocks;
  if (options.partition == "even" || options.partition == "auto") return blocks;
  for (const std::string& part : option_detail::split(options.partition, ',')) {
    if (part.empty() || part.size() > 4 || part.find_first_not_of("0123456789") != std::string::npos) {
      user_error("--partition %s is not known; use even, auto, or blocks per stage such as 3,4,4,1",
                 option_detail::shown(options.partition).c_str());
    }
    blocks.push_back(static_cast<int>(option_detail::parse_integer("--partition", part, "a number of blocks")));
  }
  return blocks;
}

/// Micro-batches of one optimizer step over all replicas, after resolve_train_options.
inline int64_t micro_batches_per_step(const TrainOptions& options) {
  return options.batch_tokens / (static_cast<int64_t>(options.micro_batch) * options.seq_len);
}

constexpr int kMaxMicroBatches = 65536;  // of a step, over all replicas: catches nonsense, nothing depends on it

namespace train_option_rules {

inline long long printable(int64_t value) { return static_cast<long long>(value); }

/// "use 3072 or 4096": the multiples of `unit` around `value` (from `unit` on).
inline std::string nearest_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  if (below == 0) return format_text("use %lld", printable(unit));
  return format_text("use %lld or %lld", printable(below), printable(below + unit));
}

/// Ranks, stages, replicas and the division of a step into micro-batches.
inline void check_layout(const TrainOptions& o, int ranks) {
  if (o.pp > ranks) {
    user_error("--pp %d needs at least %d ranks, there %s %d; start with mpirun -np %d or use --pp %d", o.pp, o.pp,
               ranks == 1 ? "is" : "are", ranks, o.pp, ranks);
  }
  if (ranks % o.pp != 0) {
    user_error("--pp %d does not divide %d ranks; start with mpirun -np %d or %d", o.pp, ranks, ranks / o.pp * o.pp,
               (ranks / o.pp + 1) * o.pp);
  }
  const int64_t micro_batch_tokens = static_cast<int64_t>(o.micro_batch) * o.seq_len;
  if (micro_batch_tokens > INT32_MAX) {
    user_error("--micro-batch %d x --seq-len %d = %lld tokens do not fit one micro-batch; use --micro-batch %lld",
               o.micro_batch, o.seq_len, printable(micro_batch_tokens), printable(INT32_MAX / o.seq_len));
  }
  if (o.batch_tokens % micro_batch_tokens != 0) {
    user_error("--batch-tokens %lld is not a multiple of --micro-batch %d x --seq-len %d = %lld; %s",
               printable(o.batch_tokens), o.micro_batch, o.seq_len, printable(micro_batch_tokens),
               nearest_multiples(o.batch_tokens, micro_batch_tokens).c_str());
  }
  const int replicas = ranks / o.pp;
  const int64_t micro_batches = o.batch_tokens / micro_batch_tokens;
  if (micro_batches > kMaxMicroBatches) {
    user_error(
        "--batch-tokens %lld is %lld micro-batches, a step takes at most %d; use --batch-tokens %lld, or a larger "
        "--micro-batch",
        printable(o.batch_tokens), printable(micro_batches), kMaxMicroBatches,
        printable(kMaxMicroBatches * micro_batch_tokens));
  }
  if (o.batch_tokens != 0 && micro_batches < replicas) {
    user_error(
        "--batch-tokens %lld is %lld micro-batches, too few for %d replicas; use --batch-tokens %lld or more, "
        "or at most %lld ranks",
        printable(o.batch_tokens), printable(micro_batches), replicas, printable(replicas * micro_batch_tokens),
        printable(micro_batches * o.pp));
  }
  const std::vector<int> blocks = partition_blocks(o);
  if (!blocks.empty() && static_cast<int>(blocks.size()) != o.pp) {
    user_error("--partition %s has %zu stages, --pp is %d; give one number per stage", o.partition.c_str(),
               blocks.size(), o.pp);
  }
}

/// Sizes of the model; those that are still 0 (they come from a file) are not checked.
inline void check_model(const TrainOptions& o) {
  if (o.heads > 0 && o.channels > 0 && o.channels % o.heads != 0) {
    user_error("--heads %d does not divide --channels %d; %s channels", o.heads, o.channels,
               nearest_multiples(o.channels, o.heads).c_str());
  }
  if (o.seq_max > 0 && o.seq_len > o.seq_max) {
    user_error("--seq-len %d is longer than the model's --seq-max %d; use --seq-len %d", o.seq_len, o.seq_max,
               o.seq_max);
  }
  if (o.layers == 0) return;
  if (o.pp > o.layers + 2) {
    user_error("--pp %d is more stages than %d blocks, embedding and loss head can fill; use --pp %d", o.pp, o.layers,
               o.layers + 2);
  }
  const std::vector<int> partition = partition_blocks(o);
  const int total = std::accumulate(partition.begin(), partition.end(), 0);
  if (!partition.empty() && total != o.layers) {
    user_error("--partition %s places %d blocks, the model has %d; the numbers must add up to %d", o.partition.c_str(),
               total, o.layers, o.layers);
  }
}

/// Schedules and what needs a folder or data.
inline void check_run(const TrainOptions& o) {
  if (o.steps >= 0 && o.warmup > o.steps) {
    user_error("--warmup %lld is longer than --steps %d; use --warmup %d or less", printable(o.warmup), o.steps,
               o.steps);
  }
  if (o.train_data.empty()) user_error("--train-data names no file; give a file, a quoted glob or a folder");
  if (o.val_data.empty() && o.val_every > 0) {
    user_error("--val-every %lld needs --val-data; give it, or use --val-every 0", printable(o.val_every));
  }
  if (o.val_every > 0 && o.val_batches == 0) {
    user_error("--val-batches 0 validates on nothing; use --val-batches -1 for all data, or --val-every 0 for never");
  }
  const bool wants_folder = o.checkpoint_every > 0 || o.resume || o.save_model;
  if (o.out.empty() && wants_folder) {
    const char* option = o.checkpoint_every > 0 ? "--checkpoint-every" : o.resume ? "--resume" : "--save-model";
    user_error("%s needs a run folder; give --out FOLDER", option);
  }
}

}  // namespace train_option_rules

/// Checks all rules between options that need no file (user error with value and remedy) and fills in what follows from
/// others: --batch-tokens 0, and, without --load, the sizes of the model that are 0. `ranks` >= 1: processes of the
/// job. Call again after sizes from --load are filled in, to check these too; filling in changes nothing the second
/// time.
inline void resolve_train_options(TrainOptions& options, int ranks) {
  assert(ranks >= 1);
  if (options.load.empty()) {
    if (options.layers == 0) options.layers = 4;
    if (options.channels == 0) options.channels = 128;
    if (options.heads == 0) options.heads = 4;
    if (options.vocab == 0) options.vocab = 256;
    if (options.seq_max == 0) options.seq_max = options.seq_len;
  }
  train_option_rules::check_layout(options, ranks);
  train_option_rules::check_model(options);
  train_option_rules::check_run(options);
  if (options.batch_tokens == 0) {
    options.batch_tokens = static_cast<int64_t>(options.micro_batch) * options.seq_len * (ranks / options.pp);
  }
}
