// job_test.h -- test programs under mpirun that also start jobs which must fail (time-out, killed rank).
//
// The program starts `mpirun -np N <itself> MODE` and looks at the exit code, the text and the time. Such tests are in
// the run with one rank only.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "test/mpi_test.h"

/// The group of all ranks.
inline Control* test_control() { return &control(); }

/// A job that ended: how, what it printed, after how long.
struct JobResult {
  int exit_code;
  double seconds;
  std::string output;
  bool prints(const std::string& text) const { return output.find(text) != std::string::npos; }
};

/// `env -u ...` for the variables of the job that we are part of, which would make a new job join it.
inline std::string clean_environment() {
  std::string command = "env";
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string name(*variable, strcspn(*variable, "="));
    for (const char* prefix : {"OMPI_", "PMIX_", "ORTE_", "PMI_", "PRTE_"}) {
      if (name.compare(0, strlen(prefix), prefix) == 0) command += " -u " + name;
    }
  }
  return command +
         " OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 "
         "OMPI_MCA_mpi_yield_when_idle=1 ";
}

/// Runs `mpirun -np ranks <this program> mode` with `variables` ("NAME=value NAME=value") in the environment; without
/// mpirun for 0 ranks.
inline JobResult run_job(int ranks, const std::string& mode, const std::string& variables = "") {
  char self[4096] = "";
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
  EXPECT_GT(length, 0);
  const std::string launcher = ranks > 0 ? "mpirun --bind-to none -np " + std::to_string(ranks) : "";
  const std::string command =
      clean_environment() + variables + " timeout -k 5 60 " + launcher + " '" + self + "' " + mode + " 2>&1 </dev/null";
  const Clock::time_point start = Clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  JobResult result = {-1, 0, ""};
  if (pipe == nullptr) return result;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) result.output.append(buffer, n);
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.seconds = seconds_since(start);
  return result;
}

/// Expects a job that ended by itself, soon, with a non-zero exit code, and printed `text`.
inline void expect_failure(const JobResult& job, const std::string& text, double within_seconds) {
  EXPECT_NE(job.exit_code, 0) << job.output;
  EXPECT_NE(job.exit_code, 124) << "it hung\n" << job.output;
  EXPECT_LT(job.seconds, within_seconds);
  EXPECT_TRUE(job.prints(text)) << "expected: " << text << "\n" << job.output;
}

/// Seconds of processor time of this process, all threads.
inline double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

using JobMode = std::function<void(Control&)>;

/// main(): one of the `modes` that run_job starts, between `prepare` and `finish`.
inline int run_job_mode(
    int argc, char** argv, const std::map<std::string, JobMode>& modes, const JobMode& prepare = [](Control&) {}) {
  const auto mode = modes.find(argv[1]);
  if (mode == modes.end()) return 3;
  std::unique_ptr<Control> control;
  try {
    control = std::make_unique<Control>(&argc, &argv);
    prepare(*control);
    mode->second(*control);
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    if (control == nullptr) return error.exit_code();
    control->abort(error.exit_code());
  }
  return 0;
}

/// Whether the arguments name a mode.
inline bool is_job_mode(int argc, char** argv) { return argc > 1 && argv[1][0] != '-'; }
