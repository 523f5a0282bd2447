// test_schedule.cpp -- the generators give the lists of the papers, and check_lists finds every fault in a list.
#include <gtest/gtest.h>

#include <random>

#include "llmc/schedules.h"

static std::string list_text(const std::vector<Action>& list) {
  std::string text;
  for (const Action& action : list) text += format_text("%c%d ", op_letter(action.op), action.micro_batch);
  return text;
}

/// With the stage: "F0:2" is micro-batch 2 through stage 0.
static std::string staged_text(const std::vector<Action>& list) {
  std::string text;
  for (const Action& a : list) text += format_text("%c%d:%d ", op_letter(a.op), a.stage, a.micro_batch);
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

// Eager 1F1B warms up with two forwards for every later rank, again cut off at m.
TEST(Schedule, EagerLists) {
  EXPECT_EQ(list_text(make_schedule("eager-1f1b", 3, 6).actions[0]), "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5 ");
  EXPECT_EQ(list_text(make_schedule("eager-1f1b", 3, 6).actions[2]), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 ");
  EXPECT_EQ(list_text(make_schedule("eager-1f1b", 3, 2).actions[0]), "F0 F1 B0 B1 ");
}

// ZB-H1 and ZB-H2: warm-up of one or two forwards for every later rank; W lags one or two micro-batches a rank behind.
TEST(Schedule, ZeroBubbleLists) {
  const Schedule h1 = make_schedule("zb-h1", 3, 4), h2 = make_schedule("zb-h2", 2, 4);
  EXPECT_EQ(list_text(h1.actions[0]), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ");
  EXPECT_EQ(list_text(h1.actions[2]), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 ");
  EXPECT_EQ(list_text(h2.actions[0]), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ");
  EXPECT_EQ(list_text(h2.actions[1]), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 ");
}

// Interleaved: groups of nearly equal size, each of p or more, through the chunks in turn; backward down the chunks.
TEST(Schedule, InterleavedLists) {
  const Schedule schedule = make_schedule("interleaved", 2, 2, 3);  // one group of 3
  EXPECT_EQ(staged_text(schedule.actions[0]), "F0:0 F0:1 F0:2 F2:0 F2:1 F2:2 B2:0 B2:1 B2:2 B0:0 B0:1 B0:2 ");
  EXPECT_EQ(staged_text(schedule.actions[1]), "F1:0 F1:1 F1:2 F3:0 B3:0 F3:1 B3:1 F3:2 B3:2 B1:0 B1:1 B1:2 ");
  EXPECT_EQ(schedule.owner, (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(staged_text(make_schedule("interleaved", 2, 2, 5).actions[1]),  // groups of 3 and 2
            "F1:0 F1:1 F1:2 F3:0 B3:0 F3:1 B3:1 F3:2 B3:2 F1:3 B1:0 F1:4 B1:1 F3:3 B1:2 F3:4 B3:3 B3:4 B1:3 B1:4 ");
  for (int m = 0; m < 9; m++) {
    EXPECT_EQ(staged_text(make_schedule("interleaved", 3, 1, m).actions[0]),
              staged_text(make_schedule("1f1b", 3, m).actions[0]));
  }
}

// Breadth-first: whole chunks at a time.
TEST(Schedule, LoopedBfsLists) {
  EXPECT_EQ(staged_text(make_schedule("looped-bfs", 2, 2, 2).actions[1]), "F1:0 F1:1 F3:0 F3:1 B3:0 B3:1 B1:0 B1:1 ");
}

// The V schedules, on the two ranks of the drawings in schedules.h; with too few micro-batches steps are left out.
TEST(Schedule, VLists) {
  const Schedule zb = make_schedule("zb-v", 2, 3), dual = make_schedule("dualpipe-v", 2, 4);
  EXPECT_EQ(zb.owner, (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(staged_text(zb.actions[0]),
            "F0:0 F0:1 F0:2 F3:0 I3:0 W3:0 F3:1 I3:1 W3:1 I0:0 W0:0 F3:2 I3:2 W3:2 I0:1 W0:1 I0:2 W0:2 ");
  EXPECT_EQ(staged_text(zb.actions[1]),
            "F1:0 F2:0 F1:1 F2:1 I2:0 W2:0 F1:2 I1:0 W1:0 F2:2 I2:1 W2:1 I1:1 I2:2 I1:2 W1:1 W2:2 W1:2 ");
  EXPECT_EQ(staged_text(make_schedule("zb-v", 2, 1).actions[1]), "F1:0 F2:0 I2:0 W2:0 I1:0 W1:0 ");
  EXPECT_EQ(staged_text(dual.actions[0]),
            "F0:0 F0:1 F0:2 F3:0 I3:0 W3:0 F3:1 F0:3 B3:1 F3:2 B0:0 B3:2 F3:3 B0:1 B3:3 I0:2 W0:2 I0:3 W0:3 ");
  EXPECT_EQ(staged_text(dual.actions[1]),
            "F1:0 F2:0 F1:1 F2:1 F1:2 B2:0 F2:2 B1:0 F1:3 B2:1 F2:3 B1:1 B2:2 B1:2 I2:3 I1:3 W2:3 W1:3 ");
}

// Every schedule of every size is complete and in order: p 1..8, v 1..4, m 0..33; m = 0 gives empty lists. The table
// says the truth about placement and split backward passes.
TEST(Schedule, EverySizeIsComplete) {
  int count = 0;
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int p = 1; p <= 8; p++) {
      for (int v = kind.min_chunks; v <= std::min(kind.max_chunks, 4); v++) {
        for (int m = 0; m <= 33; m++) {
          const Schedule schedule = make_schedule(kind.name, p, v, m);
          ASSERT_EQ(fault(schedule), "") << kind.name << " " << p << " " << v << " " << m;
          ASSERT_EQ(schedule.owner, stage_owners(kind, p, v));
          ASSERT_EQ(schedule.stages, p * v);
          ASSERT_EQ(schedule.name, kind.name);
          bool split = false;
          for (const std::vector<Action>& list : schedule.actions) {
            for (const Action& action : list) split = split || action.op == Op::kBackwardInput;
          }
          ASSERT_TRUE(split == kind.splits_backward || (kind.splits_backward && m < 2 * p)) << kind.name << p << m;
          count++;
        }
      }
    }
  }
  EXPECT_EQ(count, (5 * 1 + 4 * 4 + 2 * 1) * 8 * 34);
}

// Where the stages go: line, loop, V.
TEST(Schedule, Placement) {
  EXPECT_EQ(place_stages(Placement::kLine, 3, 1), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(place_stages(Placement::kLoop, 3, 2), (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(place_stages(Placement::kV, 3, 3), (std::vector<int>{0, 1, 2, 2, 1, 0, 0, 1, 2}));
}

/// The most chunk activations between F and the end of W on any rank.
static int most_in_flight(const Schedule& schedule) {
  int most = 0;
  for (const std::vector<Action>& list : schedule.actions) {
    int now = 0;
    for (const Action& action : list) {
      now += action.op == Op::kForward ? 1 : action.op == Op::kBackwardInput ? 0 : -1;
      most = std::max(most, now);
    }
  }
  return most;
}

// Greedy never gets stuck, stays below its cap and is deterministic, for any costs (zeros and slow links too), p 1..8,
// v 1..4, m 1..33, caps 1..p+1 and for stages anywhere.
TEST(Schedule, GreedyIsCompleteForAnyCosts) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 1500; trial++) {
    const int p = 1 + below(8), v = 1 + below(4), m = 1 + below(33), cap = below(p + 2), shape = below(3);
    std::vector<int> owner = place_stages(shape == 0 ? Placement::kLoop : Placement::kV, p, v);
    if (shape == 2) std::shuffle(owner.begin(), owner.end(), random);
    PlanCosts costs = equal_costs(p * v, {1, 1, 1}, below(3) == 0 ? 0 : below(100) / 10.0);
    for (StageCost& cost : costs.stages) cost = {below(9) / 7.0, below(9) / 7.0, below(9) / 7.0};
    const Schedule schedule = greedy_schedule(owner, p, m, costs, cap);
    ASSERT_EQ(fault(schedule), "") << p << " " << v << " " << m << " cap " << cap;
    ASSERT_LE(most_in_flight(schedule), (cap == 0 ? p : cap) * v);
    const Schedule again = greedy_schedule(owner, p, m, costs, cap);
    for (int rank = 0; rank < p; rank++) {
      ASSERT_EQ(staged_text(schedule.actions[rank]), staged_text(again.actions[rank]));
    }
  }
}

// Greedy on two ranks by hand: with cap 1 the ranks take one micro-batch at a time; while a gradient is under way there
// is time for more forwards; W goes where no input is there yet.
TEST(Schedule, GreedyByHand) {
  const std::vector<int> line = {0, 1};
  Schedule schedule = greedy_schedule(line, 2, 2, equal_costs(2));
  EXPECT_EQ(list_text(schedule.actions[0]), "F0 F1 I0 W0 I1 W1 ");
  EXPECT_EQ(list_text(schedule.actions[1]), "F0 I0 F1 I1 W0 W1 ");
  schedule = greedy_schedule(line, 2, 2, equal_costs(2), 1);
  EXPECT_EQ(list_text(schedule.actions[0]), "F0 I0 W0 F1 I1 W1 ");
  EXPECT_EQ(list_text(schedule.actions[1]), "F0 I0 W0 F1 I1 W1 ");
  schedule = greedy_schedule(line, 2, 4, equal_costs(2), 4);  // gradient 0 is there at 3, so three forwards before it
  EXPECT_EQ(list_text(schedule.actions[0]).substr(0, 12), "F0 F1 F2 I0 ");
  schedule = greedy_schedule(line, 2, 4, equal_costs(2, {1, 1, 1}, 1), 4);  // at 5: time for all four
  EXPECT_EQ(list_text(schedule.actions[0]).substr(0, 15), "F0 F1 F2 F3 I0 ");
  schedule = greedy_schedule(line, 2, 2, {{{2, 1, 1}, {1, 0.5, 0.25}}, 0});  // F(1,1) can start at 4, W(1,0) at 3.5
  EXPECT_EQ(list_text(schedule.actions[1]), "F0 I0 W0 F1 I1 W1 ");
  EXPECT_EQ(list_text(make_schedule("greedy", 2, 1, 2, {{{2, 1, 1}, {1, 0.5, 0.25}}, 0}).actions[1]),
            "F0 I0 W0 F1 I1 W1 ");
}

// Validation runs forwards only, on the stages' own ranks, for any number of micro-batches.
TEST(Schedule, ForwardOnly) {
  const Schedule simple = forward_only_schedule(2, {0, 1}, 3);
  EXPECT_TRUE(simple.forward_only);
  EXPECT_EQ(list_text(simple.actions[1]), "F0 F1 F2 ");
  const std::vector<int> loop = {0, 1, 0, 1}, turn = {0, 1, 1, 0};
  EXPECT_EQ(staged_text(forward_only_schedule(2, loop, 3, 1).actions[0]), "F0:0 F2:0 F0:1 F2:1 F0:2 F2:2 ");
  EXPECT_EQ(staged_text(forward_only_schedule(2, loop, 3, 2).actions[0]), "F0:0 F0:1 F2:0 F2:1 F0:2 F2:2 ");
  EXPECT_EQ(staged_text(forward_only_schedule(2, turn, 3, 0).actions[0]), "F0:0 F0:1 F3:0 F0:2 F3:1 F3:2 ");
  EXPECT_EQ(staged_text(forward_only_schedule(2, turn, 3, 0).actions[1]), "F1:0 F2:0 F1:1 F2:1 F1:2 F2:2 ");
  for (int m = 0; m <= 9; m++) {
    for (int group = 0; group <= 4; group++) {
      EXPECT_EQ(fault(forward_only_schedule(3, {0, 1, 2}, m, group)), "");
      EXPECT_EQ(fault(forward_only_schedule(3, {0, 1, 2, 2, 1, 0}, m, group)), "");
      EXPECT_EQ(fault(forward_only_schedule(3, {0, 1, 2, 0, 1, 2, 0, 1, 2}, m, group)), "");
    }
  }
}

/// The message of the user error that `call` must end in.
template <class Call>
static std::string user_error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "accepted";
}

// An unknown name, and a number of chunks that the schedule cannot have, are user errors that say what can be had.
TEST(Schedule, Names) {
  for (const std::string& name : schedule_names()) EXPECT_EQ(make_schedule(name, 2, 2).name, name);
  EXPECT_EQ(
      user_error_of([] { make_schedule("1F1B", 2, 2); }),
      "--schedule \"1F1B\" is not known; use auto, gpipe, 1f1b, eager-1f1b, interleaved, looped-bfs, zb-h1, zb-h2, "
      "zb-v, dualpipe-v, greedy, greedy-v, or a file that ends in .csv");
  EXPECT_EQ(user_error_of([] { make_schedule("zb-v", 2, 3, 2); }),
            "--chunks 3: schedule zb-v takes 2 on each rank; use --chunks 2");
  EXPECT_EQ(user_error_of([] { make_schedule("1f1b", 2, 2, 2); }),
            "--chunks 2: schedule 1f1b takes 1 on each rank; use --chunks 1");
  EXPECT_EQ(user_error_of([] { make_schedule("interleaved", 2, -1, 2); }),
            "--chunks -1: schedule interleaved takes 1 or more on each rank; use --chunks 2");
  EXPECT_EQ(make_schedule("interleaved", 2, 0, 2).stages, 4);
  EXPECT_EQ(make_schedule("greedy", 2, 0, 2).stages, 2);
  EXPECT_EQ(make_schedule("interleaved", 2, 7, 2).stages, 14);
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
