// Alltoall: every rank sends a part of its data to every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// The part of a sender's data for one receiver: `count` of its `total` rows (or bytes), from
// `begin` on.
struct Section {
  size_t begin = 0;
  size_t count = 0;
  size_t total = 0;
};

// Returns the parts of consecutive rows, by receiver. No split is negative.
std::vector<Section> SectionsOf(const std::vector<int64_t>& splits);

// Returns the counts of parts of rows.
std::vector<int64_t> RowsOf(const std::vector<Section>& sections);

// Tells every rank the part for it. Returns the sections for this rank, by sender. No rank learns
// of sections between others, so that the cost of a rank grows with the number of ranks and not
// with its square.
Result<std::vector<Section>> ExchangeSections(Transport& transport,
                                              const std::vector<Section>& sections,
                                              Deadline deadline);
Result<std::vector<Section>> ExchangeSections(ArenaSteps& steps,
                                              const std::vector<Section>& sections,
                                              Deadline deadline);

// Sends `sent[r]` bytes to rank r and receives `received[s]` bytes from rank s. `source` is in the
// order of the receivers, and `target` is in the order of the senders.
Status AlltoallPairwise(Transport& transport, ConstBytes source, const std::vector<size_t>& sent,
                        Bytes target, const std::vector<size_t>& received, Deadline deadline);

// Like AlltoallPairwise, among the members of an arena. `received` holds parts of the senders'
// bytes.
Status AlltoallShm(ArenaSteps& steps, ConstBytes source, Bytes target,
                   const std::vector<Section>& received, Deadline deadline);

}  // namespace sparkhvd
