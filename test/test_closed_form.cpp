// test_closed_form.cpp -- the formulas of closed_form.h and the simulator give the same numbers, bit for bit; what was
// measured for every schedule stays as it is.
#include <gtest/gtest.h>

#include "llmc/closed_form.h"
#include "llmc/plan.h"

/// Stages of one rank share its time equally.
static Plan simulated(const std::string& name, int p, int v, int m, const StageCost& rank, double transfer = 0,
                      bool early_gradient = false) {
  Schedule schedule = make_schedule(name, p, v, m);
  const int chunks = schedule.stages / p;
  const StageCost stage{rank.forward / chunks, rank.backward_input / chunks, rank.backward_weight / chunks};
  PlanCosts costs = equal_costs(p * chunks, stage, transfer);
  costs.early_gradient = early_gradient;
  return make_plan(std::move(schedule), costs);
}

/// Calls f(kind, p, v) for the sizes in the header of closed_form.h.
template <class Function>
static void for_all_sizes(Function f) {
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int p = 1; p <= 8; p++) {
      for (int v = kind.min_chunks; v <= std::min(kind.max_chunks, 4); v++) f(kind, p, v);
    }
  }
}

// The bubble is the formula's, exactly, wherever there is one: equal times at every size, other times (0..4 each, in
// units that every v divides) at a sample of sizes, half of them with early gradients. The numbers of comparisons are
// pinned, so that none gets lost.
TEST(ClosedForm, Bubble) {
  int equal = 0, other = 0;
  for_all_sizes([&](const ScheduleKind& kind, int p, int v) {
    for (int m = 0; m <= 33; m++) {
      for (bool early : {false, true}) {
        const auto formula = closed_form_bubble(kind.name, p, v, m, {12, 12, 12}, early);
        if (!formula) continue;
        ASSERT_EQ(simulated(kind.name, p, v, m, {12, 12, 12}, 0, early).bubble, *formula)
            << kind.name << " p " << p << " v " << v << " m " << m << " early " << early;
        equal++;
      }
    }
    for (int k = 0; k < 250; k++) {
      const bool early = k >= 125;
      const int m = 1 + (k * 7 + p * 5 + v) % (p > 4 ? 20 : 33);
      const StageCost cost{24.0 * (k % 5), 24.0 * (k / 5 % 5), 24.0 * (k / 25 % 5)};
      const auto formula = closed_form_bubble(kind.name, p, v, m, cost, early);
      if (!formula) continue;
      ASSERT_EQ(simulated(kind.name, p, v, m, cost, 0, early).bubble, *formula)
          << kind.name << " p " << p << " v " << v << " m " << m << " F " << cost.forward << " I "
          << cost.backward_input << " W " << cost.backward_weight << " early " << early;
      other++;
    }
  });
  EXPECT_EQ(equal, 7712);
  EXPECT_EQ(other, 24495);
}

// The ranges of m are as wide as can be: one micro-batch fewer, and some times (1..3 each) break the formula.
TEST(ClosedForm, RangesAreTight) {
  const StageCost equal{12, 12, 12};
  for (int p = 2; p <= 6; p++) {
    for (const auto& [name, least] :
         {std::make_pair("zb-h1", p), {"zb-h2", 2 * p - 1}, {"zb-v", 2 * p - 1}, {"dualpipe-v", 2 * p}}) {
      EXPECT_TRUE(closed_form_bubble(name, p, 0, least, equal)) << name;
      EXPECT_FALSE(closed_form_bubble(name, p, 0, least - 1, equal)) << name;
      int broken = 0;
      for (int k = 0; k < 27; k++) {
        const StageCost cost{12.0 * (1 + k % 3), 12.0 * (1 + k / 3 % 3), 12.0 * (1 + k / 9)};
        const auto formula = closed_form_bubble(name, p, 0, least, cost);
        broken += formula && simulated(name, p, 0, least - 1, cost).bubble != *formula;
      }
      EXPECT_GT(broken, 0) << name << " " << p;
    }
  }
  EXPECT_FALSE(closed_form_bubble("greedy", 2, 0, 8, equal));
  EXPECT_FALSE(closed_form_bubble("zb-v", 2, 0, 8, {12, 6, 6}));
  EXPECT_FALSE(closed_form_bubble("zb-v", 2, 0, 8, {12, 12, 3}));
  EXPECT_FALSE(closed_form_bubble("zb-v", 2, 0, 8, {12, 12, 15}));
  EXPECT_FALSE(closed_form_bubble("dualpipe-v", 2, 0, 8, {12, 4, 4}));
  EXPECT_EQ(closed_form_bubble("greedy", 2, 0, 0, equal), 0.0);
}

// The most activations alive on each rank are the formula's; greedy stays below p micro-batches.
TEST(ClosedForm, Peak) {
  int count = 0;
  for_all_sizes([&](const ScheduleKind& kind, int p, int v) {
    for (int m = 0; m <= 33; m++) {
      const Schedule schedule = make_schedule(kind.name, p, v, m);
      for (int rank = 0; rank < p; rank++) {
        int now = 0, most = 0;
        for (const Action& action : schedule.actions[rank]) {
          now += action.op == Op::kForward ? 1 : action.op == Op::kBackwardInput ? 0 : -1;
          most = std::max(most, now);
        }
        const auto formula = closed_form_peak(kind.name, p, v, m, rank);
        if (formula) {
          ASSERT_EQ(most / static_cast<double>(v), *formula) << kind.name << p << " " << v << " " << m;
        }
        if (kind.name.rfind("greedy", 0) == 0) {
          ASSERT_LE(most, p * v);
        }
        count += formula ? 1 : 0;
      }
    }
  });
  EXPECT_EQ(count, 17940);
}

// Sync bubbles for tF = tI = tW = 1 a rank, every schedule with its natural chunks. Interleaving divides 1f1b's bubble,
// zb-h1 takes a third, the V schedules a sixth.
TEST(ClosedForm, TableOfBubbles) {
  struct Row {
    int p, m;
    double bubble[11];
  };
  const Row rows[] = {
      // gpipe 1f1b eager interleaved bfs zb-h1 zb-h2 zb-v dualpipe-v greedy greedy-v
      {2, 4, {3, 3, 3, 1.5, 1.5, 1, 1, 0.5, 0.5, 1, 0.5}},      {4, 4, {9, 9, 9, 4.5, 4.5, 3, 4, 3, 4.5, 3, 1.5}},
      {4, 8, {9, 9, 9, 4.5, 4.5, 3, 3, 1.5, 1.5, 5, 1.5}},      {4, 16, {9, 9, 9, 4.5, 4.5, 3, 3, 1.5, 1.5, 5, 1.5}},
      {8, 8, {21, 21, 21, 10.5, 10.5, 7, 10, 7, 10.5, 7, 3.5}}, {8, 16, {21, 21, 21, 10.5, 10.5, 7, 7, 3.5, 3.5, 9, 5}},
  };
  for (const Row& row : rows) {
    for (size_t k = 0; k < schedule_kinds().size(); k++) {
      const std::string name = schedule_kinds()[k].name;
      EXPECT_EQ(simulated(name, row.p, 0, row.m, {1, 1, 1}).bubble, row.bubble[k]) << name << row.p << " " << row.m;
    }
  }
}

// With m < 2p-1 the greedy V keeps the bubble near (p-1)tF/2, where zb-v, with steps left out, has twice that.
TEST(ClosedForm, GreedyVServesFewMicroBatches) {
  for (int p = 3; p <= 8; p++) {
    const double greedy = simulated("greedy-v", p, 2, p, {1, 1, 1}).bubble;
    EXPECT_EQ(greedy, (p - 1) / 2.0) << p;
    EXPECT_GT(simulated("zb-v", p, 2, p, {1, 1, 1}).bubble, greedy);
  }
}

// Transfers add 2(p-1)c to GPipe and eager 1F1B, 2(p-1)m/p c + 2(p-2)c to 1F1B (m a multiple of p), 2(vp-1)c to
// interleaved, 4(p-1)c to zb-h1, (p-1)c to zb-h2, (5p-7)c to zb-v: all but 1F1B hide the links, whatever m is.
TEST(ClosedForm, TransferTime) {
  const double c = 1.0 / 64;
  for (int p = 2; p <= 8; p++) {
    for (int rounds = 2; rounds <= 4; rounds++) {
      const int m = rounds * p;
      const auto added = [&](const std::string& name) {
        return (simulated(name, p, 0, m, {2, 2, 2}, c).makespan - simulated(name, p, 0, m, {2, 2, 2}).makespan) / c;
      };
      EXPECT_EQ(added("gpipe"), 2 * (p - 1)) << p << " " << m;
      EXPECT_EQ(added("eager-1f1b"), 2 * (p - 1)) << p << " " << m;
      EXPECT_EQ(added("1f1b"), 2 * (p - 1) * rounds + 2 * (p - 2)) << p << " " << m;
      EXPECT_EQ(added("interleaved"), 2 * (2 * p - 1)) << p << " " << m;
      EXPECT_EQ(added("zb-h1"), 4 * (p - 1)) << p << " " << m;
      EXPECT_EQ(added("zb-h2"), p - 1) << p << " " << m;
      EXPECT_EQ(added("zb-v"), 5 * p - 7) << p << " " << m;
    }
  }
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
