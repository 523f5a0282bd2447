// mpi_measure_costs.cu -- measured costs: the same numbers on every rank, in the right places, and no memory left
// behind.
#include "llmc/comm_backend.h"
#include "llmc/measure_costs.h"
#include "llmc/start_device.h"
#include "test/mpi_test.h"

namespace {

ModelCost measure(const std::vector<int>& levels, int pipeline) {
  Device device(control());
  std::unique_ptr<Communicator> world;
  if (control().size() > 1) world = make_communicator(control(), "mpi");
  const GPT2Config config = make_gpt2_config(3, 4, 128, 2000, 64);
  const Grid grid = make_grid(control().size(), control().rank(), pipeline);
  const size_t before = device_memory_in_use();
  const ModelCost cost =
      measure_costs(config, {{4, 64}, 4, true}, levels, grid, control(), world.get(), device.blas(), device.compute());
  EXPECT_EQ(device_memory_in_use(), before);
  return cost;
}

std::vector<double> numbers(const ModelCost& cost) {
  std::vector<double> all{cost.transfer};
  const auto add = [&all](const StageCost& c) {
    all.insert(all.end(), {c.forward, c.backward_input, c.backward_weight});
  };
  add(cost.embedding), add(cost.head);
  for (const StageCost& block : cost.blocks) add(block);
  for (const StageCost& level : cost.recompute) add(level);
  return all;
}

}  // namespace

// Every rank has the same numbers to the bit; blocks are alike; the parts that work have a time, the message only where
// there is a neighbour; level 3 makes no weight gradients on their own, and its input gradient takes longer.
MPI_TEST(MeasureCosts, SameOnAllRanks) {
  for (int pipeline : {control().size(), 1}) {
    const ModelCost cost = measure({0, 3}, pipeline);
    for (double mine : numbers(cost)) {
      for (double value : control().gathered(mine)) EXPECT_EQ(value, mine);
    }
    ASSERT_EQ(cost.blocks.size(), 3u);
    EXPECT_EQ(cost.unit, "ms");
    EXPECT_EQ(total_cost(cost.blocks[2]), total_cost(cost.blocks[0]));
    const StageCost block = cost.blocks[0], again = cost.recompute[3];
    for (double time : {block.forward, block.backward_input, block.backward_weight, cost.head.forward,
                        cost.embedding.forward, cost.embedding.backward_input}) {
      EXPECT_GT(time, 0);
      EXPECT_LT(time, 5000);
    }
    EXPECT_LT(block.backward_weight + again.backward_weight, 0.3 * block.backward_weight);
    EXPECT_GT(again.backward_input, 0);
    EXPECT_EQ(total_cost(cost.recompute[1]), 0) << "not measured";
    EXPECT_EQ(cost.transfer > 0, pipeline > 1);
  }
}

// The median over the ranks, number by number; ranks without a neighbour do not count for the message.
MPI_TEST(MeasureCostsMedian, NumberByNumber) {
  using namespace measure_costs_detail;
  std::vector<Sample> ranks(3);
  const double times[] = {5, 1, 3}, transfers[] = {0, 8, 7};
  for (int r = 0; r < 3; r++) {
    ranks[r].head.forward = times[r];
    ranks[r].embedding.backward_input = 10 - times[r];
    ranks[r].transfer = transfers[r];
  }
  const Sample median = median_sample(ranks);
  EXPECT_EQ(median.head.forward, 3);
  EXPECT_EQ(median.embedding.backward_input, 7);
  EXPECT_EQ(median.transfer, 8);
  EXPECT_EQ(median.blocks[2].forward, 0);
  ranks.resize(1);
  EXPECT_EQ(median_sample(ranks).transfer, 0);
}

int main(int argc, char** argv) { return run_mpi_tests(argc, argv); }
