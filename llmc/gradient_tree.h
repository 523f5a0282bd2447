// gradient_tree.h -- sums the gradients of a step's micro-batches as a pairwise tree, in fp32.
//
// Why a tree: a replica that holds micro-batches [a, b) must end with a sum that can be combined with the other
// replicas' sums to the very bits that one device gets for all micro-batches. A left-to-right sum cannot
// ((g0+g1)+g2)+g3 != (g0+g1)+(g2+g3). The tree halves: tree(k) = tree(first ceil(k/2)) + tree(last floor(k/2)), so with
// 2, 4, 8, ... replicas and any k the shares of tree_share() (grid.h) are subtrees of the whole, and nearly equal.
//
// How: leaves come in order. The gradient of a micro-batch is written to the buffer of a stack that its place in the
// tree says (the number of finished sums that wait for it); then, for every subtree that it completes as a right child,
// the top of the stack is added to the entry below it. After all k micro-batches the sum is in buffer 0.
//   memory: floor(log2 k) + 1 buffers          additions: k - 1 in all (12 bytes each per element)
// Each phase of the backward pass (loss head, input gradient, weight gradient) of each of the rank's stages runs ahead
// of the others by as many micro-batches as the schedule likes, so each has its own counter; it touches only its own
// ranges of the buffers.
//
// Not exact (--exact 0): one buffer, every kernel accumulates into it, left to right. Less memory, no equality over
// replicas.
#pragma once

#include <utility>
#include <vector>

#include "llmc/accumulate.cuh"
#include "llmc/device.h"
#include "llmc/memory.h"
#include "llmc/stage_layout.h"

/// Where a leaf stands in the halving tree over `leaves` leaves.
struct TreePlace {
  int waiting = 0;    // sums to its left that are complete and not yet added
  int additions = 0;  // sums that it completes as the last leaf: each is added to the one to its left
};
inline TreePlace tree_place(int leaf, int leaves) {
  TreePlace place;
  while (leaves > 1) {
    const int left = (leaves + 1) / 2;
    const bool goes_left = leaf < left;
    place.waiting += goes_left ? 0 : 1;
    place.additions = goes_left ? 0 : place.additions + 1;
    leaf -= goes_left ? 0 : left;
    leaves = goes_left ? left : leaves - left;
  }
  return place;
}

class GradientTree {
 public:
  /// Buffers for up to `micro_batches` micro-batches per step of the stages of `layout`. They are zeroed once, on
  /// `stream`: the kernels overwrite every element but the padding of the buckets, which must stay zero.
  GradientTree(MemoryLedger& ledger, const StageLayout& layout, int micro_batches, bool exact, cudaStream_t stream)
      : exact_(exact) {
    const int count = buffer_count(micro_batches, exact);
    for (int i = 0; i < count; ++i) {
      buffers_.emplace_back("gradients", layout.gradient_elements, &ledger);
      CUDA_CHECK(cudaMemsetAsync(buffers_[i].data(), 0, buffers_[i].bytes(), stream));
    }
    for (int stage = 0; stage < static_cast<int>(layout.stages.size()); ++stage) {
      for (int phase = 0; phase < kGradientPhases; ++phase) {
        parts_.push_back({phase_ranges(layout, stage, static_cast<GradientPhase>(phase)), 0});
      }
    }
  }

  static int buffer_count(int micro_batches, bool exact) {
    int count = 1;
    if (exact)
      while ((2 << (count - 1)) <= micro_batches) ++count;
    return count;
  }

  /// Starts a step of `micro_batches` micro-batches (at most as many as at construction); a replica without any
  /// contributes zeros.
  void begin_step(int micro_batches, cudaStream_t stream) {
    micro_batches_ = micro_batches;
    for (Part& part : parts_) part.finished = 0;
    if (micro_batches == 0) CUDA_CHECK(cudaMemsetAsync(buffers_[0].data(), 0, buffers_[0].bytes(), stream));
  }

  /// Base of the buffer that the gradient of the next micro-batch of a phase of a stage (its index on this rank) goes
  /// to, and whether it is added to what is there.
  float* leaf(int stage, GradientPhase phase) {
    return buffers_[exact_ ? tree_place(part(stage, phase).finished, micro_batches_).waiting : 0].data();
  }
  bool accumulate(int stage, GradientPhase phase) { return !exact_ && part(stage, phase).finished > 0; }

  /// The next micro-batch of that phase of that stage is complete on `stream`: adds the sums that it completes.
  void finish_leaf(int stage, GradientPhase phase, cudaStream_t stream) {
    Part& done = part(stage, phase);
    const TreePlace place = tree_place(done.finished, micro_batches_);
    for (int i = 0; exact_ && i < place.additions; ++i) add_down(done, place.waiting - i, stream);
    ++done.finished;
  }

  /// The step's gradient sums: buffer 0, after the last micro-batch of every phase of every stage.
  float* finish() {
    for (const Part& part : parts_) assert(part.finished == micro_batches_ || part.ranges.empty());
    return buffers_[0].data();
  }

 private:
  struct Part {
    std::vector<std::pair<size_t, size_t>> ranges;
    int finished;  // micro-batches of this step
  };

  Part& part(int stage, GradientPhase phase) { return parts_[stage * kGradientPhases + static_cast<int>(phase)]; }

  // buffer[top - 1] += buffer[top]: earlier micro-batches are always the left operand.
  void add_down(const Part& part, int top, cudaStream_t stream) {
    for (const auto& range : part.ranges) {
      float* low = buffers_[top - 1].data() + range.first;
      add(low, low, buffers_[top].data() + range.first, range.second - range.first, stream);
    }
  }

  bool exact_;
  int micro_batches_ = 0;  // of this step
  std::vector<DeviceArray<float>> buffers_;
  std::vector<Part> parts_;  // kGradientPhases for each stage
};
