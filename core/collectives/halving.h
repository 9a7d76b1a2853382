// The two halves of Rabenseifner's algorithm, over slices of any lengths.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/participants.h"
#include "collectives/reduction.h"
#include "collectives/slices.h"
#include "transport/transport.h"

namespace sparkhvd {

// The data of one participant, in one slice per participant. Participant p completes the slice at
// index participants.Reversed(p).
struct Halving {
  Transport& transport;
  const Reduction& reduction;
  const Participants& participants;
  std::byte* data;
  const std::vector<Slice>& slices;  // contiguous and in order
  Deadline deadline;

  int number() const { return participants.NumberOf(transport.rank()); }
  size_t width() const { return SizeOf(reduction.dtype); }
  // Returns the memory of `length` slices, from slice `begin` on.
  Bytes View(int begin, int length) const {
    const size_t first = slices[static_cast<size_t>(begin)].begin;
    const Slice& last = slices[static_cast<size_t>(begin + length - 1)];
    return Bytes(data + first * width(), (last.begin + last.count - first) * width());
  }
};

// Combines the contributions of all participants, without an average's division, until every
// participant's own slice is complete. The other slices hold partial results. `received` has room
// for as many bytes as the data.
Status HalvingReduceScatter(const Halving& halving, std::byte* received);

// Copies every participant's slice to all other participants.
Status HalvingGather(const Halving& halving);

}  // namespace sparkhvd
