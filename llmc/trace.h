// trace.h -- steps as a Chrome trace: load the file in Perfetto (ui.perfetto.dev) or chrome://tracing, or draw it with
// scripts/plot_timeline.py.
//
//   process  a replica           row  `rank R`: its actions `F 3 stage 1` and its phases
//                                row  `activations stage 0 -> 1`: the messages of a link, from data ready to received
// The same function draws measured steps (gather_step_times) and simulated ones (simulated_step_times): plain
// intervals. Format: JSON object format of the Trace Event Format, complete events ("ph":"X"), times in microseconds.
#pragma once

#include "llmc/json.h"
#include "llmc/step_times.h"

using ReplicaTimes = std::vector<StepTimes>;  // the ranks of a replica in pipeline order, on one clock
using JobTimes = std::vector<ReplicaTimes>;   // all replicas in one step

namespace trace_detail {

class TraceWriter {
 public:
  /// Times count from `origin`: none is negative then.
  explicit TraceWriter(double origin) : origin_(origin) {}

  /// The actions and phases of a rank; `offset` brings its times to those of the trace.
  void rank(int step, int replica, int rank, const StepTimes& times, double offset) {
    if (step == 0) name("thread", replica, rank, format_text("rank %d", rank));
    for (const ActionTime& time : times.actions) {
      const Action& action = time.action;
      const char letter = op_letter(action.op);
      const std::string arguments = format_text("\"op\":\"%c\",\"micro_batch\":%d,\"stage\":%d,\"step\":%d", letter,
                                                action.micro_batch, action.stage, step);
      interval(format_text("%c %d stage %d", letter, action.micro_batch, action.stage), "action", replica, rank,
               offset + time.start, offset + time.end, arguments);
    }
    for (const PhaseTime& phase : times.phases) {
      interval(phase.name, "phase", replica, rank, offset + phase.start, offset + phase.end,
               format_text("\"step\":%d", step));
    }
  }

  /// The messages, in rows below those of the ranks, one a link. Messages of a link follow each other, so each is cut
  /// to begin after the one before it.
  void messages(int step, int replica, const ReplicaTimes& ranks, double offset) {
    const MessageTime* last = nullptr;
    int row = 0;
    const std::vector<MessageTime> messages = join_messages(ranks);
    for (const MessageTime& m : messages) {
      const bool same_link = last != nullptr && last->stage == m.stage && last->is_gradient == m.is_gradient;
      if (!same_link) row = link_row(replica, static_cast<int>(ranks.size()), m);
      const double begin = same_link ? std::min(std::max(m.begin, last->end), m.end) : m.begin;
      interval(format_text("%s %d", m.is_gradient ? "gradient" : "activation", m.micro_batch), "message", replica, row,
               offset + begin, offset + m.end,
               format_text("\"bytes\":%zu,\"from\":%d,\"to\":%d,\"step\":%d", m.bytes, m.from, m.to, step));
      last = &m;
    }
  }

  /// The name of a process or thread, and its place among the others.
  void name(const char* what, int replica, int row, const std::string& name) {
    add(format_text("{\"ph\":\"M\",\"name\":\"%s_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}", what,
                    replica, row, name.c_str()));
    add(format_text("{\"ph\":\"M\",\"name\":\"%s_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
                    what, replica, row, what[0] == 'p' ? replica : row));
  }

  std::string text(const std::string& title) const {
    return "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"title\":" + json_text(title) + "},\"traceEvents\":[\n" +
           events_ + "\n]}\n";
  }

 private:
  /// `arguments`: the inside of a JSON object.
  void interval(const std::string& name, const char* category, int replica, int row, double start, double end,
                const std::string& arguments) {
    add(
        format_text("{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
                    "\"args\":{%s}}",
                    name.c_str(), category, replica, row, 1e6 * (start - origin_), 1e6 * std::max(end - start, 0.0),
                    arguments.c_str()));
  }
  /// The row of the message's link; a new one, with its name, when it is the first message.
  int link_row(int replica, int ranks, const MessageTime& message) {
    std::map<std::pair<int, bool>, int>& rows = link_rows_[replica];
    const auto found = rows.find({message.stage, message.is_gradient});
    if (found != rows.end()) return found->second;
    const int row = ranks + static_cast<int>(rows.size()), sender = message.stage + (message.is_gradient ? 1 : -1);
    rows[{message.stage, message.is_gradient}] = row;
    name("thread", replica, row,
         format_text("%s stage %d -> %d", message.is_gradient ? "gradients" : "activations", sender, message.stage));
    return row;
  }
  void add(const std::string& event) { events_ += (events_.empty() ? "" : ",\n") + event; }

  double origin_;
  std::string events_;
  std::map<int, std::map<std::pair<int, bool>, int>> link_rows_;
};

/// The earliest moment of the step.
inline double earliest(const JobTimes& step) {
  double first = 0;
  for (const ReplicaTimes& ranks : step) {
    for (const StepTimes& times : ranks) {
      for (const ActionTime& time : times.actions) first = std::min(first, time.start);
      for (const PhaseTime& phase : times.phases) first = std::min(first, phase.start);
    }
    for (const MessageTime& message : join_messages(ranks)) first = std::min(first, message.begin);
  }
  return first;
}

}  // namespace trace_detail

/// The trace of some steps of a run, one after the other on the clock of rank 0 (StepTimes::begin says how far apart).
/// `title` is kept in the file and shown by plot_timeline.py.
inline std::string trace_json(const std::vector<JobTimes>& steps, const std::string& title) {
  assert(!steps.empty() && !steps[0].empty() && !steps[0][0].empty());
  const double begin = steps[0][0][0].begin;
  trace_detail::TraceWriter writer(trace_detail::earliest(steps[0]));
  for (size_t k = 0; k < steps.size(); ++k) {
    for (size_t r = 0; r < steps[k].size(); ++r) {
      const int step = static_cast<int>(k), replica = static_cast<int>(r);
      const ReplicaTimes& ranks = steps[k][r];
      if (step == 0) writer.name("process", replica, -1, format_text("replica %d", replica));
      const double offset = ranks[0].begin - begin;
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        writer.rank(step, replica, static_cast<int>(rank), ranks[rank], offset);
      }
      writer.messages(step, replica, ranks, offset);
    }
  }
  return writer.text(title);
}

/// The trace of one step.
inline std::string trace_json(const JobTimes& step, const std::string& title) {
  return trace_json(std::vector<JobTimes>{step}, title);
}
