// logger.h -- what a run writes down: main.log, metrics.jsonl, and progress on the screen. Rank 0 only.
//
//   main.log       llm.c's lines  `s:%d trl:%.4f lr:%.6f norm:%.2f`  and  `s:%d tel:%.4f`
//   metrics.jsonl  one JSON object a line, numbers in %.17g (they read back to the same bits; nan and inf become null):
//                  {"step":..,"loss":..,"grad_norm":..,"lr":..,"ms":..,"tokens_per_second":..}
//                  {"step":..,"val_loss":..}   {"step":..,"pipeline":{..}} (telemetry_text.h)
//   screen         one updating line on a terminal, else a plain line a step
// Every line goes to the file in one write as soon as it is known, without a buffer in the process: a kill -9 loses
// nothing, and a line is never half there unless the disk was full. A resumed run first cuts the files back to the step
// it resumes from, so that each step stands there once. A failed write is an environment error that names the file.
#pragma once

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <sys/ioctl.h>
#include <unistd.h>

#include "llmc/check.h"
#include "llmc/file.h"
#include "llmc/json.h"

/// One optimizer step. `loss` mean per token, `grad_norm` before clipping, `milliseconds` wall time of the step.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0.0;
  double grad_norm = 0.0;
  double lr = 0.0;
  double milliseconds = 0.0;
  double tokens_per_second = 0.0;
};

/// Brings what was printed to standard output: environment error when that fails (full disk, closed terminal).
inline void flush_standard_output() {
  if (fflush(stdout) != 0 || ferror(stdout)) file_error("standard output", "writing");
}

namespace logger_detail {

/// "12.3k", "1.75M": three to four significant digits.
inline std::string short_number(double value) {
  if (value >= 1e6) return format_text("%.2fM", value / 1e6);
  if (value >= 1e4) return format_text("%.1fk", value / 1e3);
  return format_text("%.0f", value);
}

/// "1:02:03", "2:03"; days count as hours.
inline std::string duration_text(double seconds) {
  const int64_t s = static_cast<int64_t>(std::min(seconds, 3.6e9) + 0.5);
  if (s < 3600) return format_text("%d:%02d", static_cast<int>(s / 60), static_cast<int>(s % 60));
  return format_text("%" PRId64 ":%02d:%02d", s / 3600, static_cast<int>(s / 60 % 60), static_cast<int>(s % 60));
}

/// The step at the start of a line of main.log ("s:12 ...") or metrics.jsonl ({"step":12,...); -1 if it has none.
inline int64_t step_of_line(const std::string& line) {
  int64_t step = -1;
  if (sscanf(line.c_str(), "s:%" SCNd64 " ", &step) == 1) return step;
  if (sscanf(line.c_str(), "{\"step\":%" SCNd64 ",", &step) == 1) return step;
  return -1;
}

/// Bytes of a log that belong to steps before `first_step`: everything up to the first line of a later step or the
/// first line without an end (torn by a full disk).
inline uint64_t bytes_before_step(const std::string& log, int64_t first_step) {
  size_t begin = 0;
  while (begin < log.size()) {
    const size_t end = log.find('\n', begin);
    if (end == std::string::npos || step_of_line(log.substr(begin, end - begin)) >= first_step) break;
    begin = end + 1;
  }
  return begin;
}

}  // namespace logger_detail

/// The text of the progress line. `total_steps` of the run; `seconds_left` < 0: not known yet.
inline std::string progress_text(const StepMetrics& metrics, int64_t total_steps, double seconds_left) {
  using namespace logger_detail;
  const std::string total = std::to_string(total_steps), step = std::to_string(metrics.step);
  const std::string padding(total.size() > step.size() ? total.size() - step.size() : 0, ' ');
  return format_text("step %s%s/%s | loss %.4f | norm %.3f | lr %.2e | %.0f ms | %s tokens/s | %s left",
                     padding.c_str(), step.c_str(), total.c_str(), metrics.loss, metrics.grad_norm, metrics.lr,
                     metrics.milliseconds, short_number(metrics.tokens_per_second).c_str(),
                     seconds_left < 0 ? "-:--" : duration_text(seconds_left).c_str());
}

struct LoggerOptions {
  std::string folder;         // run folder, created when missing; "": no files
  int64_t first_step = -1;    // resumed run: lines of this step and later ones are cut off; -1: start new files
  int64_t total_steps = 0;    // for the progress line
  FILE* screen = stdout;      // nullptr: silent
  int terminal_columns = -1;  // width of the updating line; 0: plain lines; -1: find out from `screen`
};

class Logger {
 public:
  /// Does nothing at all: for the other ranks.
  Logger() { options_.screen = nullptr; }

  /// Creates folder and files, or cuts the files of a resumed run. Environment error when they cannot be written.
  explicit Logger(const LoggerOptions& options) : options_(options) {
    if (options_.screen && options_.terminal_columns < 0) options_.terminal_columns = find_columns(options_.screen);
    if (options_.folder.empty()) return;
    make_folders(options_.folder);
    main_log_ = open_log(options_.folder + "/main.log");
    metrics_ = open_log(options_.folder + "/metrics.jsonl");
  }

  /// Writes a finished step to both files and shows the progress.
  void train_step(const StepMetrics& m) {
    if (main_log_.is_open()) {
      main_log_.write_all(format_text("s:%" PRId64 " trl:%.4f lr:%.6f norm:%.2f\n", m.step, m.loss, m.lr, m.grad_norm));
      metrics_.write_all(format_text(
          "{\"step\":%" PRId64 ",\"loss\":%s,\"grad_norm\":%s,\"lr\":%s,\"ms\":%s,\"tokens_per_second\":%s}\n", m.step,
          json_number(m.loss).c_str(), json_number(m.grad_norm).c_str(), json_number(m.lr).c_str(),
          json_number(m.milliseconds).c_str(), json_number(m.tokens_per_second).c_str()));
    }
    show_progress(m);
  }

  /// Writes a validation loss (mean per token) to both files and prints it.
  void validation(int64_t step, double loss) {
    if (std::isnan(loss)) loss = NAN;  // not "-nan"
    if (main_log_.is_open()) {
      main_log_.write_all(format_text("s:%" PRId64 " tel:%.4f\n", step, loss));
      metrics_.write_all(format_text("{\"step\":%" PRId64 ",\"val_loss\":%s}\n", step, json_number(loss).c_str()));
    }
    message(format_text("step %" PRId64 " | validation loss %.4f", step, loss));
  }

  /// Writes a finished step's telemetry: `json`, one object without a line end that begins with {"step":N, to
  /// metrics.jsonl, and `line` to the screen.
  void telemetry(const std::string& json, const std::string& line) {
    assert(logger_detail::step_of_line(json) >= 0 && "a resumed run cuts by the step");
    if (metrics_.is_open()) metrics_.write_all(json + "\n");
    message(line);
  }

  /// Prints a line (or several) on the screen, above the progress line.
  void message(const std::string& text) {
    if (!options_.screen) return;
    end_progress_line();
    print(text + "\n");
  }

  /// Brings both files to the disk: call before a checkpoint of the step is completed, so that after a power cut the
  /// logs reach at least as far as the checkpoint.
  void sync() {
    if (!main_log_.is_open()) return;
    main_log_.sync();
    metrics_.sync();
  }

 private:
  using Clock = std::chrono::steady_clock;

  File open_log(const std::string& path) const {
    if (options_.first_step < 0) {
      File::create(path).close();
      return File::open_to_append(path);
    }
    File file = File::open_to_append(path);
    std::string content(file.size(), '\0');
    file.pread_all(&content[0], content.size(), 0);
    const uint64_t kept = logger_detail::bytes_before_step(content, options_.first_step);
    if (kept < content.size()) file.truncate(kept);
    return file;
  }

  static int find_columns(FILE* screen) {
    const int descriptor = fileno(screen);
    const char* terminal = getenv("TERM");
    if (!isatty(descriptor) || (terminal && strcmp(terminal, "dumb") == 0)) return 0;
    winsize size = {};
    // mpirun gives rank 0 a pseudo-terminal without a size, whatever its own output goes to: perhaps a file
    return ioctl(descriptor, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
  }

  void show_progress(const StepMetrics& m) {
    if (!options_.screen) return;
    const std::string text = progress_text(m, options_.total_steps, seconds_left(m.step));
    if (options_.terminal_columns == 0) return print(text + "\n");
    // one column stays free: a full line would wrap, and the next \r would go to the wrong line
    print("\r" + text.substr(0, static_cast<size_t>(options_.terminal_columns) - 1) + "\x1b[K");
    line_is_open_ = true;
    if (m.step >= options_.total_steps) end_progress_line();
  }

  /// Mean wall time of the steps so far, with all that happens between them (validation, checkpoints), times steps to
  /// go.
  double seconds_left(int64_t step) {
    const Clock::time_point now = Clock::now();
    if (first_shown_step_ < 0) {
      first_shown_step_ = step;
      first_shown_time_ = now;
      return step >= options_.total_steps ? 0.0 : -1.0;
    }
    const double seconds = std::chrono::duration<double>(now - first_shown_time_).count();
    const int64_t done = std::max<int64_t>(step - first_shown_step_, 1);
    return seconds / static_cast<double>(done) * static_cast<double>(std::max<int64_t>(options_.total_steps - step, 0));
  }

  void end_progress_line() {
    if (line_is_open_) print("\n");
    line_is_open_ = false;
  }

  void print(const std::string& text) const {
    if (fputs(text.c_str(), options_.screen) < 0 || fflush(options_.screen) != 0) {
      file_error("standard output", "writing");
    }
  }

  LoggerOptions options_;
  File main_log_;
  File metrics_;
  int64_t first_shown_step_ = -1;
  Clock::time_point first_shown_time_;
  bool line_is_open_ = false;
};
