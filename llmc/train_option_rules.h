// train_option_rules.h -- train_options.h, part 2: the rules between options, and what follows from others.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/partition.h"
#include "llmc/train_options.h"

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
}

/// Stages of each rank as far as the options say: --chunks, the number of counts of --partition, what the schedule is
/// made for; 0 where the planner or a schedule file decides.
inline int known_chunks(const TrainOptions& o) {
  const int counts = static_cast<int>(partition_counts(o.partition).size());
  if (o.chunks > 0) return o.chunks;
  if (is_schedule_file(o.schedule)) return 0;
  if (counts > 0) return std::max(1, counts / o.pp);
  return o.schedule == "auto" ? 0 : find_schedule_kind(o.schedule).natural_chunks;
}

/// A --partition list has a count for each stage: pp x chunks, with chunks as given or as the schedule can have.
inline void check_counts_fit_ranks(const TrainOptions& o, const ScheduleKind* kind) {
  const int count = static_cast<int>(partition_counts(o.partition).size()), chunks = known_chunks(o);
  if (count == 0 || chunks == 0) return;
  const bool legal = kind == nullptr || (chunks >= kind->min_chunks && chunks <= kind->max_chunks);
  if (count == o.pp * chunks && (legal || o.chunks > 0)) return;
  const bool one_number = o.chunks > 0 || (kind != nullptr && kind->min_chunks == kind->max_chunks);
  const int needed = o.pp * (o.chunks > 0 ? chunks : kind != nullptr ? kind->natural_chunks : 1);
  user_error("--partition %s has %d counts, --pp %d%s%s needs %d%s; give one count for each stage", o.partition.c_str(),
             count, o.pp, o.chunks > 0 ? format_text(" with --chunks %d", o.chunks).c_str() : "",
             kind != nullptr ? (" and schedule " + kind->name).c_str() : "", needed,
             one_number ? "" : " or another multiple of the ranks");
}

/// Schedule, chunks, partition and recomputation, as far as no file is needed.
inline void check_pipeline(const TrainOptions& o) {
  const bool named = o.schedule != "auto" && !is_schedule_file(o.schedule);
  if (is_schedule_file(o.schedule) && o.chunks > 0) {
    user_error("--chunks %d: the stages of each rank are in --schedule %s; leave --chunks out", o.chunks,
               o.schedule.c_str());
  }
  check_counts_fit_ranks(o, named ? &find_schedule_kind(o.schedule) : nullptr);
  if (named) legal_chunks(find_schedule_kind(o.schedule), known_chunks(o));
  const std::vector<std::string> levels = {"auto", "0", "1", "2", "3"};
  if (std::find(levels.begin(), levels.end(), o.recompute) == levels.end()) {
    user_error("--recompute %s is not known; use auto, 0, 1, 2 or 3", option_detail::shown(o.recompute).c_str());
  }
}

/// Planning and reports.
inline void check_planning(const TrainOptions& o) {
  if (!o.plan && o.replicas != 1) {
    user_error("--replicas %d is for --plan; a run has ranks / pp replicas, start it with mpirun -np %lld", o.replicas,
               printable(static_cast<int64_t>(o.replicas) * o.pp));
  }
  if (o.plan && o.plan_costs == "measured") {
    user_error("--plan-costs measured needs the devices of a run, --plan has none; leave it out");
  }
  if (!o.save_schedule.empty() && !is_schedule_file(o.save_schedule)) {
    user_error("--save-schedule %s does not end in .csv, so --schedule could not read it; use --save-schedule %s.csv",
               o.save_schedule.c_str(), o.save_schedule.c_str());
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
  const bool named = o.schedule != "auto" && !is_schedule_file(o.schedule);
  check_stage_count(o.pp, std::max(1, known_chunks(o)), o.layers,
                    named ? find_schedule_kind(o.schedule).min_chunks : 1);
  const std::vector<int> counts = partition_counts(o.partition);
  if (!counts.empty()) check_counts(o.partition, counts, static_cast<int>(counts.size()), o.layers);
}

/// Learning-rate schedule and what needs a folder or data.
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
  train_option_rules::check_pipeline(options);
  train_option_rules::check_planning(options);
  train_option_rules::check_model(options);
  train_option_rules::check_run(options);
  if (options.batch_tokens == 0) {
    options.batch_tokens = static_cast<int64_t>(options.micro_batch) * options.seq_len * (ranks / options.pp);
  }
}
