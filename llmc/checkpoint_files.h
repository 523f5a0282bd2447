// checkpoint_files.h -- what a checkpoint is on disk, and reading one on a single process. Host only.
//
//   RUN/ckpt/step-00000020/parameters.bin   fp32 master parameters: element e of the model at byte 4 e
//                          m.bin, v.bin     AdamW moments, in the same order
//                          meta.txt         written last: `key = value` lines, sizes and hashes of the files
// Elements are numbered as in the parameter table, so nothing on disk depends on stages, replicas, ZeRO stage, schedule
// or precision: the same run writes the same bytes on every layout, and every rank finds its ranges by a
// multiplication. The hash of parameters.bin is the `params H` that the program prints last. Numbers are little-endian.
// A folder `step-N.tmp` is unfinished or being deleted. `step-N.old` is a whole checkpoint whose replacement by a new
// one of the same step was interrupted.
#pragma once

#include <array>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "llmc/element_hash.h"
#include "llmc/file.h"
#include "llmc/gpt2_config.h"

enum class CheckpointFile { kParameters = 0, kFirstMoment = 1, kSecondMoment = 2 };
constexpr int kCheckpointFiles = 3;
constexpr int kCheckpointFormat = 1;

inline const char* checkpoint_file_name(CheckpointFile file) {
  static const char* const kNames[] = {"parameters.bin", "m.bin", "v.bin"};
  return kNames[static_cast<int>(file)];
}

/// What a run needs, besides the three arrays, to go on where it stood. Texts are single lines.
struct CheckpointMeta {
  int step = 0;           // optimizer steps done = AdamW::step of the last update, which keys the rounding to bf16
  uint64_t position = 0;  // samples trained on since the start, over all epochs and replicas
  uint64_t seed = 0;
  std::string precision;                     // of the run that wrote it; the files are fp32 in any case
  std::map<std::string, std::string> model;  // kind and sizes; a run with others cannot use the checkpoint
  std::map<std::string, std::string> extra;  // whatever the trainer wants to have back
};

/// The model part of the meta data of a GPT-2.
inline std::map<std::string, std::string> checkpoint_model(const GPT2Config& config) {
  return {{"kind", "gpt2"},
          {"layers", std::to_string(config.layers)},
          {"heads", std::to_string(config.heads)},
          {"channels", std::to_string(config.channels)},
          {"vocab", std::to_string(config.vocab)},
          {"padded_vocab", std::to_string(config.padded_vocab)},
          {"max_seq_len", std::to_string(config.max_seq_len)}};
}

/// Content of meta.txt.
struct CheckpointRecord {
  CheckpointMeta meta;
  uint64_t tensors = 0;
  uint64_t elements = 0;
  uint64_t table = 0;  // table_hash() of the parameter table
  std::array<uint64_t, kCheckpointFiles> hashes{};
};

/// FNV-1a over bytes: any single changed byte changes it.
inline uint64_t text_hash(const std::string& text) {
  uint64_t hash = 14695981039346656037ull;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

/// Hash of names and shapes in order: tells whether an element number means the same parameter.
inline uint64_t table_hash(const ParameterTable& table) {
  std::string text;
  for (const ParameterTensor& tensor : table.tensors) {
    text += tensor.name;
    for (int64_t extent : tensor.shape) text += " " + std::to_string(extent);
    text += "\n";
  }
  return text_hash(text);
}

/// meta.txt: a pure function of the record, ending with a hash of all lines before.
inline std::string checkpoint_text(const CheckpointRecord& record) {
  const CheckpointMeta& meta = record.meta;
  std::string text;
  const auto line = [&text](const std::string& key, const std::string& value) {
    assert((key + value).find('\n') == std::string::npos && key.find(" = ") == std::string::npos && "one line each");
    text += key + " = " + value + "\n";
  };
  const auto hex = [](uint64_t value) { return format_text("%016llx", static_cast<unsigned long long>(value)); };
  line("format", std::to_string(kCheckpointFormat));
  line("step", std::to_string(meta.step));
  line("position", std::to_string(meta.position));
  line("seed", std::to_string(meta.seed));
  line("precision", meta.precision);
  for (const auto& [key, value] : meta.model) line("model." + key, value);
  line("tensors", std::to_string(record.tensors));
  line("elements", std::to_string(record.elements));
  line("table", hex(record.table));
  for (int i = 0; i < kCheckpointFiles; ++i) {
    line(std::string(checkpoint_file_name(static_cast<CheckpointFile>(i))) + ".bytes",
         std::to_string(4 * record.elements));
    line(std::string(checkpoint_file_name(static_cast<CheckpointFile>(i))) + ".hash", hex(record.hashes[i]));
  }
  for (const auto& [key, value] : meta.extra) line("extra." + key, value);
  line("hash", hex(text_hash(text)));
  return text;
}

/// The inverse of checkpoint_text(). Throws an Error that says why `text` is not the whole, unchanged content of a
/// meta.txt of this format.
inline CheckpointRecord parse_checkpoint_text(const std::string& text) {
  const std::string start = "format = ", last_key = "hash = ";
  if (text.compare(0, start.size(), start) != 0) user_error("meta.txt is not that of a checkpoint");
  const int format = atoi(text.c_str() + start.size());
  if (format != kCheckpointFormat) {
    user_error("meta.txt has format %d, this program reads format %d", format, kCheckpointFormat);
  }
  const size_t last = text.rfind("\n" + last_key);
  if (last == std::string::npos || text.back() != '\n') user_error("meta.txt is cut off");
  const uint64_t hash = strtoull(text.c_str() + last + 1 + last_key.size(), nullptr, 16);
  if (hash != text_hash(text.substr(0, last + 1)))
    user_error("meta.txt was changed or damaged: its hash does not match");

  CheckpointRecord record;
  std::map<std::string, std::string> values;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    const std::string line = text.substr(begin, end - begin);
    const size_t equals = std::min(line.find(" = "), line.size());
    const std::string key = line.substr(0, equals), value = equals < line.size() ? line.substr(equals + 3) : "";
    values[key] = value;
    if (key.compare(0, 6, "model.") == 0) record.meta.model[key.substr(6)] = value;
    if (key.compare(0, 6, "extra.") == 0) record.meta.extra[key.substr(6)] = value;
  }
  const auto number = [&values](const std::string& key, int base) {
    return strtoull(values[key].c_str(), nullptr, base);
  };
  record.meta.step = static_cast<int>(number("step", 10));
  record.meta.position = number("position", 10);
  record.meta.seed = number("seed", 10);
  record.meta.precision = values["precision"];
  record.tensors = number("tensors", 10);
  record.elements = number("elements", 10);
  record.table = number("table", 16);
  for (int i = 0; i < kCheckpointFiles; ++i) {
    record.hashes[i] = number(std::string(checkpoint_file_name(static_cast<CheckpointFile>(i))) + ".hash", 16);
  }
  // Whatever was missing, doubled, unknown or out of range above does not survive this comparison.
  if (checkpoint_text(record) != text) user_error("meta.txt is malformed");
  return record;
}

/// Where a stored checkpoint is of another model than `own`, the record of this run: "layers 4 (this run: 2), ...", or
/// "".
inline std::string model_difference(const CheckpointRecord& stored, const CheckpointRecord& own) {
  std::string text;
  for (const auto& [key, value] : own.meta.model) {
    const auto found = stored.meta.model.find(key);
    const std::string other = found == stored.meta.model.end() ? "?" : found->second;
    if (other != value) text += format_text(", %s %s (this run: %s)", key.c_str(), other.c_str(), value.c_str());
  }
  if (text.empty() && (stored.table != own.table || stored.elements != own.elements)) {
    text =
        format_text(", %llu tensors with %llu elements (this run: %llu with %llu, or others)",
                    static_cast<unsigned long long>(stored.tensors), static_cast<unsigned long long>(stored.elements),
                    static_cast<unsigned long long>(own.tensors), static_cast<unsigned long long>(own.elements));
  }
  return text.empty() ? text : text.substr(2);
}

/// meta.txt of a checkpoint folder as text. Throws an Error when it is missing or cannot be one.
inline std::string read_checkpoint_text(const std::string& folder) {
  const std::string path = folder + "/meta.txt";
  if (!path_exists(path)) user_error("meta.txt is missing");
  if (File::open_to_read(path, "checkpoint file").size() > 1 << 20) user_error("meta.txt is not that of a checkpoint");
  return read_whole_file(path, "checkpoint file");
}

/// One checkpoint, open for reading at any place. Host only; read() may be called from several threads.
class CheckpointReader {
 public:
  /// Opens the files and compares their sizes with the record; throws an Error with the reason when one is missing or
  /// has another size. Reads no content.
  CheckpointReader(const std::string& folder, const CheckpointRecord& record) : record_(record) {
    for (int i = 0; i < kCheckpointFiles; ++i) {
      const char* name = checkpoint_file_name(static_cast<CheckpointFile>(i));
      if (!path_exists(folder + "/" + name)) user_error("%s is missing", name);
      files_[i] = File::open_to_read(folder + "/" + name, "checkpoint file");
      const unsigned long long size = files_[i].size(), expected = 4 * record.elements;
      if (size != expected) user_error("%s has %llu bytes, expected %llu", name, size, expected);
    }
  }
  explicit CheckpointReader(const std::string& folder)
      : CheckpointReader(folder, parse_checkpoint_text(read_checkpoint_text(folder))) {}

  const CheckpointRecord& record() const { return record_; }

  /// out (count) = elements first .. of the whole model. Throws an environment error when the disk fails.
  void read(CheckpointFile file, uint64_t first, size_t count, float* out) const {
    assert(first <= record_.elements && count <= record_.elements - first);
    files_[static_cast<int>(file)].pread_all(out, count * sizeof(float), first * sizeof(float));
  }
  std::vector<float> read_tensor(CheckpointFile file, const ParameterTensor& tensor) const {
    std::vector<float> values(tensor.elements);
    read(file, tensor.offset, tensor.elements, values.data());
    return values;
  }

  /// What is wrong with the content, or "". Reads all of it, 4 MiB at a time.
  std::string problem() const {
    std::array<uint64_t, kCheckpointFiles> hashes{};
    std::vector<float> chunk(std::min<uint64_t>(record_.elements, 1 << 20));
    for (int i = 0; i < kCheckpointFiles; ++i) {
      for (uint64_t first = 0; first < record_.elements; first += chunk.size()) {
        const size_t count = std::min<uint64_t>(chunk.size(), record_.elements - first);
        read(static_cast<CheckpointFile>(i), first, count, chunk.data());
        hashes[i] += element_hash(chunk.data(), count, first);
      }
    }
    return hash_problem(hashes);
  }

  /// Compares hashes of the content with those of meta.txt: what is wrong, or "".
  std::string hash_problem(const std::array<uint64_t, kCheckpointFiles>& hashes) const {
    for (int i = 0; i < kCheckpointFiles; ++i) {
      if (hashes[i] == record_.hashes[i]) continue;
      return format_text(
          "%s is damaged: hash %016llx, expected %016llx", checkpoint_file_name(static_cast<CheckpointFile>(i)),
          static_cast<unsigned long long>(hashes[i]), static_cast<unsigned long long>(record_.hashes[i]));
    }
    return "";
  }

 private:
  CheckpointRecord record_;
  std::array<File, kCheckpointFiles> files_;
};
