// clock.h -- the host's clock, and how far the clocks of the ranks are apart.
//
// Events of several hosts come on one timeline through the clock of rank 0. In a round trip rank 0 reads its clock (a),
// asks rank r, which answers with its own clock (c), and reads again (b). Whatever the way there and back took,
//   c - b <= offset of r <= c - a        (offset: clock of r minus clock of rank 0)
// and every round narrows the interval: one with a fast way there bounds it above, one with a fast way back below. The
// middle of what is left is the estimate, half its length the error; better than the fastest round alone, whose error
// is half its own length (Cristian's algorithm). Clocks drift by some microseconds a second: measure again at each
// report.
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/control.h"

/// Seconds on the host's steady clock, the same for all processes of a host.
inline double host_seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

/// Clock of a rank minus clock of rank 0, in seconds, known to +- `error`.
struct ClockOffset {
  double offset = 0;
  double error = 0;
};

/// One round trip: clock of rank 0 before and after, clock of the other rank in between.
struct ClockRound {
  double before = 0, after = 0, other = 0;
};

/// The offset that all rounds allow; when the clocks have drifted so far meanwhile that there is none, that of the
/// fastest round. At least one round.
inline ClockOffset offset_of_rounds(const std::vector<ClockRound>& rounds) {
  assert(!rounds.empty());
  double low = -1e300, high = 1e300;
  const ClockRound* fastest = &rounds[0];
  for (const ClockRound& round : rounds) {
    low = std::max(low, round.other - round.after);
    high = std::min(high, round.other - round.before);
    if (round.after - round.before < fastest->after - fastest->before) fastest = &round;
  }
  if (low > high) {
    low = fastest->other - fastest->after;
    high = fastest->other - fastest->before;
  }
  return {(low + high) / 2, (high - low) / 2};
}

/// Offsets of all ranks of the group, on every rank; rank 0 has 0. Collective. Some 0.1 ms a round and rank.
inline std::vector<ClockOffset> measure_clocks(Control& control, int rounds = 20) {
  std::vector<ClockOffset> offsets(static_cast<size_t>(control.size()));
  for (int r = 1; r < control.size(); ++r) {
    std::vector<ClockRound> measured;
    for (int i = 0; i < rounds && (control.rank() == 0 || control.rank() == r); ++i) {
      ClockRound round;
      char question = 0;
      round.before = host_seconds();
      control.move(&question, 1, 0, r);
      round.other = host_seconds();
      control.move(&round.other, sizeof(round.other), r, 0);
      round.after = host_seconds();
      measured.push_back(round);
    }
    if (control.rank() == 0) offsets[static_cast<size_t>(r)] = offset_of_rounds(measured);
  }
  control.broadcast(offsets.data(), offsets.size() * sizeof(ClockOffset), 0);
  return offsets;
}
