// planner.h -- which schedule, how many stages a rank, which blocks on which stage, what to recompute: found by trying.
//
// Candidates are schedule x chunks (x memory cap of the greedy schedules); each gets the best cuts and the cheapest
// recomputation that layout_search.h finds for it, and is then simulated with the real number of micro-batches. The
// fastest that fits the memory wins. What the user has given is kept. Costs are all that counts, so the answer is the
// same on every rank that has the same costs. Pure host code.
#pragma once

#include "llmc/layout_search.h"

/// Candidates by time, those that fit first; the first one is the choice, if it fits.
struct PlanResult {
  std::vector<PlanCandidate> candidates;

  bool found() const { return !candidates.empty() && candidates.front().fits; }
  const PlanCandidate& best() const { return candidates.front(); }
  /// The candidate that needs least memory; for messages.
  const PlanCandidate& leanest() const {
    return *std::min_element(candidates.begin(), candidates.end(), [](const PlanCandidate& a, const PlanCandidate& b) {
      return a.most_bytes() < b.most_bytes();
    });
  }
};

/// Chunks that `auto` tries: more stages have more messages, and smaller matrices are no faster. The greedy schedules
/// and looped-bfs, which has the bubble of interleaved and more memory, have not been ahead with more than two.
constexpr int kMostChunks = 4;
constexpr int kMostChunksOfOthers = 2;
/// Candidates whose times differ by less are equal: then the one with less memory is taken. No cost is known better.
constexpr double kEqualTime = 1e-3;

namespace planner_detail {

inline PipelineLayout bare_layout(const PlanRequest& request, const std::string& schedule, int chunks, int cap = 0) {
  PipelineLayout layout;
  layout.schedule = schedule;
  layout.ranks = request.ranks;
  layout.chunks = chunks;
  layout.in_flight = cap;
  layout.cost = request.cost;
  layout.cuts.assign(static_cast<size_t>(request.ranks) * chunks + 1, 0);
  return layout;
}

/// Chunks that the request fixes, by --chunks or by the number of counts; 0: none.
inline int fixed_chunks(const PlanRequest& request) {
  const std::vector<int> counts = partition_counts(request.partition);
  if (request.chunks != 0 || counts.empty()) return request.chunks;
  return std::max(1, static_cast<int>(counts.size()) / request.ranks);
}

/// Every schedule x chunks (x cap) that `auto` means. One rank needs no schedule: its stages run one after the other.
inline std::vector<PipelineLayout> free_layouts(const PlanRequest& request) {
  const int blocks = static_cast<int>(request.cost.blocks.size()), fixed = fixed_chunks(request);
  std::vector<PipelineLayout> layouts;
  if (request.ranks == 1 && fixed <= 1) return {bare_layout(request, "1f1b", 1)};
  for (const ScheduleKind& kind : schedule_kinds()) {
    const bool is_greedy = kind.name.compare(0, 6, "greedy") == 0;
    // with one chunk these are 1f1b, gpipe and greedy
    const bool is_for_chunks = kind.name == "interleaved" || kind.name == "looped-bfs" || kind.name == "greedy-v";
    const int first = fixed > 0 ? fixed : std::max(kind.min_chunks, is_for_chunks ? 2 : 1);
    const int most = kind.name == "interleaved" ? kMostChunks : kMostChunksOfOthers;
    const int last = fixed > 0 ? fixed : std::min(kind.max_chunks, most);
    for (int chunks = first; chunks <= last; chunks++) {
      const bool legal = chunks >= kind.min_chunks && chunks <= kind.max_chunks;
      if (!legal || request.ranks * chunks > blocks + 2) continue;
      layouts.push_back(bare_layout(request, kind.name, chunks));
      if (!is_greedy || request.ranks == 1 || request.micro_batches <= request.ranks) continue;
      layouts.push_back(bare_layout(request, kind.name, chunks, 2 * request.ranks - 1));
    }
  }
  return layouts;
}

/// The one schedule that is asked for.
inline PipelineLayout given_layout(const PlanRequest& request) {
  const int blocks = static_cast<int>(request.cost.blocks.size());
  if (!is_schedule_file(request.schedule)) {
    const ScheduleKind& kind = find_schedule_kind(request.schedule);
    const int chunks = legal_chunks(kind, fixed_chunks(request));
    check_stage_count(request.ranks, chunks, blocks, kind.min_chunks);
    return bare_layout(request, request.schedule, chunks);
  }
  const Schedule schedule = read_layout_schedule(request.schedule, request.ranks, request.micro_batches);
  if (schedule.stages > blocks + 2) {
    user_error("--schedule %s has %d stages, too many for %d blocks: at most %d (embedding, blocks, head)",
               request.schedule.c_str(), schedule.stages, blocks, blocks + 2);
  }
  PipelineLayout layout = bare_layout(request, request.schedule, std::max(1, schedule.stages / request.ranks));
  layout.cuts.assign(static_cast<size_t>(schedule.stages) + 1, 0);
  return layout;
}

}  // namespace planner_detail

/// All candidates of the request. User errors: unknown schedule, chunks that it cannot have, more stages than blocks +
/// 2, counts that do not fit, a schedule file that does not. Whether one fits the memory: PlanResult::found(). Less
/// than a second for 8 ranks, 48 blocks and 64 micro-batches.
inline PlanResult search_plans(const PlanRequest& request) {
  using namespace planner_detail;
  const int blocks = static_cast<int>(request.cost.blocks.size());
  std::vector<PipelineLayout> layouts;
  if (request.schedule != "auto") {
    layouts.push_back(given_layout(request));
  } else {
    check_stage_count(request.ranks, std::max(1, fixed_chunks(request)), blocks);
    layouts = free_layouts(request);
  }
  PlanResult result;
  for (PipelineLayout& layout : layouts) {
    if (request.partition != "auto") layout.cuts = make_partition(request.partition, layout.stages(), layout.cost);
    result.candidates.push_back(LayoutSearch(request, layout).run());
  }
  std::vector<PlanCandidate>& all = result.candidates;
  std::stable_sort(all.begin(), all.end(), [](const PlanCandidate& a, const PlanCandidate& b) {
    return a.fits != b.fits ? a.fits : a.makespan < b.makespan;
  });
  size_t chosen = 0;
  for (size_t k = 1; k < all.size() && all[k].fits && all[k].makespan <= all[0].makespan * (1 + kEqualTime); k++) {
    if (all[k].most_bytes() < all[chosen].most_bytes()) chosen = k;
  }
  std::rotate(all.begin(), all.begin() + chosen, all.begin() + chosen + 1);
  return result;
}
