// control.h -- what the host sides of a group of processes tell each other: agreement, small tables, start and end.
//
// Blocking, host memory, same calls in the same order on all ranks of the group. Everything is built on one all_gather
// (to rank 0 and back): 2 (N-1) messages, some 20 us for four ranks on one machine; never for bulk data, which is
// comm.h's. A sum adds in rank order, so it gives the same bits on every rank and run, keeps a NaN wherever it comes
// from (MPI_MAX and MPI_SUM need not), and is exact where one rank alone contributes to an element. Flags are integers.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "llmc/process.h"

/// A group of processes. The first one (all processes) starts MPI; split() makes others. Used by one thread.
class Control {
 public:
  /// Starts MPI, once per process, before any other thread. Throws a user error when started as one of several ranks by
  /// a launcher that this build cannot talk to.
  Control(int* argc, char*** argv) : process_(std::make_shared<Process>(argc, argv)) {
    for (int r = 0; r < process_->size(); ++r) members_.push_back(r);
    rank_ = process_->rank();
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  /// Rank in the job of a rank of this group.
  int job_rank(int rank) const { return members_[static_cast<size_t>(rank)]; }
  const std::shared_ptr<Process>& process() const { return process_; }

  /// Seconds without progress after which any wait ends the job with a line that names it (--comm-timeout; 0 = never).
  void set_timeout(double seconds) { process_->set_timeout(seconds); }

  /// Ends all processes of the job with `exit_code`. Does not return, does not wait for anybody.
  [[noreturn]] void abort(int exit_code) { process_->abort(exit_code); }

  /// Returns when all ranks have called it.
  void barrier() {
    const char mine = 0;
    std::vector<char> all(members_.size());
    gather_and_spread(&mine, all.data(), 1, "barrier");
  }

  /// all(rank r) = mine of rank r. mine (bytes), all (size * bytes); they do not overlap.
  void all_gather(const void* mine, void* all, size_t bytes) { gather_and_spread(mine, all, bytes, "all_gather"); }

  /// Overwrites data (bytes) on all ranks with that of `root`.
  void broadcast(void* data, size_t bytes, int root) {
    assert(root >= 0 && root < size());
    std::vector<Message> messages;
    if (rank_ == root) {
      for (int r = 0; r < size(); ++r) {
        if (r != root) messages.push_back({true, job_rank(r), data, bytes});
      }
    } else {
      messages.push_back({false, job_rank(root), data, bytes});
    }
    process_->transfer(messages, kTag, "broadcast");
  }

  /// values[i] = sum over ranks, in rank order. In place.
  void sum(double* values, size_t count) { sum_in_rank_order(values, count, "sum"); }
  void sum(uint64_t* values, size_t count) { sum_in_rank_order(values, count, "sum"); }

  int max(int value) {
    const std::vector<int> all = gathered(value, "max");
    return *std::max_element(all.begin(), all.end());
  }
  int min(int value) {
    const std::vector<int> all = gathered(value, "min");
    return *std::min_element(all.begin(), all.end());
  }

  /// One message of `bytes` bytes from rank `from` to rank `to`, both of which call it (others may, and do nothing).
  void move(void* data, size_t bytes, int from, int to) {
    if (from == to) return;
    if (rank_ == from) process_->transfer({{true, job_rank(to), data, bytes}}, kTag, "message");
    if (rank_ == to) process_->transfer({{false, job_rank(from), data, bytes}}, kTag, "message");
  }

  /// What each rank has, of any length, in rank order on rank 0; nothing on the others.
  std::vector<std::string> gather_texts(std::string mine) {
    const std::vector<size_t> sizes = gathered(mine.size(), "gather");
    std::vector<std::string> all;
    for (int r = 0; r < size(); ++r) {
      if (rank_ != 0 && rank_ != r) continue;
      std::string text = r == rank_ ? std::move(mine) : std::string(sizes[static_cast<size_t>(r)], '\0');
      move(&text[0], text.size(), r, 0);
      if (rank_ == 0) all.push_back(std::move(text));
    }
    return all;
  }

  /// One value of each rank, in rank order.
  template <class Value>
  std::vector<Value> gathered(const Value& value, const char* operation = "all_gather") {
    std::vector<Value> all(members_.size());
    gather_and_spread(&value, all.data(), sizeof(Value), operation);
    return all;
  }

  /// This rank's place among the ranks of the group on this host, and their number: picks the device. Collective.
  int local_rank() { return count_on_this_host(rank_); }
  int local_size() { return count_on_this_host(size()); }

  /// The group of all ranks with the same `color`, ordered by (key, rank). Collective over this group.
  Control split(int color, int key) {
    struct Entry {
      int color, key, rank;
    };
    std::vector<Entry> entries = gathered(Entry{color, key, rank_}, "split");
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
    Control group(process_);
    for (const Entry& entry : entries) {
      if (entry.color != color) continue;
      if (entry.rank == rank_) group.rank_ = group.size();
      group.members_.push_back(job_rank(entry.rank));
    }
    return group;
  }

  /// First of `count` message tags that no pair of ranks of this group uses yet. Collective, same count on all ranks.
  int reserve_tags(int count) {
    const int first = max(process_->next_tag());
    process_->set_next_tag(first + count);
    return first;
  }

 private:
  explicit Control(std::shared_ptr<Process> process) : process_(std::move(process)) {}
  // One tag for all groups: the calls are blocking and in the same order on both ranks of any pair, so nothing can mix.
  static constexpr int kTag = 0;

  // Ranks 0 .. below - 1 that run on this host.
  int count_on_this_host(int below) {
    struct Host {
      char name[256];
    } host = {};
    gethostname(host.name, sizeof(host.name) - 1);
    const std::vector<Host> all = gathered(host);
    int count = 0;
    for (int r = 0; r < below; ++r) count += strcmp(all[static_cast<size_t>(r)].name, host.name) == 0;
    return count;
  }

  void gather_and_spread(const void* mine, void* all, size_t bytes, const char* operation) {
    char* table = static_cast<char*>(all);
    const size_t total = bytes * members_.size();
    std::vector<Message> gather, spread;
    if (rank_ == 0) {
      for (int r = 1; r < size(); ++r) {
        gather.push_back({false, job_rank(r), table + static_cast<size_t>(r) * bytes, bytes});
        spread.push_back({true, job_rank(r), all, total});
      }
    } else {
      gather.push_back({true, job_rank(0), const_cast<void*>(mine), bytes});
      spread.push_back({false, job_rank(0), all, total});
    }
    if (bytes > 0) memcpy(table + static_cast<size_t>(rank_) * bytes, mine, bytes);
    process_->transfer(gather, kTag, operation);
    process_->transfer(spread, kTag, operation);
  }

  template <class Value>
  void sum_in_rank_order(Value* values, size_t count, const char* operation) {
    std::vector<Value> all(count * members_.size());
    gather_and_spread(values, all.data(), count * sizeof(Value), operation);
    std::copy_n(all.begin(), count, values);
    for (size_t r = 1; r < members_.size(); ++r) {
      for (size_t i = 0; i < count; ++i) values[i] += all[r * count + i];
    }
  }

  std::shared_ptr<Process> process_;
  std::vector<int> members_;  // ranks in the job
  int rank_ = 0;              // in this group
};
