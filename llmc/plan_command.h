// plan_command.h -- `train_gpt2 --plan`: what a run with these options would do, without a device, MPI or data.
#pragma once

#include <cstdio>
#include <string>

#include "llmc/file.h"
#include "llmc/logger.h"
#include "llmc/model_options.h"
#include "llmc/plan_report.h"
#include "llmc/trace.h"

namespace plan_command_detail {

inline void print_question(const TrainOptions& o, const GPT2Config& config, const Gpt2Planning& planning) {
  printf("model       GPT-2, %d layers, %d channels, vocabulary %d, %lld parameters, %s\n", config.layers,
         config.channels, config.vocab, static_cast<long long>(gpt2_parameter_count(config)),
         sizeof(floatX) == sizeof(float) ? "fp32" : "bf16");
  printf(
      "job         %d ranks a replica x %d replicas, ZeRO %d; step: %lld tokens, %d micro-batches of %d x %d a "
      "replica\n",
      o.pp, o.replicas, o.zero, static_cast<long long>(o.batch_tokens), planning.micro_batches(), o.micro_batch,
      o.seq_len);
  printf(
      "costs       FLOPs of one micro-batch; times are in GFLOP of work on one rank (a device that does R GFLOP a\n"
      "            second needs time / R seconds); a value between ranks costs %g FLOPs\n",
      kFlopsPerValue);
}

inline void write_files(const TrainOptions& o, const Plan& plan) {
  if (!o.save_schedule.empty()) {
    write_file_atomically(o.save_schedule, schedule_csv_text(plan.schedule));
    printf("schedule    written to %s\n", o.save_schedule.c_str());
  }
  if (!o.trace.empty()) {
    const std::string title = format_text("%s, simulated (1 s = 1 GFLOP of work)", plan.schedule.name.c_str());
    write_file_atomically(o.trace, trace_json(JobTimes{simulated_step_times(plan)}, title));
    printf("trace       simulated step written to %s\n", o.trace.c_str());
  }
}

}  // namespace plan_command_detail

/// Prints candidates, choice, timeline and memory for the parsed options, and writes --save-schedule and --trace. User
/// errors as in a run. Less than a second.
inline void run_plan_command(TrainOptions options) {
  using namespace plan_command_detail;
  const int64_t ranks = static_cast<int64_t>(options.pp) * options.replicas;
  if (ranks > INT32_MAX) user_error("--pp %d x --replicas %d are too many ranks", options.pp, options.replicas);
  resolve_train_options(options, static_cast<int>(ranks));
  resolve_model_options(options, static_cast<int>(ranks));
  if (!options.trace.empty()) check_output_path("--trace", options.trace);
  if (!options.save_schedule.empty()) check_output_path("--save-schedule", options.save_schedule);
  const GPT2Config config = model_config(options);
  const ModelCost cost = gpt2_model_cost(config, options.micro_batch, options.seq_len);
  const Gpt2Planning planning(options, config, options.replicas, cost);
  const PlanResult result = planning.search_or_explain();
  const PipelineLayout& layout = result.best().layout;
  const Plan plan = make_train_plan(layout, planning.micro_batches());

  print_question(options, config, planning);
  printf("candidates  (eff.: work / (ranks x step); GB/rank: of the fullest rank%s)\n%s",
         options.memory_limit > 0 ? format_text("; limit %g GB", options.memory_limit).c_str() : "",
         candidates_table(result, options.memory_limit > 0).c_str());
  printf("choice      %s, blocks %s, recompute %s\n", schedule_text(layout).c_str(),
         partition_text(layout.cuts).c_str(), recompute_text(layout.recompute).c_str());
  printf("%s", bubble_text(layout, plan).c_str());
  printf("timeline\n%s", timeline_text(plan).c_str());
  std::vector<RankMemory> memory;
  for (int rank = 0; rank < layout.ranks; rank++) memory.push_back(planning.memory(layout, plan, rank));
  printf("memory      GB (1e9 bytes) of each rank\n%s", memory_table(layout, plan, memory).c_str());
  write_files(options, plan);
  flush_standard_output();
}
