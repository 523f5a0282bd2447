// checkpoint_test.h -- what the tests of checkpoints share: a small model, arrays whose every element is a function of
// its global number, and the comparison of what a rank holds with that function.
//
// Nothing here is compared with another run: files and optimizers are compared with values(file, element, step), so all
// layouts that pass agree with each other bit for bit.
#pragma once

#include <memory>

#include "llmc/checkpoint.h"
#include "test/host_test.h"

inline GPT2Config small_model() { return make_gpt2_config(3, 2, 16, 50, 8); }

/// What element `element` of a file holds in the checkpoint of `step`. Parameters are in [-1, 1); moments are any 32
/// bits, NaNs included: a checkpoint copies bits.
inline uint32_t stored_bits(int file, uint64_t element, int step) {
  const uint32_t random = random_u32x4(static_cast<uint64_t>(step), static_cast<uint64_t>(file), element).x;
  if (file != static_cast<int>(CheckpointFile::kParameters)) return random;
  const float value = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-31f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline void fill_stored(float* out, int file, uint64_t first, size_t count, int step) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = stored_bits(file, first + i, step);
    memcpy(out + i, &bits, sizeof bits);
  }
}

/// First element of values[0 .. count) that is not what `step` stores, as text, or "".
inline std::string first_difference(const float* values, int file, uint64_t first, size_t count, int step) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof bits);
    const uint32_t expected = stored_bits(file, first + i, step);
    if (bits == expected) continue;
    return format_text("%s, element %llu: bits %08x, expected %08x of step %d",
                       checkpoint_file_name(static_cast<CheckpointFile>(file)),
                       static_cast<unsigned long long>(first + i), bits, expected, step);
  }
  return "";
}

inline CheckpointMeta test_meta(int step, const GPT2Config& config = small_model()) {
  CheckpointMeta meta;
  meta.step = step;
  meta.position = (1ull << 40) + static_cast<uint64_t>(step);
  meta.seed = 1234567890123456789ull;
  meta.precision = kPrecisionName;
  meta.model = checkpoint_model(config);
  meta.extra["best_loss"] = "3.25 (step 7 = best)";
  return meta;
}

/// The content of a checkpoint folder compared with what `step` stores, on one process and without the trainer's code.
inline std::string stored_difference(const std::string& folder, int step) {
  try {
    const CheckpointReader reader(folder);
    const CheckpointRecord& record = reader.record();
    if (record.meta.step != step) return format_text("step %d, expected %d", record.meta.step, step);
    std::vector<float> values(record.elements);
    for (int file = 0; file < kCheckpointFiles; ++file) {
      reader.read(static_cast<CheckpointFile>(file), 0, values.size(), values.data());
      const std::string difference = first_difference(values.data(), file, 0, values.size(), step);
      if (!difference.empty()) return difference;
    }
    return reader.problem();
  } catch (const Error& error) {
    return error.what();
  }
}

/// The stages that one rank holds, on a stream of its own.
class HeldStages {
 public:
  HeldStages(const ParameterTable& table, const std::vector<StageRange>& ranges, int replicas = 1, int zero_stage = 0,
             Communicator* communicator = nullptr)
      : table_(table) {
    CUDA_CHECK(cudaStreamCreate(&stream_));
    for (const StageRange& range : ranges) {
      layouts_.push_back(std::make_unique<StageLayout>(make_stage_layout(table, {range}, replicas)));
      optimizers_.push_back(
          std::make_unique<StageOptimizer>(ledger_, table, *layouts_.back(), zero_stage, communicator, stream_));
    }
  }
  HeldStages(const HeldStages&) = delete;
  ~HeldStages() {
    optimizers_.clear();
    cudaStreamDestroy(stream_);
  }

  cudaStream_t stream() const { return stream_; }
  std::vector<StageOptimizer*> optimizers() {
    std::vector<StageOptimizer*> all;
    for (const auto& optimizer : optimizers_) all.push_back(optimizer.get());
    return all;
  }

  /// As after `step` optimizer steps.
  void fill(int step) {
    for (StageOptimizer* optimizer : optimizers()) {
      const auto values = [&](const OwnedRange& range, float* out) {
        fill_stored(out, 0, optimizer->global_element(range), range.count, step);
      };
      optimizer->set_parameters(values, test_meta(step).seed, step);
      for (const OwnedRange& range : optimizer->updated()) {
        for (int file : {1, 2}) {
          std::vector<float> values(range.count);
          fill_stored(values.data(), file, optimizer->global_element(range), range.count, step);
          CUDA_CHECK(cudaMemcpyAsync(moment(*optimizer, file, range), values.data(), range.count * sizeof(float),
                                     cudaMemcpyHostToDevice, stream_));
          CUDA_CHECK(cudaStreamSynchronize(stream_));
        }
      }
    }
  }

  /// Everything that the optimizers hold compared with fill(step): "" or the first difference. `rounded`: all
  /// parameters as floatX in canonical order (see rounded_parameters).
  std::string difference(int step, const std::vector<floatX>& rounded) {
    for (StageOptimizer* optimizer : optimizers()) {
      for (const OwnedRange& range : optimizer->updated()) {
        for (int file = 0; file < kCheckpointFiles; ++file) {
          const float* device = file == 0 ? optimizer->master(range) : moment(*optimizer, file, range);
          const std::vector<float> values = to_host(device, range.count);
          const std::string found =
              first_difference(values.data(), file, optimizer->global_element(range), range.count, step);
          if (!found.empty()) return found;
        }
      }
      const std::vector<floatX> held = to_host(optimizer->parameters(), optimizer->layout().parameter_elements);
      std::vector<Segment> segments = optimizer->layout().by_tensor;
      if (optimizer->layout().has_head()) segments.push_back(optimizer->layout().head_weight);
      for (const Segment& segment : segments) {
        const size_t offset = table_.tensors[segment.tensor].offset;
        for (size_t i = 0; i < segment.elements; ++i) {
          if (memcmp(&held[segment.begin + i], &rounded[offset + i], sizeof(floatX)) == 0) continue;
          return format_text("parameters as floatX, tensor %s, element %zu: %.9g, expected %.9g",
                             table_.tensors[segment.tensor].name.c_str(), i, (float)held[segment.begin + i],
                             (float)rounded[offset + i]);
        }
      }
    }
    return "";
  }

  /// Parameters as floatX in canonical order; for one stage that holds all of the model.
  std::vector<floatX> rounded_parameters() {
    StageOptimizer& optimizer = *optimizers_.front();
    const std::vector<floatX> held = to_host(optimizer.parameters(), optimizer.layout().parameter_elements);
    std::vector<floatX> rounded(table_.total);
    for (const Segment& segment : optimizer.layout().by_tensor) {
      memcpy(&rounded[table_.tensors[segment.tensor].offset], &held[segment.begin], segment.elements * sizeof(floatX));
    }
    return rounded;
  }

 private:
  static float* moment(StageOptimizer& optimizer, int file, const OwnedRange& range) {
    return file == 1 ? optimizer.first_moment(range) : optimizer.second_moment(range);
  }
  template <class T>
  std::vector<T> to_host(const T* device, size_t count) {
    std::vector<T> host(count);
    CUDA_CHECK(cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    return host;
  }

  const ParameterTable& table_;
  MemoryLedger ledger_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<StageLayout>> layouts_;
  std::vector<std::unique_ptr<StageOptimizer>> optimizers_;
};

/// Stages [cuts[s], cuts[s+1]) of a model, embedding in the first, head in the last.
inline std::vector<StageRange> stage_ranges(const std::vector<int>& cuts) {
  std::vector<StageRange> ranges;
  for (size_t s = 0; s + 1 < cuts.size(); ++s) {
    ranges.push_back({cuts[s], cuts[s + 1], s == 0, s + 2 == cuts.size()});
  }
  return ranges;
}

/// All parameters as floatX after fill(step), from one stage on this process. They must be near what was set.
inline std::vector<floatX> rounded_reference(const ParameterTable& table, int step) {
  HeldStages whole(table, stage_ranges({0, table.tensors.back().block}));
  whole.fill(step);
  const std::vector<floatX> rounded = whole.rounded_parameters();
  std::vector<float> exact(table.total);
  fill_stored(exact.data(), 0, 0, exact.size(), step);
  size_t far = 0;
  for (size_t i = 0; i < exact.size(); ++i) far += std::fabs((float)rounded[i] - exact[i]) > std::fabs(exact[i]) / 128;
  EXPECT_EQ(far, 0u) << "parameters that are not the master parameters rounded";
  return rounded;
}
