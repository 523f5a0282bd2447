// test_logger.cpp -- log lines, their precision, resuming, the progress line, and disks that are full.
#include "llmc/logger.h"

#include <cmath>

#include <gtest/gtest.h>

#include "test/host_test.h"

namespace {

LoggerOptions silent(const TemporaryFolder& folder) {
  LoggerOptions options;
  options.folder = folder / "run/a";
  options.screen = nullptr;
  return options;
}
StepMetrics metrics(int64_t step) {
  StepMetrics m;
  m.step = step;
  m.loss = 2.0 + 1.0 / 3.0;
  m.grad_norm = 0.1;
  m.lr = 3e-4;
  m.milliseconds = 12.5;
  m.tokens_per_second = 4096.0;
  return m;
}
std::string main_log(const TemporaryFolder& folder) { return read_whole_file(folder / "run/a/main.log", "log"); }
std::string json_log(const TemporaryFolder& folder) { return read_whole_file(folder / "run/a/metrics.jsonl", "log"); }

/// What a logger writes to its screen.
std::string screen_of(LoggerOptions options, const std::function<void(Logger&)>& use) {
  char* text = nullptr;
  size_t size = 0;
  options.screen = open_memstream(&text, &size);
  {
    Logger logger(options);
    use(logger);
  }
  fclose(options.screen);
  const std::string result(text, size);
  free(text);
  return result;
}

}  // namespace

// main.log holds llm.c's lines to the byte, metrics.jsonl one object a line with every digit.
TEST(Logger, Lines) {
  const TemporaryFolder folder;
  Logger logger(silent(folder));
  logger.validation(0, 5.54321);
  logger.train_step(metrics(1));
  EXPECT_EQ(main_log(folder), "s:0 tel:5.5432\ns:1 trl:2.3333 lr:0.000300 norm:0.10\n");
  EXPECT_EQ(json_log(folder),
            "{\"step\":0,\"val_loss\":5.5432100000000002}\n"
            "{\"step\":1,\"loss\":2.3333333333333335,\"grad_norm\":0.10000000000000001,\"lr\":0.00029999999999999997,"
            "\"ms\":12.5,\"tokens_per_second\":4096}\n");
}

// Telemetry goes to metrics.jsonl and the screen; a resumed run cuts it like the other lines of its step.
TEST(Logger, Telemetry) {
  const TemporaryFolder folder;
  LoggerOptions options = silent(folder);
  const std::string screen = screen_of(options, [&](Logger& logger) {
    logger.telemetry("{\"step\":1,\"pipeline\":{}}", "step 1 | pipeline");
    logger.telemetry("{\"step\":2,\"pipeline\":{}}", "step 2 | pipeline");
  });
  EXPECT_EQ(screen, "step 1 | pipeline\nstep 2 | pipeline\n");
  EXPECT_EQ(json_log(folder), "{\"step\":1,\"pipeline\":{}}\n{\"step\":2,\"pipeline\":{}}\n");
  options.first_step = 2;
  { Logger resumed(options); }
  EXPECT_EQ(json_log(folder), "{\"step\":1,\"pipeline\":{}}\n");
}

// The loss in metrics.jsonl reads back to the same bits; nan and inf, which JSON does not have, become null.
TEST(Logger, FullPrecision) {
  for (double value : {0.1 + 0.2, 1e-300, 4.9406564584124654e-324, 1.0000000000000002, -7.0 / 3.0}) {
    EXPECT_EQ(strtod(json_number(value).c_str(), nullptr), value);
  }
  EXPECT_EQ(json_number(NAN), "null");
  EXPECT_EQ(json_number(INFINITY), "null");
}

// A run that stops anywhere and resumes leaves the same files as one that never stopped: later lines are cut, none
// doubled.
TEST(Logger, ResumeEqualsUninterrupted) {
  const auto train = [](Logger& logger, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; step++) {
      logger.train_step(metrics(step));
      if (step % 5 == 0) logger.validation(step, 1.0 / static_cast<double>(step));
    }
  };
  const TemporaryFolder whole;
  Logger uninterrupted(silent(whole));
  train(uninterrupted, 1, 120);
  for (int64_t checkpoint : {1, 9, 10, 11, 99, 100}) {
    for (int64_t stop : {int64_t{0}, int64_t{1}, int64_t{15}}) {
      const TemporaryFolder folder;
      {
        Logger logger(silent(folder));
        train(logger, 1, checkpoint + stop);
      }
      LoggerOptions options = silent(folder);
      options.first_step = checkpoint + 1;
      Logger resumed(options);
      train(resumed, checkpoint + 1, 120);
      EXPECT_EQ(main_log(folder), main_log(whole)) << checkpoint << " + " << stop;
      EXPECT_EQ(json_log(folder), json_log(whole)) << checkpoint << " + " << stop;
    }
  }
}

// A line torn by a full disk is dropped on resuming even when its step is kept; a missing log is created.
TEST(Logger, ResumeWithTornOrMissingLog) {
  const TemporaryFolder folder;
  make_folders(folder / "run/a");
  folder.write("run/a/main.log", "s:1 trl:2.3333 lr:0.000300 norm:0.10\ns:2 trl:2.3");
  LoggerOptions options = silent(folder);
  options.first_step = 30;
  Logger logger(options);
  logger.train_step(metrics(30));
  EXPECT_EQ(main_log(folder), "s:1 trl:2.3333 lr:0.000300 norm:0.10\ns:30 trl:2.3333 lr:0.000300 norm:0.10\n");
  EXPECT_EQ(json_log(folder).compare(0, 10, "{\"step\":30"), 0);
}

// A new run (not resumed) starts new files.
TEST(Logger, FreshRunStartsNewFiles) {
  const TemporaryFolder folder;
  {
    Logger logger(silent(folder));
    logger.train_step(metrics(1));
  }
  Logger logger(silent(folder));
  EXPECT_EQ(main_log(folder), "");
  EXPECT_EQ(json_log(folder), "");
}

// Not on a terminal: one plain line a step, with step, loss, speed and time left, and no control characters.
TEST(Logger, PlainProgress) {
  LoggerOptions options;
  options.total_steps = 100;
  options.terminal_columns = 0;
  const std::string screen = screen_of(options, [](Logger& logger) {
    logger.train_step(metrics(1));
    logger.validation(1, 5.5);
    logger.train_step(metrics(100));
  });
  EXPECT_EQ(screen,
            "step   1/100 | loss 2.3333 | norm 0.100 | lr 3.00e-04 | 12 ms | 4096 tokens/s | -:-- left\n"
            "step 1 | validation loss 5.5000\n"
            "step 100/100 | loss 2.3333 | norm 0.100 | lr 3.00e-04 | 12 ms | 4096 tokens/s | 0:00 left\n");
}

// On a terminal: the line is rewritten in place, never as wide as the terminal, and other output gets its own line.
TEST(Logger, TerminalProgress) {
  LoggerOptions options;
  options.total_steps = 3;
  options.terminal_columns = 21;
  const std::string screen = screen_of(options, [](Logger& logger) {
    logger.train_step(metrics(1));
    logger.train_step(metrics(2));
    logger.message("hello");
    logger.train_step(metrics(3));
  });
  EXPECT_EQ(screen,
            "\rstep 1/3 | loss 2.33\x1b[K"
            "\rstep 2/3 | loss 2.33\x1b[K\nhello\n"
            "\rstep 3/3 | loss 2.33\x1b[K\n");
}

// Numbers and times are short and readable.
TEST(Logger, ShortNumbers) {
  using namespace logger_detail;
  EXPECT_EQ(short_number(950.4), "950");
  EXPECT_EQ(short_number(12345), "12.3k");
  EXPECT_EQ(short_number(1750000), "1.75M");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(3723), "1:02:03");
  EXPECT_EQ(duration_text(360000), "100:00:00");
  EXPECT_TRUE(contains(progress_text(metrics(7), 20, 65), "step  7/20 |"));
  EXPECT_TRUE(contains(progress_text(metrics(7), 20, 65), "| 1:05 left"));
}

// The logger of the other ranks writes nothing anywhere.
TEST(Logger, OtherRanksAreSilent) {
  Logger logger;
  logger.train_step(metrics(1));
  logger.validation(1, 2.0);
  logger.message("text");
  logger.sync();
}

// A full disk is an environment error that names the file (the log leads to /dev/full), for each file and for the
// screen.
TEST(Logger, FullDisk) {
  for (const char* name : {"main.log", "metrics.jsonl"}) {
    const TemporaryFolder folder;
    make_folders(folder / "run/a");
    const std::string path = folder / (std::string("run/a/") + name);
    ASSERT_EQ(symlink("/dev/full", path.c_str()), 0);
    Logger logger(silent(folder));
    for (const auto& write : {std::function<void()>([&] { logger.train_step(metrics(1)); }),
                              std::function<void()>([&] { logger.validation(1, 2.0); })}) {
      EXPECT_EQ(environment_error_text(write),
                path + ": writing failed: No space left on device; free some space and start again");
    }
  }
  LoggerOptions options;
  options.screen = fopen("/dev/full", "w");
  Logger logger(options);
  EXPECT_TRUE(contains(environment_error_text([&] { logger.message("text"); }), "standard output: writing failed"));
  fclose(options.screen);
}

// A run folder that cannot be made is an environment error that names it, and nothing is overwritten.
TEST(Logger, UnwritableFolder) {
  const TemporaryFolder folder;
  folder.write("run", "a file, not a folder");
  const std::string message = environment_error_text([&] { Logger logger(silent(folder)); });
  EXPECT_TRUE(contains(message, folder / "run")) << message;
  EXPECT_EQ(read_whole_file(folder / "run", "file"), "a file, not a folder");
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
