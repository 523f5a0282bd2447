// test_schedule.cpp -- the generators give the lists of the papers, and check_lists finds every fault in a list.
#include <gtest/gtest.h>

#include "llmc/schedule.h"

static std::string list_text(const std::vector<Action>& list) {
  std::string text;
  for (const Action& action : list) text += format_text("%c%d ", op_letter(action.op), action.micro_batch);
  return text;
}

static std::string fault(const Schedule& schedule) {
  std::vector<int> peak;
  return check_lists(schedule, &peak);
}

// GPipe runs all forwards, then all backwards, both ascending, on every rank.
TEST(Schedule, GpipeLists) {
  const Schedule schedule = make_schedule("gpipe", 2, 3);
  EXPECT_EQ(list_text(schedule.actions[0]), "F0 F1 F2 B0 B1 B2 ");
  EXPECT_EQ(list_text(schedule.actions[1]), "F0 F1 F2 B0 B1 B2 ");
  EXPECT_EQ(schedule.owner, (std::vector<int>{0, 1}));
  EXPECT_FALSE(schedule.forward_only);
}

// 1F1B warms up with one forward for every later rank, then alternates, then drains.
TEST(Schedule, OneForwardOneBackwardLists) {
  const Schedule schedule = make_schedule("1f1b", 3, 4);
  EXPECT_EQ(list_text(schedule.actions[0]), "F0 F1 F2 B0 F3 B1 B2 B3 ");
  EXPECT_EQ(list_text(schedule.actions[1]), "F0 F1 B0 F2 B1 F3 B2 B3 ");
  EXPECT_EQ(list_text(schedule.actions[2]), "F0 B0 F1 B1 F2 B2 F3 B3 ");
}

// With fewer micro-batches than stages the warm-up is cut off at m (the crash of AMD-AGI/Primus#1003).
TEST(Schedule, OneForwardOneBackwardWithFewMicroBatches) {
  const Schedule schedule = make_schedule("1f1b", 4, 2);
  EXPECT_EQ(list_text(schedule.actions[0]), "F0 F1 B0 B1 ");
  EXPECT_EQ(list_text(schedule.actions[1]), "F0 F1 B0 B1 ");
  EXPECT_EQ(list_text(schedule.actions[2]), "F0 F1 B0 B1 ");
  EXPECT_EQ(list_text(schedule.actions[3]), "F0 B0 F1 B1 ");
}

// Every size gives lists that check_lists accepts, with the peak in flight of pipeline.md 2.1: m, and min(m, p-r).
TEST(Schedule, EverySizeIsCompleteAndHasTheStatedPeak) {
  for (int p = 1; p <= 8; p++) {
    for (int m = 0; m <= 33; m++) {
      std::vector<int> peak;
      ASSERT_EQ(check_lists(make_schedule("gpipe", p, m), &peak), "") << p << " " << m;
      EXPECT_EQ(peak, std::vector<int>(p, m));
      ASSERT_EQ(check_lists(make_schedule("1f1b", p, m), &peak), "") << p << " " << m;
      for (int rank = 0; rank < p; rank++) EXPECT_EQ(peak[rank], std::min(m, p - rank));
    }
  }
}

// Validation runs forwards only, on the stages' own ranks, for any number of micro-batches.
TEST(Schedule, ForwardOnly) {
  const Schedule simple = forward_only_schedule(2, {0, 1}, 3);
  EXPECT_TRUE(simple.forward_only);
  EXPECT_EQ(list_text(simple.actions[1]), "F0 F1 F2 ");
  const Schedule looped = forward_only_schedule(2, {0, 1, 0, 1}, 3);
  std::string text;
  for (const Action& action : looped.actions[0]) text += action_text(action) + " ";
  EXPECT_EQ(text, "F(0,0) F(0,1) F(2,0) F(2,1) F(0,2) F(2,2) ");
  for (int m = 0; m <= 9; m++) {
    EXPECT_EQ(fault(forward_only_schedule(3, {0, 1, 2}, m)), "");
    EXPECT_EQ(fault(forward_only_schedule(3, {0, 1, 2, 2, 1, 0}, m)), "");
  }
}

// An unknown name is a user error that lists the known ones; each listed name works.
TEST(Schedule, Names) {
  for (const std::string& name : schedule_names()) EXPECT_EQ(make_schedule(name, 2, 2).name, name);
  try {
    make_schedule("1F1B", 2, 2);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    EXPECT_STREQ(error.what(), "--schedule 1F1B is unknown; use gpipe or 1f1b");
  }
}

// Each kind of fault in a list is found, and the message names rank, action and reason.
TEST(Schedule, FaultsAreNamed) {
  const Schedule good = make_schedule("1f1b", 2, 3);  // rank 0: F0 F1 B0 F2 B1 B2, rank 1: F0 B0 F1 B1 F2 B2
  Schedule bad = good;
  std::swap(bad.actions[0][1], bad.actions[0][3]);
  EXPECT_EQ(fault(bad), "rank 0, action 1, F(0,2): F(0,1) must come first (micro-batches go up)");
  bad = good;
  std::swap(bad.actions[1][0], bad.actions[1][1]);
  EXPECT_EQ(fault(bad), "rank 1, action 0, B(1,0): it comes before its forward pass");
  bad = good;
  std::swap(bad.actions[0][4], bad.actions[0][5]);
  EXPECT_EQ(fault(bad), "rank 0, action 4, B(0,2): B(0,1) must come first (micro-batches go up)");
  bad = good;
  bad.actions[0].push_back({Op::kForward, 0, 1});
  EXPECT_EQ(fault(bad), "rank 0, action 6, F(0,1): F(0,1) is there twice");
  bad = good;
  bad.actions[0].push_back({Op::kForward, 1, 0});
  EXPECT_EQ(fault(bad), "rank 0, action 6, F(1,0): stage 1 belongs to rank 1");
  bad = good;
  bad.actions[1].pop_back();
  EXPECT_EQ(fault(bad), "rank 1: B(1,2) is missing");
  bad = good;
  bad.actions[1].push_back({Op::kForward, 1, 3});
  EXPECT_EQ(fault(bad), "rank 1, action 6, F(1,3): there is no such stage or micro-batch");
  bad.actions[1].back() = {Op::kForward, -1, 0};
  EXPECT_EQ(fault(bad), "rank 1, action 6, F(-1,0): there is no such stage or micro-batch");
  bad.actions[1].back() = {static_cast<Op>(9), 1, 0};
  EXPECT_EQ(fault(bad), "rank 1, action 6, ?(1,0): there is no such stage or micro-batch");
  bad = good;
  bad.forward_only = true;
  EXPECT_EQ(fault(bad), "rank 0, action 2, B(0,0): a forward-only plan has no backward pass");
  bad = good;
  bad.owner[1] = 2;
  EXPECT_EQ(fault(bad), "stage 1 is on rank 2, which does not exist");
  bad = good;
  bad.owner.pop_back();
  EXPECT_EQ(fault(bad), "needs a rank for each stage");
  bad = good;
  bad.actions.pop_back();
  EXPECT_EQ(fault(bad), "needs a list for each rank");
}

// A split backward pass needs I before W, W ascending, and B and W of one stage in one ascending order of weight
// gradients.
TEST(Schedule, SplitBackward) {
  const Op F = Op::kForward, B = Op::kBackward, I = Op::kBackwardInput, W = Op::kBackwardWeight;
  Schedule schedule = make_schedule("gpipe", 1, 2);
  const auto with = [&](const std::vector<Action>& list) {
    schedule.actions[0] = list;
    return fault(schedule);
  };
  EXPECT_EQ(with({{F, 0, 0}, {I, 0, 0}, {F, 0, 1}, {I, 0, 1}, {W, 0, 0}, {W, 0, 1}}), "");
  EXPECT_EQ(with({{F, 0, 0}, {I, 0, 0}, {F, 0, 1}, {W, 0, 0}, {B, 0, 1}}), "");
  EXPECT_EQ(with({{F, 0, 0}, {W, 0, 0}, {I, 0, 0}, {F, 0, 1}, {B, 0, 1}}),
            "rank 0, action 1, W(0,0): it comes before its input gradient");
  EXPECT_EQ(with({{F, 0, 0}, {I, 0, 0}, {F, 0, 1}, {I, 0, 1}, {W, 0, 1}, {W, 0, 0}}),
            "rank 0, action 4, W(0,1): W(0,0) must come first (micro-batches go up)");
  EXPECT_EQ(with({{F, 0, 0}, {I, 0, 0}, {F, 0, 1}, {B, 0, 1}, {W, 0, 0}}),
            "rank 0, action 3, B(0,1): W(0,0) must come first (micro-batches go up)");
  EXPECT_EQ(with({{F, 0, 0}, {F, 0, 1}, {B, 0, 0}, {I, 0, 1}}), "rank 0: W(0,1) is missing");
  EXPECT_EQ(with({{F, 0, 0}, {F, 0, 1}, {B, 0, 0}, {W, 0, 0}, {B, 0, 1}}),
            "rank 0, action 3, W(0,0): W(0,0) is there twice");
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
