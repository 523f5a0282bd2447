// test_schedule_csv.cpp -- schedules as files: every schedule comes back as it was, and each kind of fault in a file is
// one line that names the place and the remedy.
#include <gtest/gtest.h>

#include "llmc/plan.h"
#include "llmc/schedule_csv.h"

static bool same(const Schedule& a, const Schedule& b) {
  if (a.ranks != b.ranks || a.stages != b.stages || a.micro_batches != b.micro_batches || a.owner != b.owner) {
    return false;
  }
  const auto equal = [](const Action& x, const Action& y) {
    return x.op == y.op && x.stage == y.stage && x.micro_batch == y.micro_batch;
  };
  for (int rank = 0; rank < a.ranks; rank++) {
    const std::vector<Action>&x = a.actions[rank], &y = b.actions[rank];
    if (!std::equal(x.begin(), x.end(), y.begin(), y.end(), equal)) return false;
  }
  return true;
}

static std::string error_of(const std::string& text) {
  try {
    parse_schedule_csv(text, "s.csv");
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "accepted";
}

// Every schedule, written and read, is the same: ranks, stages, owners, micro-batches and every list.
TEST(ScheduleCsv, RoundTrip) {
  for (const ScheduleKind& kind : schedule_kinds()) {
    for (int p = 1; p <= 5; p++) {
      for (int v = kind.min_chunks; v <= std::min(kind.max_chunks, 3); v++) {
        for (int m : {1, 2, 7, 12}) {
          const Schedule schedule = make_schedule(kind.name, p, v, m);
          EXPECT_TRUE(same(schedule, parse_schedule_csv(schedule_csv_text(schedule), "s.csv"))) << kind.name << p << v;
        }
      }
    }
  }
}

// The text is what torch.distributed.pipelining reads; its own tables, with empty cells for idle time, blanks and
// Windows line ends, give the same schedule.
TEST(ScheduleCsv, Format) {
  EXPECT_EQ(schedule_csv_text(make_schedule("1f1b", 2, 2)), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  const std::string torch = "0F0,0F1,,,0B0, ,0B1,\r\n,1F0,1B0 , 1F1,1B1,,,\r\n\r\n";
  EXPECT_TRUE(same(make_schedule("1f1b", 2, 2), parse_schedule_csv(torch, "s.csv")));
  EXPECT_EQ(parse_schedule_csv(torch, "a/b.csv").name, "a/b.csv");
  const Schedule split = parse_schedule_csv("0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2B0,1B0", "s.csv");
  EXPECT_EQ(split.owner, (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(make_plan(split, equal_costs(4)).makespan, 11);
}

// From and to disk; a file that is not there is a user error with its path.
TEST(ScheduleCsv, Files) {
  const std::string path = testing::TempDir() + "/schedule_csv_test.csv";
  const Schedule schedule = make_schedule("zb-v", 3, 5);
  write_file_atomically(path, schedule_csv_text(schedule));
  EXPECT_TRUE(same(schedule, read_schedule_csv(path)));
  remove(path.c_str());
  try {
    read_schedule_csv(path);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
  }
}

// Each fault is found, with file, line and what to do.
TEST(ScheduleCsv, FaultsAreNamed) {
  for (const char* empty : {"", "\n\n", ",,\n , \r\n"}) {
    EXPECT_EQ(error_of(empty).rfind("s.csv", 0), 0u) << error_of(empty);
  }
  EXPECT_EQ(error_of(""), "s.csv: no actions in it; write one line for each rank, such as 0F0,0B0");
  EXPECT_EQ(error_of("0F0,0B0\n\n1F0,1B0\n"), "s.csv:2: a rank without actions; give each rank a stage");
  for (const char* cell : {"0G0", "F0", "0F", "00", "0f0", "0F-1", "-1F0", "0F0x", "0FF0", "0 F0", "0SEND_F0",
                           "1234567F0", "0F1234567", "0F0;0B0"}) {
    EXPECT_EQ(error_of(std::string("0F0,0B0\n1F0,") + cell + "\n"),
              format_text("s.csv:2: cell \"%s\" is no action; write stage, F, B, I or W, micro-batch, such as 0F3 (no "
                          "messages)",
                          cell));
  }
  EXPECT_EQ(error_of("0F0,0B0\n1F0,0F1\n"), "s.csv:2: cell \"0F1\": stage 0 is on line 1 already; give it to one rank");
  EXPECT_EQ(error_of("0F0,0B0\n2F0,2B0\n"),
            "s.csv: stage 1 has no cell, stage 2 has; number the stages from 0 without gaps");
  EXPECT_EQ(error_of("0F0,0B0\n1F0,1F2,1B0,1B2\n"),
            "s.csv:2: rank 1, action 1, F(1,2): F(1,1) must come first (micro-batches go up)");
  EXPECT_EQ(error_of("0F0,0F1,0B0,0B1\n1F0,1B0\n"), "s.csv:2: rank 1: F(1,1) is missing");
  EXPECT_EQ(error_of("0F0,0I0\n1F0,1B0\n"), "s.csv:1: rank 0: W(0,0) is missing");
  EXPECT_EQ(error_of("0F0,0F1,0B1,0B0\n"),
            "s.csv:1: rank 0, action 2, B(0,1): B(0,0) must come first (micro-batches go up)");
  EXPECT_EQ(error_of("0F0,0B0\n1B0,1F0\n"), "s.csv:2: rank 1, action 0, B(1,0): it comes before its forward pass");
}

// Lists that are right one by one but wait for each other are read, and refused by the plan.
TEST(ScheduleCsv, CircleIsLeftToThePlan) {
  const Schedule schedule = parse_schedule_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "s.csv");
  try {
    make_plan(schedule, equal_costs(2));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind("schedule s.csv cannot run: it would hang in a circle", 0), 0u);
  }
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
