// token_shards.h -- training data: files of 16-bit tokens in llm.c's format, cut into samples of T + 1 tokens.
//
// Shard (little-endian): 256 int32 header {20240520, 1, number of tokens, 0...}, then uint16 tokens. Sample i of a
// shard is tokens [i T, i T + T]; inputs are its first T tokens, targets its last T (the next token at each place). A
// sample never crosses shards: samples of an epoch = sum over shards of floor((tokens - 1) / T). Shards may have any
// sizes; a shard shorter than a sample gives none. Shards follow each other in the byte order of their names, so sample
// numbers are a pure function of the files. Offsets are 64 bits (llm.c fails above 2 GiB), the token count up to 2^32
// - 1. Read with pread, not mmap: a file that shrinks while in use gives a message instead of a SIGBUS.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <fnmatch.h>
#include <glob.h>

#include "llmc/check.h"
#include "llmc/file.h"

/// What data is for: it picks files in a folder and names the option in messages.
enum class DataSplit { kTrain, kValidation };

constexpr int32_t kTokenFileMagic = 20240520;
constexpr int32_t kTokenFileVersion = 1;
constexpr uint64_t kTokenFileHeaderBytes = 256 * sizeof(int32_t);

namespace token_shards_detail {

inline const char* option_of(DataSplit split) { return split == DataSplit::kTrain ? "--train-data" : "--val-data"; }

inline unsigned long long printable(uint64_t value) { return value; }

}  // namespace token_shards_detail

/// The files that a pattern names, sorted by byte: a file, a glob ("fineweb/train_*.bin"), or a folder (its *train*.bin
/// or *val*.bin, so that one folder serves both). User error when there is none.
inline std::vector<std::string> list_token_files(const std::string& pattern, DataSplit split) {
  const char* option = token_shards_detail::option_of(split);
  std::vector<std::string> files;
  if (is_folder(pattern)) {
    const char* wanted = split == DataSplit::kTrain ? "*train*.bin" : "*val*.bin";
    for (const std::string& name : list_folder(pattern)) {
      if (fnmatch(wanted, name.c_str(), 0) == 0) files.push_back(pattern + "/" + name);
    }
    if (files.empty()) user_error("%s: the folder %s holds no file %s", option, pattern.c_str(), wanted);
  } else if (path_exists(pattern)) {
    files.push_back(pattern);  // before globbing: the name may hold [ or *
  } else {
    glob_t found = {};
    const int result = glob(pattern.c_str(), 0, nullptr, &found);
    for (size_t i = 0; result == 0 && i < found.gl_pathc; i++) files.push_back(found.gl_pathv[i]);
    globfree(&found);
    if (files.empty()) {
      user_error("%s: no file matches %s; make token files with dev/data/get_text.sh or dev/data/prepare_text.py",
                 option, pattern.c_str());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Tokens in a token file, from its header; checked against the file's size both ways. User error naming the file, what
/// was found and what was expected.
inline uint64_t read_token_file_header(const File& file) {
  using token_shards_detail::printable;
  const char* path = file.path().c_str();
  const uint64_t bytes = file.size();
  if (bytes < kTokenFileHeaderBytes) {
    user_error("%s is %s: %llu bytes, a token file starts with a header of %llu", path, bytes ? "cut short" : "empty",
               printable(bytes), printable(kTokenFileHeaderBytes));
  }
  int32_t header[256];
  file.pread_all(header, sizeof(header), 0);
  if (header[0] != kTokenFileMagic) {
    user_error("%s is not a token file: it starts with %d, expected %d; make one with dev/data/prepare_text.py", path,
               header[0], kTokenFileMagic);
  }
  if (header[1] != kTokenFileVersion) {
    user_error("%s is a token file of version %d, expected %d (16-bit tokens)", path, header[1], kTokenFileVersion);
  }
  const uint64_t tokens = static_cast<uint32_t>(header[2]);
  const uint64_t expected = kTokenFileHeaderBytes + tokens * sizeof(uint16_t);
  if (bytes != expected) {
    user_error("%s is %s: its header says %llu tokens = %llu bytes, it has %llu bytes", path,
               bytes < expected ? "cut short" : "longer than its header says", printable(tokens), printable(expected),
               printable(bytes));
  }
  if (tokens == 0) user_error("%s holds no token; remove it from the data", path);
  return tokens;
}

/// All samples of a set of shards. Movable. read() keeps some files open, so an object belongs to one thread; ranks and
/// threads open their own, which costs a header per shard.
class TokenData {
 public:
  /// Opens and checks every shard: header, size, and the ids of its first tokens (all others when they are read, so
  /// that opening 100 GB takes no time). `T` >= 1 tokens per sequence, ids must be below `vocab`. User error when a
  /// file is missing, foreign, cut, has an id >= vocab, or when there is not one sample.
  static TokenData open(const std::string& pattern, int T, int vocab, DataSplit split) {
    assert(T >= 1 && vocab >= 1);
    TokenData data;
    data.T_ = T;
    data.vocab_ = vocab;
    data.split_ = split;
    uint64_t longest = 0;
    for (const std::string& path : list_token_files(pattern, split)) {
      const File file = File::open_to_read(path, "token file");
      Shard shard;
      shard.path = path;
      shard.tokens = read_token_file_header(file);
      shard.first_sample = data.samples_;
      data.samples_ += (shard.tokens - 1) / static_cast<uint64_t>(T);
      data.tokens_ += shard.tokens;
      longest = std::max(longest, shard.tokens);
      data.buffer_.resize(std::min<uint64_t>(shard.tokens, kCheckedAtOpen));
      data.read_tokens(file, 0);
      data.shards_.push_back(shard);
    }
    if (data.samples_ == 0) {
      const char* option = token_shards_detail::option_of(split);
      if (longest < 2) user_error("%s %s: no file has the 2 tokens of the shortest sample", option, pattern.c_str());
      user_error(
          "%s %s: the longest file has %llu tokens, a sample needs --seq-len + 1 = %d; use --seq-len %llu or less",
          option, pattern.c_str(), token_shards_detail::printable(longest), T + 1,
          token_shards_detail::printable(longest - 1));
    }
    return data;
  }

  /// Samples of one epoch (at least 1), tokens and files in all.
  uint64_t samples() const { return samples_; }
  uint64_t tokens() const { return tokens_; }
  size_t files() const { return shards_.size(); }

  /// inputs[t] = token t, targets[t] = token t + 1 of sample `index` < samples(); both (T) ints of host memory,
  /// overwritten. User error naming file and position for an id >= vocab; environment error when the file cannot be
  /// read. Costs one pread of 2 (T + 1) bytes.
  void read(uint64_t index, int* inputs, int* targets) {
    assert(index < samples_);
    const auto after = std::upper_bound(shards_.begin(), shards_.end(), index,
                                        [](uint64_t i, const Shard& shard) { return i < shard.first_sample; });
    const size_t shard = static_cast<size_t>(after - shards_.begin()) - 1;
    const uint64_t T = static_cast<uint64_t>(T_);
    buffer_.resize(T + 1);
    read_tokens(open_shard(shard), (index - shards_[shard].first_sample) * T);
    for (uint64_t t = 0; t < T; t++) {
      inputs[t] = buffer_[t];
      targets[t] = buffer_[t + 1];
    }
  }

 private:
  struct Shard {
    std::string path;
    uint64_t tokens = 0;
    uint64_t first_sample = 0;
  };
  struct OpenFile {
    size_t shard = SIZE_MAX;
    File file;
  };
  static constexpr uint64_t kCheckedAtOpen = 4096;
  static constexpr size_t kOpenFiles = 64;  // a process may have 1024 open by default; FineWeb 100B has more shards

  TokenData() = default;

  const File& open_shard(size_t shard) {
    OpenFile& slot = open_files_[shard % kOpenFiles];
    if (slot.shard != shard) {
      slot.file = File::open_to_read(shards_[shard].path, "token file");
      slot.shard = shard;
    }
    return slot.file;
  }

  /// Fills buffer_ (all of it) with tokens [first, first + size) and checks their ids.
  void read_tokens(const File& file, uint64_t first) {
    file.pread_all(buffer_.data(), buffer_.size() * sizeof(uint16_t), kTokenFileHeaderBytes + first * sizeof(uint16_t));
    for (size_t i = 0; i < buffer_.size(); i++) {
      if (buffer_[i] >= vocab_) {
        user_error("%s: token %llu is %u, but ids must be below the vocabulary of %d; use --vocab %d or other data",
                   file.path().c_str(), token_shards_detail::printable(first + i), buffer_[i], vocab_,
                   buffer_[i] < 256     ? 256
                   : buffer_[i] < 50257 ? 50257
                                        : buffer_[i] + 1);
      }
    }
  }

  int T_ = 0;
  int vocab_ = 0;
  DataSplit split_ = DataSplit::kTrain;
  uint64_t samples_ = 0;
  uint64_t tokens_ = 0;
  std::vector<Shard> shards_;
  std::vector<uint16_t> buffer_;
  std::array<OpenFile, kOpenFiles> open_files_;
};
