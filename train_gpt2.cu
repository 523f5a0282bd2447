// train_gpt2.cu -- trains a GPT-2 on one device, or as pipeline stages x replicas under mpirun.
//
//   make train_gpt2 && ./train_gpt2 --train-data data/train.bin --val-data data/val.bin
//   mpirun -np 4 ./train_gpt2 --pp 2 ...         2 pipeline ranks x 2 replicas, equal to one device bit for bit
//   ./train_gpt2 --plan --pp 4 --schedule auto   what such a run would do; needs no GPU, no MPI, no data
//
// Here: start, options, the end. The steps are in llmc/trainer.h, the model in llmc/gpt2_stage.h, the schedule in
// llmc/schedule.h, one optimizer step over all ranks in llmc/parallel_gpt2_steps.h.
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "llmc/plan_command.h"
#include "llmc/trainer.h"

namespace {

int train(int argc, char** argv, Control& control) {
  TrainOptions options;
  CommandLine command_line;
  run_together(control, [&] {
    command_line = train_option_table().parse(argc, argv, options);
    if (command_line.help) return;
    if (options.plan && control.size() > 1) {
      user_error("--plan is for one process, there are %d ranks; start it without mpirun, --replicas says how many",
                 control.size());
    }
    if (!options.plan) resolve_train_options(options, control.size());
  });
  if (command_line.help) {
    if (control.rank() == 0) printf("%s", train_option_table().help_text().c_str());
    flush_standard_output();
    return 0;
  }
  if (options.plan) {
    run_plan_command(options);
    return 0;
  }
  control.set_timeout(static_cast<double>(options.comm_timeout));
  Trainer trainer(options, control);
  trainer.run();
  return 0;
}

// An error that all ranks share is printed once and ends them in order; any other must not leave the others waiting.
int report(const Error& error, Control& control) {
  if (error.on_all_ranks() || control.size() == 1) {
    if (control.rank() == 0) fprintf(stderr, "error: %s\n", error.what());
    control.barrier();
    return error.exit_code();
  }
  const bool names_rank = strncmp(error.what(), "rank ", 5) == 0;
  fprintf(stderr, "error: %s%s\n", names_rank ? "" : format_text("rank %d: ", control.rank()).c_str(), error.what());
  control.abort(error.exit_code());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Control control(&argc, &argv);
    try {
      return train(argc, argv, control);
    } catch (const Error& error) {
      return report(error, control);
    } catch (const std::bad_alloc&) {
      return report(
          Error(ErrorKind::kEnvironment, "out of host memory; use a smaller model or fewer ranks on this machine"),
          control);
    } catch (const std::exception& error) {  // threads, file systems
      return report(Error(ErrorKind::kEnvironment, error.what()), control);
    }
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
