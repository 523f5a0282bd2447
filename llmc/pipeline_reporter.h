// pipeline_reporter.h -- what the trainer says about the pipeline: a report every N steps, and the trace of the first.
//
//   reporter.before_step(step);  model.train_step(...);  reporter.after_step(step, log);
//
// On the other steps nothing is recorded and nothing is sent. A reported step gathers some 100 bytes an action on rank
// 0, after the step: it is not slower itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "llmc/closed_form.h"
#include "llmc/parallel_gpt2.h"
#include "llmc/recorder.h"
#include "llmc/telemetry_text.h"
#include "llmc/timeline.h"
#include "llmc/trace.h"

struct ReportSettings {
  int64_t every = 10;     // steps; 0: never
  bool timeline = false;  // with each report the measured timeline as text
  std::string trace;      // file for a trace, or ""
  int trace_steps = 3;    // the first steps of this start
};

class PipelineReporter {
 public:
  /// `world` may be null for one rank. The references outlive the reporter. Same settings on all ranks.
  PipelineReporter(const ReportSettings& settings, const Grid& grid, Control& control, Communicator* world,
                   ParallelGPT2& model, cudaStream_t stream)
      : settings_(settings),
        grid_(grid),
        control_(control),
        model_(model),
        recorder_(stream, world),
        watches_(static_cast<size_t>(grid.replicas)) {
    for (int r = 0; r < grid.replicas; ++r) {
      const int count = tree_share(model.micro_batches(), grid.replicas, r).count;
      plans_.push_back(make_train_plan(model.layout(), count));
    }
  }

  /// `step`: 1-based number of the optimizer step that comes next.
  void before_step(int64_t step) {
    const bool reports = settings_.every > 0 && step % settings_.every == 0;
    recording_ = reports || is_tracing();
    model_.set_recorder(recording_ ? &recorder_ : nullptr);
  }

  /// Collective. The report goes to `log`, the trace to its file once its steps are complete.
  void after_step(int64_t step, Logger& log) {
    if (!recording_) return;
    const std::vector<StepTimes> all = gather_step_times(control_, recorder_.finish_step());
    if (control_.rank() == 0) {
      const JobTimes replicas = by_replica(all);
      if (settings_.every > 0 && step % settings_.every == 0) report(step, replicas, log);
      if (is_tracing()) trace_.push_back(replicas);
    }
    if (is_tracing() && ++traced_ == settings_.trace_steps) write_trace();
  }

  /// The run is over: writes what there is of a trace whose steps are not complete. Environment error on all ranks if a
  /// trace could not be written: only now, so that a full disk does not cost the training. Collective.
  void finish() {
    if (is_tracing() && traced_ > 0) write_trace();
    run_together(control_, [&] {
      if (!failure_.empty()) environment_error("--trace: %s; the run itself is complete", failure_.c_str());
    });
  }

 private:
  bool is_tracing() const { return !settings_.trace.empty() && traced_ < settings_.trace_steps; }

  JobTimes by_replica(const std::vector<StepTimes>& all) const {
    JobTimes replicas(static_cast<size_t>(grid_.replicas));
    for (int replica = 0; replica < grid_.replicas; ++replica) {
      for (int place = 0; place < grid_.pipeline; ++place) {
        replicas[replica].push_back(all[grid_.rank_of(place, replica)]);
      }
    }
    return replicas;
  }

  // One object a replica in metrics.jsonl; on the screen the slowest pipeline of the job.
  void report(int64_t step, const JobTimes& replicas, Logger& log) {
    std::vector<PipelineReport> reports;
    std::string json;
    std::vector<int> stragglers;
    size_t slowest = 0;
    for (size_t r = 0; r < replicas.size(); ++r) {
      reports.push_back(make_report(plans_[r], replicas[r]));
      reports[r].closed_form = closed_form(plans_[r], reports[r]);
      stragglers.push_back(watches_[r].update(reports[r]));
      json += (r ? "\n" : "") + telemetry_json(step, reports[r], stragglers[r], static_cast<int>(r));
      if (reports[r].makespan > reports[slowest].makespan) slowest = r;
    }
    log.telemetry(json, telemetry_line(step, reports[slowest], stragglers[slowest]));
    if (!settings_.timeline) return;
    log.message(timeline_text(measured_plan(plans_[slowest], reports[slowest], replicas[slowest])));
  }

  // For stages that are all as expensive as those of this step on average.
  std::optional<double> closed_form(const Plan& plan, const PipelineReport& report) const {
    if (is_schedule_file(model_.layout().schedule)) return std::nullopt;
    StageCost rank;
    for (const StageCost& stage : report.costs.stages) add_cost(&rank, stage, 1.0 / plan.schedule.ranks);
    return closed_form_bubble(plan.schedule.name, plan.schedule.ranks, model_.layout().chunks,
                              plan.schedule.micro_batches, rank, true);
  }

  void write_trace() {
    if (control_.rank() != 0) return;
    const std::string title = format_text("%s, measured", plans_[0].schedule.name.c_str());
    try {
      write_file_atomically(settings_.trace, trace_json(trace_, title));
    } catch (const Error& error) {
      failure_ = error.what();
    }
  }

  ReportSettings settings_;
  Grid grid_;
  Control& control_;
  ParallelGPT2& model_;
  StepRecorder recorder_;
  std::vector<Plan> plans_;  // of each replica
  std::vector<StragglerWatch> watches_;
  bool recording_ = false;
  int traced_ = 0;
  std::string failure_;          // to write the trace
  std::vector<JobTimes> trace_;  // one a step; on rank 0
};
