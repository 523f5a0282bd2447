// schedules.h -- the pipeline schedules that --schedule knows: one short generator each, and the table of them.
//
// In the drawings (timeline.h) time runs to the right, one row a rank; F, I and W take two columns each, B = I + W
// four; lower case is a rank's second stage. tF, tI, tW are a rank's times for one micro-batch (all its chunks), T
// their sum; v chunks (stages) a rank. Bubble: idle time of a step whose end all ranks wait for, m T of work on each
// rank. Peak: most activations alive on a rank, in whole micro-batches. Which formula holds where: closed_form.h. These
// are the textbook's, where B sends its gradient at its end; the executor sends it as soon as I is done
// (PlanCosts::early_gradient), and for gpipe and 1f1b (p-1)T becomes (p-1)(tF+tI).
// Overview and further references: GPipe arXiv 1811.06965; 1F1B (PipeDream-Flush) 2006.09503; interleaved 2104.04473;
// breadth-first 2211.05953; zero bubble 2401.10241; V placement (controllable memory) 2405.15362; DualPipe 2412.19437.
#pragma once

#include <climits>
#include <string>
#include <vector>

#include "llmc/greedy_schedule.h"
#include "llmc/option_text.h"
#include "llmc/schedule.h"

/// Appends to one rank's list. Each call takes the stage's next micro-batch, so they go up in every list by
/// construction, and one that does not exist (i >= m) is left out: a schedule that needs at least M micro-batches is
/// generated for M. Leaving whole micro-batches out of an order that works gives an order that works.
class ListWriter {
 public:
  ListWriter(Schedule* schedule, int rank)
      : list_(schedule->actions[rank]), micro_batches_(schedule->micro_batches), next_(schedule->stages) {}

  void forward(int stage) { append(Op::kForward, stage, next_[stage].forward++); }
  void backward(int stage) {
    assert(next_[stage].weight == next_[stage].backward);
    next_[stage].weight++;
    append(Op::kBackward, stage, next_[stage].backward++);
  }
  void input(int stage) { append(Op::kBackwardInput, stage, next_[stage].backward++); }
  void weight(int stage) { append(Op::kBackwardWeight, stage, next_[stage].weight++); }

  int forwards(int stage) const { return next_[stage].forward; }
  int inputs(int stage) const { return next_[stage].backward; }
  int weights(int stage) const { return next_[stage].weight; }

 private:
  struct Next {
    int forward = 0, backward = 0, weight = 0;
  };
  void append(Op op, int stage, int micro_batch) {
    if (micro_batch < micro_batches_) list_.push_back({op, stage, micro_batch});
  }
  std::vector<Action>& list_;
  int micro_batches_;
  std::vector<Next> next_;
};

// ---- one stage a rank ---------------------------------------------------------------------------------------------

/// GPipe: all forwards, then all backwards.
///     rank 0 |F0F1F2F3............B0--B1--B2--B3--|
///     rank 1 |..F0F1F2F3......B0--B1--B2--B3--....|
///     rank 2 |....F0F1F2F3B0--B1--B2--B3--........|
/// Bubble (p-1)T. Peak m: every micro-batch's activations are alive at once.
inline Schedule gpipe_schedule(int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("gpipe", ranks, place_stages(Placement::kLine, ranks, 1), micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    for (int i = 0; i < micro_batches; i++) list.forward(rank);
    for (int i = 0; i < micro_batches; i++) list.backward(rank);
  }
  return schedule;
}

/// One forward, one backward in turn, after a warm-up of `ahead` forwards for every later stage.
inline Schedule alternating_schedule(const std::string& name, int ranks, int micro_batches, int ahead) {
  Schedule schedule = empty_schedule(name, ranks, place_stages(Placement::kLine, ranks, 1), micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    const int warm_up = std::min(ahead * (ranks - 1 - rank), micro_batches);
    for (int i = 0; i < warm_up; i++) list.forward(rank);
    for (int i = warm_up; i < micro_batches; i++) list.forward(rank), list.backward(rank);
    for (int i = 0; i < warm_up; i++) list.backward(rank);
  }
  return schedule;
}

/// 1F1B: as many forwards ahead as there are stages behind, then one forward, one backward in turn.
///     rank 0 |F0F1F2........B0--F3B1--..B2--..B3--|
///     rank 1 |..F0F1....B0--F2B1--F3B2--..B3--....|
///     rank 2 |....F0B0--F1B1--F2B2--F3B3--........|
/// The same bubble (p-1)T as GPipe. Peak min(m, p-rank), whatever m is. With fewer micro-batches than stages the
/// warm-up takes all of them, and 1F1B is GPipe. Transfers cost 2(p-1)m/p of their time: F and B follow without slack.
inline Schedule one_forward_one_backward_schedule(int ranks, int micro_batches) {
  return alternating_schedule("1f1b", ranks, micro_batches, 1);
}

/// Eager 1F1B: twice the warm-up, so that each message has the time of one forward and one backward to travel.
///     rank 0 |F0F1F2F3......B0--..B1--..B2--..B3--|
///     rank 1 |..F0F1F2..B0--F3B1--..B2--..B3--....|
///     rank 2 |....F0B0--F1B1--F2B2--F3B3--........|
/// Bubble (p-1)T. Peak min(m, 2(p-1-rank)+1). Transfers cost 2(p-1) of their time, whatever m is.
inline Schedule eager_schedule(int ranks, int micro_batches) {
  return alternating_schedule("eager-1f1b", ranks, micro_batches, 2);
}

/// Zero bubble, H1 (k = 1) and H2 (k = 2): B is split, and W waits so that I, which the rank before needs, comes
/// sooner. Warm-up k(p-1-rank) forwards, then F, I, W in turn, W behind I by k*rank micro-batches: every rank has the
/// same peak. The W left over fill the time in which 1F1B drains.
///     rank 0 |F0F1F2....I0W0F3I1W1I2W2I3W3|
///     rank 1 |..F0F1..I0F2I1W0F3I2W1I3W2W3|
///     rank 2 |....F0I0F1I1F2I2W0F3I3W1W2W3|
/// H1: bubble (p-1) max(tF, tI, tF+tI-tW), a third of 1F1B's for equal times; peak min(m, p) on every rank.
/// H2: bubble (p-1) max(tF, tI-tF, tF+tI-2tW); peak min(m, 2p-1). Worth it only where W is short: the first forward
/// reaches the last rank no sooner, and below 2p-1 micro-batches H2 is slower than H1.
inline Schedule zero_bubble_schedule(int ranks, int micro_batches, int k) {
  const std::vector<int> owner = place_stages(Placement::kLine, ranks, 1);
  Schedule schedule = empty_schedule(k == 1 ? "zb-h1" : "zb-h2", ranks, owner, micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    const int warm_up = std::min(k * (ranks - 1 - rank), micro_batches), lag = k * rank;
    for (int i = 0; i < warm_up; i++) list.forward(rank);
    for (int i = 0; i < micro_batches; i++) {
      if (list.forwards(rank) < micro_batches) list.forward(rank);
      list.input(rank);
      if (i >= lag) list.weight(rank);
    }
    while (list.weights(rank) < micro_batches) list.weight(rank);
  }
  return schedule;
}

// ---- several stages a rank, in a loop -----------------------------------------------------------------------------

/// Interleaved 1F1B: rank r has the stages r, p+r, 2p+r, ... and takes a group of micro-batches through each in turn,
/// forward up, backward down; otherwise 1F1B with a warm-up that reaches the last chunk.
///     rank 0 |F0F1F2f0f1f2..b0--..b1--..b2--B0--B1--B2--|
///     rank 1 |..F0F1F2f0b0--f1b1--f2b2--B0--B1--B2--....|
/// Bubble (p-1)T/v: the first micro-batch needs only 1/v as long to the last rank. Peak p(1 + (p-1)/(pv)) on rank 0.
/// Megatron-LM wants m % p == 0. A short last group would not only cost time: the order itself can have a circle, for
/// example p 4, v 3, m 5. Here max(1, m/p) groups as equal as possible, all of p or more, work for any m at no cost.
inline Schedule interleaved_schedule(int ranks, int chunks, int micro_batches) {
  const std::vector<int> owner = place_stages(Placement::kLoop, ranks, chunks);
  Schedule schedule = empty_schedule("interleaved", ranks, owner, micro_batches);
  const int groups = std::max(1, micro_batches / ranks), largest = (micro_batches + groups - 1) / groups;
  std::vector<int> order;  // the chunk of the k-th forward pass; that of the k-th backward pass is v-1 minus it
  for (int group = 0; group < groups; group++) {
    const int size = micro_batches / groups + (group < micro_batches % groups ? 1 : 0);
    for (int chunk = 0; chunk < chunks; chunk++) order.insert(order.end(), static_cast<size_t>(size), chunk);
  }
  const int total = static_cast<int>(order.size());
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    const int behind = ranks - 1 - rank, ahead = chunks == 1 ? behind : 2 * behind + (chunks - 1) * largest;
    const int warm_up = std::min(ahead, total);
    for (int k = 0; k < total + warm_up; k++) {
      if (k < total) list.forward(order[k] * ranks + rank);
      if (k >= warm_up) list.backward((chunks - 1 - order[k - warm_up]) * ranks + rank);
    }
  }
  return schedule;
}

/// Breadth-first: every micro-batch through the first chunk, then through the second, ...; backward the other way
/// round. GPipe for several stages a rank.
///     rank 0 |F0F1F2f0f1f2......b0--b1--b2--B0--B1--B2--|
///     rank 1 |..F0F1F2f0f1f2b0--b1--b2--B0--B1--B2--....|
/// Bubble (p-1)T/v, peak m. Each chunk's weights are used in two stretches of time, which is what it is for: weights
/// that are gathered or fetched before use.
inline Schedule looped_bfs_schedule(int ranks, int chunks, int micro_batches) {
  const std::vector<int> owner = place_stages(Placement::kLoop, ranks, chunks);
  Schedule schedule = empty_schedule("looped-bfs", ranks, owner, micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    for (int chunk = 0; chunk < chunks; chunk++) {
      for (int i = 0; i < micro_batches; i++) list.forward(chunk * ranks + rank);
    }
    for (int chunk = chunks; chunk-- > 0;) {
      for (int i = 0; i < micro_batches; i++) list.backward(chunk * ranks + rank);
    }
  }
  return schedule;
}

// ---- two stages a rank, in a V ------------------------------------------------------------------------------------

/// Zero bubble in V placement: rank r has stage r, on the way down, and stage 2p-1-r, on the way up. The first backward
/// pass starts on rank 0, right behind the last forward pass there, and so no rank waits for the way back.
///     rank 0 |F0F1F2F3F4f0i0w0f1i1w1f2i2w2I0W0f3i3w3I1W1f4i4w4I2W2I3W3I4W4....|
///     rank 1 |..F0F1F2f0F3f1i0w0f2i1w1F4I0W0f3i2w2I1W1f4i3w3I2i4I3W2I4W3w4W4..|
///     rank 2 |....F0f0F1f1F2f2i0w0F3I0W0f3i1w1F4I1W1f4i2w2I2i3I3i4I4W2w3w4W3W4|
/// Bubble (p-1)tI/2 for balanced times (closed_form.h): only the wait for the first input is left, and half a stage
/// takes half as long. Peak p on every rank. Needs 2p-1 micro-batches: with fewer some steps are left out, and the gaps
/// stay.
inline Schedule zero_bubble_v_schedule(int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("zb-v", ranks, place_stages(Placement::kV, ranks, 2), micro_batches);
  const int all = std::max(2 * ranks - 1, micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    const int down = rank, up = 2 * ranks - 1 - rank;
    const auto turn = [&](int stage) { list.forward(stage), list.input(stage), list.weight(stage); };
    for (int k = 0; k < 2 * (ranks - rank) - 1; k++) list.forward(down);  // fill the way to the last rank and back
    for (int k = 0; k < rank; k++) list.forward(up), list.forward(down);  // the first are on the way up
    for (int k = 0; k < ranks - rank; k++) turn(up);                      // the first gradients
    while (list.forwards(up) < list.forwards(down) || list.forwards(down) < all) {  // steady: both ways in turn
      if (list.forwards(down) < all) list.forward(down);
      list.input(down), list.weight(down);
      turn(up);
    }
    for (int k = 0; k < rank; k++) list.input(down), list.input(up);  // drain: gradients first...
    for (int k = 0; k < ranks - rank; k++) list.input(down), list.weight(down);
    while (list.weights(up) < list.inputs(up)) list.weight(up);  // ...then the weights left over
    while (list.weights(down) < list.inputs(down)) list.weight(down);
  }
  return schedule;
}

/// DualPipeV, the half of DualPipe that needs no second copy of the weights: a forward pass of one way beside a
/// backward pass of the other, which lets an expert layer's messages of one hide behind the compute of the other. Here
/// the two run one after the other.
///     rank 0 |F0F1F2f0i0w0f1F3b1--f2B0--b2--f3..B1--b3--I2W2I3W3|
///     rank 1 |..F0f0F1f1F2b0--f2B0--F3b1--f3B1--b2--B2--i3I3w3W3|
/// Bubble (p-1)tF/2 for equal times (closed_form.h for others); peak p+1/2. Needs 2p micro-batches: with fewer some
/// steps are left out.
inline Schedule dualpipe_v_schedule(int ranks, int micro_batches) {
  Schedule schedule = empty_schedule("dualpipe-v", ranks, place_stages(Placement::kV, ranks, 2), micro_batches);
  const int all = std::max(2 * ranks, micro_batches);
  for (int rank = 0; rank < ranks; rank++) {
    ListWriter list(&schedule, rank);
    const int down = rank, up = 2 * ranks - 1 - rank, behind = ranks - 1 - rank;
    for (int k = 0; k < 2 * behind; k++) list.forward(down);
    for (int k = 0; k <= rank; k++) list.forward(down), list.forward(up);
    for (int k = 0; k < behind; k++) list.input(up), list.weight(up), list.forward(up);
    for (int k = 0; k <= all - 2 * ranks + rank; k++) {
      list.forward(down), list.backward(up), list.forward(up), list.backward(down);
    }
    for (int k = 0; k < behind; k++) list.backward(up), list.forward(up), list.backward(down);
    std::vector<int> waiting;                   // stages whose W has been put off, oldest first
    for (int k = 0; k < 2 * (rank + 1); k++) {  // whole backward passes in the first half, split ones in the second
      const int stage = k % 2 == 0 ? up : down;
      if (k <= rank) {
        list.backward(stage);
      } else {
        list.input(stage), waiting.push_back(stage);
      }
    }
    for (int k = 0; k < behind; k++) waiting.push_back(down);
    for (size_t k = 0; k < waiting.size(); k++) {
      list.weight(waiting[k]);
      if (k < static_cast<size_t>(behind)) list.input(down);
    }
  }
  return schedule;
}

// ---- the table ----------------------------------------------------------------------------------------------------

constexpr int kAnyChunks = INT_MAX;

struct ScheduleKind {
  std::string name;
  int natural_chunks;  // stages a rank if nothing else is asked for
  int min_chunks;
  int max_chunks;  // kAnyChunks: no limit
  Placement placement;
  bool splits_backward;  // has I and W
  std::string summary;   // one line for --help and tables
  Schedule (*generate)(int ranks, int chunks, int micro_batches, const PlanCosts& costs);
};

/// Everything that --schedule knows.
inline const std::vector<ScheduleKind>& schedule_kinds() {
  using Costs = PlanCosts;
  constexpr Placement kLine = Placement::kLine, kLoop = Placement::kLoop, kV = Placement::kV;
  static const std::vector<ScheduleKind> kinds = {
      {"gpipe", 1, 1, 1, kLine, false, "all forwards, then all backwards",
       [](int p, int, int m, const Costs&) { return gpipe_schedule(p, m); }},
      {"1f1b", 1, 1, 1, kLine, false, "one forward, one backward in turn; least memory",
       [](int p, int, int m, const Costs&) { return one_forward_one_backward_schedule(p, m); }},
      {"eager-1f1b", 1, 1, 1, kLine, false, "1f1b with twice the warm-up; hides transfers",
       [](int p, int, int m, const Costs&) { return eager_schedule(p, m); }},
      {"interleaved", 2, 1, kAnyChunks, kLoop, false, "1f1b over several stages a rank; bubble / chunks",
       [](int p, int v, int m, const Costs&) { return interleaved_schedule(p, v, m); }},
      {"looped-bfs", 2, 1, kAnyChunks, kLoop, false, "gpipe over several stages a rank",
       [](int p, int v, int m, const Costs&) { return looped_bfs_schedule(p, v, m); }},
      {"zb-h1", 1, 1, 1, kLine, true, "1f1b with split backward passes; about a third of the bubble",
       [](int p, int, int m, const Costs&) { return zero_bubble_schedule(p, m, 1); }},
      {"zb-h2", 1, 1, 1, kLine, true, "zb-h1 with twice the memory; for short weight gradients",
       [](int p, int, int m, const Costs&) { return zero_bubble_schedule(p, m, 2); }},
      {"zb-v", 2, 2, 2, kV, true, "split backward passes in V placement; the least bubble of the written ones",
       [](int p, int, int m, const Costs&) { return zero_bubble_v_schedule(p, m); }},
      {"dualpipe-v", 2, 2, 2, kV, true, "forwards of one way beside backwards of the other, V placement",
       [](int p, int, int m, const Costs&) { return dualpipe_v_schedule(p, m); }},
      {"greedy", 1, 1, kAnyChunks, kLoop, true, "made for the costs at hand, stages in a line or loop",
       [](int p, int v, int m, const Costs& costs) {
         return greedy_schedule(place_stages(Placement::kLoop, p, v), p, m, costs);
       }},
      {"greedy-v", 2, 1, kAnyChunks, kV, true, "made for the costs at hand, stages in a V",
       [](int p, int v, int m, const Costs& costs) {
         return greedy_schedule(place_stages(Placement::kV, p, v), p, m, costs);
       }},
  };
  return kinds;
}

/// The names, in the order of the table.
inline std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleKind& kind : schedule_kinds()) names.push_back(kind.name);
  return names;
}

/// The row of that name; any other name is a user error that lists what --schedule takes.
inline const ScheduleKind& find_schedule_kind(const std::string& name) {
  std::string known;
  for (const ScheduleKind& kind : schedule_kinds()) {
    if (kind.name == name) return kind;
    known += kind.name + ", ";
  }
  user_error("--schedule %s is not known; use auto, %sor a file that ends in .csv", option_detail::shown(name).c_str(),
             known.c_str());
}

/// The stages a rank that `chunks` asks for: 0 is the natural number; one that the schedule cannot have is a user
/// error.
inline int legal_chunks(const ScheduleKind& kind, int chunks) {
  if (chunks == 0) return kind.natural_chunks;
  if (chunks >= kind.min_chunks && chunks <= kind.max_chunks) return chunks;
  const std::string legal = kind.max_chunks == kAnyChunks ? format_text("%d or more", kind.min_chunks)
                                                          : format_text("%d", kind.natural_chunks);
  user_error("--chunks %d: schedule %s takes %s on each rank; use --chunks %d", chunks, kind.name.c_str(),
             legal.c_str(), kind.natural_chunks);
}

/// The rank (S) of each stage, chunks as in make_schedule.
inline std::vector<int> stage_owners(const ScheduleKind& kind, int ranks, int chunks) {
  return place_stages(kind.placement, ranks, legal_chunks(kind, chunks));
}

/// The schedule of that name for `ranks` >= 1, `chunks` stages on each (0: the schedule's natural number) and
/// `micro_batches` >= 0. The greedy ones fit `costs` (S stages; none: all equal), the others do not look at them. A
/// wrong name or number of chunks is a user error with the legal ones. Host only, the same on every rank; O(S m),
/// greedy O(S^2 m).
inline Schedule make_schedule(const std::string& name, int ranks, int chunks, int micro_batches,
                              const PlanCosts& costs = {}) {
  const ScheduleKind& kind = find_schedule_kind(name);
  Schedule schedule = kind.generate(ranks, legal_chunks(kind, chunks), micro_batches, costs);
  schedule.name = name;
  return schedule;
}

/// The same with the natural number of chunks and equal costs.
inline Schedule make_schedule(const std::string& name, int ranks, int micro_batches) {
  return make_schedule(name, ranks, 0, micro_batches);
}
