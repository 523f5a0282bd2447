// timeline.h -- a plan's simulated timeline as text: one row a rank, time to the right.
//
//   rank 0 |F0F1....B0--F2B1--..B2--|
//   rank 1 |..F0B0--F1B1--F2B2--....|
//
// An action is its letter (F, B, I, W) and its micro-batch, then `-` to its end; dots are idle time. Where ranks have
// several stages the stage follows as F3:1. Narrow actions keep their letter, or nothing at all when thinner than a
// column.
#pragma once

#include <cmath>

#include "llmc/plan.h"

inline std::string timeline_label(const Schedule& schedule, const Action& action) {
  const std::string label = op_letter(action.op) + std::to_string(action.micro_batch);
  return schedule.stages > schedule.ranks ? label + ":" + std::to_string(action.stage) : label;
}

/// Columns that give the shortest action room for the longest label, but no more than a wide screen has.
inline int timeline_width(const Plan& plan) {
  constexpr double kMostColumns = 160;
  double shortest = plan.makespan;
  size_t longest = 1;
  for (const std::vector<Action>& list : plan.schedule.actions) {
    for (const Action& action : list) {
      const Interval& time = plan.at(node_kind(action.op), action.stage, action.micro_batch);
      if (time.end > time.start) shortest = std::min(shortest, time.end - time.start);
      longest = std::max(longest, timeline_label(plan.schedule, action).size());
    }
  }
  if (shortest <= 0) return 1;
  return static_cast<int>(std::lround(std::min(longest * plan.makespan / shortest, kMostColumns)));
}

/// `width` columns for the whole makespan, 0: timeline_width. Ends with a line that gives makespan, bubble and slots.
/// Deterministic; O(width p + S m).
inline std::string timeline_text(const Plan& plan, int width = 0) {
  const Schedule& schedule = plan.schedule;
  if (width <= 0) width = timeline_width(plan);
  const auto column = [&](double time) {
    return plan.makespan > 0 ? static_cast<size_t>(std::lround(time / plan.makespan * width)) : 0;
  };
  std::string text;
  for (int rank = 0; rank < schedule.ranks; rank++) {
    std::string row(static_cast<size_t>(width), '.');
    for (const Action& action : schedule.actions[rank]) {
      const Interval& time = plan.at(node_kind(action.op), action.stage, action.micro_batch);
      const size_t begin = column(time.start), columns = column(time.end) - begin;
      std::string label = timeline_label(schedule, action);
      if (label.size() > columns) label.resize(1);
      label.resize(columns, '-');
      row.replace(begin, columns, label);
    }
    text += format_text("rank %-2d|%s|\n", rank, row.c_str());
  }
  std::string slots;
  for (int count : plan.slots) slots += (slots.empty() ? "" : ",") + std::to_string(count);
  text += format_text("%s: makespan %.6g, bubble %.6g (%.1f%%), activation slots %s\n", schedule.name.c_str(),
                      plan.makespan, plan.bubble, 100 * plan.bubble_fraction, slots.c_str());
  return text;
}
