// checkpoint_folder.h -- the names in a folder of checkpoints: listing, starting, publishing, choosing what goes.
//
// Under its own name a checkpoint is always whole: it gets the name last, by a rename, and loses it before it loses
// files. So a process that is killed at any moment leaves whole checkpoints and `.tmp` folders, which the next save
// removes. A folder cannot be renamed over a full one, so replacing takes two renames: step-N to step-N.old, step-N.tmp
// to step-N; between them step-N.old is listed in its place. All of it is done by one process (rank 0).
#pragma once

#include <climits>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "llmc/checkpoint_files.h"

/// A checkpoint folder by its name.
struct CheckpointName {
  int step = 0;
  bool replaced = false;  // .old
  std::string name;
};

inline std::string checkpoint_name(int step) { return format_text("step-%08d", step); }

/// Complete checkpoints of a folder as far as names tell, newest first; none if there is no such folder.
/// User error when it cannot be read.
inline std::vector<CheckpointName> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointName> found;
  if (!path_exists(folder)) return found;
  for (const std::string& name : list_folder(folder)) {
    if (name.compare(0, 5, "step-") != 0) continue;
    const long long step = strtoll(name.c_str() + 5, nullptr, 10);
    if (step < 0 || step > INT_MAX) continue;
    const std::string expected = checkpoint_name(static_cast<int>(step));
    if (name == expected || name == expected + ".old")
      found.push_back({static_cast<int>(step), name != expected, name});
  }
  std::sort(found.begin(), found.end(), [](const CheckpointName& a, const CheckpointName& b) {
    return a.step != b.step ? a.step > b.step : a.replaced < b.replaced;
  });
  return found;
}

/// What prune() keeps.
struct KeepRule {
  int64_t keep = 0;               // this many, the newest; 0: all
  int64_t keep_major = 0;         // multiples of this step; 0: none
  int verified_step = -1;         // known to be whole: never deleted
  std::set<std::string> damaged;  // names; do not count as kept, and those newer than the verified one stay for a human
};

/// Those of `newest_first` (as list_checkpoints gives them) that no rule keeps. Pure.
inline std::vector<CheckpointName> checkpoints_to_delete(const std::vector<CheckpointName>& newest_first,
                                                         const KeepRule& rule) {
  std::vector<CheckpointName> doomed;
  int64_t kept = 0;
  for (const CheckpointName& checkpoint : newest_first) {
    if (rule.keep <= 0) break;
    const bool damaged = rule.damaged.count(checkpoint.name) > 0;
    const bool verified = checkpoint.step == rule.verified_step && !checkpoint.replaced;
    if (verified || (!damaged && kept < rule.keep)) {
      ++kept;
      continue;
    }
    const bool major = rule.keep_major > 0 && checkpoint.step % rule.keep_major == 0;
    if (major || (damaged && checkpoint.step > rule.verified_step)) continue;
    doomed.push_back(checkpoint);
  }
  return doomed;
}

/// Deletes a folder with all that is in it; none is fine.
inline void remove_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) environment_error("%s: deleting it failed: %s", path.c_str(), error.message().c_str());
}

/// Deletes a checkpoint; killed half-way it leaves a `.tmp` folder.
inline void remove_checkpoint(const std::string& path) {
  const std::string doomed = path + ".tmp";
  remove_folder(doomed);
  rename_durably(path, doomed);
  remove_folder(doomed);
}

/// Deletes what a failed save left, as far as that works.
inline void remove_quietly(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

/// Deletes unfinished folders of runs that were killed, and makes `temporary` with empty files of full length (holes).
inline void start_checkpoint(const std::string& folder, const std::string& temporary, uint64_t elements) {
  make_folders(folder);
  for (const std::string& name : list_folder(folder)) {
    const bool unfinished =
        name.compare(0, 5, "step-") == 0 && name.size() > 4 && name.substr(name.size() - 4) == ".tmp";
    if (unfinished) remove_folder(folder + "/" + name);
  }
  if (mkdir(temporary.c_str(), 0777) != 0) file_error(temporary, "creating the folder");
  for (int i = 0; i < kCheckpointFiles; ++i) {
    File file = File::create(temporary + "/" + checkpoint_file_name(static_cast<CheckpointFile>(i)));
    file.truncate(sizeof(float) * elements);
    file.close();
  }
}

/// Writes meta.txt into `temporary`, the other files of which are complete and fsynced, and gives the folder its name.
inline void publish_checkpoint(const CheckpointRecord& record, const std::string& folder, const std::string& temporary,
                               const std::string& final_path) {
  File meta = File::create(temporary + "/meta.txt");
  meta.write_all(checkpoint_text(record));
  meta.sync();
  meta.close();
  sync_folder(temporary);
  const std::string old = final_path + ".old";
  if (path_exists(final_path)) {
    if (path_exists(old)) remove_checkpoint(old);
    rename_durably(final_path, old);
  }
  rename_durably(temporary, final_path);
  sync_folder(parent_folder(folder));
  if (path_exists(old)) remove_checkpoint(old);
}
