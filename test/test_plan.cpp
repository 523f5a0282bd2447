// test_plan.cpp -- the checker accepts what the executor can run, and nothing else; the simulator gives the closed
// forms.
#include <gtest/gtest.h>

#include "llmc/timeline.h"
#include "test/plan_interpreter.h"

static Plan simulated(const std::string& name, int p, int m, double transfer = 0) {
  Schedule schedule = make_schedule(name, p, m);
  const PlanCosts costs = equal_costs(schedule.stages, {1, 1, 1}, transfer);
  return make_plan(std::move(schedule), costs);
}

/// One of the generated schedules, of any number of chunks up to 3; greedy ones for random costs.
static Schedule random_generated(std::mt19937& random, int p, int m) {
  const ScheduleKind& kind = schedule_kinds()[random() % schedule_kinds().size()];
  const int v = kind.min_chunks + random() % (std::min(kind.max_chunks, 3) - kind.min_chunks + 1);
  PlanCosts costs = equal_costs(p * v, {}, random() % 3);
  for (StageCost& cost : costs.stages) cost = {random() % 4 / 2.0, random() % 4 / 2.0, random() % 4 / 2.0};
  return make_schedule(kind.name, p, v, m, costs);
}

/// "" or the reason; `slots` empty: counted.
static std::string verdict(const Schedule& schedule, std::vector<int> slots = {}) {
  Plan plan;
  plan.schedule = schedule;
  plan.costs = equal_costs(schedule.stages);
  plan.slots = slots;
  return evaluate_plan(&plan);
}

static Outcome outcome(const Schedule& schedule, const std::vector<int>& slots, unsigned seed) {
  return PlanInterpreter(schedule, slots, seed).run();
}

/// A random valid plan: stages on ranks in a line, a loop, a V or at random; actions in a random order that their
/// dependencies allow, dealt to the lists. Backward passes are split or not, one by one.
static Schedule random_schedule(std::mt19937& random, bool may_split) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int p = 1 + below(4), m = below(7), shape = below(4), stages = shape == 0 ? p : p * (1 + below(3));
  Schedule schedule = empty_schedule("random", p, std::vector<int>(stages), m);
  for (int s = 0; s < stages; s++) {
    schedule.owner[s] = shape == 3 ? below(p) : shape == 2 && s / p % 2 == 1 ? p - 1 - s % p : s % p;
  }
  std::vector<StageProgress> done(stages);
  const int eager = below(4);  // how strongly forwards are preferred
  for (;;) {
    std::vector<Action> ready;
    for (int s = 0; s < stages; s++) {
      const StageProgress& at = done[s];
      const bool input = at.forward < m && (s == 0 || done[s - 1].forward > at.forward);
      for (int k = 0; input && k < 1 + eager; k++) ready.push_back({Op::kForward, s, at.forward});
      if (at.weight < at.backward) ready.push_back({Op::kBackwardWeight, s, at.weight});
      if (at.backward == at.forward || (s + 1 < stages && done[s + 1].backward == at.backward)) continue;
      if (may_split) ready.push_back({Op::kBackwardInput, s, at.backward});
      if (at.weight == at.backward) ready.push_back({Op::kBackward, s, at.backward});
    }
    if (ready.empty()) return schedule;
    const Action action = ready[below(static_cast<int>(ready.size()))];
    StageProgress& at = done[action.stage];
    at.forward += action.op == Op::kForward;
    at.backward += action.op == Op::kBackward || action.op == Op::kBackwardInput;
    at.weight += action.op == Op::kBackward || action.op == Op::kBackwardWeight;
    schedule.actions[schedule.owner[action.stage]].push_back(action);
  }
}

/// One random change: two actions swapped, one dropped, doubled, moved within its list or to another one, made another
/// kind, or one slot fewer. False if the plan has nothing to change.
static bool mutate(std::mt19937& random, Schedule* schedule, std::vector<int>* slots) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  std::vector<Action>& list = schedule->actions[below(schedule->actions.size())];
  if (list.empty()) return false;
  const size_t from = below(list.size());
  const Action action = list[from];
  switch (below(8)) {
    case 0:
      std::swap(list[from], list[below(list.size())]);
      break;
    case 1:
      std::swap(list[from], list[std::min(from + 1, list.size() - 1)]);
      break;
    case 2:
      list.erase(list.begin() + from);
      break;
    case 3:
      list.insert(list.begin() + below(list.size() + 1), action);
      break;
    case 4:
      list.erase(list.begin() + from);
      list.insert(list.begin() + below(list.size() + 1), action);
      break;
    case 5: {
      list.erase(list.begin() + from);
      std::vector<Action>& other = schedule->actions[below(schedule->actions.size())];
      other.insert(other.begin() + below(other.size() + 1), action);
      break;
    }
    case 6:
      list[from].op = static_cast<Op>(below(4));
      break;
    default:
      (*slots)[below(slots->size())]--;
      break;
  }
  return true;
}

// Every generated plan is accepted: p 1..8, v 1..4, m 0..33. Each rank computes m T, the bubble is what is left, and
// the slots are the peak, and one more where the input comes by message.
TEST(Plan, EveryGeneratedPlanIsAccepted) {
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int p = 1; p <= 8; p++) {
      for (int v = kind.min_chunks; v <= std::min(kind.max_chunks, 4); v++) {
        for (int m = 0; m <= 33; m++) {
          Plan plan;
          plan.schedule = make_schedule(kind.name, p, v, m);
          plan.costs = equal_costs(p * v, {2, 3, 4});
          ASSERT_EQ(evaluate_plan(&plan), "") << kind.name << " " << p << " " << v << " " << m;
          ASSERT_EQ(plan.busy, std::vector<double>(p, m * v * 9.0));
          ASSERT_EQ(plan.bubble, plan.makespan - m * v * 9.0);
          ASSERT_EQ(plan.bubble_fraction, m == 0 ? 0 : plan.bubble / plan.makespan);
          for (int s = 0; s < p * v; s++) {
            ASSERT_EQ(plan.slots[s], std::min(m, plan.peak[s] + has_link_into(plan.schedule, s)));
          }
        }
      }
    }
  }
}

// The counted slots cost no time at all against one slot for every micro-batch: with slow links and unequal stages for
// most schedules, for the others (where a rank runs far ahead of the next) with equal stages and transfers up to half a
// stage's time, and never more than 30% beyond. With peak slots alone, the least that works, slow links do cost time.
TEST(Plan, SlotsAreEnough) {
  std::mt19937 random(1);
  double worst_with_peak = 1, worst_beyond = 1;
  for (int trial = 0; trial < 3000; trial++) {
    const ScheduleKind& kind = schedule_kinds()[trial % schedule_kinds().size()];
    const bool always = kind.name != "eager-1f1b" && kind.name != "interleaved" && kind.name.rfind("greedy", 0) != 0;
    const int p = 1 + random() % 8, v = std::min<int>(kind.max_chunks, kind.min_chunks + random() % 4);
    const int m = 1 + random() % 20;
    const StageCost same{1 + random() % 8 / 4.0, 1 + random() % 8 / 4.0, 1 + random() % 8 / 4.0};
    PlanCosts costs = equal_costs(p * v, same, random() % 7 / 4.0);  // a stage takes 3 or more
    costs.early_gradient = random() % 2;
    const bool beyond = trial % 2 == 0;
    if (beyond) {
      costs.transfer = random() % 9 / 2.0;
      for (StageCost& cost : costs.stages) cost = {random() % 9 / 4.0, random() % 9 / 4.0, random() % 9 / 4.0};
    }
    const Schedule schedule = make_schedule(kind.name, p, v, m, costs);
    const Plan plan = make_plan(schedule, costs);
    const double best = make_plan(schedule, costs, std::vector<int>(p * v, m)).makespan;
    if (always || !beyond) {
      ASSERT_EQ(plan.makespan, best) << kind.name << " " << p << " " << v << " " << m;
    }
    if (best == 0) continue;
    worst_beyond = std::max(worst_beyond, plan.makespan / best);
    worst_with_peak = std::max(worst_with_peak, make_plan(schedule, costs, plan.peak).makespan / best);
  }
  EXPECT_GT(worst_beyond, 1);
  EXPECT_LT(worst_beyond, 1.3);
  EXPECT_GT(worst_with_peak, 1.3);
}

// One slot fewer than the peak is refused with stage and numbers, and really does harm.
TEST(Plan, TooFewSlots) {
  const Schedule schedule = make_schedule("1f1b", 3, 5);
  EXPECT_EQ(verdict(schedule, {2, 2, 1}),
            "rank 0, stage 0: 3 micro-batches are in flight, but it has 2 activation slots");
  EXPECT_EQ(outcome(schedule, {2, 2, 1}, 1), Outcome::kCorrupt);
  EXPECT_EQ(outcome(schedule, {3, 1, 1}, 1), Outcome::kHang);
  EXPECT_EQ(verdict(schedule, {3, 2, 1}), "");
  EXPECT_EQ(outcome(schedule, {3, 2, 1}, 1), Outcome::kFinished);
  EXPECT_NE(verdict(make_schedule("gpipe", 2, 3), {3, 2}), "");
  EXPECT_NE(verdict(make_schedule("1f1b", 1, 1), {0}), "");
}

// Lists that are right one by one but wait for each other: the message walks the circle.
TEST(Plan, CycleIsNamed) {
  Schedule schedule = make_schedule("1f1b", 2, 2);  // rank 1: F0 B0 F1 B1; rank 0 made to wait for B0 before F1...
  schedule.actions[0] = {{Op::kForward, 0, 0}, {Op::kBackward, 0, 0}, {Op::kForward, 0, 1}, {Op::kBackward, 0, 1}};
  EXPECT_EQ(verdict(schedule), "");
  schedule.actions[1] = make_schedule("gpipe", 2, 2).actions[1];  // ...while rank 1 waits for F1 before B0
  const std::string reason = verdict(schedule);
  EXPECT_EQ(reason.rfind("it would hang in a circle: ", 0), 0u) << reason;
  for (const char* part :
       {"rank 0 B(0,0) waits for gradient 0 to stage 0", "gradient 0 to stage 0 waits for rank 1 B(1,0)",
        "rank 1 B(1,0) waits for rank 1 F(1,1)", "activation 1 to stage 1 waits for rank 0 F(0,1)"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }
  EXPECT_EQ(outcome(schedule, {2, 2}, 1), Outcome::kHang);
  EXPECT_THROW(make_plan(schedule, equal_costs(2)), Error);
}

// Every generated plan runs to the end under random delays, with the counted slots and with peak slots.
TEST(Plan, GeneratedPlansRun) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 1500; trial++) {
    const int p = 1 + random() % 8, m = random() % 34;
    const Schedule schedule = random_generated(random, p, m);
    const Plan plan = make_plan(schedule, equal_costs(schedule.stages));
    ASSERT_EQ(outcome(schedule, plan.slots, trial), Outcome::kFinished) << schedule.name << " " << p << " " << m;
    ASSERT_EQ(outcome(schedule, plan.peak, trial), Outcome::kFinished) << schedule.name << " " << p << " " << m;
  }
}

// Validation runs on the slots that training has, for any placement, numbers of micro-batches and slots; it is the
// fastest of the orders that these allow, and as fast as can be where it matters: no wait but for the first input.
TEST(Plan, ForwardPlans) {
  std::mt19937 random(6);
  for (int trial = 0; trial < 400; trial++) {
    const int p = 1 + random() % 6, v = 1 + random() % 3, m = random() % 20;
    const std::vector<int> owner = place_stages(random() % 2 ? Placement::kLoop : Placement::kV, p, v);
    std::vector<int> slots(owner.size());
    for (int& count : slots) count = 1 + random() % 4;
    const PlanCosts costs = equal_costs(p * v, {2, 0, 0}, random() % 3);
    const Plan plan = make_forward_plan(p, owner, m, costs, slots);
    EXPECT_TRUE(plan.schedule.forward_only);
    EXPECT_EQ(plan.schedule.owner, owner);
    EXPECT_EQ(plan.slots, slots);
    EXPECT_LE(plan.makespan, make_plan(forward_only_schedule(p, owner, m, 1), costs, slots).makespan);
    EXPECT_LE(plan.makespan, make_plan(forward_only_schedule(p, owner, m, 0), costs, slots).makespan);
    ASSERT_EQ(outcome(plan.schedule, slots, trial), Outcome::kFinished) << trial;
  }
  for (const char* name : {"1f1b", "interleaved", "zb-v"}) {
    for (int p = 1; p <= 6; p++) {
      const Plan training = simulated(name, p, 4 * p);
      const int stages = training.schedule.stages, m = 4 * p;
      const PlanCosts costs = equal_costs(stages, {1, 0, 0});
      const Plan plan = make_forward_plan(p, training.schedule.owner, m, costs, training.slots);
      const double last = name == std::string("zb-v") ? std::max(0, 2 * p - 2) : p - 1;  // on rank 0, the last stage
      EXPECT_LE(plan.makespan, m * stages / p + last) << name << p;
    }
  }
  EXPECT_EQ(make_forward_plan(3, {0, 1, 2}, 5, equal_costs(3)).slots, (std::vector<int>{2, 2, 2}));
}

// Any order of actions that the dependencies allow is accepted with peak slots, and what is accepted never hangs or
// corrupts under random delays: loops, V and random placements, split and whole backward passes, 4000 plans.
TEST(Plan, RandomPlansRun) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 4000; trial++) {
    const Schedule schedule = random_schedule(random, trial % 2 == 0);
    std::vector<int> peak;
    ASSERT_EQ(check_lists(schedule, &peak), "");
    ASSERT_EQ(verdict(schedule, peak), "") << trial;
    ASSERT_EQ(verdict(schedule), "") << trial;
    for (unsigned seed = 0; seed < 2; seed++) {
      ASSERT_EQ(outcome(schedule, peak, trial * 8 + seed), Outcome::kFinished) << trial;
      ASSERT_EQ(outcome(schedule, count_slots(schedule, peak), trial * 8 + 4 + seed), Outcome::kFinished) << trial;
    }
  }
}

// A changed plan is accepted exactly if it is harmless: what the checker accepts finishes under random delays, what it
// rejects hangs, corrupts or leaves work undone. Both happen often.
TEST(Plan, MutationsAreRejectedExactlyIfHarmful) {
  std::mt19937 random(3);
  int accepted = 0, hangs = 0, corruptions = 0, incomplete = 0;
  for (int trial = 0; trial < 30000; trial++) {
    Schedule schedule;
    const int p = 1 + random() % 4, m = random() % 7, kind = random() % 5;
    if (kind < 2) schedule = random_generated(random, p, m);
    if (kind == 2) schedule = forward_only_schedule(p, random_generated(random, p, m).owner, m, random() % 2);
    if (kind > 2) schedule = random_schedule(random, kind == 3);
    std::vector<int> peak;
    ASSERT_EQ(check_lists(schedule, &peak), "");
    std::vector<int> slots = random() % 2 ? peak : count_slots(schedule, peak);
    if (!mutate(random, &schedule, &slots)) continue;
    const std::string reason = verdict(schedule, slots);
    for (unsigned seed = 0; seed < 2; seed++) {
      const Outcome result = outcome(schedule, slots, trial * 2 + seed);
      ASSERT_EQ(reason.empty(), result == Outcome::kFinished) << "trial " << trial << ": " << reason;
      accepted += result == Outcome::kFinished;
      hangs += result == Outcome::kHang;
      corruptions += result == Outcome::kCorrupt;
      incomplete += result == Outcome::kIncomplete;
    }
  }
  for (int count : {accepted, hangs, corruptions, incomplete}) EXPECT_GT(count, 500);
  printf("accepted %d, hang %d, corrupt %d, incomplete %d\n", accepted, hangs, corruptions, incomplete);
}

// `order` has every node once, each rank's actions as in its list, and no node before one that it waits for: a rank
// that walks its own nodes in this order, blocking at each, cannot deadlock.
TEST(Plan, OrderServesABlockingExecutor) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; trial++) {
    const Schedule schedule = trial < 100 ? random_generated(random, 1 + trial % 6, 7) : random_schedule(random, true);
    const Plan plan = make_plan(schedule, equal_costs(schedule.stages, {1, 1, 0}, 0));
    std::vector<size_t> next(schedule.ranks, 0);
    std::vector<int> position(plan.times.size(), -1);
    for (size_t k = 0; k < plan.order.size(); k++) {
      const PlanNode node = plan.order[k];
      const int s = node.stage, i = node.micro_batch, rank = schedule.owner[s];
      ASSERT_EQ(position[plan.node_id(node.kind, s, i)], -1);
      position[plan.node_id(node.kind, s, i)] = static_cast<int>(k);
      const auto is_done = [&](NodeKind kind, int stage) { return position[plan.node_id(kind, stage, i)] >= 0; };
      const bool by_message =
          node.kind == NodeKind::kForward ? has_link_into(schedule, s) : has_link_into(schedule, s + 1);
      switch (node.kind) {
        case NodeKind::kActivation:
          EXPECT_TRUE(is_done(NodeKind::kForward, s - 1));
          break;
        case NodeKind::kGradient:
          EXPECT_TRUE(is_done(NodeKind::kBackward, s + 1));
          break;
        case NodeKind::kForward:
          EXPECT_TRUE(!by_message || is_done(NodeKind::kActivation, s));
          break;
        case NodeKind::kBackward:
          EXPECT_TRUE(!by_message || is_done(NodeKind::kGradient, s));
          break;
        case NodeKind::kWeight:
          EXPECT_TRUE(is_done(NodeKind::kBackward, s));
          break;
      }
      if (node.kind == NodeKind::kActivation || node.kind == NodeKind::kGradient) continue;
      const Action& action = schedule.actions[rank][next[rank]++];
      ASSERT_EQ(action.stage, s);
      ASSERT_EQ(action.micro_batch, i);
    }
    for (int rank = 0; rank < schedule.ranks; rank++) EXPECT_EQ(next[rank], schedule.actions[rank].size());
  }
}

// Unequal stages: the slowest one sets the pace, bubble is the mean idle time of a rank.
TEST(Plan, UnequalStages) {
  const Plan plan = make_plan(make_schedule("gpipe", 2, 4), {{{1, 1, 0}, {3, 2, 1}}, 0});
  EXPECT_EQ(plan.makespan, 1 + 4 * 3 + 4 * 3 + 1);
  EXPECT_EQ(plan.busy, (std::vector<double>{8, 24}));
  EXPECT_EQ(plan.bubble, 26 - 16);
  EXPECT_EQ(plan.at(NodeKind::kBackward, 1, 0).start, 13);
  EXPECT_EQ(plan.at(NodeKind::kBackward, 0, 3).end, 26);
}

// Times worked out by hand: messages of a hop follow one another, and a receive waits for the slot and for its dx.
TEST(Plan, TransferTimesByHand) {
  const Plan queued = make_plan(make_schedule("gpipe", 2, 3), equal_costs(2, {1, 1, 0}, 10));
  EXPECT_EQ(queued.at(NodeKind::kActivation, 1, 2).start, 21);  // 1, 11, 21
  EXPECT_EQ(queued.at(NodeKind::kGradient, 0, 2).start, 53);    // 33, 43, 53
  EXPECT_EQ(queued.makespan, 64);
  const Plan tight = make_plan(make_schedule("1f1b", 2, 2), equal_costs(2, {1, 1, 0}, 1), {2, 1});
  EXPECT_EQ(tight.at(NodeKind::kBackward, 1, 0).end, 4);
  EXPECT_EQ(tight.at(NodeKind::kGradient, 0, 0).end, 5);
  EXPECT_EQ(tight.at(NodeKind::kActivation, 1, 1).start, 5);
  EXPECT_EQ(tight.makespan, 10);
  Schedule split = make_schedule("gpipe", 2, 2);  // the slot is taken until W, and dx has been sent long before
  split.actions[1].clear();
  for (int i = 0; i < 2; i++) {
    for (Op op : {Op::kForward, Op::kBackwardInput, Op::kBackwardWeight}) split.actions[1].push_back({op, 1, i});
  }
  const Plan until_weight = make_plan(split, equal_costs(2, {1, 1, 3}, 1), {2, 1});
  EXPECT_EQ(until_weight.at(NodeKind::kGradient, 0, 0).end, 5);
  EXPECT_EQ(until_weight.at(NodeKind::kActivation, 1, 1).start, 7);
  const Plan forward = make_plan(forward_only_schedule(2, {0, 1}, 4), {{{1, 0, 0}, {10, 0, 0}}, 1});
  EXPECT_EQ(forward.at(NodeKind::kActivation, 1, 1).start, 2);
  EXPECT_EQ(forward.at(NodeKind::kActivation, 1, 2).start, 12);  // F(1,0) has ended
  EXPECT_EQ(forward.at(NodeKind::kForward, 0, 3).start, 3);      // activation 1 has gone
}

// The hash sees every part of a plan, and equal plans have equal hashes.
TEST(Plan, HashCoversEverything) {
  const Plan plan = simulated("1f1b", 3, 4, 0.5);
  const uint64_t hash = plan_hash(plan, {0, 1, 2, 3});
  EXPECT_EQ(hash, plan_hash(simulated("1f1b", 3, 4, 0.5), {0, 1, 2, 3}));
  EXPECT_NE(hash, plan_hash(plan, {0, 1, 3, 3}));
  EXPECT_NE(hash, plan_hash(plan));
  const auto changed = [&](void (*change)(Plan*)) {
    Plan copy = plan;
    change(&copy);
    return plan_hash(copy, {0, 1, 2, 3}) != hash;
  };
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.name = "x"; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.ranks++; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.stages++; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.micro_batches++; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.forward_only = true; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.owner[2] = 0; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.actions[1][3].op = Op::kBackwardInput; }));
  EXPECT_TRUE(changed([](Plan* p) { p->schedule.actions[2][1].micro_batch++; }));
  EXPECT_TRUE(changed([](Plan* p) { p->costs.transfer = 0.25; }));
  EXPECT_TRUE(changed([](Plan* p) { p->costs.early_gradient = true; }));
  EXPECT_TRUE(changed([](Plan* p) { p->costs.stages[1].backward_weight = 2; }));
  EXPECT_TRUE(changed([](Plan* p) { p->slots[2]++; }));
  EXPECT_TRUE(changed([](Plan* p) { p->peak[0]++; }));
  EXPECT_TRUE(changed([](Plan* p) { std::swap(p->order[0], p->order[1]); }));
  EXPECT_TRUE(changed([](Plan* p) { p->times[0].end += 1; }));
  EXPECT_TRUE(changed([](Plan* p) { p->busy[0] += 1; }));
  EXPECT_TRUE(changed([](Plan* p) { p->makespan += 1; }));
  EXPECT_TRUE(changed([](Plan* p) { p->bubble += 1; }));
  EXPECT_TRUE(changed([](Plan* p) { p->bubble_fraction += 1; }));
}

// Actions are where the simulator puts them, dots where a rank waits; the widest label fits the shortest action. The
// second stage of a rank is in lower case, more stages have numbers, and the legend says so.
TEST(Plan, Timeline) {
  EXPECT_EQ(timeline_text(make_plan(make_schedule("1f1b", 2, 3), equal_costs(2)), 24),
            "rank 0 |F0F1....B0--F2B1--..B2--|\n"
            "rank 1 |..F0B0--F1B1--F2B2--....|\n"
            "F forward, B backward, . idle\n"
            "1f1b: makespan 12, bubble 3 (25.0%), activation slots 2,2\n");
  EXPECT_EQ(timeline_text(simulated("zb-v", 2, 1)),
            "rank 0 |F0....f0i0w0....I0W0|\n"
            "rank 1 |..F0f0....i0w0I0W0..|\n"
            "F forward, I input gradient, W weight gradient, . idle; lower case: the rank's second stage\n"
            "zb-v: makespan 10, bubble 4 (40.0%), activation slots 1,1,1,1\n");
  const Schedule looped = forward_only_schedule(2, {0, 1, 0, 1, 0, 1}, 2, 2);
  EXPECT_EQ(timeline_text(make_plan(looped, equal_costs(6, {2, 0, 0}))),
            "rank 0 |F0:0F1:0F0:2F1:2F0:4F1:4....|\n"
            "rank 1 |....F0:1F1:1F0:3F1:3F0:5F1:5|\n"
            "F forward, . idle; the number behind the colon is the stage\n"
            "forward: makespan 14, bubble 2 (14.3%), activation slots 2,2,2,2,2,2\n");
  EXPECT_EQ(timeline_text(simulated("gpipe", 1, 0)),
            "rank 0 |.|\n. idle\ngpipe: makespan 0, bubble 0 (0.0%), activation slots 0\n");
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
