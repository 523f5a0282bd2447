// grid.h -- where a rank stands: place in the pipeline x data-parallel replica. A place has one stage of the model, or
// several (plan.h: owner). The replicas of a place are adjacent in rank.
#pragma once

#include "llmc/check.h"

struct Grid {
  int pipeline = 1;  // p, the ranks of one replica
  int replicas = 1;
  int rank = 0;

  int place() const { return rank / replicas; }
  int replica() const { return rank % replicas; }
  int rank_of(int place, int replica) const { return place * replicas + replica; }
};

/// World of `size` ranks as pipelines of --pp `pipeline` ranks; the rest of the ranks are replicas.
inline Grid make_grid(int size, int rank, int pipeline) {
  if (pipeline < 1 || pipeline > size || size % pipeline != 0) {
    int below = pipeline > size ? size : pipeline;
    while (below > 1 && size % below != 0) --below;
    user_error("--pp %d does not fit %d ranks; use --pp %d, or mpirun -np with a multiple of %d", pipeline, size,
               below < 1 ? 1 : below, pipeline < 1 ? 1 : pipeline);
  }
  return {pipeline, size / pipeline, rank};
}

/// Items [first, first + count) of `total` that fall to `part` of `parts`: contiguous, sizes differ by at most one.
struct Share {
  int first = 0;
  int count = 0;
};
inline Share contiguous_share(int total, int parts, int part) {
  const int base = total / parts, extra = total % parts;
  return {part * base + (part < extra ? part : extra), base + (part < extra ? 1 : 0)};
}

/// The same, cut where the halving tree of gradient_tree.h is cut: as long as `parts` is even, items and parts are
/// halved, the larger half of the items first. With 2, 4, 8, ... parts every share is a whole subtree.
inline Share tree_share(int total, int parts, int part) {
  Share share{0, total};
  for (; parts % 2 == 0; parts /= 2) {
    const int left = (share.count + 1) / 2;
    const bool goes_left = part < parts / 2;
    share.first += goes_left ? 0 : left;
    share.count = goes_left ? left : share.count - left;
    part -= goes_left ? 0 : parts / 2;
  }
  const Share rest = contiguous_share(share.count, parts, part);
  return {share.first + rest.first, rest.count};
}
