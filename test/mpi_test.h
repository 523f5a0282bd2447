// mpi_test.h -- GoogleTest under mpirun: every rank runs every test, rank 0 reports, a failure on any rank fails the
// test.
//
//   MPI_TEST(Ring, arrives) { ... control() ... }      int main -> run_mpi_tests(argc, argv)
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "llmc/control.h"

/// The group of all ranks; alive from run_mpi_tests on.
inline std::unique_ptr<Control>& control_holder() {
  static std::unique_ptr<Control> control;
  return control;
}
inline Control& control() { return *control_holder(); }

/// Ranks meet at the end of each test, so that a failure is known to rank 0 and the next test starts together.
class MpiTest : public testing::Test {
 protected:
  void TearDown() override {
    const bool failed_here = HasFailure();
    if (control().max(failed_here ? 1 : 0) != 0 && !failed_here) ADD_FAILURE() << "failed on another rank";
  }
};
#define MPI_TEST(suite, name)      \
  class suite : public MpiTest {}; \
  TEST_F(suite, name)

/// Prints the failures of ranks other than 0, which report nothing else.
class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fprintf(stderr, "rank %d: %s:%d: %s\n", control().rank(), result.file_name() ? result.file_name() : "?",
            result.line_number(), result.summary());
  }
};

inline int run_mpi_tests(int argc, char** argv) {
  control_holder() = std::make_unique<Control>(&argc, &argv);
  control().set_timeout(60);
  testing::InitGoogleTest(&argc, argv);
  if (control().rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  const int status = RUN_ALL_TESTS();
  control().barrier();
  control_holder().reset();
  return status;
}
