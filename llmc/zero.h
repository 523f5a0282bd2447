// zero.h -- the parameters, gradients and optimizer state of one rank: of its pipeline stages, on one replica.
//
//   stage 0   every replica holds everything; gradients: reduce-scatter + all-gather, all replicas update all
//   parameters stage 1   optimizer state (m, v, fp32 master) is cut into one shard per replica; gradients:
//   reduce-scatter, each replica
//             updates its shard, then all-gather of the parameters
// Bytes sent per replica and step, S = bytes of the gradients, f = (N-1)/N: stage 0: 2 f S; stage 1: f S + f
// S_parameters. Source: Rajbhandari et al. 2020 (ZeRO).
//
// The reduction is the same for both and for every number of replicas N: each replica sends slice j of a bucket to
// replica j (all to all), and replica j adds the N slices as a pairwise tree over the replica numbers. With contiguous
// micro-batches per replica and the pairwise tree of gradient_tree.h this is, for 2, 4, 8, ... replicas, the very tree
// that one device uses: the bits are equal. Everything is issued to the compute stream in one order; nothing here
// depends on how many stages or ranks there are.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "llmc/accumulate.cuh"
#include "llmc/adamw.cuh"
#include "llmc/comm.h"
#include "llmc/global_norm.cuh"
#include "llmc/memory.h"
#include "llmc/stage_layout.h"

/// A run of consecutive elements of one tensor that this replica updates (or answers for).
struct OwnedRange {
  int tensor = 0;
  size_t first = 0;  // element within the tensor
  size_t count = 0;
  size_t position = 0;  // in the flat parameter and gradient buffers
  size_t state = 0;     // in the optimizer state arrays
};

/// Element counts of a stage's buffers, for the memory forecast.
struct StageMemory {
  size_t parameters = 0, gradients = 0, state = 0, receive = 0;
  size_t norm_blocks = 0;  // doubles
  size_t tied = 0;         // floats of the tied embedding's gradient that the other rank sends
};

class StageOptimizer {
 public:
  /// `replicas` is the communicator of the stage's replicas, null for one. `zero_stage` 0 or 1.
  StageOptimizer(MemoryLedger& ledger, const ParameterTable& table, const StageLayout& layout, int zero_stage,
                 Communicator* replicas, cudaStream_t stream)
      : table_(table),
        layout_(layout),
        zero_stage_(zero_stage),
        replicas_(replicas),
        replica_(replicas ? replicas->rank() : 0),
        stream_(stream),
        sizes_(forecast(layout, zero_stage, replica_)),
        parameters_("parameters", sizes_.parameters, &ledger),
        m_("optimizer", sizes_.state, &ledger),
        v_("optimizer", sizes_.state, &ledger),
        master_("optimizer", kHasMaster ? sizes_.state : 0, &ledger),
        receive_("gradient exchange", sizes_.receive, &ledger),
        partials_("norm", sizes_.norm_blocks, &ledger),
        host_partials_(sizes_.norm_blocks) {
    for (auto* array : {&m_, &v_}) CUDA_CHECK(cudaMemsetAsync(array->data(), 0, array->bytes(), stream));
    CUDA_CHECK(cudaMemsetAsync(parameters_.data(), 0, parameters_.bytes(), stream));
    collect_ranges();
  }

  static constexpr bool kHasMaster = sizeof(floatX) != sizeof(float);

  /// What the optimizer of `layout` on `replica` allocates.
  static StageMemory forecast(const StageLayout& layout, int zero_stage, int replica) {
    StageMemory memory;
    memory.parameters = layout.parameter_elements;
    memory.gradients = layout.gradient_elements;
    for (const Bucket& bucket : layout.buckets) {
      const size_t part = zero_stage >= 1 ? bucket.shard_elements(layout.replicas) : bucket.padded;
      if (bucket.has_parameters) memory.state += part;
      if (layout.replicas > 1) memory.receive = std::max(memory.receive, bucket.padded);
      if (&bucket == find_bucket(layout, "wte.weight") || bucket.is_head_copy) memory.tied = part;
    }
    for_each_shard(layout, replica,
                   [&](const Bucket&, size_t, size_t count) { memory.norm_blocks += norm_blocks(count); });
    return memory;
  }

  floatX* parameters() { return parameters_.data(); }
  const StageLayout& layout() const { return layout_; }

  /// Ranges whose optimizer state is here: written by update().
  const std::vector<OwnedRange>& updated() const { return updated_; }
  /// Ranges that this rank alone answers for in the norm, the hash and the checkpoint: together they cover every
  /// parameter of the model once.
  const std::vector<OwnedRange>& accountable() const { return accountable_; }

  /// fp32 master parameters and AdamW moments of a range. Device memory.
  float* master(const OwnedRange& range) {
    if constexpr (kHasMaster)
      return master_.data() + range.state;
    else
      return reinterpret_cast<float*>(parameters_.data()) + range.position;
  }
  float* first_moment(const OwnedRange& range) { return m_.data() + range.state; }
  float* second_moment(const OwnedRange& range) { return v_.data() + range.state; }

  /// Sums `gradients` over the replicas: this replica's shard of every bucket (ZeRO 1) or all of it (ZeRO 0).
  void reduce(float* gradients) {
    if (!replicas_) return;
    for (const Bucket& bucket : layout_.buckets) {
      const size_t shard = bucket.shard_elements(layout_.replicas);
      float* mine = gradients + bucket.shard_begin(layout_.replicas, replica_);
      Ticket arrived = replicas_->all_to_all(gradients + bucket.begin, receive_.data(), shard * sizeof(float), stream_);
      replicas_->wait(arrived, stream_);
      tree_sum(mine, receive_.data(), layout_.replicas, shard, stream_);
      if (zero_stage_ == 0)
        replicas_->wait(replicas_->all_gather(gradients + bucket.begin, shard * sizeof(float), stream_), stream_);
    }
  }

  /// The part of a bucket that is valid after reduce(): first element and length.
  std::pair<size_t, size_t> reduced_range(const Bucket& bucket) const {
    if (zero_stage_ == 0) return {bucket.begin, bucket.padded};
    return {bucket.shard_begin(layout_.replicas, replica_), bucket.shard_elements(layout_.replicas)};
  }

  const Bucket* find_bucket(const std::string& name) const { return find_bucket(layout_, name); }

  /// Writes the sum of squares of every norm block of this rank's accountable shards into `partials`, an array over the
  /// norm blocks of the whole model (host memory). Waits for the stream.
  void square_sums(const float* gradients, double* partials) {
    size_t next = 0;
    for_each_shard(layout_, replica_, [&](const Bucket& bucket, size_t first, size_t count) {
      square_sum_blocks(partials_.data() + next, gradients + bucket.begin + first, count, stream_);
      next += norm_blocks(count);
    });
    if (next)
      CUDA_CHECK(cudaMemcpyAsync(host_partials_.data(), partials_.data(), next * sizeof(double), cudaMemcpyDeviceToHost,
                                 stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    next = 0;
    for_each_shard(layout_, replica_, [&](const Bucket& bucket, size_t first, size_t count) {
      std::copy_n(host_partials_.data() + next, norm_blocks(count),
                  partials + bucket.first_norm_block + first / kNormBlock);
      next += norm_blocks(count);
    });
  }

  /// AdamW on the ranges of updated(); weight decay where the table says so.
  void update(const float* gradients, const AdamW& adamw) {
    for (const OwnedRange& range : updated_) {
      AdamW settings = adamw;
      if (!table_.tensors[range.tensor].weight_decay) settings.weight_decay = 0.0f;
      adamw_update(parameters_.data() + range.position, kHasMaster ? master(range) : nullptr, first_moment(range),
                   second_moment(range), gradients + range.position, range.count, global_element(range), settings,
                   stream_);
    }
  }

  /// ZeRO 1: brings every replica's shard of the parameters to all replicas.
  void gather_parameters() {
    if (!replicas_ || zero_stage_ == 0) return;
    for (const Bucket& bucket : layout_.buckets) {
      if (!bucket.has_parameters) continue;
      const size_t shard = bucket.shard_elements(layout_.replicas);
      replicas_->wait(replicas_->all_gather(parameters_.data() + bucket.begin, shard * sizeof(floatX), stream_),
                      stream_);
    }
  }

  /// Sets the master parameters of every updated range from `values(range, host buffer)`, then makes the parameters of
  /// this stage on all replicas from them. `step` and `seed` key the rounding to floatX, as in update().
  void set_parameters(const std::function<void(const OwnedRange&, float*)>& values, uint64_t seed, int step) {
    constexpr size_t kChunk = size_t{1} << 20;  // bounds the host memory, whatever the size of a tensor
    std::vector<float> host;
    for (const OwnedRange& whole : updated_) {
      for (size_t done = 0; done < whole.count; done += kChunk) {
        OwnedRange range = whole;
        range.first += done;
        range.position += done;
        range.state += done;
        range.count = std::min(kChunk, whole.count - done);
        host.resize(range.count);
        values(range, host.data());
        CUDA_CHECK(
            cudaMemcpyAsync(master(range), host.data(), range.count * sizeof(float), cudaMemcpyHostToDevice, stream_));
        if constexpr (kHasMaster) {
          round_parameters(parameters_.data() + range.position, master(range), range.count, global_element(range), seed,
                           step, stream_);
        }
        CUDA_CHECK(cudaStreamSynchronize(stream_));
      }
    }
    gather_parameters();
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  uint64_t global_element(const OwnedRange& range) const { return table_.tensors[range.tensor].offset + range.first; }

 private:
  static const Bucket* find_bucket(const StageLayout& layout, const std::string& name) {
    for (const Bucket& bucket : layout.buckets)
      if (bucket.name == name) return &bucket;
    return nullptr;
  }

  // Calls f(bucket, first, count) for the accountable shard of each bucket, without padding.
  template <class F>
  static void for_each_shard(const StageLayout& layout, int replica, F f) {
    for (const Bucket& bucket : layout.buckets) {
      if (bucket.is_head_copy) continue;
      const size_t first = bucket.shard_begin(layout.replicas, replica) - bucket.begin;
      const size_t end = std::min(bucket.elements, first + bucket.shard_elements(layout.replicas));
      if (first < end) f(bucket, first, end - first);
    }
  }

  void collect_ranges() {
    size_t state = 0;
    for (const Bucket& bucket : layout_.buckets) {
      const size_t shard_first = bucket.shard_begin(layout_.replicas, replica_);
      const size_t shard_end = shard_first + bucket.shard_elements(layout_.replicas);
      const bool sharded = zero_stage_ >= 1;
      const size_t state_first = sharded ? shard_first : bucket.begin;
      for (const Segment& segment : bucket.segments) {
        const size_t end = segment.begin + segment.elements;
        const size_t a = std::max(segment.begin, shard_first), b = std::min(end, shard_end);
        auto range = [&](size_t from, size_t to) {
          return OwnedRange{segment.tensor, from - segment.begin, to - from, from, state + from - state_first};
        };
        if (bucket.has_parameters && !sharded) updated_.push_back(range(segment.begin, end));
        if (bucket.has_parameters && sharded && a < b) updated_.push_back(range(a, b));
        if (!bucket.is_head_copy && a < b) accountable_.push_back(range(a, b));
      }
      if (bucket.has_parameters) state += sharded ? bucket.shard_elements(layout_.replicas) : bucket.padded;
    }
  }

  const ParameterTable& table_;
  const StageLayout& layout_;
  int zero_stage_;
  Communicator* replicas_;
  int replica_;
  cudaStream_t stream_;
  StageMemory sizes_;
  DeviceArray<floatX> parameters_;
  DeviceArray<float> m_, v_, master_, receive_;
  DeviceArray<double> partials_;
  PinnedArray<double> host_partials_;
  std::vector<OwnedRange> updated_, accountable_;
};
