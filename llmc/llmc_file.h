// llmc_file.h -- model checkpoints in llm.c's format, addressed by the parameter table, so that a rank touches only its
// tensors.
//
// File (little-endian): 256 int32 header {20240326, version, maxT, V, L, NH, C, Vp, 0...}, then 16 arrays of parameters
// in the order
//   wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb
// where an array of the blocks holds all layers back to back. Version 3 stores float, version 5 bf16; values are
// converted on the way (to bf16: nearest, ties to even). Our table lists the tensors block by block; offset() is the
// map between the two orders.
//
// Writing: one rank create()s a temporary file, the others join() it, all write() their ranges and sync(), and after a
// barrier the first rank commit()s, which renames it: PATH holds the old model or the whole new one, never a part. Host
// code, plain files; every offset is 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "llmc/check.h"
#include "llmc/file.h"
#include "llmc/gpt2_config.h"

/// How a file stores its values; the number is the file's version.
enum class LlmcPrecision : int32_t { kFloat32 = 3, kBfloat16 = 5 };

constexpr int32_t kLlmcModelMagic = 20240326;
constexpr int kLlmcHeaderInts = 256;
constexpr uint64_t kLlmcHeaderBytes = kLlmcHeaderInts * sizeof(int32_t);

namespace llmc_file_detail {

inline float float_from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

// Nearest bf16, ties to even; a NaN stays a NaN (the carry of rounding could turn its payload into infinity).
inline uint16_t bf16_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// What llm.c writes with this magic number, or null.
inline const char* kind_of_magic(int32_t magic) {
  switch (magic) {
    case 20240327:
      return "llm.c debug state";
    case 20240328:
      return "tokenizer";
    case 20240520:
      return "token file";
    case 20240522:
      return "multiple-choice evaluation file";
    case 20240527:
      return "llm.c optimizer state";
    case 20240801:
      return "token file of Llama 3";
    default:
      return nullptr;
  }
}

inline std::string describe(const GPT2Config& c) {
  return format_text("layers %d, heads %d, channels %d, vocabulary %d (padded %d), positions %d", c.layers, c.heads,
                     c.channels, c.vocab, c.padded_vocab, c.max_seq_len);
}

}  // namespace llmc_file_detail

/// Places of all tensors in a model file.
class LlmcModelLayout {
 public:
  LlmcModelLayout(const GPT2Config& config, LlmcPrecision precision)
      : config_(config), precision_(precision), table_(gpt2_parameter_table(config)) {
    const std::vector<ParameterTensor>& tensors = table_.tensors;
    const size_t layers = static_cast<size_t>(config.layers);
    begin_.resize(tensors.size());
    uint64_t end = 0;  // in elements
    const auto place = [&](size_t tensor) {
      begin_[tensor] = end;
      end += tensors[tensor].elements;
    };
    place(0);
    place(1);
    for (int k = 0; k < kGpt2BlockTensors; ++k) {
      for (size_t l = 0; l < layers; ++l) place(static_cast<size_t>(gpt2_block_tensor(static_cast<int>(l), k)));
    }
    place(tensors.size() - 2);
    place(tensors.size() - 1);
    assert(end == table_.total && "LlmcModelLayout: every tensor has one place");
  }

  const GPT2Config& config() const { return config_; }
  LlmcPrecision precision() const { return precision_; }
  const ParameterTable& table() const { return table_; }
  /// Bytes of one stored value.
  uint64_t value_bytes() const { return precision_ == LlmcPrecision::kFloat32 ? sizeof(float) : sizeof(uint16_t); }
  /// Byte of the file where element `first` of row `tensor` of the table begins.
  uint64_t offset(int tensor, size_t first = 0) const {
    return kLlmcHeaderBytes + (begin_.at(static_cast<size_t>(tensor)) + first) * value_bytes();
  }
  uint64_t file_bytes() const { return kLlmcHeaderBytes + table_.total * value_bytes(); }
  void check_range(int tensor, size_t first, size_t count) const {
    const size_t elements = table_.tensors.at(static_cast<size_t>(tensor)).elements;
    assert(first <= elements && count <= elements - first && "model file: range outside the tensor");
  }

 private:
  GPT2Config config_;
  LlmcPrecision precision_;
  ParameterTable table_;
  std::vector<uint64_t> begin_;  // elements before row i of the table, in the order of the file
};

/// A model file, open for reading. All functions are const and may be called from several threads.
class LlmcModelFile {
 public:
  /// Opens and checks a file: exists, magic number, version, sizes that make a model, exact length.
  /// User error naming the file, what was found, what was expected and what to do.
  static LlmcModelFile open(const std::string& path) {
    if (!path_exists(path)) {
      user_error("no model file %s; give a checkpoint of llm.c (gpt2_124M.bin) or a preset: %s", path.c_str(),
                 gpt2_preset_names());
    }
    File file = File::open_to_read(path, "model file");
    LlmcModelLayout layout = read_header(file);
    const uint64_t expected = layout.file_bytes(), found = file.size();
    if (found != expected) {
      user_error("model file %s has %llu bytes, expected %llu (%s, %s): it is %s; copy or write it again", path.c_str(),
                 static_cast<unsigned long long>(found), static_cast<unsigned long long>(expected),
                 llmc_file_detail::describe(layout.config()).c_str(),
                 layout.precision() == LlmcPrecision::kFloat32 ? "fp32" : "bf16",
                 found < expected ? "truncated" : "not the file that its header describes");
    }
    return LlmcModelFile(std::move(file), std::move(layout));
  }

  const LlmcModelLayout& layout() const { return layout_; }
  const GPT2Config& config() const { return layout_.config(); }
  const ParameterTable& table() const { return layout_.table(); }
  LlmcPrecision precision() const { return layout_.precision(); }

  /// out[0 .. count) = elements [first, first + count) of row `tensor` of the table, as float (host memory,
  /// overwritten). Environment error when the file cannot be read. Scratch 64 KiB for bf16.
  void read(float* out, int tensor, size_t first, size_t count) const {
    layout_.check_range(tensor, first, count);
    const uint64_t offset = layout_.offset(tensor, first);
    if (precision() == LlmcPrecision::kFloat32) return file_.pread_all(out, count * sizeof(float), offset);
    std::vector<uint16_t> chunk(std::min<size_t>(count, kChunk));
    for (size_t done = 0; done < count; done += chunk.size()) {
      const size_t n = std::min(chunk.size(), count - done);
      file_.pread_all(chunk.data(), n * sizeof(uint16_t), offset + done * sizeof(uint16_t));
      for (size_t i = 0; i < n; ++i) out[done + i] = llmc_file_detail::float_from_bf16(chunk[i]);
    }
  }

 private:
  static constexpr size_t kChunk = 32768;
  LlmcModelFile(File file, LlmcModelLayout layout) : file_(std::move(file)), layout_(std::move(layout)) {}

  static LlmcModelLayout read_header(const File& file) {
    const char* path = file.path().c_str();
    const uint64_t bytes = file.size();
    int32_t header[kLlmcHeaderInts] = {};
    file.pread_all(header, static_cast<size_t>(std::min(bytes, kLlmcHeaderBytes)), 0);
    if (bytes == 0) user_error("model file %s is empty; copy or write it again", path);
    if (bytes >= sizeof(int32_t) && header[0] != kLlmcModelMagic) {
      const char* kind = llmc_file_detail::kind_of_magic(header[0]);
      user_error(
          "%s is not a model file of llm.c: %s%s%s begins with %d, expected %d; give the checkpoint (gpt2_124M.bin) or "
          "%s",
          path, kind ? "a " : "it", kind ? kind : "", kind ? "," : "", header[0], kLlmcModelMagic, gpt2_preset_names());
    }
    if (bytes < kLlmcHeaderBytes) {
      user_error("model file %s is truncated: %llu bytes, its header alone has %llu; copy or write it again", path,
                 static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(kLlmcHeaderBytes));
    }
    const int32_t version = header[1];
    if (version != static_cast<int32_t>(LlmcPrecision::kFloat32) &&
        version != static_cast<int32_t>(LlmcPrecision::kBfloat16)) {
      user_error("model file %s has version %d, expected 3 (fp32) or 5 (bf16); write it again with a current llm.c",
                 path, version);
    }
    const GPT2Config config{header[4], header[5], header[6], header[3], header[7], header[2]};
    const std::string problem = gpt2_config_problem(config);
    if (!problem.empty()) {
      user_error("model file %s describes no GPT-2: %s (its header says %s); it is damaged, copy it again", path,
                 problem.c_str(), llmc_file_detail::describe(config).c_str());
    }
    return LlmcModelLayout(config, static_cast<LlmcPrecision>(version));
  }

  File file_;
  LlmcModelLayout layout_;
};

/// A model file in the making, PATH.tmp until commit(). Several processes may write one file, each its own ranges.
class LlmcModelWriter {
 public:
  /// Starts a new file: header and full length. One rank. Environment error when that is not possible.
  /// Without commit() the temporary file is removed when the writer is destroyed.
  static LlmcModelWriter create(const std::string& path, const GPT2Config& config, LlmcPrecision precision) {
    LlmcModelLayout layout(config, precision);
    int32_t header[kLlmcHeaderInts] = {kLlmcModelMagic,    static_cast<int32_t>(precision),
                                       config.max_seq_len, config.vocab,
                                       config.layers,      config.heads,
                                       config.channels,    config.padded_vocab};
    LlmcModelWriter writer(path, File::create(temporary_name(path)), std::move(layout), true);
    writer.file_.truncate(writer.layout_.file_bytes());
    writer.file_.pwrite_all(header, sizeof(header), 0);
    return writer;
  }

  /// Opens the file that another rank has created (call it after a barrier). Environment error if it is not there in
  /// full length, for example because the folder is not shared between the nodes.
  static LlmcModelWriter join(const std::string& path, const GPT2Config& config, LlmcPrecision precision) {
    const std::string temporary = temporary_name(path);
    LlmcModelLayout layout(config, precision);
    if (!path_exists(temporary)) {
      environment_error("%s, made by the first rank, is not visible here: the folder must be shared by all nodes",
                        temporary.c_str());
    }
    LlmcModelWriter writer(path, File::open_to_update(temporary), std::move(layout), false);
    if (writer.file_.size() != writer.layout_.file_bytes()) {
      environment_error("%s has %llu bytes, expected %llu: it is not the file that the first rank made",
                        temporary.c_str(), static_cast<unsigned long long>(writer.file_.size()),
                        static_cast<unsigned long long>(writer.layout_.file_bytes()));
    }
    return writer;
  }

  LlmcModelWriter(LlmcModelWriter&& other) noexcept
      : path_(std::move(other.path_)),
        file_(std::move(other.file_)),
        layout_(std::move(other.layout_)),
        remove_(std::exchange(other.remove_, false)) {}
  ~LlmcModelWriter() {
    if (remove_) unlink(temporary_name(path_).c_str());
  }

  const LlmcModelLayout& layout() const { return layout_; }

  /// Elements [first, first + count) of row `tensor` of the table = values[0 .. count) (host memory). Ranges of
  /// different ranks must not overlap. Environment error (disk full...).
  void write(const float* values, int tensor, size_t first, size_t count) {
    layout_.check_range(tensor, first, count);
    const uint64_t offset = layout_.offset(tensor, first);
    if (layout_.precision() == LlmcPrecision::kFloat32) return file_.pwrite_all(values, count * sizeof(float), offset);
    std::vector<uint16_t> chunk(std::min<size_t>(count, kChunk));
    for (size_t done = 0; done < count; done += chunk.size()) {
      const size_t n = std::min(chunk.size(), count - done);
      for (size_t i = 0; i < n; ++i) chunk[i] = llmc_file_detail::bf16_from_float(values[done + i]);
      file_.pwrite_all(chunk.data(), n * sizeof(uint16_t), offset + done * sizeof(uint16_t));
    }
  }

  /// What this rank has written reaches the disk. Every rank, before the barrier that precedes commit().
  void sync() { file_.sync(); }

  /// The rank that called create(), after all ranks have called sync(): the file gets its final name. Durable on
  /// return.
  void commit() {
    assert(remove_ && "LlmcModelWriter::commit: only once, by the writer that created the file");
    file_.sync();
    file_.close();
    rename_durably(temporary_name(path_), path_);
    remove_ = false;
  }

 private:
  static constexpr size_t kChunk = 32768;
  LlmcModelWriter(const std::string& path, File file, LlmcModelLayout layout, bool remove)
      : path_(path), file_(std::move(file)), layout_(std::move(layout)), remove_(remove) {}
  static std::string temporary_name(const std::string& path) { return path + ".tmp"; }

  std::string path_;
  File file_;
  LlmcModelLayout layout_;
  bool remove_;  // the temporary file, when the writer is destroyed
};
