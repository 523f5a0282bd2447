// test_trace.cpp -- the trace holds every action, message and phase of measured and simulated steps, as JSON that
// parses and that the plot script draws.
#include "llmc/trace.h"

#include <cmath>

#include <gtest/gtest.h>

#include "test/host_test.h"

namespace {

/// What `python3 -c program file` prints; the program sees the parsed file as `trace` and its intervals as `events`.
std::string python(const std::string& file, const std::string& program) {
  const std::string command =
      "python3 -c \"\nimport json, sys\ntrace = json.load(open(sys.argv[1]))\n"
      "events = [e for e in trace['traceEvents'] if e['ph'] == 'X']\n" +
      program + "\n\" " + file + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  std::string text;
  for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) text += static_cast<char>(c);
  EXPECT_EQ(pclose(pipe), 0) << command << "\n" << text;
  return text;
}

Plan example_plan(const std::string& name, double transfer = 0.5e-3) {
  const ScheduleKind& kind = find_schedule_kind(name);
  PlanCosts costs = equal_costs(3 * kind.natural_chunks, {2e-3, 2e-3, 1e-3}, transfer);
  costs.early_gradient = true;
  return make_plan(make_schedule(name, 3, 0, 4, costs), costs);
}

}  // namespace

// All of a simulated step, in microseconds, in its replica, row and with its name: also with stages that share a rank.
TEST(Trace, HoldsEveryInterval) {
  const TemporaryFolder folder;
  for (const char* name : {"1f1b", "zb-v"}) {
    const Plan plan = example_plan(name);
    std::vector<StepTimes> ranks = simulated_step_times(plan);
    ranks[2].phases.push_back({"optimizer", plan.makespan, plan.makespan + 1e-3});
    const std::string file = folder.write("trace.json", trace_json(JobTimes{ranks, ranks}, name));
    std::string expected;
    for (const std::vector<Action>& list : plan.schedule.actions) {
      for (const Action& a : list) {
        const Interval& time = plan.at(node_kind(a.op), a.stage, a.micro_batch);
        expected += format_text("%c %d stage %d, row %d: %.1f %.1f\n", op_letter(a.op), a.micro_batch, a.stage,
                                plan.schedule.owner[a.stage], 1e6 * time.start, 1e6 * (time.end - time.start));
      }
    }
    EXPECT_EQ(python(file,
                     "for e in events:\n"
                     "  if e['pid'] == 1 and e['cat'] == 'action':\n"
                     "    print('%s, row %d: %.1f %.1f' % (e['name'], e['tid'], e['ts'], e['dur']))"),
              expected);
    int messages = 0;
    for (const PlanNode& node : plan.order) {
      messages += node.kind == NodeKind::kActivation || node.kind == NodeKind::kGradient;
    }
    EXPECT_EQ(python(file, "print(sum(e['cat'] == 'message' for e in events), trace['otherData']['title'])"),
              format_text("%d %s\n", 2 * messages, name));
    EXPECT_EQ(python(file, "print([(e['name'], e['tid'], e['dur']) for e in events if e['cat'] == 'phase'])"),
              "[('optimizer', 2, 1000.0), ('optimizer', 2, 1000.0)]\n");
  }
}

// Perfetto wants the intervals of a row apart, times that are not negative, and shows rows by name: one row for each
// rank and each link, that of a link with the messages of this link only.
TEST(Trace, RowsAreInOrder) {
  const TemporaryFolder folder;
  std::vector<StepTimes> ranks = simulated_step_times(example_plan("1f1b", 3e-3));
  for (StepTimes& times : ranks) {
    shift(&times, -1e-3);
    for (TransferTime& transfer : times.transfers) transfer.ready = -1e-3;  // messages wait for those before them
  }
  const std::string file = folder.write("trace.json", trace_json(JobTimes{ranks}, "early"));
  EXPECT_EQ(python(file,
                   "rows = {}\n"
                   "for e in events: rows.setdefault(e['tid'], []).append(e)\n"
                   "for row in rows.values():\n"
                   "  for a, b in zip(row, row[1:]): assert a['ts'] + a['dur'] <= b['ts'] + 0.002, (a, b)\n"
                   "  assert len({e['name'].split()[0] for e in row if e['cat'] == 'message'}) <= 1, row\n"
                   "print(min(e['ts'] for e in events), sorted(rows))"),
            "0.0 [0, 1, 2, 3, 4, 5, 6]\n");
  EXPECT_EQ(python(file, "print([e['args']['name'] for e in trace['traceEvents'] if e['name'] == 'thread_name'])"),
            "['rank 0', 'rank 1', 'rank 2', 'activations stage 0 -> 1', 'gradients stage 1 -> 0', "
            "'activations stage 1 -> 2', 'gradients stage 2 -> 1']\n");
}

// Steps follow each other at the distance of their begins, in the same rows; rows are named once.
TEST(Trace, HoldsSeveralSteps) {
  const TemporaryFolder folder;
  const ReplicaTimes first = simulated_step_times(example_plan("1f1b"));
  ReplicaTimes second = first;
  for (StepTimes& times : second) times.begin += 0.5;
  const std::string file = folder.write("trace.json", trace_json(std::vector<JobTimes>{{first}, {second}}, "two"));
  EXPECT_EQ(python(file,
                   "a, b = ([e for e in events if e['args']['step'] == n] for n in (0, 1))\n"
                   "assert len(a) == len(b)\n"
                   "for x, y in zip(a, b):\n"
                   "  assert (x['name'], x['tid'], x['dur']) == (y['name'], y['tid'], y['dur'])\n"
                   "print(set(round(y['ts'] - x['ts'], 2) for x, y in zip(a, b)))\n"
                   "print(sum(e['name'] == 'thread_name' for e in trace['traceEvents']))"),
            "{500000.0}\n7\n");
}

// The plot script draws what trace.h writes.
TEST(Trace, IsDrawn) {
  const TemporaryFolder folder;
  const std::string measured =
                        folder.write("a.json", trace_json(JobTimes{simulated_step_times(example_plan("1f1b"))}, "one")),
                    simulated =
                        folder.write("b.json", trace_json(JobTimes{simulated_step_times(example_plan("zb-v"))}, "two"));
  const std::string command =
      "python3 scripts/plot_timeline.py " + measured + " " + simulated + " " + (folder / "o.svg");
  ASSERT_EQ(system(command.c_str()), 0);
  const std::string svg = read_whole_file(folder / "o.svg", "drawing");
  EXPECT_TRUE(contains(svg, format_text("one: 30 ms, bubble %.1f%%", 100 * example_plan("1f1b").bubble_fraction)))
      << 1e3 * example_plan("1f1b").makespan;
  EXPECT_TRUE(contains(svg, format_text(", bubble %.1f%%", 100 * example_plan("zb-v").bubble_fraction)));
  EXPECT_TRUE(contains(svg, "<title>weight gradient of micro-batch 3, stage 5: "));
}
