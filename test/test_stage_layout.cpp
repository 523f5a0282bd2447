// test_stage_layout.cpp -- where the parameters of a rank's stages lie: every tensor once, one copy of the tied weight
// in V placement, and an order of sums that does not depend on how the model is cut or what is recomputed.
#include <gtest/gtest.h>

#include <map>

#include "llmc/gpt2_config.h"
#include "llmc/stage_layout.h"

namespace {

const ParameterTable& table() {
  static const ParameterTable small = gpt2_parameter_table(make_gpt2_config(6, 2, 16, 61, 12));
  return small;
}

/// Stages of two blocks (three stages), each with that recompute level.
std::vector<StageRange> three_stages(int recompute = 0) {
  return {{0, 2, true, false, recompute}, {2, 4, false, false, recompute}, {4, 6, false, true, recompute}};
}

size_t copies_of_wte(const std::vector<StageLayout>& ranks) {
  size_t copies = 0;
  for (const StageLayout& layout : ranks) {
    for (const Bucket& bucket : layout.buckets) {
      copies += bucket.has_parameters && bucket.segments.front().tensor == 0;
    }
  }
  return copies;
}

}  // namespace

// Whatever stages a rank has: each tensor lies on exactly one rank, inside its bucket, and no two overlap.
TEST(StageLayout, EveryTensorOnceWithoutOverlap) {
  const std::vector<StageRange> stages = three_stages();
  const std::vector<std::vector<std::vector<StageRange>>> placements = {
      {{stages[0], stages[1], stages[2]}},                                             // one rank
      {{stages[0]}, {stages[1]}, {stages[2]}},                                         // a line
      {{stages[0], stages[2]}, {stages[1]}},                                           // a loop of two ranks
      {{stages[0]}, {stages[1], stages[2]}},                                           // any other
      {{{0, 6, true, true, 0}}},                                                       // one stage
      {{{0, 0, true, false, 0}, {6, 6, false, true, 0}}, {{0, 6, false, false, 0}}}};  // a V whose ends have no blocks
  for (const auto& placement : placements) {
    for (int replicas : {1, 3}) {
      std::vector<int> holders(table().tensors.size(), 0);
      for (const std::vector<StageRange>& mine : placement) {
        const StageLayout layout = make_stage_layout(table(), mine, replicas);
        size_t end = 0;
        for (const Bucket& bucket : layout.buckets) {
          EXPECT_EQ(bucket.begin, end);
          EXPECT_EQ(bucket.padded % (kNormBlock * replicas), 0u);
          size_t inside = bucket.begin;
          for (const Segment& segment : bucket.segments) {
            EXPECT_EQ(segment.begin, inside);
            inside += segment.elements;
            if (!bucket.is_head_copy) holders[segment.tensor]++;
          }
          EXPECT_EQ(inside, bucket.begin + bucket.elements);
          end = bucket.begin + bucket.padded;
        }
        EXPECT_EQ(layout.gradient_elements, end);
      }
      EXPECT_EQ(holders, std::vector<int>(table().tensors.size(), 1));
    }
  }
}

// First and last stage on one rank, as in V placement or on one rank: the tied weight has one copy and two gradient
// accumulators. On two ranks: two copies.
TEST(StageLayout, TiedWeightHasOneCopyWhereBothEndsAreOnOneRank) {
  const std::vector<StageRange> s = three_stages();
  const StageLayout ends = make_stage_layout(table(), {s[0], s[2]}, 2), middle = make_stage_layout(table(), {s[1]}, 2);
  EXPECT_EQ(copies_of_wte({ends, middle}), 1u);
  EXPECT_EQ(ends.head_weight.begin, ends.by_tensor[0].begin);
  EXPECT_NE(ends.head_gradient.begin, ends.by_tensor[0].begin);
  EXPECT_GE(ends.head_gradient.begin, ends.parameter_elements);
  const StageLayout first = make_stage_layout(table(), {s[0]}, 2), last = make_stage_layout(table(), {s[2]}, 2);
  EXPECT_EQ(copies_of_wte({first, middle, last}), 2u);
  EXPECT_LT(last.head_weight.begin, last.parameter_elements);
  const size_t once = ends.parameter_elements + middle.parameter_elements;
  const size_t twice = first.parameter_elements + middle.parameter_elements + last.parameter_elements;
  EXPECT_EQ(twice - once, first.buckets.front().padded);
}

// Numbers of norm blocks and the order within a bucket are the same on every cut and at every level: the norm is one
// sum in one order.
TEST(StageLayout, OrderOfSumsIsThatOfOneStage) {
  const StageLayout whole = make_stage_layout(table(), {{0, 6, true, true, 0}}, 1);
  std::map<std::string, const Bucket*> expected;
  for (const Bucket& bucket : whole.buckets) expected[bucket.name] = &bucket;
  for (int recompute = 0; recompute <= 3; recompute++) {
    const std::vector<StageRange> s = three_stages(recompute);
    for (const std::vector<StageRange>& mine : {std::vector<StageRange>{s[0], s[2]}, {s[1]}, {s[1], s[2]}}) {
      for (const Bucket& bucket : make_stage_layout(table(), mine, 1).buckets) {
        const Bucket& other = *expected.at(bucket.name);
        EXPECT_EQ(bucket.first_norm_block, other.first_norm_block) << bucket.name;
        ASSERT_EQ(bucket.segments.size(), other.segments.size());
        for (size_t i = 0; i < bucket.segments.size(); i++) {
          EXPECT_EQ(bucket.segments[i].tensor, other.segments[i].tensor) << bucket.name;
        }
      }
    }
  }
}

// The ranges of a stage's phases cover its gradients once, and what moves from W to I with the level is what
// recomputation takes from W: fcproj; then fc and qkv; then attproj.
TEST(StageLayout, PhasesFollowTheRecomputeLevel) {
  const size_t C = 16, fcproj = 4 * C * C, fc = 4 * C * C, qkv = 3 * C * C, attproj = C * C, blocks = 2;
  const size_t in_weight_phase[] = {blocks * (qkv + attproj + fc + fcproj), blocks * (qkv + attproj + fc),
                                    blocks * attproj, 0};
  for (int recompute = 0; recompute <= 3; recompute++) {
    const std::vector<StageRange> s = three_stages(recompute);
    const StageLayout layout = make_stage_layout(table(), {s[0], s[2]}, 1);
    std::vector<int> covered(layout.gradient_elements, 0);
    size_t weight[2] = {0, 0};
    for (int stage = 0; stage < 2; stage++) {
      for (int phase = 0; phase < kGradientPhases; phase++) {
        for (const auto& range : phase_ranges(layout, stage, static_cast<GradientPhase>(phase))) {
          for (size_t i = range.first; i < range.second; i++) covered[i]++;
          if (phase == static_cast<int>(GradientPhase::kWeightGradient)) weight[stage] += range.second - range.first;
        }
      }
    }
    EXPECT_EQ(weight[0], in_weight_phase[recompute]);
    EXPECT_EQ(weight[1], in_weight_phase[recompute]);
    for (const Bucket& bucket : layout.buckets) {
      for (size_t i = 0; i < bucket.padded; i++) {
        ASSERT_EQ(covered[bucket.begin + i], i < bucket.elements ? 1 : 0) << bucket.name << " " << i;
      }
    }
  }
}
