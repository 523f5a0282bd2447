// train_options.h -- every option of train_gpt2, its default, its range, and the rules between options.
//
// One row per option in train_option_table(); the aliases and, where they make sense, the defaults are llm.c's, so its
// run scripts work. Rules that need a file (sizes of a checkpoint, samples of a data set) are checked where the file is
// read. "Replica" = one whole model over --pp ranks; replicas = ranks / pp. A rank has one pipeline stage or several
// (chunks). A micro-batch is B = --micro-batch sequences of T = --seq-len tokens; a step takes --batch-tokens / (B * T)
// micro-batches over all replicas together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/options.h"
#include "llmc/pipeline_layout.h"

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
  int chunks = 0;
  std::string partition = "auto";
  std::string recompute = "auto";
  double memory_limit = 0;
  int zero = 0;
  bool exact = true;
  std::string comm = "auto";
  int64_t comm_timeout = 600;

  bool plan = false;
  int replicas = 1;
  std::string plan_costs = "auto";
  std::string save_schedule;

  int64_t report_every = -1;
  bool timeline = false;
  std::string trace;
  int trace_steps = 3;
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

inline std::vector<Row> model() {
  const char* group = "Model (0: from --load)";
  const OptionRange width = OptionRange::between(0, 65536);
  return {
      {group, "layers", "", &O::layers, "L", OptionRange::between(0, 4096), "", "transformer blocks; without --load 4"},
      {group, "channels", "", &O::channels, "C", width, "", "width; without --load 128"},
      {group, "heads", "", &O::heads, "NH", width, "", "attention heads; without --load 4"},
      {group, "vocab", "", &O::vocab, "V", width, "", "token ids 0..V-1; without --load 256, the bytes"},
      {group, "seq-max", "", &O::seq_max, "T", OptionRange::between(0, 1 << 24), "",
       "longest sequence that the model has positions for; without --load that of --seq-len"},
  };
}

/// "gpipe, 1f1b, ...": what --schedule knows by name.
inline const std::string& known_schedules() {
  static const std::string names = [] {
    std::string text;
    for (const std::string& name : schedule_names()) text += (text.empty() ? "" : ", ") + name;
    return text;
  }();
  return names;
}

inline std::vector<Row> parallel() {
  const char* group = "Parallel";
  static const std::string schedules =
      "order of the micro-batches: " + known_schedules() +
      "; auto: the fastest that fits the memory; or a file FILE.csv with a line of actions for each rank";
  return {
      {group, "pp", "", &O::pp, "P", at_least(1), "", "ranks that the model is spread over; replicas = ranks / P"},
      {group, "schedule", "", &O::schedule, "NAME", kNoRange, "", schedules.c_str()},
      {group, "chunks", "", &O::chunks, "V", OptionRange::between(0, 4096), "",
       "pipeline stages of each rank; 0: as the schedule is made for, or as many as --partition has"},
      {group, "partition", "", &O::partition, "HOW", kNoRange, "",
       "blocks per stage: even, auto (least simulated time, counting the loss head), or a list such as 3,4,4,1"},
      {group, "recompute", "r", &O::recompute, "HOW", kNoRange, "",
       "what blocks compute again in the backward pass to save memory: 0 nothing, 1 GELU, 2 GELU and layernorms, 3 "
       "everything; auto: as little as --memory-limit needs, for each stage"},
      {group, "memory-limit", "", &O::memory_limit, "GB", OptionRange::between(0, 1e6), "",
       "most device memory of a rank, in 1e9 bytes; 0: no limit"},
      {group, "zero", "z", &O::zero, "0|1", OptionRange::between(0, 1), "",
       "1: replicas share the optimizer state (ZeRO stage 1); 0: each has all of it"},
      {group, "exact", "", &O::exact, "0|1", kNoRange, "",
       "1: micro-batches and replicas are summed as one tree, equal bits for every layout; 0: left to right, less "
       "memory"},
      {group, "comm", "", &O::comm, "NAME", kNoRange, "auto|mpi|nccl",
       "transport: mpi (through host memory), nccl (one GPU per rank), or auto"},
      {group, "comm-timeout", "", &O::comm_timeout, "SECONDS", at_least(1), "",
       "end the run when a rank waits longer than this for another"},
  };
}

inline std::vector<Row> planning_and_reports() {
  const char *plan = "Planning", *reports = "Pipeline reports";
  return {
      {plan, "plan", "", &O::plan, "[0|1]", kNoRange, "",
       "only say what a run with these options would do: candidates, timeline, memory; needs no GPU, no MPI and no "
       "data",
       true},
      {plan, "replicas", "", &O::replicas, "R", at_least(1), "", "with --plan: plan for pp x R ranks"},
      {plan, "plan-costs", "", &O::plan_costs, "HOW", kNoRange, "auto|model|measured",
       "costs of the planner: model (FLOPs), measured (on every rank, before the run), or auto: measured where a run "
       "has something to search for"},
      {plan, "save-schedule", "", &O::save_schedule, "FILE", kNoRange, "",
       "write the schedule as a CSV file that --schedule reads"},
      {reports, "report-every", "", &O::report_every, "N", at_least(-1), "",
       "report bubble, messages and imbalance every N steps; 0: never, -1: 10 with several pipeline ranks, else never"},
      {reports, "timeline", "", &O::timeline, "0|1", kNoRange, "", "1: with each report the measured timeline as text"},
      {reports, "trace", "", &O::trace, "FILE", kNoRange, "",
       "write a timeline of all ranks for chrome://tracing or Perfetto (JSON); with --plan the simulated one"},
      {reports, "trace-steps", "", &O::trace_steps, "N", at_least(1), "", "steps in the trace"},
  };
}

}  // namespace train_option_rows

/// The table of all options of train_gpt2, in the order of --help.
inline const OptionTable<TrainOptions>& train_option_table() {
  static const OptionTable<TrainOptions> table = [] {
    std::vector<Option<TrainOptions>> rows;
    using namespace train_option_rows;
    for (const auto& group : {data_and_files(), batch_and_optimizer(), evaluation(), checkpoints(), model(), parallel(),
                              planning_and_reports()}) {
      rows.insert(rows.end(), group.begin(), group.end());
    }
    return OptionTable<TrainOptions>(
        "usage: train_gpt2 [--option value]...          one process\n"
        "       mpirun -np RANKS train_gpt2 --pp P ...  pipelines of P ranks x RANKS / P replicas\n"
        "       train_gpt2 --plan --pp P ...            says what such a run would do\n"
        "Trains a GPT-2. Short names are those of llm.c. [..] shows the default.\n",
        rows);
  }();
  return table;
}

#include "llmc/train_option_rules.h"
