// The two halves of the ring algorithms, over slices of any lengths.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/reduction.h"
#include "collectives/slices.h"
#include "transport/transport.h"

namespace sparkhvd {

// The data that moves around the ring: one slice of `data` per rank.
struct Ring {
  Transport& transport;
  const Reduction& reduction;
  std::byte* data;
  const std::vector<Slice>& slices;  // indexed by rank
  Deadline deadline;

  int size() const { return transport.size(); }
  int Neighbor(int distance) const { return (transport.rank() + distance + size()) % size(); }
  // Returns the slice `distance` positions after this rank's.
  Slice SliceAt(int distance) const { return slices[static_cast<size_t>(Neighbor(distance))]; }
  size_t width() const { return SizeOf(reduction.dtype); }
  Bytes View(Slice slice) const {
    return Bytes(data + slice.begin * width(), slice.count * width());
  }
};

// Combines the contributions of all ranks, without an average's division, until every rank's own
// slice is complete. The other slices hold partial results. `scratch` is the caller's working
// memory; it grows as needed and should be reused.
Status RingReduceScatter(const Ring& ring, std::vector<std::byte>& scratch);

// Copies every rank's slice to all other ranks.
Status RingGather(const Ring& ring);

}  // namespace sparkhvd
