// checkpoint.h -- writing and reading checkpoints (checkpoint_files.h) by all ranks together; nothing is ever lost.
//
// save   every rank writes the ranges that it alone answers for (StageOptimizer::accountable) into `step-N.tmp`,
//        hashes and fsyncs them; when all ranks say it went well, rank 0 writes meta.txt, fsyncs and renames the
//        folder. Whatever happens before the rename leaves older checkpoints as they are.
// load   newest first; a checkpoint is used when its meta data, file sizes and hashes are right. Every rank reads what
//        it needs itself and hashes what it answers for on the way, so every byte is checked, and read once where
//        replicas share the optimizer state. A damaged one is named and the one before it is tried.
// Bytes on disk: 12 per parameter. Host memory: 4 MiB, and one tensor while parameters are loaded.
// After PyTorch's distributed checkpoints: the files know global ranges, not ranks.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/checkpoint_folder.h"
#include "llmc/control.h"
#include "llmc/together.h"
#include "llmc/zero.h"

/// The checkpoints of one run. All functions are called by all ranks of `control` at the same point; an Error that
/// comes from files is thrown by all of them, marked so. One run at a time per folder.
class CheckpointStore {
 public:
  /// The stages that a rank holds, in the same order on all replicas.
  using Optimizers = std::vector<StageOptimizer*>;

  /// `folder`: RUN/ckpt, on a file system that all ranks see; created by the first save. `stream`: that of the
  /// optimizers.
  CheckpointStore(std::string folder, Control& control, const ParameterTable& table, cudaStream_t stream)
      : folder_(std::move(folder)), control_(control), table_(table), stream_(stream) {}

  /// Writes checkpoint `meta.step`; one of the same step is replaced (it may be damaged, or of other options). Reads
  /// master parameters and moments, waits for the stream. On failure anywhere (full disk, no permission, a rank that
  /// does not see the folder) all ranks throw one environment error, and all that was there before still is. Cost:
  /// writes 12 bytes per parameter, one fsync per file and rank.
  void save(const CheckpointMeta& meta, const Optimizers& optimizers) {
    const std::string final_path = folder_ + "/" + checkpoint_name(meta.step), temporary = final_path + ".tmp";
    try {
      run_together(control_, [&] {
        if (control_.rank() == 0) start_checkpoint(folder_, temporary, table_.total);
      });
      CheckpointRecord record = make_record(meta);
      run_together(control_, [&] {
        for (int i = 0; i < kCheckpointFiles; ++i) {
          record.hashes[i] = write_ranges(temporary, static_cast<CheckpointFile>(i), optimizers);
        }
      });
      control_.sum(record.hashes.data(), record.hashes.size());
      run_together(control_, [&] {
        if (control_.rank() == 0) publish_checkpoint(record, folder_, temporary, final_path);
      });
    } catch (const Error& error) {
      if (!error.on_all_ranks()) throw;
      if (control_.rank() == 0) remove_quietly(temporary);
      environment_error_on_all_ranks(
          "checkpoint of step %d not written: %s; older checkpoints are untouched, --resume 1 goes on from them once "
          "the "
          "folder can be written",
          meta.step, error.what());
    }
    verified_step_ = meta.step;
    damaged_.erase(checkpoint_name(meta.step));
  }

  /// Sets the optimizers (parameters as they were rounded, moments) to the newest usable checkpoint and returns its
  /// meta data; nothing if there is no checkpoint. Damaged ones are named in a warning on rank 0. User error if a
  /// checkpoint belongs to a model other than `expected.model`; environment error if there are checkpoints but none is
  /// usable (the optimizers are then undefined). Seed and precision are not compared: the seed of the checkpoint keys
  /// the rounding. Waits for the stream. Cost: reads 12 bytes per parameter that is updated here.
  std::optional<CheckpointMeta> load_newest(const Optimizers& optimizers, const CheckpointMeta& expected) {
    const std::vector<CheckpointName> checkpoints = shared_list();
    for (size_t i = 0; i < checkpoints.size(); ++i) {
      const std::string& name = checkpoints[i].name;
      CheckpointRecord record;
      std::string problem = read_record(name, &record);
      if (problem.empty()) problem = load(name, record, optimizers, expected);
      if (problem.empty()) {
        verified_step_ = record.meta.step;
        return record.meta;
      }
      damaged_.insert(name);
      if (control_.rank() == 0) {
        fprintf(stderr, "warning: checkpoint %s/%s cannot be used: %s%s\n", folder_.c_str(), name.c_str(),
                problem.c_str(), i + 1 < checkpoints.size() ? "; trying the one before it" : "");
      }
    }
    if (checkpoints.empty()) return std::nullopt;
    environment_error_on_all_ranks(
        "%s: none of the %zu checkpoints can be used; put back a copy of one, or start afresh with another --out",
        folder_.c_str(), checkpoints.size());
  }

  /// Deletes what checkpoints_to_delete() names; the verified step is the one that was saved or loaded last, damaged
  /// ones are those that load_newest found so. A deletion that fails is a warning. Rank 0 works, the others return at
  /// once.
  void prune(int64_t keep, int64_t keep_major) {
    if (control_.rank() != 0) return;
    const KeepRule rule{keep, keep_major, verified_step_, damaged_};
    for (const CheckpointName& checkpoint : checkpoints_to_delete(list_checkpoints(folder_), rule)) {
      try {
        remove_checkpoint(folder_ + "/" + checkpoint.name);
      } catch (const Error& error) {
        fprintf(stderr, "warning: old checkpoint not deleted: %s\n", error.what());
      }
    }
  }

 private:
  static constexpr size_t kChunk = size_t{1} << 20;  // floats

  // --- saving

  CheckpointRecord make_record(const CheckpointMeta& meta) const {
    CheckpointRecord record;
    record.meta = meta;
    record.tensors = table_.tensors.size();
    record.elements = table_.total;
    record.table = table_hash(table_);
    return record;
  }

  // Returns the hash of what was written.
  uint64_t write_ranges(const std::string& temporary, CheckpointFile which, const Optimizers& optimizers) {
    const std::string path = temporary + "/" + checkpoint_file_name(which);
    if (!path_exists(path)) {
      environment_error("%s is not there on rank %d: --out must be on a file system that all ranks share", path.c_str(),
                        control_.rank());
    }
    File file = File::open_to_update(path);
    uint64_t hash = 0;
    buffer_.resize(std::min<size_t>(kChunk, table_.total));
    for (StageOptimizer* optimizer : optimizers) {
      for (const OwnedRange& range : optimizer->accountable()) {
        for (size_t done = 0; done < range.count; done += kChunk) {
          const size_t count = std::min(kChunk, range.count - done);
          const uint64_t element = optimizer->global_element(range) + done;
          CUDA_CHECK(cudaMemcpyAsync(buffer_.data(), state(*optimizer, which, range) + done, count * sizeof(float),
                                     cudaMemcpyDeviceToHost, stream_));
          CUDA_CHECK(cudaStreamSynchronize(stream_));
          hash += element_hash(buffer_.data(), count, element);
          file.pwrite_all(buffer_.data(), count * sizeof(float), element * sizeof(float));
        }
      }
    }
    file.sync();
    file.close();
    return hash;
  }

  // --- loading

  std::vector<CheckpointName> shared_list() {
    std::vector<CheckpointName> checkpoints;
    run_together(control_, [&] {
      if (control_.rank() == 0) checkpoints = list_checkpoints(folder_);
    });
    uint64_t count = checkpoints.size();
    control_.broadcast(&count, sizeof count, 0);
    checkpoints.resize(count);
    for (CheckpointName& checkpoint : checkpoints) {
      int numbers[] = {checkpoint.step, checkpoint.replaced};
      control_.broadcast(numbers, sizeof numbers, 0);
      checkpoint = {numbers[0], numbers[1] != 0, checkpoint_name(numbers[0]) + (numbers[1] != 0 ? ".old" : "")};
    }
    return checkpoints;
  }

  // Rank 0 reads meta.txt for all. Returns what is wrong with it, or "".
  std::string read_record(const std::string& name, CheckpointRecord* record) {
    std::string text, problem;
    if (control_.rank() == 0) {
      problem = problem_of([&] { parse_checkpoint_text(text = read_checkpoint_text(folder_ + "/" + name)); });
    }
    problem = shared_problem(problem);
    if (!problem.empty()) return problem;
    *record = parse_checkpoint_text(broadcast_text(text, 0));
    const bool right_name = checkpoint_name(record->meta.step) == name.substr(0, name.find('.'));
    return right_name ? "" : format_text("it is a checkpoint of step %d", record->meta.step);
  }

  struct Loading {
    const CheckpointReader& reader;
    std::string problem;  // of the files on this rank; after one, zeros are loaded
    std::array<uint64_t, kCheckpointFiles> hashes{};
  };

  // Returns what is wrong with the files, the same on all ranks, or "".
  std::string load(const std::string& name, const CheckpointRecord& record, const Optimizers& optimizers,
                   const CheckpointMeta& expected) {
    const std::string difference = model_difference(record, make_record(expected));
    if (!difference.empty()) {
      const std::string remedy = "use the options of the run that wrote it, or another --out";
      throw Error(ErrorKind::kUser, folder_ + "/" + name + " is of another model: " + difference + "; " + remedy, true);
    }
    std::optional<CheckpointReader> reader;
    const std::string missing = shared_problem(problem_of([&] { reader.emplace(folder_ + "/" + name, record); }));
    if (!missing.empty()) return missing;
    Loading loading{*reader, "", {}};
    for (StageOptimizer* optimizer : optimizers) {
      // Sends parameters between replicas, so it is gone through to the end on every rank, whatever the disk says.
      const auto values = [&](const OwnedRange& range, float* out) {
        read_range(loading, CheckpointFile::kParameters, *optimizer, range, out);
      };
      optimizer->set_parameters(values, record.meta.seed, record.meta.step);
      for (CheckpointFile which : {CheckpointFile::kFirstMoment, CheckpointFile::kSecondMoment}) {
        load_moment(loading, which, *optimizer);
      }
    }
    const std::string problem = shared_problem(loading.problem);
    control_.sum(loading.hashes.data(), loading.hashes.size());
    return problem.empty() ? reader->hash_problem(loading.hashes) : problem;
  }

  void load_moment(Loading& loading, CheckpointFile which, StageOptimizer& optimizer) {
    buffer_.resize(std::min<size_t>(kChunk, table_.total));
    for (const OwnedRange& range : optimizer.updated()) {
      for (size_t done = 0; done < range.count; done += kChunk) {
        OwnedRange part = range;
        part.first += done;
        part.count = std::min(kChunk, range.count - done);
        read_range(loading, which, optimizer, part, buffer_.data());
        CUDA_CHECK(cudaMemcpyAsync(state(optimizer, which, range) + done, buffer_.data(), part.count * sizeof(float),
                                   cudaMemcpyHostToDevice, stream_));
        CUDA_CHECK(cudaStreamSynchronize(stream_));
      }
    }
  }

  // out = elements of `range`; adds the hash of those that this rank answers for.
  void read_range(Loading& loading, CheckpointFile which, const StageOptimizer& optimizer, const OwnedRange& range,
                  float* out) {
    const uint64_t first = optimizer.global_element(range);
    if (loading.problem.empty()) {
      loading.problem = problem_of([&] { loading.reader.read(which, first, range.count, out); });
    }
    if (!loading.problem.empty()) {
      std::fill_n(out, range.count, 0.0f);
      return;
    }
    for (const OwnedRange& own : optimizer.accountable()) {
      if (own.tensor != range.tensor) continue;
      const size_t from = std::max(own.first, range.first);
      const size_t to = std::min(own.first + own.count, range.first + range.count);
      if (from >= to) continue;
      const size_t skipped = from - range.first;
      loading.hashes[static_cast<int>(which)] += element_hash(out + skipped, to - from, first + skipped);
    }
  }

  // --- both

  static float* state(StageOptimizer& optimizer, CheckpointFile which, const OwnedRange& range) {
    if (which == CheckpointFile::kParameters) return optimizer.master(range);
    return which == CheckpointFile::kFirstMoment ? optimizer.first_moment(range) : optimizer.second_moment(range);
  }

  template <class Work>
  static std::string problem_of(Work work) {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  // The problem of the lowest rank that has one, on all ranks.
  std::string shared_problem(const std::string& mine) {
    const int first = control_.min(mine.empty() ? control_.size() : control_.rank());
    return first == control_.size() ? "" : broadcast_text(mine, first);
  }

  std::string broadcast_text(std::string text, int root) {
    uint64_t length = text.size();
    control_.broadcast(&length, sizeof length, root);
    text.resize(length);
    if (length > 0) control_.broadcast(&text[0], length, root);
    return text;
  }

  std::string folder_;
  Control& control_;
  const ParameterTable& table_;
  cudaStream_t stream_;
  std::vector<float> buffer_;
  int verified_step_ = -1;         // saved or loaded last
  std::set<std::string> damaged_;  // found so by load_newest
};
