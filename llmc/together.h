// together.h -- doing something on every rank that may fail on some of them: all go on, or all throw the same error.
#pragma once

#include <string>
#include <vector>

#include "llmc/control.h"

/// Runs `work` on every rank (it must not communicate), then compares notes. If it threw on any rank, every rank throws
/// the error of the lowest of those, marked as thrown on all ranks. Collective; costs one small all-gather when nothing
/// fails.
template <class Work>
void run_together(Control& control, Work work) {
  int code = 0;
  std::string message;
  try {
    work();
  } catch (const Error& error) {
    code = error.exit_code();
    message = error.what();
  }
  std::vector<int> codes(control.size());
  control.all_gather(&code, codes.data(), sizeof code);
  for (int rank = 0; rank < control.size(); ++rank) {
    if (codes[rank] == 0) continue;
    uint64_t length = message.size();
    control.broadcast(&length, sizeof length, rank);
    message.resize(length);
    if (length > 0) control.broadcast(&message[0], length, rank);
    throw Error(static_cast<ErrorKind>(codes[rank]), message, true);
  }
}
