// schedule_csv.h -- schedules as files: the compute-only table of torch.distributed.pipelining.
//
// One line a rank, cells separated by commas, run from left to right: stage, letter, micro-batch.
//     0F0,0F1,,0B0,0B1         rank 0: stage 0, forward and backward of micro-batches 0 and 1
//     ,1F0,1B0,1F1,1B1         rank 1: stage 1
// F forward, B whole backward, I input gradient, W weight gradient. Empty cells draw idle time and mean nothing. Ranks,
// stages, their owners and the number of micro-batches follow from the cells. Messages are not in the table: they
// follow from the owners, as everywhere here. Reading checks that each rank's list is complete and in order (a backward
// pass in falling order, as torch's looped BFS has it, is refused: the sums would differ); make_plan finds circles.
#pragma once

#include <string>
#include <vector>

#include "llmc/file.h"
#include "llmc/option_text.h"
#include "llmc/schedule.h"

/// The parts of "12F3": false if it is anything else.
inline bool parse_schedule_cell(const std::string& cell, Action* action) {
  constexpr size_t kMostDigits = 6;
  const std::string letters = "FBIW", digits = "0123456789";
  const size_t at = cell.find_first_not_of(digits);
  if (at == std::string::npos || at == 0 || at > kMostDigits) return false;
  const size_t letter = letters.find(cell[at]), rest = cell.size() - at - 1;
  if (letter == std::string::npos || rest == 0 || rest > kMostDigits) return false;
  if (cell.find_first_not_of(digits, at + 1) != std::string::npos) return false;
  constexpr Op kOps[] = {Op::kForward, Op::kBackward, Op::kBackwardInput, Op::kBackwardWeight};
  *action = {kOps[letter], atoi(cell.c_str()), atoi(cell.c_str() + at + 1)};
  return true;
}

/// The actions of one line. `where` is FILE:LINE for the messages.
inline std::vector<Action> parse_schedule_line(const std::string& line, const std::string& where) {
  std::vector<Action> actions;
  for (std::string cell : option_detail::split(line, ',')) {
    const size_t begin = cell.find_first_not_of(" \t\r");
    if (begin == std::string::npos) continue;
    cell = cell.substr(begin, cell.find_last_not_of(" \t\r") + 1 - begin);
    Action action{};
    if (!parse_schedule_cell(cell, &action)) {
      user_error("%s: cell %s is no action; write stage, F, B, I or W, micro-batch, such as 0F3 (no messages)",
                 where.c_str(), option_detail::shown(cell).c_str());
    }
    actions.push_back(action);
  }
  if (actions.empty()) user_error("%s: a rank without actions; give each rank a stage", where.c_str());
  return actions;
}

/// Sets stages, owner and micro_batches from the lists.
inline void infer_owners(Schedule* schedule, const std::string& path) {
  for (int rank = 0; rank < schedule->ranks; rank++) {
    for (const Action& action : schedule->actions[rank]) {
      schedule->micro_batches = std::max(schedule->micro_batches, action.micro_batch + 1);
      if (action.stage >= static_cast<int>(schedule->owner.size())) schedule->owner.resize(action.stage + 1, -1);
      int& owner = schedule->owner[action.stage];
      if (owner >= 0 && owner != rank) {
        user_error("%s:%d: cell \"%d%c%d\": stage %d is on line %d already; give it to one rank", path.c_str(),
                   rank + 1, action.stage, op_letter(action.op), action.micro_batch, action.stage, owner + 1);
      }
      owner = rank;
    }
  }
  schedule->stages = static_cast<int>(schedule->owner.size());
  for (int stage = 0; stage < schedule->stages; stage++) {
    if (schedule->owner[stage] >= 0) continue;
    user_error("%s: stage %d has no cell, stage %d has; number the stages from 0 without gaps", path.c_str(), stage,
               schedule->stages - 1);
  }
}

/// The schedule in `text`; `path` is its name and stands in the messages. User errors, FILE:LINE with the cell and what
/// to write instead: an empty file, a cell that is no action, a rank without any, a stage on two ranks, a gap in the
/// stages, an action missing, doubled or in the wrong order.
inline Schedule parse_schedule_csv(const std::string& text, const std::string& path) {
  const std::string mark = "\xEF\xBB\xBF";  // some editors begin a file with it
  std::vector<std::string> lines = option_detail::split(text.compare(0, 3, mark) == 0 ? text.substr(3) : text, '\n');
  while (!lines.empty() && lines.back().find_first_not_of(" \t\r") == std::string::npos) lines.pop_back();
  if (lines.empty()) user_error("%s: no actions in it; write one line for each rank, such as 0F0,0B0", path.c_str());
  Schedule schedule = empty_schedule(path, static_cast<int>(lines.size()), {}, 0);
  for (int rank = 0; rank < schedule.ranks; rank++) {
    schedule.actions[rank] = parse_schedule_line(lines[rank], format_text("%s:%d", path.c_str(), rank + 1));
  }
  infer_owners(&schedule, path);
  std::vector<int> peak;
  int rank = 0;
  const std::string fault = check_lists(schedule, &peak, &rank);
  if (!fault.empty()) user_error("%s:%d: %s", path.c_str(), rank + 1, fault.c_str());
  return schedule;
}

/// The same from a file, which a user error names if it cannot be read.
inline Schedule read_schedule_csv(const std::string& path) {
  return parse_schedule_csv(read_whole_file(path, "schedule"), path);
}

/// The table, without empty cells; parse_schedule_csv gives the schedule back (m >= 1; with no actions there is nothing
/// to tell the stages by).
inline std::string schedule_csv_text(const Schedule& schedule) {
  std::string text;
  for (const std::vector<Action>& list : schedule.actions) {
    std::string line;
    for (const Action& action : list) {
      line += format_text("%s%d%c%d", line.empty() ? "" : ",", action.stage, op_letter(action.op), action.micro_batch);
    }
    text += line + "\n";
  }
  return text;
}
