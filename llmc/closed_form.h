// closed_form.h -- formulas for the bubble and the memory of a schedule with equal stages and free transfers.
//
// Bubble: makespan - m T, from the first action of the step to the last action of any rank: what a step pays whose
// optimizer waits for all ranks. (The zero-bubble papers count the longest rank from its own first action on; that can
// be had only where the next step may begin before this one has ended everywhere.) No schedule goes below (p-1) times
// the F of one stage: the last rank cannot begin earlier.
// A formula is here only for sizes and times where the simulator gives the same number, bit for bit:
// test_closed_form.cpp, p 1..8, v 1..4, m 1..33, each of tF, tI, tW from 0 to 4.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "llmc/schedules.h"

/// The bubble for p ranks, v chunks (0: the schedule's natural number), m micro-batches; `cost` is a RANK's time for
/// one micro-batch, all its chunks together. `early_gradient` as in PlanCosts: an unsplit B sends its dx before it
/// makes the weight gradient, so that the ranks before wait for tI only. Nothing where no formula is known:
///                              B in one piece                               early_gradient
///   gpipe, 1f1b, eager-1f1b    (p-1) T                                      (p-1) (tF+tI)
///   interleaved, looped-bfs    (p-1) T/v; m < p: p T + (m-1) T/v - m T      (p-1) (tF+tI)/v; with v > 1 for m >= p,
///                                                                           interleaved also needs tW <= tF
///   zb-h1                      (p-1) max(tF, tI, tF+tI-tW)                  the same, for m >= p
///   zb-h2                      (p-1) max(tF, tI-tF, tF+tI-2tW)              the same, for m >= 2p-1
///   zb-v                       (p-1) tI/2                                   the same, for m >= 2p-1, tF <= tI and
///                                                                           tI/2 <= tW <= tI
///   dualpipe-v                 ((p-1) max(tF, tF+tI-tW)                     the same, for m >= 2p, tF <= tI+tW
///                               + max(0, (p-1) tI - p tF)) / 2
///   greedy, greedy-v           none: they depend on every cost
inline std::optional<double> closed_form_bubble(const std::string& name, int p, int v, int m, const StageCost& cost,
                                                bool early_gradient = false) {
  v = legal_chunks(find_schedule_kind(name), v);
  const double F = cost.forward, I = cost.backward_input, W = cost.backward_weight, T = F + I + W;
  if (m == 0) return 0.0;
  if (name == "gpipe" || name == "1f1b" || name == "eager-1f1b") return (p - 1) * (early_gradient ? F + I : T);
  const bool interleaved = name == "interleaved";
  if ((interleaved || name == "looped-bfs") && !early_gradient) {
    return m >= p ? (p - 1) * T / v : p * T + (m - 1) * T / v - m * T;
  }
  if (interleaved || name == "looped-bfs") {
    const bool known = v == 1 || (m >= p && (W <= F || !interleaved));
    return known ? std::optional<double>((p - 1) * (F + I) / v) : std::nullopt;
  }
  if (name == "zb-h1" && m >= p) return (p - 1) * std::max({F, I, F + I - W});
  if (name == "zb-h2" && m >= 2 * p - 1) return (p - 1) * std::max({F, I - F, F + I - 2 * W});
  if (name == "zb-v" && m >= 2 * p - 1 && F <= I && I <= 2 * W && W <= I) return (p - 1) * I / 2;
  if (name == "dualpipe-v" && m >= 2 * p && F <= I + W) {
    return ((p - 1) * std::max(F, F + I - W) + std::max(0.0, (p - 1) * I - p * F)) / 2;
  }
  return std::nullopt;
}

/// The most activations that `rank` holds at a time, from F to the end of B or W, in whole micro-batches: one chunk
/// counts 1/v. Nothing where no formula is known. The slots to allocate may be a few more: they are counted stage by
/// stage, and one more where the input comes by message (count_slots in plan.h).
inline std::optional<double> closed_form_peak(const std::string& name, int p, int v, int m, int rank) {
  v = legal_chunks(find_schedule_kind(name), v);
  const int behind = p - 1 - rank;
  if (m == 0) return 0.0;
  if (name == "gpipe" || name == "looped-bfs") return m;
  if (name == "1f1b" || (name == "interleaved" && v == 1)) return std::min(m, behind + 1);
  if (name == "eager-1f1b") return std::min(m, 2 * behind + 1);
  if (name == "interleaved") {
    const int groups = std::max(1, m / p), largest = (m + groups - 1) / groups;
    return std::min(m * v, 2 * behind + (v - 1) * largest + 1) / static_cast<double>(v);
  }
  if (name == "zb-h1") return std::min(m, p);
  if (name == "zb-h2") return std::min(m, 2 * p - 1);
  if (name == "zb-v" && m >= 2 * p - 1) return p;
  if (name == "dualpipe-v" && m >= 2 * p) return p + 0.5;
  return std::nullopt;
}
