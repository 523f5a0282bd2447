// golden_file.h -- reads the reference values that dev/reference/*.py writes to test/golden/.
//
// A golden file is a list of named arrays (float32, int32 or float64); the format is documented in
// dev/reference/golden_file.py, the entries in dev/reference/README.md. Entries that belong to a parameter end in its
// name in the parameter table:
//   GoldenFile golden("test/golden/gpt2_tiny_fp32.golden");
//   golden.floats("single.gradient." + table.tensors[i].name)     // row-major, as many values as the tensor has
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/file.h"

class GoldenFile {
 public:
  /// Reads the whole file. User error if it is missing or not a golden file.
  explicit GoldenFile(const std::string& path) : path_(path), content_(read_whole_file(path, "golden file")) {
    if (content_.compare(0, 8, "LLMCGOLD") != 0) damaged("wrong magic");
    at_ = 8;
    if (take<uint32_t>() != 1) damaged("wrong version");
    const uint32_t entries = take<uint32_t>();
    for (uint32_t i = 0; i < entries; ++i) read_entry();
    if (at_ != content_.size()) damaged("bytes left over");
  }

  bool has(const std::string& name) const { return entries_.count(name) != 0; }
  const std::vector<int64_t>& shape(const std::string& name) const { return find(name).shape; }
  /// Values of an entry of exactly that type, row-major. User error if there is no such entry.
  std::vector<float> floats(const std::string& name) const { return values<float>(name, 0); }
  std::vector<int> ints(const std::string& name) const { return values<int>(name, 1); }
  std::vector<double> doubles(const std::string& name) const { return values<double>(name, 2); }
  /// A float64 entry with one value.
  double number(const std::string& name) const { return single(doubles(name), name); }
  /// An int32 entry with one value.
  int integer(const std::string& name) const { return single(ints(name), name); }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : entries_) result.push_back(entry.first);
    return result;
  }

 private:
  struct Entry {
    uint32_t type = 0;
    std::vector<int64_t> shape;
    size_t begin = 0, elements = 1;
  };

  [[noreturn]] void damaged(const char* how) const {
    user_error("golden file %s is damaged (%s); write it again with dev/reference/gpt2_golden.py", path_.c_str(), how);
  }
  const char* bytes(size_t count) {
    if (count > content_.size() - at_) damaged("truncated");
    at_ += count;
    return content_.data() + at_ - count;
  }
  template <class T>
  T take() {
    T value;
    memcpy(&value, bytes(sizeof(T)), sizeof(T));
    return value;
  }
  void read_entry() {
    const uint32_t length = take<uint32_t>();
    const std::string name(bytes(length), length);
    Entry entry;
    entry.type = take<uint32_t>();
    if (entry.type > 2) damaged("unknown type");
    const uint32_t rank = take<uint32_t>();
    for (uint32_t i = 0; i < rank; ++i) {
      entry.shape.push_back(take<int64_t>());
      if (entry.shape.back() < 0 || entry.shape.back() > (int64_t{1} << 31)) damaged("absurd shape");
      entry.elements *= static_cast<size_t>(entry.shape.back());
    }
    entry.begin = at_;
    bytes(entry.elements * (entry.type == 2 ? sizeof(double) : sizeof(float)));
    entries_[name] = entry;
  }
  const Entry& find(const std::string& name) const {
    const auto entry = entries_.find(name);
    if (entry == entries_.end()) user_error("golden file %s has no entry %s", path_.c_str(), name.c_str());
    return entry->second;
  }
  template <class T>
  std::vector<T> values(const std::string& name, uint32_t type) const {
    const Entry& entry = find(name);
    if (entry.type != type)
      user_error("golden file %s: entry %s has type %u, not %u", path_.c_str(), name.c_str(), entry.type, type);
    std::vector<T> result(entry.elements);
    memcpy(result.data(), content_.data() + entry.begin, entry.elements * sizeof(T));
    return result;
  }
  template <class T>
  T single(const std::vector<T>& all, const std::string& name) const {
    if (all.size() != 1)
      user_error("golden file %s: entry %s has %zu values, not one", path_.c_str(), name.c_str(), all.size());
    return all[0];
  }

  std::string path_, content_;
  size_t at_ = 0;
  std::map<std::string, Entry> entries_;
};

/// |values - exact| / |exact| in the Euclidean norm, in double; |values| where exact is zero. NaN in `values` gives
/// NaN.
template <class A, class B>
inline double relative_error(const std::vector<A>& values, const std::vector<B>& exact) {
  assert(values.size() == exact.size() && "relative_error: different sizes");
  double difference = 0.0, scale = 0.0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double e = static_cast<double>(exact[i]), d = static_cast<double>(values[i]) - e;
    difference += d * d;
    scale += e * e;
  }
  return scale > 0.0 ? std::sqrt(difference / scale) : std::sqrt(difference);
}
