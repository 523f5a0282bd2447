// file.h -- files with 64-bit offsets where every failure is said in words.
//
// A full disk, a short read and an error that only shows when the file is closed (NFS, quotas) are environment errors
// that name the file and what the system said. A file that is missing or unreadable is a user error (the user named
// it). Crash safety: data is written to a temporary name, fsynced, renamed over the final name, and the folder is
// fsynced, so that after a crash the name holds either the old content or the whole new one (rename(2), fsync(2)).
// Plain system calls, no stdio buffer: what write_all() has returned from survives a kill -9 of the process.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/check.h"

/// "PATH: ACTION failed: REASON" as an environment error (exit code 1); errno must still be that of the failed call.
[[noreturn]] inline void file_error(const std::string& path, const char* action) {
  const int error = errno;
  const char* remedy = error == ENOSPC || error == EDQUOT ? "; free some space and start again" : "";
  environment_error("%s: %s failed: %s%s", path.c_str(), action, strerror(error), remedy);
}

/// One open file: owns the descriptor, knows its path for messages. Movable. pread_all and pwrite_all do not share a
/// position and may be called from several threads.
class File {
 public:
  File() = default;
  File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(other.descriptor_) {
    other.descriptor_ = -1;
  }
  File& operator=(File&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);  // errors matter to writers only: they call close()
  }

  /// An existing regular file, for reading. `what` names the thing in the message ("token file", "checkpoint").
  /// User error when it cannot be opened or is a folder.
  static File open_to_read(const std::string& path, const char* what) {
    File file(path, ::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (file.descriptor_ < 0) user_error("cannot open %s %s: %s", what, path.c_str(), strerror(errno));
    struct stat status;
    if (fstat(file.descriptor_, &status) != 0) file_error(path, "reading its size");
    if (S_ISDIR(status.st_mode)) user_error("%s is a folder, expected a %s", path.c_str(), what);
    return file;
  }
  /// A new file; an old one of that name is emptied.
  static File create(const std::string& path) { return open_to_write(path, O_CREAT | O_TRUNC, "creating it"); }
  /// An existing file (created when missing), content kept, for pwrite_all by several processes.
  static File open_to_update(const std::string& path) { return open_to_write(path, O_CREAT, "opening it"); }
  /// Each write goes to the end of the file, which is created when missing.
  static File open_to_append(const std::string& path) { return open_to_write(path, O_CREAT | O_APPEND, "opening it"); }

  bool is_open() const { return descriptor_ >= 0; }
  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }

  uint64_t size() const {
    struct stat status;
    if (fstat(descriptor_, &status) != 0) file_error(path_, "reading its size");
    return static_cast<uint64_t>(status.st_size);
  }

  /// Reads exactly `bytes` at `offset`; an environment error when the file ends before.
  void pread_all(void* data, size_t bytes, uint64_t offset) const {
    size_t done = 0;
    while (done < bytes) {
      const ssize_t n = ::pread(descriptor_, static_cast<char*>(data) + done, bytes - done, as_offset(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) file_error(path_, "reading");
      if (n == 0) {
        environment_error(
            "%s: reading failed: the file ends at byte %llu, expected %llu more (was it cut while in use?)",
            path_.c_str(), static_cast<unsigned long long>(offset + done),
            static_cast<unsigned long long>(bytes - done));
      }
      done += static_cast<size_t>(n);
    }
  }

  /// Writes all bytes at `offset`; repeats short writes.
  void pwrite_all(const void* data, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
      const char* from = static_cast<const char*>(data) + done;
      const ssize_t n = ::pwrite(descriptor_, from, bytes - done, as_offset(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) file_error(path_, "writing");
      done += static_cast<size_t>(n);
    }
  }

  /// Writes all bytes at the file's position (its end after open_to_append).
  void write_all(const void* data, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
      const ssize_t n = ::write(descriptor_, static_cast<const char*>(data) + done, bytes - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) file_error(path_, "writing");
      done += static_cast<size_t>(n);
    }
  }
  void write_all(const std::string& text) { write_all(text.data(), text.size()); }

  void truncate(uint64_t bytes) {
    if (ftruncate(descriptor_, as_offset(bytes)) != 0) file_error(path_, "setting its size");
  }
  /// Content and size reach the disk (fsync).
  void sync() {
    if (fsync(descriptor_) != 0) file_error(path_, "fsync");
  }
  /// Closes and reports what the system only tells now.
  void close() {
    const int descriptor = descriptor_;
    descriptor_ = -1;
    if (descriptor >= 0 && ::close(descriptor) != 0) file_error(path_, "closing it");
  }

 private:
  static_assert(sizeof(off_t) == 8, "files above 2 GiB need 64-bit offsets");

  File(const std::string& path, int descriptor) : path_(path), descriptor_(descriptor) {}
  static File open_to_write(const std::string& path, int flags, const char* action) {
    File file(path, ::open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0666));
    if (file.descriptor_ < 0) file_error(path, action);
    return file;
  }
  static off_t as_offset(uint64_t offset) { return static_cast<off_t>(offset); }

  std::string path_;
  int descriptor_ = -1;
};

inline bool path_exists(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0;
}
inline bool is_folder(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

/// The folder part of a path: "a/b/c" -> "a/b", "c" -> ".".
inline std::string parent_folder(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// Creates a folder and the missing folders above it; an existing one is fine.
inline void make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    // a read-only or foreign parent that exists needs no creation
    if (mkdir(folder.c_str(), 0777) != 0) {
      const int reason = errno;
      if (!is_folder(folder)) {
        errno = reason;
        file_error(folder, "creating the folder");
      }
    }
    if (end == std::string::npos) return;
  }
}

/// Names in a folder except "." and "..", sorted by byte. User error when it cannot be read.
inline std::vector<std::string> list_folder(const std::string& path) {
  DIR* folder = opendir(path.c_str());
  if (!folder) user_error("cannot read the folder %s: %s", path.c_str(), strerror(errno));
  std::vector<std::string> names;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

/// Makes created, renamed and removed names of a folder durable.
inline void sync_folder(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) file_error(path, "opening the folder");
  const int result = fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  errno = error;
  if (result != 0 && error != EINVAL) file_error(path, "fsync of the folder");  // EINVAL: not supported there
}

/// Renames a file or folder and makes that durable; `to` is replaced in one step when it is a file.
inline void rename_durably(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) file_error(to, ("renaming " + from + " to it").c_str());
  sync_folder(parent_folder(to));
}

/// User error, naming `option`, if a file cannot be made at PATH because of what is there, or because its folder is
/// not.
inline void check_output_path(const char* option, const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    user_error("%s %s is a folder; give the name of a file", option, path.c_str());
  }
  const std::string folder = parent_folder(path);
  if (stat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    user_error("%s %s: there is no folder %s; make it first", option, path.c_str(), folder.c_str());
  }
}

/// Replaces PATH by `content`: temporary name, fsync, rename, fsync of the folder. On failure PATH is as before and the
/// temporary file is removed. One writer per PATH at a time. A device or a pipe is written to, not replaced.
inline void write_file_atomically(const std::string& path, const std::string& content) {
  struct stat status;
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode)) {
    File::open_to_append(path).write_all(content);
    return;
  }
  const std::string temporary = path + ".tmp";
  try {
    File file = File::create(temporary);
    file.write_all(content);
    file.sync();
    file.close();
    rename_durably(temporary, path);
  } catch (const Error&) {
    unlink(temporary.c_str());
    throw;
  }
}

/// The whole content of a file. `what` as in File::open_to_read.
inline std::string read_whole_file(const std::string& path, const char* what) {
  File file = File::open_to_read(path, what);
  std::string content(file.size(), '\0');
  file.pread_all(&content[0], content.size(), 0);
  return content;
}
