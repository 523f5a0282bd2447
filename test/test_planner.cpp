// test_planner.cpp -- the timer equals the simulator; the search finds the best cuts, recomputes where it must, keeps
// what it was given, says so when nothing fits, and reaches the efficiencies of the design.
#include <gtest/gtest.h>

#include <ctime>
#include <random>

#include "llmc/planner.h"
#include "test/host_test.h"

namespace {

/// Equal blocks of (1,1,1) and a head of `head` blocks.
ModelCost toy(int blocks, double head) {
  ModelCost cost;
  cost.blocks.assign(static_cast<size_t>(blocks), {1, 1, 1});
  cost.head = {head, head, head};
  cost.recompute = {StageCost{}, {0, 1, -1}, {0, 1.25, -1}, {0, 2, -1}};  // 0, 0.25 and 1 of a block again
  cost.early_gradient = false;
  return cost;
}

PlanRequest request_of(const std::string& schedule, int ranks, int micro_batches, const ModelCost& cost) {
  PlanRequest request;
  request.ranks = ranks;
  request.micro_batches = micro_batches;
  request.cost = cost;
  request.schedule = schedule;
  return request;
}

/// A rank holds 100 a block, and for each slot 10, 6, 4 or 1 a block, by level.
size_t toy_bytes(const PipelineLayout& layout, const Plan& plan, int rank) {
  const size_t width[] = {10, 6, 4, 1};
  size_t bytes = 0;
  for (int s = 0; s < layout.stages(); s++) {
    const size_t blocks = layout.cuts[s + 1] - layout.cuts[s];
    if (plan.schedule.owner[s] == rank) bytes += blocks * (100 + plan.slots[s] * width[layout.recompute[s]]);
  }
  return bytes;
}

double best_by_brute_force(PipelineLayout layout, int micro_batches, size_t stage, int from) {
  const int blocks = static_cast<int>(layout.cost.blocks.size());
  if (stage + 1 == layout.cuts.size()) {
    layout.cuts.back() = blocks;
    return make_train_plan(layout, micro_batches).makespan;
  }
  double best = 1e300;
  for (int cut = from; cut <= blocks; cut++) {
    layout.cuts[stage] = cut;
    best = std::min(best, best_by_brute_force(layout, micro_batches, stage + 1, cut));
  }
  return best;
}

std::string blocks_of(const PlanResult& result) { return partition_text(result.best().layout.cuts); }

}  // namespace

// PlanTimer gives the makespan of the simulator to the bit, for every schedule, any costs, early gradients and late
// ones, and also for costs other than those that it was made with.
TEST(PlanTimer, EqualsTheSimulator) {
  std::mt19937 random(1);
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int trial = 0; trial < 12; trial++) {
      const int p = 1 + random() % 5, m = random() % 13, v = std::min(kind.max_chunks, kind.natural_chunks + trial % 2);
      PlanCosts costs = equal_costs(p * v, {1, 1, 1}, 0.25);
      Plan plan = make_plan(make_schedule(kind.name, p, v, m, costs), costs);
      PlanTimer timer(plan);
      for (int other = 0; other < 4; other++) {
        for (StageCost& stage : plan.costs.stages) {
          stage = {random() % 100 / 7.0, random() % 100 / 7.0, random() % 100 / 7.0};
        }
        plan.costs.transfer = random() % 20 / 7.0;
        plan.costs.early_gradient = other % 2;
        ASSERT_EQ(evaluate_plan(&plan), "");
        EXPECT_EQ(timer.makespan(plan.costs), plan.makespan) << kind.name << " p " << p << " v " << v << " m " << m;
      }
    }
  }
}

// Two ranks, twelve blocks, a head that weighs four: the work is equal with 8 and 4, and that is what comes out.
TEST(Planner, HeadMovesTheSplit) {
  EXPECT_EQ(blocks_of(search_plans(request_of("1f1b", 2, 64, toy(12, 4)))), "8,4");
  EXPECT_EQ(blocks_of(search_plans(request_of("1f1b", 2, 64, toy(12, 0)))), "6,6");
  EXPECT_EQ(blocks_of(search_plans(request_of("1f1b", 4, 64, toy(12, 4)))), "4,4,4,0");
}

// The climb ends at the best of all cuts or close to it: small models, unequal blocks, five schedules, compared with
// every partition.
TEST(Planner, CutsAreNearlyOptimal) {
  std::mt19937 random(2);
  int optimal = 0, all = 0;
  for (int trial = 0; trial < 60; trial++) {
    const char* schedules[] = {"1f1b", "zb-h1", "eager-1f1b", "zb-v", "interleaved"};
    const bool two_chunks = trial % 5 > 2;
    const int ranks = two_chunks ? 2 : 2 + random() % 2, blocks = 4 + random() % 5, m = 1 + random() % 9;
    ModelCost cost = toy(blocks, random() % 12 / 4.0);
    for (StageCost& block : cost.blocks) block = {1 + random() % 3 / 4.0, 1 + random() % 3 / 4.0, 1};
    cost.transfer = random() % 3 / 8.0;
    cost.early_gradient = trial % 2;
    const PlanResult result = search_plans(request_of(schedules[trial % 5], ranks, m, cost));
    const double best = best_by_brute_force(result.best().layout, m, 1, 0);
    EXPECT_LE(result.best().makespan, best * 1.05) << schedules[trial % 5] << " blocks " << blocks << " m " << m;
    optimal += result.best().makespan <= best * (1 + 1e-9);
    all++;
  }
  EXPECT_GE(optimal, all * 8 / 10) << "of " << all;
}

// `auto` is the fastest of all candidates that were tried one by one; the candidates come by time; efficiency and
// bubble are what the simulator says.
TEST(Planner, TakesTheFastestSchedule) {
  const ModelCost cost = toy(22, 2);
  const PlanResult result = search_plans(request_of("auto", 4, 12, cost));
  ASSERT_TRUE(result.found());
  EXPECT_GT(result.candidates.size(), 10u);
  for (size_t k = 1; k < result.candidates.size(); k++) {
    EXPECT_GE(result.candidates[k].makespan, result.best().makespan * (1 - kEqualTime));
  }
  for (const ScheduleKind& kind : schedule_kinds()) {
    const PlanResult one = search_plans(request_of(kind.name, 4, 12, cost));
    EXPECT_LE(result.best().makespan, one.best().makespan * (1 + kEqualTime)) << kind.name;
  }
  for (const PlanCandidate& candidate : result.candidates) {
    const Plan plan = make_train_plan(candidate.layout, 12);
    EXPECT_EQ(plan.makespan, candidate.makespan);
    EXPECT_DOUBLE_EQ(candidate.efficiency, 12 * whole_cost(cost) / (4 * plan.makespan));
    EXPECT_NEAR(candidate.efficiency, 1 - plan.bubble_fraction, 1e-9) << "without recomputation all work is needed";
  }
}

// What is given stays: the schedule, the chunks, the partition (a list fixes the chunks), the recompute level.
TEST(Planner, KeepsWhatIsGiven) {
  PlanRequest request = request_of("auto", 2, 8, toy(8, 1));
  request.partition = "3,1,2,2";
  for (const PlanCandidate& candidate : search_plans(request).candidates) {
    EXPECT_EQ(partition_text(candidate.layout.cuts), "3,1,2,2");
    EXPECT_EQ(candidate.layout.chunks, 2);
  }
  request = request_of("auto", 2, 8, toy(8, 1));
  request.chunks = 3;
  request.partition = "even";
  request.recompute = "2";
  for (const PlanCandidate& candidate : search_plans(request).candidates) {
    EXPECT_EQ(partition_text(candidate.layout.cuts), "2,2,1,1,1,1");
    EXPECT_EQ(candidate.layout.recompute, std::vector<int>(6, 2));
  }
  request = request_of("zb-v", 2, 8, toy(8, 1));
  const PlanResult result = search_plans(request);
  ASSERT_EQ(result.candidates.size(), 1u);
  EXPECT_EQ(result.best().layout.schedule, "zb-v");
  EXPECT_EQ(result.best().layout.stages(), 4);
}

// One rank: one candidate, nothing is idle.
TEST(Planner, OneRank) {
  const PlanResult result = search_plans(request_of("auto", 1, 5, toy(6, 1)));
  ASSERT_EQ(result.candidates.size(), 1u);
  EXPECT_EQ(result.best().layout.schedule, "1f1b");
  EXPECT_DOUBLE_EQ(result.best().efficiency, 1);
}

// 1f1b on 4 ranks needs 4, 4, 3, 2 slots (one more than in flight where a message arrives). With a limit that only the
// first two ranks exceed these recompute, at the level that costs least, and with a lower limit more than that.
TEST(Planner, RecomputesOnTheRanksThatNeedIt) {
  PlanRequest request = request_of("1f1b", 4, 16, toy(16, 0));
  request.partition = "4,4,4,4";
  request.bytes = toy_bytes;
  const PlanCandidate free = search_plans(request).best();
  EXPECT_EQ(free.bytes, (std::vector<size_t>{560, 560, 520, 480}));
  EXPECT_EQ(free.layout.recompute, (std::vector<int>{0, 0, 0, 0}));
  const auto levels = [&](double limit) {
    request.memory_limit = limit;
    const PlanResult result = search_plans(request);
    EXPECT_TRUE(result.found());
    EXPECT_LE(static_cast<double>(result.best().most_bytes()), limit);
    return result.best().layout.recompute;
  };
  EXPECT_EQ(levels(560), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(levels(559), (std::vector<int>{1, 1, 0, 0}));
  EXPECT_EQ(levels(496), (std::vector<int>{1, 1, 1, 0}));
  EXPECT_EQ(levels(495), (std::vector<int>{2, 2, 1, 0}));
  EXPECT_EQ(levels(416), (std::vector<int>{3, 3, 3, 3}));
  request.recompute = "1";  // given: nothing to choose
  request.memory_limit = 495;
  EXPECT_FALSE(search_plans(request).found());
}

// Without recomputation blocks move off the ranks that are over the limit, and do not come back for the sake of time:
// of 14 blocks the first two ranks may have 3 each, the others 4.
TEST(Planner, MovesBlocksForMemory) {
  PlanRequest request = request_of("1f1b", 4, 16, toy(14, 0));
  request.recompute = "0";
  request.bytes = toy_bytes;
  const double free = search_plans(request).best().makespan;
  request.memory_limit = 558;
  const PlanResult result = search_plans(request);
  ASSERT_TRUE(result.found());
  EXPECT_EQ(blocks_of(result), "3,3,4,4");
  EXPECT_LT(free, result.best().makespan) << "else the limit has changed nothing";
}

// With free cuts blocks move to where there is room before anything is recomputed in vain; whatever the limit, what is
// chosen fits, is no slower than any other candidate that fits, and a higher limit is never slower.
TEST(Planner, FastestThatFits) {
  double last = 1e300;
  for (double limit : {420.0, 450.0, 480.0, 520.0, 600.0, 900.0}) {
    PlanRequest request = request_of("auto", 4, 16, toy(16, 1));
    request.bytes = toy_bytes;
    request.memory_limit = limit;
    const PlanResult result = search_plans(request);
    ASSERT_TRUE(result.found()) << limit;
    for (const PlanCandidate& candidate : result.candidates) {
      const Plan plan = make_train_plan(candidate.layout, 16);
      for (int rank = 0; rank < 4; rank++) EXPECT_EQ(candidate.bytes[rank], toy_bytes(candidate.layout, plan, rank));
      EXPECT_EQ(candidate.fits, static_cast<double>(candidate.most_bytes()) <= limit);
      if (!candidate.fits) continue;
      EXPECT_LE(result.best().makespan, candidate.makespan * (1 + kEqualTime));
    }
    EXPECT_LE(result.best().makespan, last * (1 + 1e-9)) << limit;
    last = result.best().makespan;
  }
}

// Nothing fits: there is no choice, and the leanest candidate is the one whose fullest rank has least.
TEST(Planner, NothingFits) {
  PlanRequest request = request_of("auto", 4, 16, toy(16, 1));
  request.bytes = toy_bytes;
  request.memory_limit = 300;  // 4 blocks on some rank, 100 each
  const PlanResult result = search_plans(request);
  EXPECT_FALSE(result.found());
  for (const PlanCandidate& candidate : result.candidates) {
    EXPECT_FALSE(candidate.fits);
    EXPECT_GE(candidate.most_bytes(), result.leanest().most_bytes());
  }
  EXPECT_LT(result.leanest().most_bytes(), 450u) << "all levels up, blocks evenly spread";
  // measured costs may say that the leanest level is also the fastest: it is still the leanest
  request.cost.recompute = {StageCost{}, {0, 2, 0}, {0, 1, 0}, {0, 0.5, 0}};
  EXPECT_EQ(search_plans(request).leanest().most_bytes(), result.leanest().most_bytes());
}

// The same answer twice, and from a copy of the request: ranks must not disagree.
TEST(Planner, Deterministic) {
  PlanRequest request = request_of("auto", 3, 20, toy(13, 1.5));
  request.bytes = toy_bytes;
  request.memory_limit = 500;
  const PlanRequest copy = request;
  const PlanResult a = search_plans(request), b = search_plans(copy);
  ASSERT_EQ(a.candidates.size(), b.candidates.size());
  for (size_t k = 0; k < a.candidates.size(); k++) {
    const PipelineLayout &x = a.candidates[k].layout, &y = b.candidates[k].layout;
    EXPECT_EQ(x.schedule, y.schedule);
    EXPECT_EQ(x.cuts, y.cuts);
    EXPECT_EQ(x.recompute, y.recompute);
    EXPECT_EQ(plan_hash(make_train_plan(x, 20), x.cuts), plan_hash(make_train_plan(y, 20), y.cuts));
  }
}

// Requests that cannot be met are user errors with the remedy.
TEST(Planner, Errors) {
  const auto message = [](const std::string& schedule, int ranks, int chunks, const std::string& partition) {
    PlanRequest request = request_of(schedule, ranks, 8, toy(6, 1));
    request.chunks = chunks;
    request.partition = partition;
    return user_error_text([&] { search_plans(request); });
  };
  EXPECT_EQ(message("auto", 9, 0, "auto"),
            "--pp 9 is 9 stages, too many for 6 blocks: at most 8 (embedding, blocks, head); use --pp 8");
  EXPECT_EQ(message("zb-v", 5, 0, "auto"),
            "--pp 5 with 2 chunks is 10 stages, too many for 6 blocks: at most 8 (embedding, blocks, head); use --pp "
            "4");
  EXPECT_EQ(message("auto", 2, 0, "3,2"), "--partition 3,2 places 5 blocks, the model has 6; use --partition 3,3");
  EXPECT_EQ(message("auto", 2, 2, "3,3"), "--partition 3,3 has 2 counts for 4 stages; use --partition 2,2,1,1");
}

// A schedule from a file is taken as it is: its stages get cuts, and one for other ranks or micro-batches is refused.
TEST(Planner, ScheduleFile) {
  const TemporaryFolder folder;
  const std::string path = folder.write("s.csv", schedule_csv_text(make_schedule("zb-v", 2, 2, 6)));
  const PlanResult result = search_plans(request_of(path, 2, 6, toy(9, 1)));
  ASSERT_TRUE(result.found());
  EXPECT_EQ(result.best().makespan, search_plans(request_of("zb-v", 2, 6, toy(9, 1))).best().makespan);
  EXPECT_EQ(user_error_text([&] { search_plans(request_of(path, 3, 6, toy(9, 1))); }),
            "--schedule " + path + " is for 2 ranks, --pp is 3; use --pp 2");
  EXPECT_TRUE(contains(user_error_text([&] { search_plans(request_of(path, 2, 5, toy(9, 1))); }),
                       "is for 6 micro-batches, a replica has 5 of a step"));
  EXPECT_TRUE(contains(user_error_text([&] { search_plans(request_of(path, 2, 6, toy(1, 1))); }),
                       "has 4 stages, too many for 1 blocks: at most 3"));
}

// The efficiencies of the design (pipeline schedules of GPT-2 at 1024 tokens, 16 micro-batches, a message 3 % of a
// quarter of the forward pass, gradients sent after the whole backward pass): within two points, and the planned split
// of 1f1b within a block of the one given there.
TEST(Planner, EfficienciesOfTheDesign) {
  struct Row {
    const char* model;
    int ranks;
    double even, planned, eager, interleaved, h1, v;
  };
  const Row rows[] = {
      {"124M", 2, 75.1, 90.1, 92.2, 92.6, 91.6, 95.0}, {"124M", 4, 50.1, 75.2, 75.2, 63.1, 77.3, 76.3},
      {"350M", 2, 84.1, 93.3, 94.9, 97.7, 95.8, 97.4}, {"350M", 4, 63.7, 82.8, 86.0, 89.3, 89.1, 93.9},
      {"774M", 4, 70.9, 82.1, 85.3, 90.6, 90.1, 94.4}, {"1558M", 4, 75.3, 82.1, 84.8, 90.7, 90.1, 93.4}};
  for (const Row& row : rows) {
    ModelCost cost = gpt2_model_cost(*gpt2_preset(row.model), 1, 1024);
    cost.early_gradient = false;
    cost.transfer = 0.03 / 4 * (cost.blocks[0].forward * cost.blocks.size() + cost.head.forward);
    const auto efficiency = [&](const char* schedule, const char* partition) {
      PlanRequest request = request_of(schedule, row.ranks, 16, cost);
      request.partition = partition;
      return 100 * search_plans(request).best().efficiency;
    };
    const std::string what = format_text("%s p %d", row.model, row.ranks);
    EXPECT_NEAR(efficiency("1f1b", "even"), row.even, 2) << what;
    EXPECT_NEAR(efficiency("1f1b", "auto"), row.planned, 2) << what;
    EXPECT_NEAR(efficiency("eager-1f1b", "auto"), row.eager, 2) << what;
    EXPECT_NEAR(efficiency("interleaved", "auto"), row.interleaved, 2) << what;
    EXPECT_NEAR(efficiency("zb-h1", "auto"), row.h1, 2) << what;
    EXPECT_NEAR(efficiency("zb-v", "auto"), row.v, 2) << what;
    EXPECT_GE(100 * search_plans(request_of("auto", row.ranks, 16, cost)).best().efficiency,
              std::max(row.h1, row.v) - 0.5)
        << what;
  }
}

// The whole search for 8 ranks, 48 blocks and 64 micro-batches takes less than a second of processor time.
TEST(Planner, SearchTime) {
  const clock_t start = clock();
  const ModelCost cost = gpt2_model_cost(*gpt2_preset("1558M"), 1, 1024);
  EXPECT_TRUE(search_plans(request_of("auto", 8, 64, cost)).found());
  EXPECT_LT(static_cast<double>(clock() - start) / CLOCKS_PER_SEC, 1.0);
}
