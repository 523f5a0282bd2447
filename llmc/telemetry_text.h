// telemetry_text.h -- a pipeline report (telemetry.h) as a line for people and a line of JSON for metrics.jsonl.
#pragma once

#include <cinttypes>

#include "llmc/logger.h"
#include "llmc/telemetry.h"

namespace telemetry_detail {

inline std::string milliseconds(double seconds) { return json_number(1e3 * seconds); }

inline std::string rank_json(const RankTimes& rank) {
  return format_text(
      "{\"busy_ms\":%s,\"F_ms\":%s,\"B_ms\":%s,\"I_ms\":%s,\"W_ms\":%s,\"warm_up_ms\":%s,\"wait_activation_ms\":%s,"
      "\"wait_gradient_ms\":%s,\"other_ms\":%s,\"drain_ms\":%s,\"after_ms\":%s}",
      milliseconds(rank.busy()).c_str(), milliseconds(rank.forward).c_str(), milliseconds(rank.backward).c_str(),
      milliseconds(rank.input_gradient).c_str(), milliseconds(rank.weight_gradient).c_str(),
      milliseconds(rank.warm_up).c_str(), milliseconds(rank.wait_activation).c_str(),
      milliseconds(rank.wait_gradient).c_str(), milliseconds(rank.other).c_str(), milliseconds(rank.drain).c_str(),
      milliseconds(rank.after).c_str());
}

inline std::string link_json(const LinkTimes& link) {
  return format_text(
      "{\"kind\":\"%s\",\"into_stage\":%d,\"from\":%d,\"to\":%d,\"messages\":%d,\"latency_ms\":%s,"
      "\"bytes_per_second\":%s,\"exposed_ms\":%s,\"overlap\":%s}",
      link.is_gradient ? "gradient" : "activation", link.stage, link.from, link.to, link.messages,
      milliseconds(link.latency()).c_str(), json_number(link.bytes_per_second()).c_str(),
      milliseconds(link.exposed).c_str(), json_number(link.overlap()).c_str());
}

inline std::string cost_json(const StageCost& cost) {
  return format_text("{\"F_ms\":%s,\"I_ms\":%s,\"W_ms\":%s}", milliseconds(cost.forward).c_str(),
                     milliseconds(cost.backward_input).c_str(), milliseconds(cost.backward_weight).c_str());
}

/// "[a,b,...]" of the texts of all values.
template <class Values, class Text>
std::string json_list(const Values& values, Text text) {
  std::string list;
  for (const auto& value : values) list += (list.empty() ? "" : ",") + text(value);
  return "[" + list + "]";
}

/// "92/89", or the least and the most of many ranks: "71..92".
inline std::string busy_text(const PipelineReport& report) {
  constexpr size_t kMostRanks = 8;
  std::vector<double> percent;
  for (const RankTimes& rank : report.rank) {
    percent.push_back(report.makespan > 0 ? 100 * rank.busy() / report.makespan : 0);
  }
  if (percent.size() > kMostRanks) {
    const auto range = std::minmax_element(percent.begin(), percent.end());
    return format_text("%.0f..%.0f", *range.first, *range.second);
  }
  std::string text;
  for (double value : percent) text += (text.empty() ? "" : "/") + format_text("%.0f", value);
  return text;
}

}  // namespace telemetry_detail

/// One object without a line end, for Logger::telemetry. Times in milliseconds, bubbles and overlaps as fractions;
/// `straggler` as from StragglerWatch, null if there is none. Numbers read back to the same bits.
inline std::string telemetry_json(int64_t step, const PipelineReport& report, int straggler = -1, int replica = 0) {
  using namespace telemetry_detail;
  std::string phases;
  for (const PhaseTime& phase : report.phases) {
    phases += format_text("%s\"%s\":%s", phases.empty() ? "" : ",", phase.name.c_str(),
                          milliseconds(phase.end - phase.start).c_str());
  }
  return format_text(
             "{\"step\":%" PRId64
             ",\"pipeline\":{\"schedule\":%s,\"replica\":%d,\"ranks\":%d,\"stages\":%d,\"micro_batches\":%d,"
             "\"makespan_ms\":%s,\"makespan_simulated_ms\":%s,\"bubble\":%s,\"bubble_simulated\":%s,"
             "\"bubble_closed_form\":%s,\"transfer_ms\":%s,\"overlap\":%s,\"imbalance\":%s,\"straggler\":%s,",
             step, json_text(report.schedule).c_str(), replica, report.ranks, report.stages, report.micro_batches,
             milliseconds(report.makespan).c_str(), milliseconds(report.simulated_makespan).c_str(),
             json_number(report.bubble_fraction()).c_str(), json_number(report.simulated_fraction()).c_str(),
             report.closed_form ? json_number(report.closed_form_fraction()).c_str() : "null",
             milliseconds(report.costs.transfer).c_str(), json_number(report.overlap()).c_str(),
             json_number(report.imbalance).c_str(), straggler < 0 ? "null" : std::to_string(straggler).c_str()) +
         "\"slowness\":" + json_list(report.slowness, json_number) +
         ",\"cost\":" + json_list(report.costs.stages, cost_json) + ",\"rank\":" + json_list(report.rank, rank_json) +
         ",\"link\":" + json_list(report.links, link_json) + ",\"phase_ms\":{" + phases + "}}}";
}

/// `step 40 | pipeline 812 ms | bubble 9.1% measured, 8.7% simulated, 6.7% closed form | busy 92/89% | messages 97%
/// hidden | imbalance 1.03`, and `| rank 1 is slow (1.24x)` for a straggler.
inline std::string telemetry_line(int64_t step, const PipelineReport& report, int straggler = -1) {
  std::string line = format_text("step %" PRId64 " | pipeline %.*f ms | bubble %.1f%% measured, %.1f%% simulated", step,
                                 report.makespan < 0.1 ? 1 : 0, 1e3 * report.makespan, 100 * report.bubble_fraction(),
                                 100 * report.simulated_fraction());
  if (report.closed_form) line += format_text(", %.1f%% closed form", 100 * report.closed_form_fraction());
  line += format_text(" | busy %s%%", telemetry_detail::busy_text(report).c_str());
  if (!report.links.empty()) line += format_text(" | messages %.0f%% hidden", 100 * report.overlap());
  line += format_text(" | imbalance %.2f", report.imbalance);
  if (straggler >= 0) {
    line += format_text(" | rank %d is slow (%.2fx)", straggler, report.slowness[static_cast<size_t>(straggler)]);
  }
  return line;
}
