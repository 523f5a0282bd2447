// plan_report.h -- what the planner found, as text: candidates, the choice with its timeline, memory of each rank.
#pragma once

#include <string>
#include <vector>

#include "llmc/closed_form.h"
#include "llmc/gpt2_plan.h"
#include "llmc/timeline.h"

/// "0" where all stages have one level, else "0,0,2,3".
inline std::string recompute_text(const std::vector<int>& levels) {
  const bool equal = std::all_of(levels.begin(), levels.end(), [&](int level) { return level == levels.front(); });
  std::string text;
  for (int level : levels) {
    if (!equal || text.empty()) text += (text.empty() ? "" : ",") + std::to_string(level);
  }
  return text;
}

/// "zb-v", "interleaved x 3 chunks", "greedy, 7 in flight".
inline std::string schedule_text(const PipelineLayout& layout) {
  std::string text = layout.schedule;
  const bool natural = is_schedule_file(text) || find_schedule_kind(text).natural_chunks == layout.chunks;
  if (!natural) text += format_text(" x %d", layout.chunks);
  if (layout.in_flight > 0) text += format_text(", %d in flight", layout.in_flight);
  return text;
}

/// "1,1,1,1,1,1,1,0" in at most `width` characters: "1x7,0", cut off where that is still too long.
inline std::string short_list(const std::string& list, size_t width) {
  if (list.size() <= width) return list;
  const std::vector<std::string> items = option_detail::split(list, ',');
  std::string text;
  for (size_t first = 0, next = 0; first < items.size(); first = next) {
    while (next < items.size() && items[next] == items[first]) next++;
    text += (text.empty() ? "" : ",") + items[first];
    if (next - first > 1) text += format_text("x%zu", next - first);
  }
  return text.size() <= width ? text : text.substr(0, width - 3) + "...";
}

/// One line a candidate, best first. `unit`: of the step time.
inline std::string candidates_table(const PlanResult& result, bool has_limit) {
  const std::string unit = result.best().layout.cost.unit;
  std::string text =
      format_text("  %-24s %-22s %-14s %11s %7s %6s %9s%s\n", "schedule", "blocks per stage", "recompute",
                  ("step " + unit).c_str(), "bubble", "eff.", "GB/rank", has_limit ? "  fits" : "");
  for (const PlanCandidate& candidate : result.candidates) {
    const char mark = &candidate == &result.best() && candidate.fits ? '*' : ' ';
    text += format_text(
        "%c %-24s %-22s %-14s %11.6g %6.1f%% %5.1f%% %9.4g%s\n", mark, schedule_text(candidate.layout).c_str(),
        short_list(partition_text(candidate.layout.cuts), 22).c_str(),
        short_list(recompute_text(candidate.layout.recompute), 14).c_str(), candidate.makespan,
        100 * candidate.bubble_fraction, 100 * candidate.efficiency, static_cast<double>(candidate.most_bytes()) * 1e-9,
        has_limit ? candidate.fits ? "  yes" : "  no" : "");
  }
  return text;
}

/// "embedding+0..3", "4..7", "8+head", "-" for a stage without anything.
inline std::string stage_text(const PipelineLayout& layout, int stage) {
  const int first = layout.cuts[stage], end = layout.cuts[stage + 1];
  std::vector<std::string> parts;
  if (stage == 0) parts.push_back("embedding");
  if (first < end) parts.push_back(first + 1 == end ? std::to_string(first) : format_text("%d..%d", first, end - 1));
  if (stage + 1 == layout.stages()) parts.push_back("head");
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : "+") + part;
  return text.empty() ? "-" : text;
}

/// One line a rank: stages, slots, bytes by purpose.
inline std::string memory_table(const PipelineLayout& layout, const Plan& plan, const std::vector<RankMemory>& memory) {
  std::string text = format_text("  %4s %-24s %-16s %9s %9s %9s %11s %8s %9s %8s\n", "rank", "blocks", "slots",
                                 "params", "gradients", "optimizer", "activations", "scratch", "exchange", "total");
  for (int rank = 0; rank < layout.ranks; rank++) {
    std::string blocks, slots;
    for (int s = 0; s < layout.stages(); s++) {
      if (plan.schedule.owner[s] != rank) continue;
      blocks += (blocks.empty() ? "" : " ") + stage_text(layout, s);
      slots += (slots.empty() ? "" : ",") + std::to_string(plan.slots[s]);
    }
    const RankMemory& m = memory[rank];
    const auto giga = [](size_t bytes) { return static_cast<double>(bytes) * 1e-9; };
    text += format_text("  %4d %-24s %-16s %9.3f %9.3f %9.3f %11.3f %8.3f %9.3f %8.3f\n", rank, blocks.c_str(),
                        slots.c_str(), giga(m.parameters), giga(m.gradients), giga(m.optimizer), giga(m.activations),
                        giga(m.scratch), giga(m.exchange + m.tokens), giga(m.total()));
  }
  return text;
}

/// The bubble beside what the textbook formula gives for equal stages of the same total work and free transfers.
inline std::string bubble_text(const PipelineLayout& layout, const Plan& plan) {
  const std::string unit = layout.cost.unit;
  std::string text = format_text("bubble      simulated %.4g %s (%.1f %% of the step)", plan.bubble, unit.c_str(),
                                 100 * plan.bubble_fraction);
  StageCost rank;
  for (const StageCost& stage : plan.costs.stages) add_cost(&rank, stage, 1.0 / layout.ranks);
  std::optional<double> formula;
  if (!is_schedule_file(layout.schedule)) {
    formula = closed_form_bubble(layout.schedule, layout.ranks, layout.chunks, plan.schedule.micro_batches, rank);
  }
  if (!formula) return text + "; no formula for this case\n";
  const double step = *formula + total_cost(rank) * plan.schedule.micro_batches;
  return text + format_text("; textbook formula for equal stages %.4g (%.1f %%)\n", *formula,
                            step > 0 ? 100 * *formula / step : 0);
}
