// stage_layout.h -- where every parameter of a rank's pipeline stages lies in the flat buffers of that rank.
//
// A model is a list of buckets in canonical order (GPT-2: wte, wpe, one per block, final layernorm). A rank holds those
// of its stages back to back; parameters, gradients and (unsharded) optimizer state share the same offsets. Every
// bucket is padded to a multiple of replicas * kNormBlock elements, so that
//   - replica r owns slice r of every bucket, whatever the sizes of the tensors in it,
//   - a norm block (kNormBlock elements of a bucket) never straddles two replicas, and its number does not depend on
//   the
//     number of replicas or stages: the gradient norm is added up in one order on every layout.
// The tied token embedding has two gradient accumulators, one for the lookup (bucket "wte") and one for the loss head
// (bucket "wte.head"), also when both are on one rank; the gradient is head + lookup, in that order, on every layout.
// Where one rank has the first and the last stage (one rank, V placement) the parameters of wte exist once.
//
// Pure functions of the parameter table; no device, no communication. After ZeRO (Rajbhandari et al. 2020, section 5).
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/norm_block.h"
#include "llmc/numeric.h"
#include "llmc/parameter_table.h"

/// The part of the backward pass that produces a gradient. Each part runs through the micro-batches in ascending order
/// on its own, so each has its own counter of finished micro-batches (see gradient_tree.h).
enum class GradientPhase { kLossHead = 0, kInputGradient = 1, kWeightGradient = 2 };
constexpr int kGradientPhases = 3;

/// Tensors that are reduced, sharded and gathered together. `tensors` are rows of the parameter table.
struct ModelBucket {
  std::string name;
  std::vector<int> tensors;
  size_t elements = 0;
  size_t first_norm_block = 0;  // number of this bucket's first norm block in the whole model
};

/// What a pipeline stage holds: blocks [first_block, last_block), and maybe the embedding and the loss head.
/// `recompute`: what its blocks do not keep for the backward pass. 0 nothing, 1 GELU, 2 GELU and layernorms, 3 all but
/// the blocks' inputs.
struct StageRange {
  int first_block = 0;
  int last_block = 0;
  bool embedding = false;
  bool head = false;
  int recompute = 0;
  int blocks() const { return last_block - first_block; }
};

/// One tensor inside the flat buffers: elements [begin, begin + elements).
struct Segment {
  int tensor = 0;
  size_t begin = 0;
  size_t elements = 0;
  GradientPhase phase = GradientPhase::kInputGradient;
};

struct Bucket {
  std::string name;
  int stage = 0;                // index in StageLayout::stages
  size_t begin = 0;             // first element in the flat buffers
  size_t elements = 0;          // without padding
  size_t padded = 0;            // multiple of replicas * kNormBlock
  size_t first_norm_block = 0;  // in the numbering of the whole model
  bool is_head_copy = false;    // gradient of the tied embedding from the loss head
  bool has_parameters = true;   // false: accumulator only, the parameters are those of bucket "wte" on this stage
  std::vector<Segment> segments;

  size_t shard_elements(int replicas) const { return padded / static_cast<size_t>(replicas); }
  size_t shard_begin(int replicas, int replica) const {
    return begin + shard_elements(replicas) * static_cast<size_t>(replica);
  }
};

struct StageLayout {
  std::vector<StageRange> stages;  // of this rank, in the order of the model
  int replicas = 1;
  std::vector<Bucket> buckets;
  size_t parameter_elements = 0;  // length of the parameter buffer
  size_t gradient_elements = 0;  // length of the gradient buffer: longer where the head's accumulator has no parameters
  std::vector<Segment> by_tensor;  // index: row of the parameter table; elements == 0 where the tensor is elsewhere
  Segment head_weight;             // wte as the loss head reads it (its own copy, or the embedding's)
  Segment head_gradient;           // accumulator of the head's part of d wte

  bool has_embedding() const { return !stages.empty() && stages.front().embedding; }
  bool has_head() const { return !stages.empty() && stages.back().head; }
};

/// Number of norm blocks of a bucket (without padding).
inline size_t norm_blocks(size_t elements) { return ceil_div(elements, kNormBlock); }

/// Number of norm blocks of the whole model.
inline size_t total_norm_blocks(const std::vector<ModelBucket>& model) {
  return model.empty() ? 0 : model.back().first_norm_block + norm_blocks(model.back().elements);
}

/// The buckets of a model whose table has block -1 for embeddings, 0..L-1 for blocks and L for what follows them.
/// Embeddings get a bucket each, a block one bucket, the rest one bucket.
inline std::vector<ModelBucket> make_model_buckets(const ParameterTable& table) {
  std::vector<ModelBucket> buckets;
  int open_block = -2;
  for (int i = 0; i < static_cast<int>(table.tensors.size()); ++i) {
    const ParameterTensor& tensor = table.tensors[i];
    if (tensor.block < 0 || tensor.block != open_block) {
      const size_t dot = tensor.block < 0 ? std::string::npos : tensor.name.find('.', tensor.name.find('.') + 1);
      const size_t next = buckets.empty() ? 0 : buckets.back().first_norm_block + norm_blocks(buckets.back().elements);
      buckets.push_back({tensor.name.substr(0, dot), {}, 0, next});
      open_block = tensor.block;
    }
    buckets.back().tensors.push_back(i);
    buckets.back().elements += tensor.elements;
  }
  return buckets;
}

/// Phase in which the gradient of a tensor is made on a stage with that recompute level: matrices of blocks in the
/// weight gradient as long as their input is kept, vectors of blocks and the embeddings together with the input
/// gradient, the final layernorm in the loss head at the tail of the forward pass.
inline GradientPhase gradient_phase(const ParameterTable& table, const ParameterTensor& tensor, int recompute) {
  const int last_block = table.tensors.back().block;
  if (tensor.block == last_block) return GradientPhase::kLossHead;
  return recompute <= tensor.split_up_to ? GradientPhase::kWeightGradient : GradientPhase::kInputGradient;
}

namespace stage_layout_detail {

// Appends a bucket at `begin`. Within a block the matrices come first, so that each phase is one contiguous range
// without recomputation; the order depends on nothing else, since the norm blocks count along it.
inline Bucket place_bucket(const ParameterTable& table, const ModelBucket& source, size_t begin, int replicas,
                           int recompute) {
  Bucket bucket;
  bucket.name = source.name;
  bucket.begin = begin;
  bucket.first_norm_block = source.first_norm_block;
  std::vector<int> order = source.tensors;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return gradient_phase(table, table.tensors[a], 0) > gradient_phase(table, table.tensors[b], 0);
  });
  for (int index : order) {
    const ParameterTensor& tensor = table.tensors[index];
    const GradientPhase phase = gradient_phase(table, tensor, recompute);
    bucket.segments.push_back({index, begin + bucket.elements, tensor.elements, phase});
    bucket.elements += tensor.elements;
  }
  bucket.padded = round_up(bucket.elements, kNormBlock * static_cast<size_t>(replicas));
  return bucket;
}

// Index of the stage that holds the bucket, or -1.
inline int stage_with(const ParameterTable& table, const ModelBucket& bucket, const std::vector<StageRange>& stages) {
  const int block = table.tensors[bucket.tensors.front()].block;
  for (int s = 0; s < static_cast<int>(stages.size()); ++s) {
    const StageRange& range = stages[s];
    const bool inside = block >= range.first_block && block < range.last_block;
    if (block < 0 ? range.embedding : block == table.tensors.back().block ? range.head : inside) return s;
  }
  return -1;
}

}  // namespace stage_layout_detail

/// The layout of a rank's stages (in the order of the model) for `replicas` data-parallel replicas. Bucket order: wte,
/// wpe, blocks, final layernorm, head's wte.
inline StageLayout make_stage_layout(const ParameterTable& table, const std::vector<StageRange>& stages, int replicas) {
  using namespace stage_layout_detail;
  const std::vector<ModelBucket> model = make_model_buckets(table);
  StageLayout layout;
  layout.stages = stages;
  layout.replicas = replicas;
  layout.by_tensor.resize(table.tensors.size());
  size_t end = 0;
  for (const ModelBucket& source : model) {
    const int stage = stage_with(table, source, stages);
    if (stage < 0) continue;
    layout.buckets.push_back(place_bucket(table, source, end, replicas, stages[stage].recompute));
    layout.buckets.back().stage = stage;
    end += layout.buckets.back().padded;
    for (const Segment& segment : layout.buckets.back().segments) layout.by_tensor[segment.tensor] = segment;
  }
  layout.parameter_elements = end;
  if (layout.has_head()) {
    Bucket copy = place_bucket(table, model.front(), end, replicas, 0);
    copy.name = "wte.head";
    copy.stage = static_cast<int>(stages.size()) - 1;
    copy.is_head_copy = true;
    copy.has_parameters = !layout.has_embedding();
    copy.segments.front().phase = GradientPhase::kLossHead;
    end += copy.padded;
    layout.head_gradient = copy.segments.front();
    layout.head_weight = copy.has_parameters ? copy.segments.front() : layout.by_tensor[0];
    if (copy.has_parameters) layout.parameter_elements = end;
    layout.buckets.push_back(copy);
  }
  layout.gradient_elements = end;
  return layout;
}

/// Contiguous ranges [begin, end) of the gradient buffer that a phase of a stage (index on this rank) writes; adjacent
/// segments are merged.
inline std::vector<std::pair<size_t, size_t>> phase_ranges(const StageLayout& layout, int stage, GradientPhase phase) {
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const Bucket& bucket : layout.buckets) {
    for (const Segment& segment : bucket.segments) {
      if (bucket.stage != stage || segment.phase != phase) continue;
      const bool adjacent = !ranges.empty() && ranges.back().second == segment.begin;
      if (adjacent)
        ranges.back().second += segment.elements;
      else
        ranges.push_back({segment.begin, segment.begin + segment.elements});
    }
  }
  return ranges;
}
