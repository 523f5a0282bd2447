// host_test.h -- helpers for tests of host code: expected errors, temporary folders, small files.
#pragma once

#include <cstdlib>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "llmc/check.h"
#include "llmc/file.h"

/// Runs `action`, which must throw an Error of `kind`; returns its text.
inline std::string error_text(ErrorKind kind, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}
inline std::string user_error_text(const std::function<void()>& action) { return error_text(ErrorKind::kUser, action); }
inline std::string environment_error_text(const std::function<void()>& action) {
  return error_text(ErrorKind::kEnvironment, action);
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// A new folder that is removed, with its content, at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const char* base = getenv("TMPDIR");
    std::string name = std::string(base && *base ? base : "/tmp") + "/llmc_test_XXXXXX";
    if (!mkdtemp(&name[0])) file_error(name, "creating the folder");
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { remove_all(path_); }

  const std::string& path() const { return path_; }
  /// Path of a name in the folder.
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  /// Writes a file into the folder; returns its path.
  std::string write(const std::string& name, const std::string& content) const {
    File file = File::create(*this / name);
    file.write_all(content);
    file.close();
    return file.path();
  }

 private:
  static void remove_all(const std::string& path) {
    struct stat status;
    if (lstat(path.c_str(), &status) != 0) return;
    if (S_ISDIR(status.st_mode)) {
      for (const std::string& name : list_folder(path)) remove_all(path + "/" + name);
      rmdir(path.c_str());
    } else {
      unlink(path.c_str());
    }
  }
  std::string path_;
};
