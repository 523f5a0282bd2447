// timeline.h -- a plan's simulated timeline as text: one row a rank, time to the right.
//
//   rank 0 |F0F1....B0--F2B1--..B2--|          rank 0 |F0F1F2f0I0W0f1i1....|
//   rank 1 |..F0B0--F1B1--F2B2--....|          F forward, I input gradient, W weight gradient, . idle; lower case: ...
//
// An action is its letter (F, B, I, W) and its micro-batch, then `-` to its end; dots are idle time. With two stages a
// rank the second one's letters are lower case, with more the stage follows as in F3:1. An action that is too narrow
// for its label is shown by its letter alone, or not at all when thinner than a column.
#pragma once

#include <cctype>
#include <cmath>

#include "llmc/plan.h"

/// Draws plan.times, which a caller may have replaced by measured ones.
class Timeline {
 public:
  explicit Timeline(const Plan& plan) : plan_(plan), chunk_(plan.schedule.owner.size()) {
    std::vector<int> stages_of(static_cast<size_t>(plan.schedule.ranks), 0);
    for (size_t stage = 0; stage < chunk_.size(); stage++) {
      chunk_[stage] = stages_of[plan.schedule.owner[stage]]++;
      chunks_ = std::max(chunks_, chunk_[stage] + 1);
    }
  }

  std::string label(const Action& action) const {
    char letter = op_letter(action.op);
    if (chunks_ == 2 && chunk_[action.stage] == 1) letter = static_cast<char>(tolower(letter));
    const std::string text = letter + std::to_string(action.micro_batch);
    return chunks_ > 2 ? text + ":" + std::to_string(action.stage) : text;
  }

  /// Columns that give the shortest action room for the longest label, but no more than a wide screen has.
  int natural_width() const {
    constexpr double kMostColumns = 160;
    double shortest = plan_.makespan;
    size_t longest = 1;
    for (const std::vector<Action>& list : plan_.schedule.actions) {
      for (const Action& action : list) {
        const Interval& time = time_of(action);
        if (time.end > time.start) shortest = std::min(shortest, time.end - time.start);
        longest = std::max(longest, label(action).size());
      }
    }
    if (shortest <= 0) return 1;
    return static_cast<int>(std::lround(std::min(longest * plan_.makespan / shortest, kMostColumns)));
  }

  std::string row(int rank, int width) const {
    std::string text(static_cast<size_t>(width), '.');
    const auto column = [&](double time) {
      return plan_.makespan > 0 ? static_cast<size_t>(std::lround(time / plan_.makespan * width)) : 0;
    };
    for (const Action& action : plan_.schedule.actions[rank]) {
      const size_t begin = column(time_of(action).start), columns = column(time_of(action).end) - begin;
      std::string drawn = label(action);
      if (drawn.size() > columns) drawn.resize(1);
      drawn.resize(columns, '-');
      text.replace(begin, columns, drawn);
    }
    return text;
  }

  /// What the letters mean, for those that occur.
  std::string legend() const {
    constexpr Op kOps[] = {Op::kForward, Op::kBackward, Op::kBackwardInput, Op::kBackwardWeight};
    const char* meaning[] = {"forward", "backward", "input gradient", "weight gradient"};
    std::string text;
    for (int k = 0; k < 4; k++) {
      bool occurs = false;
      for (const std::vector<Action>& list : plan_.schedule.actions) {
        for (const Action& action : list) occurs = occurs || action.op == kOps[k];
      }
      if (occurs) text += format_text("%c %s, ", op_letter(kOps[k]), meaning[k]);
    }
    text += ". idle";
    if (chunks_ == 2) text += "; lower case: the rank's second stage";
    if (chunks_ > 2) text += "; the number behind the colon is the stage";
    return text;
  }

 private:
  const Interval& time_of(const Action& action) const {
    return plan_.at(node_kind(action.op), action.stage, action.micro_batch);
  }
  const Plan& plan_;
  std::vector<int> chunk_;  // (S) which of its rank's stages it is
  int chunks_ = 1;
};

/// `width` columns for the whole makespan, 0: the natural width, at most 160. Below the rows a line that explains the
/// letters and one that gives makespan, bubble and slots. Deterministic; O(width p + S m).
inline std::string timeline_text(const Plan& plan, int width = 0) {
  const Schedule& schedule = plan.schedule;
  const Timeline timeline(plan);
  if (width <= 0) width = timeline.natural_width();
  std::string text;
  for (int rank = 0; rank < schedule.ranks; rank++) {
    text += format_text("rank %-2d|%s|\n", rank, timeline.row(rank, width).c_str());
  }
  text += timeline.legend() + "\n";
  std::string slots;
  for (int count : plan.slots) slots += (slots.empty() ? "" : ",") + std::to_string(count);
  text += format_text("%s: makespan %.6g, bubble %.6g (%.1f%%), activation slots %s\n", schedule.name.c_str(),
                      plan.makespan, plan.bubble, 100 * plan.bubble_fraction, slots.c_str());
  return text;
}
