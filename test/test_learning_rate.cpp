// test_learning_rate.cpp -- the learning rate schedules at the points where their formulas can be read off.
#include "llmc/learning_rate.h"

#include <gtest/gtest.h>

#include "test/host_test.h"

namespace {

LearningRateSchedule schedule(const char* name, int64_t warmup, int64_t total, double final_fraction) {
  LearningRateSchedule result;
  result.shape = parse_learning_rate_shape(name);
  result.peak = 0.5;
  result.warmup_steps = warmup;
  result.total_steps = total;
  result.final_fraction = final_fraction;
  return result;
}
constexpr const char* kNames[] = {"constant", "linear", "cosine", "wsd"};

}  // namespace

// Warm-up rises by peak / W a step and reaches the peak in step W - 1, for every shape.
TEST(LearningRate, WarmUp) {
  for (const char* name : kNames) {
    const LearningRateSchedule s = schedule(name, 4, 20, 0.1);
    EXPECT_DOUBLE_EQ(learning_rate_at(s, 0), 0.125) << name;
    EXPECT_DOUBLE_EQ(learning_rate_at(s, 1), 0.25) << name;
    EXPECT_DOUBLE_EQ(learning_rate_at(s, 3), 0.5) << name;
    EXPECT_DOUBLE_EQ(learning_rate_at(s, 4), 0.5) << name;
  }
}

// The decay between warm-up and end: quarter, middle and last points of each curve, computed by hand.
TEST(LearningRate, Shapes) {
  // S = 24, W = 4: r = (s - 4) / 20; lowest = 0.05, span 0.45
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("constant", 4, 24, 0.1), 14), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("linear", 4, 24, 0.1), 9), 0.05 + 0.75 * 0.45);
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("linear", 4, 24, 0.1), 23), 0.05 + 0.05 * 0.45);
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("cosine", 4, 24, 0.1), 14), 0.05 + 0.5 * 0.45);
  EXPECT_NEAR(learning_rate_at(schedule("cosine", 4, 24, 0.1), 9), 0.05 + 0.8535533905932738 * 0.45, 1e-15);
  // S = 100: flat to D = 80, then r = (s - 80) / 20; r = 1/4 leaves half of the height
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("wsd", 4, 100, 0.1), 80), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("wsd", 4, 100, 0.1), 79), 0.5);
  EXPECT_LT(learning_rate_at(schedule("wsd", 4, 100, 0.1), 81), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate_at(schedule("wsd", 4, 100, 0.1), 85), 0.05 + 0.5 * 0.45);
}

// After the warm-up no schedule rises, and all stay between the final rate and the peak.
TEST(LearningRate, FallsMonotonically) {
  for (const char* name : kNames) {
    for (int64_t total : {1, 2, 3, 5, 7, 100, 1001}) {
      for (int64_t warmup : {0, 1, 5}) {
        if (warmup > total) continue;
        const LearningRateSchedule s = schedule(name, warmup, total, 0.25);
        double previous = 0.5;
        for (int64_t step = warmup; step < total + 3; step++) {
          const double lr = learning_rate_at(s, step);
          EXPECT_LE(lr, previous) << name << " " << step << "/" << total;
          EXPECT_GE(lr, 0.125) << name << " " << step << "/" << total;
          previous = lr;
        }
      }
    }
  }
}

// Past the end: the final rate (the peak when constant). Degenerate lengths (no steps, warm-up = all steps, warm-up
// into the decay of wsd) give finite values. A final fraction of 1 keeps every shape flat.
TEST(LearningRate, EndsAndDegenerateLengths) {
  for (const char* name : kNames) {
    const bool constant = std::string(name) == "constant";
    for (int64_t step : {10, 11, 1000}) {
      EXPECT_DOUBLE_EQ(learning_rate_at(schedule(name, 2, 10, 0.1), step), constant ? 0.5 : 0.05);
      EXPECT_DOUBLE_EQ(learning_rate_at(schedule(name, 10, 10, 0.1), step), constant ? 0.5 : 0.05);
      EXPECT_DOUBLE_EQ(learning_rate_at(schedule(name, 0, 0, 0.1), step), constant ? 0.5 : 0.05);
      EXPECT_DOUBLE_EQ(learning_rate_at(schedule(name, 2, 50, 1.0), step), 0.5);
    }
    EXPECT_DOUBLE_EQ(learning_rate_at(schedule(name, 9, 10, 0.1), 9), 0.5) << name;
  }
}

// An unknown name is a user error that lists the known ones.
TEST(LearningRate, UnknownName) {
  EXPECT_EQ(user_error_text([] { parse_learning_rate_shape("cos"); }),
            "--lr-schedule cos is not known; use constant, linear, cosine or wsd");
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
