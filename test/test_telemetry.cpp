// test_telemetry.cpp -- what a report says of times that are known: two ranks by hand, every schedule by simulation.
#include "llmc/telemetry_text.h"

#include <gtest/gtest.h>

#include "llmc/timeline.h"

namespace {

/// 1F1B of 2 ranks and 2 micro-batches, as it may have been measured (seconds, not on a grid that hides errors):
///   rank 0 |F0 F1 .  . B0 (I to 6.5) . B1 |optimizer to 14        messages: F0 at 1.5, F1 at 2.5 while rank 1
///   computes; rank 1 |.  .  F0 B0 F1 B1 ...                                           dB0 at 5, dB1 at 10.5
std::vector<StepTimes> measured_by_hand() {
  StepTimes first, second;
  first.end = 14;
  first.actions = {{{Op::kForward, 0, 0}, 0, 1, 1},
                   {{Op::kForward, 0, 1}, 1, 2, 2},
                   {{Op::kBackward, 0, 0}, 5.25, 6.5, 7.25},
                   {{Op::kBackward, 0, 1}, 10.5, 12, 12.5}};
  first.transfers = {{true, false, 1, 0, 100, 1, 1.5},
                     {false, true, 0, 0, 100, 1.5, 5},
                     {true, false, 1, 1, 100, 2, 2.75},
                     {false, true, 0, 1, 100, 5, 10.5}};
  first.phases = {{"reduce", 12.5, 13}, {"optimizer", 13, 14}};
  second.end = 13.5;
  second.actions = {{{Op::kForward, 1, 0}, 1.75, 2.5, 2.5},
                    {{Op::kBackward, 1, 0}, 2.5, 4, 5.5},
                    {{Op::kForward, 1, 1}, 5.75, 6.5, 6.5},
                    {{Op::kBackward, 1, 1}, 6.5, 9, 10}};
  second.transfers = {{false, false, 1, 0, 100, 0.25, 1.5},
                      {true, true, 0, 0, 100, 4, 5},
                      {false, false, 1, 1, 100, 2.25, 2.75},
                      {true, true, 0, 1, 100, 9, 10.5}};
  second.phases = {{"reduce", 10, 12}, {"reduce", 12, 12.5}, {"optimizer", 12.5, 13.5}};
  return {first, second};
}

Plan plan_by_hand() { return make_plan(make_schedule("1f1b", 2, 1, 2), equal_costs(2)); }

}  // namespace

// Busy time by kind, every sort of idle time, and the time after the pipeline, to the last digit.
TEST(Telemetry, SaysWhereTheTimeWent) {
  const PipelineReport report = make_report(plan_by_hand(), measured_by_hand());
  const RankTimes &first = report.rank[0], &second = report.rank[1];
  EXPECT_DOUBLE_EQ(first.forward, 2);
  EXPECT_DOUBLE_EQ(first.backward, 4);
  EXPECT_DOUBLE_EQ(first.warm_up, 0);
  EXPECT_DOUBLE_EQ(first.wait_gradient, 3 + 3.25);  // 2 to 5, 7.25 to 10.5
  EXPECT_DOUBLE_EQ(first.other, 0.25);              // 5 to 5.25: it had arrived
  EXPECT_DOUBLE_EQ(first.drain, 0);
  EXPECT_DOUBLE_EQ(first.after, 1.5);
  EXPECT_DOUBLE_EQ(second.forward, 1.5);
  EXPECT_DOUBLE_EQ(second.backward, 6.5);
  EXPECT_DOUBLE_EQ(second.warm_up, 1.75);
  EXPECT_DOUBLE_EQ(second.wait_activation, 0);
  EXPECT_DOUBLE_EQ(second.wait_gradient, 0);
  EXPECT_DOUBLE_EQ(second.other, 0.25);  // its activation had arrived long before
  EXPECT_DOUBLE_EQ(second.drain, 2.5);
  EXPECT_DOUBLE_EQ(second.after, 1);
  for (const RankTimes& rank : report.rank) EXPECT_DOUBLE_EQ(rank.busy() + rank.idle(), 12.5);
  EXPECT_DOUBLE_EQ(report.makespan, 12.5);
  EXPECT_DOUBLE_EQ(report.mean_busy, 7);
  EXPECT_DOUBLE_EQ(report.bubble, 5.5);
  EXPECT_DOUBLE_EQ(report.imbalance, 8.0 / 7);
}

// Another origin of time, as where another replica began first, changes nothing.
TEST(Telemetry, CountsFromItsOwnFirstAction) {
  std::vector<StepTimes> later = measured_by_hand();
  for (StepTimes& times : later) shift(&times, 64);
  const PipelineReport report = make_report(plan_by_hand(), measured_by_hand()),
                       same = make_report(plan_by_hand(), later);
  EXPECT_EQ(telemetry_json(1, same), telemetry_json(1, report));
  EXPECT_EQ(timeline_text(measured_plan(plan_by_hand(), same, later)),
            timeline_text(measured_plan(plan_by_hand(), report, measured_by_hand())));
}

// Messages are under way from the moment when the data is there and the receive can begin; exposed while the receiver
// is idle before the action that takes them. An unsplit backward pass sends when its input gradient is there.
TEST(Telemetry, MeasuresLinks) {
  const PipelineReport report = make_report(plan_by_hand(), measured_by_hand());
  ASSERT_EQ(report.links.size(), 2u);
  const LinkTimes &down = report.links[0], &up = report.links[1];
  EXPECT_EQ(down.is_gradient, false);
  EXPECT_EQ(down.from, 0);
  EXPECT_EQ(down.to, 1);
  EXPECT_EQ(down.stage, 1);
  EXPECT_EQ(down.messages, 2);
  EXPECT_EQ(down.bytes, 200u);
  EXPECT_DOUBLE_EQ(down.total, 0.5 + 0.5);  // 1 to 1.5; the second waits for its receive: 2.25 to 2.75
  EXPECT_DOUBLE_EQ(down.exposed, 0.5);      // the second arrives while rank 1 computes
  EXPECT_DOUBLE_EQ(down.latency(), 0.5);
  EXPECT_DOUBLE_EQ(down.bytes_per_second(), 200);
  EXPECT_DOUBLE_EQ(down.overlap(), 0.5);
  EXPECT_EQ(up.is_gradient, true);
  EXPECT_EQ(up.from, 1);
  EXPECT_EQ(up.to, 0);
  EXPECT_EQ(up.stage, 0);
  EXPECT_DOUBLE_EQ(up.total, 1 + 1.5);
  EXPECT_DOUBLE_EQ(up.exposed, 1 + 1.5);
  EXPECT_DOUBLE_EQ(report.overlap(), 1 - 3 / 3.5);
}

// Costs are kept for each action and as means by stage, split where a backward pass is not; the report compares with
// the same plan simulated with each action's own time: a slow one counts where it was.
TEST(Telemetry, SimulatesWithMeasuredCosts) {
  const PipelineReport report = make_report(plan_by_hand(), measured_by_hand());
  EXPECT_DOUBLE_EQ(report.costs.stages[0].forward, 1);
  EXPECT_DOUBLE_EQ(report.costs.stages[0].backward_input, (1.25 + 1.5) / 2);
  EXPECT_DOUBLE_EQ(report.costs.stages[0].backward_weight, (0.75 + 0.5) / 2);
  EXPECT_DOUBLE_EQ(report.costs.stages[1].forward, 0.75);
  EXPECT_DOUBLE_EQ(report.costs.stages[1].backward_input, 2);
  EXPECT_DOUBLE_EQ(report.costs.stages[1].backward_weight, 1.25);
  EXPECT_DOUBLE_EQ(report.costs.transfer, 0.5);  // of 0.5, 0.5, 1, 1.5 the lower median
  // F0 1 + 0.5 + rank 1's F0 B0 F1 and I of B1, which took longer than that of B0, + 0.5 + B1 of rank 0
  EXPECT_DOUBLE_EQ(report.simulated_makespan, 1 + 0.5 + 2 * 0.75 + 3 + 2.5 + 0.5 + 2);
  EXPECT_DOUBLE_EQ(report.simulated_bubble, report.simulated_makespan - report.mean_busy);
}

// Phases of a name add up on a rank; the longest rank counts.
TEST(Telemetry, AddsUpPhases) {
  const PipelineReport report = make_report(plan_by_hand(), measured_by_hand());
  ASSERT_EQ(report.phases.size(), 2u);
  EXPECT_EQ(report.phases[0].name, "reduce");
  EXPECT_DOUBLE_EQ(report.phases[0].end, 2.5);
  EXPECT_EQ(report.phases[1].name, "optimizer");
  EXPECT_DOUBLE_EQ(report.phases[1].end, 1);
}

// A simulated plan, looked at as if it had been measured, gives the simulator's own numbers back: for every schedule,
// also with several stages a rank, backward passes split here and there, one rank, no data.
TEST(Telemetry, AgreesWithTheSimulator) {
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int ranks : {1, 2, 3, 4}) {
      for (int m : {0, 1, 3, 2 * ranks}) {
        const int stages = ranks * kind.natural_chunks;
        PlanCosts costs = equal_costs(stages, {}, 0.25);
        costs.early_gradient = true;
        for (int s = 0; s < stages; ++s) costs.stages[s] = {1 + s * 0.25, 1.5, 0.5 + s % 2};
        const Plan plan = make_plan(make_schedule(kind.name, ranks, 0, m, costs), costs);
        const std::vector<StepTimes> ranks_times = simulated_step_times(plan);
        const PipelineReport report = make_report(plan, ranks_times);
        const std::string what = format_text("%s, p %d, m %d", kind.name.c_str(), ranks, m);
        EXPECT_NEAR(report.makespan, plan.makespan, 1e-9) << what;
        EXPECT_NEAR(report.simulated_makespan, plan.makespan, 1e-9) << what;
        EXPECT_NEAR(report.bubble, plan.bubble, 1e-9) << what;
        for (int r = 0; r < ranks; ++r) {
          EXPECT_NEAR(report.rank[r].busy(), plan.busy[r], 1e-9) << what;
          EXPECT_NEAR(report.rank[r].busy() + report.rank[r].idle(), plan.makespan, 1e-9) << what;
          EXPECT_NEAR(report.rank[r].other, 0, 1e-9) << what;
          EXPECT_NEAR(report.slowness[r], m > 0 ? 1 : 0, 1e-9) << what;
        }
        for (const LinkTimes& link : report.links) {
          EXPECT_EQ(link.messages, m) << what;
          EXPECT_LE(link.exposed, link.total + 1e-9) << what;
        }
        EXPECT_EQ(timeline_text(measured_plan(plan, report, ranks_times)), timeline_text(plan)) << what;
      }
    }
  }
}

// Times survive the way to rank 0, come to its clock, and count from the first action of any rank.
TEST(StepTimes, AreAligned) {
  std::vector<StepTimes> ranks = measured_by_hand();
  ranks[0].begin = 1000.5;  // rank 0's first action: 1000.5
  ranks[1].begin = 3007.5;  // the clock of rank 1 is 2007 ahead: 1000.5 as well
  for (StepTimes& times : ranks) times = from_bytes(to_bytes(times));
  shift(&ranks[0], 2);  // counted from 2 s earlier: the same moments
  EXPECT_DOUBLE_EQ(ranks[0].begin, 998.5);
  EXPECT_DOUBLE_EQ(ranks[0].actions[1].start, 3);
  align(&ranks, {{0, 0}, {2007, 0}});
  const std::vector<StepTimes> expected = measured_by_hand();
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_DOUBLE_EQ(ranks[r].begin, 1000.5);
    EXPECT_DOUBLE_EQ(ranks[r].end, expected[r].end);
    for (size_t i = 0; i < expected[r].actions.size(); ++i) {
      EXPECT_EQ(action_text(ranks[r].actions[i].action), action_text(expected[r].actions[i].action));
      EXPECT_DOUBLE_EQ(ranks[r].actions[i].start, expected[r].actions[i].start);
      EXPECT_DOUBLE_EQ(ranks[r].actions[i].ready, expected[r].actions[i].ready);
      EXPECT_DOUBLE_EQ(ranks[r].actions[i].end, expected[r].actions[i].end);
    }
    for (size_t i = 0; i < expected[r].transfers.size(); ++i) {
      EXPECT_EQ(ranks[r].transfers[i].is_gradient, expected[r].transfers[i].is_gradient);
      EXPECT_DOUBLE_EQ(ranks[r].transfers[i].ready, expected[r].transfers[i].ready);
      EXPECT_DOUBLE_EQ(ranks[r].transfers[i].done, expected[r].transfers[i].done);
    }
    for (size_t i = 0; i < expected[r].phases.size(); ++i) {
      EXPECT_EQ(ranks[r].phases[i].name, expected[r].phases[i].name);
      EXPECT_DOUBLE_EQ(ranks[r].phases[i].start, expected[r].phases[i].start);
      EXPECT_DOUBLE_EQ(ranks[r].phases[i].end, expected[r].phases[i].end);
    }
  }
}

// Rounds with slow ways there or back narrow the offset from both sides; clocks that drifted apart leave the fastest.
TEST(Clock, OffsetIsWhatAllRoundsAllow) {
  // the other clock is 10 ahead; ways there and back: 1 and 5, 4 and 1
  const ClockOffset both = offset_of_rounds({{0, 10, 15}, {20, 25, 34}, {40, 46, 51}, {60, 70, 75}});
  EXPECT_DOUBLE_EQ(both.offset, 10);  // within 9..11 by the fast ways
  EXPECT_DOUBLE_EQ(both.error, 1);
  const ClockOffset drifted = offset_of_rounds({{0, 2, 11}, {20, 24, 42}});
  EXPECT_DOUBLE_EQ(drifted.offset, 10);
  EXPECT_DOUBLE_EQ(drifted.error, 1);
}

// A straggler is slow for its planned share three times in a row; being slow because it has more to do is no reason.
TEST(Straggler, IsSlowForItsShareAgainAndAgain) {
  PlanCosts costs = equal_costs(3);
  costs.stages[2] = {2, 2, 2};
  const Plan plan = make_plan(make_schedule("gpipe", 3, 1, 4), costs);
  const auto report = [&](double slow) {
    std::vector<StepTimes> ranks = simulated_step_times(plan);
    for (ActionTime& time : ranks[1].actions) time.end = time.ready = time.start + slow * (time.end - time.start);
    return make_report(plan, ranks);
  };
  EXPECT_NEAR(report(1.25).slowness[1], 1.25, 1e-9);
  EXPECT_NEAR(report(1.25).slowness[2], 1, 1e-9);
  StragglerWatch watch;
  for (double slow : {1.0, 1.25, 1.25, 1.05, 1.25, 1.25}) EXPECT_EQ(watch.update(report(slow)), -1);
  EXPECT_EQ(watch.update(report(1.25)), 1);
  EXPECT_EQ(watch.update(report(1.0)), -1);
}

// The line for people and the line for metrics.jsonl; nothing is left out that is not known, but named null.
TEST(TelemetryText, Lines) {
  PipelineReport report = make_report(plan_by_hand(), measured_by_hand());
  EXPECT_EQ(
      telemetry_line(40, report),
      "step 40 | pipeline 12500 ms | bubble 44.0% measured, 36.4% simulated | busy 48/64% | messages 14% hidden | "
      "imbalance 1.14");
  report.closed_form = report.mean_busy / 4;
  EXPECT_EQ(telemetry_line(40, report, 1),
            "step 40 | pipeline 12500 ms | bubble 44.0% measured, 36.4% simulated, 20.0% closed form | busy 48/64% | "
            "messages 14% hidden | imbalance 1.14 | rank 1 is slow (1.33x)");
  const std::string json = telemetry_json(40, report, 1);
  EXPECT_EQ(json.find("{\"step\":40,\"pipeline\":{\"schedule\":\"1f1b\",\"replica\":0,\"ranks\":2,\"stages\":2,"
                      "\"micro_batches\":2,\"makespan_ms\":12500,"),
            0u);
  for (const char* part :
       {"\"bubble\":0.44,", "\"bubble_closed_form\":0.20000000000000001,", "\"straggler\":1,",
        "\"phase_ms\":{\"reduce\":2500,\"optimizer\":1000}}}", "\"wait_gradient_ms\":6250,", "\"exposed_ms\":500,"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << " in " << json;
  }
  report.closed_form.reset();
  EXPECT_NE(telemetry_json(40, report).find("\"bubble_closed_form\":null,"), std::string::npos);
  EXPECT_NE(telemetry_json(40, report).find("\"straggler\":null,"), std::string::npos);
}
