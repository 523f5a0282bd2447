// test_partition.cpp -- every block in exactly one stage, `auto` as good as any cut, errors that name what works.
#include <gtest/gtest.h>

#include <random>

#include "llmc/partition.h"

static ModelCost random_model(std::mt19937& random, int blocks) {
  ModelCost model;
  for (int block = 0; block < blocks; block++) model.blocks.push_back({random() % 8 / 4.0, random() % 8 / 4.0, 0.5});
  model.embedding = {random() % 4 / 2.0, 0, 0.25};
  model.head = {random() % 20 / 4.0, 0.5, 0.5};
  return model;
}

/// Most expensive stage and sum of squares of a partition.
static std::pair<double, double> quality(const ModelCost& model, const std::vector<int>& cuts) {
  double most = 0, squares = 0;
  for (const StageCost& cost : stage_costs(model, cuts)) {
    most = std::max(most, total_cost(cost));
    squares += total_cost(cost) * total_cost(cost);
  }
  return {most, squares};
}

static std::pair<double, double> best_by_brute_force(const ModelCost& model, std::vector<int>* cuts, int stages) {
  const int blocks = static_cast<int>(model.blocks.size());
  if (static_cast<int>(cuts->size()) == stages) {
    cuts->push_back(blocks);
    const std::pair<double, double> result = quality(model, *cuts);
    cuts->pop_back();
    return result;
  }
  std::pair<double, double> best{1e300, 1e300};
  for (int cut = cuts->back(); cut <= blocks; cut++) {
    cuts->push_back(cut);
    best = std::min(best, best_by_brute_force(model, cuts, stages));
    cuts->pop_back();
  }
  return best;
}

static ModelCost model_of(int blocks) { return gpt2_model_cost(make_gpt2_config(blocks, 4, 48, 256, 64), 1, 64); }

static std::string message(const std::string& text, int stages, int blocks) {
  try {
    make_partition(text, stages, model_of(blocks));
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "accepted";
}

// For L 0..50 and S 1..16: cuts cover all blocks, in order, without overlap; even counts differ by one at most.
TEST(Partition, CoversEveryBlockOnce) {
  std::mt19937 random(1);
  for (int blocks = 0; blocks <= 50; blocks++) {
    for (int stages = 1; stages <= 16; stages++) {
      const ModelCost model = random_model(random, blocks);
      for (const char* text : {"even", "auto"}) {
        if (stages > blocks + 2) continue;
        const std::vector<int> cuts = make_partition(text, stages, model);
        ASSERT_EQ(cuts.size(), stages + 1u);
        EXPECT_EQ(cuts.front(), 0);
        EXPECT_EQ(cuts.back(), blocks);
        EXPECT_TRUE(std::is_sorted(cuts.begin(), cuts.end()));
        EXPECT_EQ(make_partition(partition_text(cuts), stages, model), cuts);
        for (int s = 0; s < stages && text[0] == 'e'; s++) {
          const int count = cuts[s + 1] - cuts[s];
          EXPECT_TRUE(count == blocks / stages || count == (blocks + stages - 1) / stages);
        }
      }
    }
  }
}

// `auto` reaches the smallest most-expensive stage of all cuts, and among those the smallest sum of squares.
TEST(Partition, AutoIsOptimal) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 600; trial++) {
    const int blocks = random() % 9, stages = 1 + random() % std::min(blocks + 2, 5);
    const ModelCost model = random_model(random, blocks);
    std::vector<int> start(1, 0);
    EXPECT_EQ(quality(model, auto_partition(model, stages)), best_by_brute_force(model, &start, stages));
  }
}

// The head at its true cost: the planned splits of pipeline.md 3, where the head of 124M stands alone on the last of
// four.
TEST(Partition, Gpt2Splits) {
  const ModelCost small = gpt2_model_cost(*gpt2_preset("124M"), 1, 1024);
  const ModelCost medium = gpt2_model_cost(*gpt2_preset("350M"), 1, 1024);
  EXPECT_NEAR(small.head.forward / small.blocks[0].forward, 4.9, 0.05);
  EXPECT_NEAR(medium.head.forward / medium.blocks[0].forward, 3.8, 0.05);
  EXPECT_EQ(partition_text(auto_partition(small, 4)), "4,4,4,0");
  EXPECT_EQ(partition_text(auto_partition(small, 2)), "8,4");
  EXPECT_EQ(partition_text(auto_partition(medium, 4)), "7,7,7,3");
  EXPECT_EQ(partition_text(auto_partition(medium, 2)), "14,10");
}

// Even: larger counts first; with L+2 stages embedding and head are alone.
TEST(Partition, Even) {
  EXPECT_EQ(partition_text(even_partition(12, 5)), "3,3,2,2,2");
  EXPECT_EQ(partition_text(even_partition(7, 3)), "3,2,2");
  EXPECT_EQ(partition_text(even_partition(2, 3)), "1,1,0");
  EXPECT_EQ(partition_text(even_partition(2, 4)), "0,1,1,0");
  EXPECT_EQ(partition_text(even_partition(0, 2)), "0,0");
  EXPECT_EQ(partition_text(even_partition(0, 1)), "0");
}

// Counts are taken as they stand, empty stages included.
TEST(Partition, Counts) {
  const ModelCost model = model_of(12);
  EXPECT_EQ(make_partition("4,4,3,1", 4, model), (std::vector<int>{0, 4, 8, 11, 12}));
  EXPECT_EQ(make_partition("0,12,0", 3, model), (std::vector<int>{0, 0, 12, 12}));
  EXPECT_EQ(make_partition("12", 1, model), (std::vector<int>{0, 12}));
}

// Each wrong request is a user error that says what is wrong and what is near and works.
TEST(Partition, Errors) {
  EXPECT_EQ(message("3,3,3", 4, 12), "--partition 3,3,3 has 3 counts for 4 stages; use --partition 3,3,3,3");
  EXPECT_EQ(message("3,3,3,2", 4, 12),
            "--partition 3,3,3,2 places 11 blocks, the model has 12; use --partition 3,3,3,3");
  EXPECT_EQ(message("6,5,2", 3, 12), "--partition 6,5,2 places 13 blocks, the model has 12; use --partition 5,5,2");
  EXPECT_EQ(message("999999,999999", 2, 3),
            "--partition 999999,999999 places 1999998 blocks, the model has 3; use --partition 1,2");
  for (const char* text :
       {"", ",", "3,", ",3", "3,,3", "-3,9", "3, 9", "a,b", "3.5,2.5", "1234567,0", "Even", "6x,6"}) {
    EXPECT_NE(message(text, 2, 12).find("is not a number of blocks; use even, auto or counts such as 4,4,3,1"),
              std::string::npos)
        << text << ": " << message(text, 2, 12);
  }
}

// More stages than embedding, blocks and head can fill: the message names the chunks or ranks that are left.
TEST(Partition, TooManyStages) {
  const auto text = [](int pp, int chunks) {
    try {
      check_stage_count(pp, chunks, 12);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(text(14, 1), "accepted");
  EXPECT_EQ(text(7, 2), "accepted");
  EXPECT_EQ(text(15, 1),
            "--pp 15 is 15 stages, too many for 12 blocks: at most 14 (embedding, blocks, head); use --pp 14");
  EXPECT_EQ(text(4, 4),
            "--pp 4 with 4 chunks is 16 stages, too many for 12 blocks: at most 14 (embedding, blocks, head); use "
            "--chunks 3");
}

// rank_partition: in V placement the rank with the head gets fewer blocks on both of its stages, by its whole share;
// with one stage a rank it is as good as half a block allows.
TEST(Partition, RanksWithSeveralStages) {
  ModelCost model;
  model.blocks.assign(14, {1, 0, 0});
  model.head = {2, 0, 0};  // 16 units on 4 ranks: 4 each, rank 0 has 2 blocks beside the head
  EXPECT_EQ(partition_text(rank_partition(model, {0, 1, 2, 3, 3, 2, 1, 0}, 4)), "1,2,2,2,2,2,2,1");
  EXPECT_EQ(partition_text(rank_partition(model, {0, 1, 2, 3}, 4)), "4,4,4,2");
  model.head = {30, 0, 0};  // more than a share: no blocks there, the others equal
  EXPECT_EQ(partition_text(rank_partition(model, {0, 1, 1, 0}, 2)), "0,7,7,0");
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; trial++) {  // always a partition, whatever the costs
    const ModelCost any = random_model(random, random() % 20);
    const int ranks = 1 + random() % 4;
    const std::vector<int> owner = place_stages(Placement::kLoop, ranks, 1 + random() % 3);
    const std::vector<int> cuts = rank_partition(any, owner, ranks);
    ASSERT_EQ(cuts.size(), owner.size() + 1);
    EXPECT_EQ(cuts.front(), 0);
    EXPECT_EQ(cuts.back(), static_cast<int>(any.blocks.size()));
    EXPECT_TRUE(std::is_sorted(cuts.begin(), cuts.end()));
  }
}

// FLOPs of GPT-2: the head in blocks as the design quotes it, attention causal, and what each recompute level moves
// from the weight gradient to the input gradient and does again.
TEST(Partition, ModelCost) {
  const double quoted[][2] = {{12, 4.9}, {24, 3.8}, {36, 3.1}, {48, 2.5}};
  for (const auto& row : quoted) {
    const GPT2Config config = *gpt2_preset("d" + std::to_string(static_cast<int>(row[0])));
    const ModelCost cost = gpt2_model_cost(config, 2, 1024);
    EXPECT_NEAR(cost.head.forward / cost.blocks[0].forward, row[1], 0.06);
    EXPECT_NEAR(cost.blocks[0].backward_input / cost.blocks[0].forward, 1.115, 0.045);
    EXPECT_NEAR(cost.blocks[0].backward_weight / cost.blocks[0].forward, 0.93, 0.04);
  }
  // one token attends to itself: two dot products of C elements, 2 FLOPs each
  const GPT2Config config = *gpt2_preset("124M");
  const double C = 768, giga = 3e-9;  // three sequences of one token
  const ModelCost cost = gpt2_model_cost(config, 3, 1);
  EXPECT_DOUBLE_EQ(cost.blocks[0].forward, giga * (24 * C * C + 4 * C));
  EXPECT_DOUBLE_EQ(cost.head.forward, giga * 2 * C * 50304);
  const double moved[] = {0, 8 * C * C, 22 * C * C, 24 * C * C};  // fcproj 8; fc 8, qkv 6; attproj 2
  for (int level = 0; level < kRecomputeLevels; level++) {
    EXPECT_DOUBLE_EQ(cost.recompute[level].backward_weight, -giga * moved[level]) << level;
    EXPECT_EQ(cost.recompute[level].forward, 0);
  }
  EXPECT_EQ(total_cost(cost.recompute[0]), 0);
  EXPECT_NEAR(total_cost(cost.recompute[1]), giga * 32 * C, giga);
  EXPECT_NEAR(total_cost(cost.recompute[2]), giga * 48 * C, giga);
  EXPECT_NEAR(total_cost(cost.recompute[3]), cost.blocks[0].forward, giga);
}

// Stage costs add up to the model, with the head's whole cost in the forward pass of the last stage.
TEST(Partition, StageCosts) {
  ModelCost model;
  model.embedding = {1, 0, 2};
  model.blocks = {{10, 20, 30}, {11, 21, 31}, {12, 22, 32}};
  model.head = {100, 200, 300};
  const std::vector<StageCost> costs = stage_costs(model, {0, 2, 3, 3});
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_EQ(costs[0].forward, 22);
  EXPECT_EQ(costs[0].backward_input, 41);
  EXPECT_EQ(costs[0].backward_weight, 63);
  EXPECT_EQ(total_cost(costs[1]), 66);
  EXPECT_EQ(costs[2].forward, 600);
  EXPECT_EQ(costs[2].backward_input + costs[2].backward_weight, 0);
  model.recompute[2] = {0, 7, -3};
  const std::vector<StageCost> again = stage_costs(model, {0, 2, 3, 3}, {0, 2, 0});
  EXPECT_EQ(again[0].backward_input, costs[0].backward_input);
  EXPECT_EQ(again[1].backward_input, costs[1].backward_input + 7);
  EXPECT_EQ(again[1].backward_weight, costs[1].backward_weight - 3);
  const std::vector<StageCost> single = stage_costs(model, {0, 3}, {}, true);
  EXPECT_EQ(single[0].forward, 1 + 33 + 100);
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
