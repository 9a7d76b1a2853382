// Alltoall: every rank sends a part of its data to every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// The rows that a rank sends: `splits[r]` rows of `row_bytes` bytes to rank r, in the order of the
// ranks. No split is negative.
struct RowsToSend {
  ConstBytes data;
  const std::vector<int64_t>& splits;
  size_t row_bytes;
};

// Returns memory for `rows[s]` rows of every rank s, in the order of the ranks. Fails if a number
// is negative or there are too many rows. Called once.
using RowsTarget = std::function<Result<Bytes>(const std::vector<int64_t>& rows)>;

// A rank only knows how many rows it sends. It learns from each other rank how many it receives. No
// rank learns about rows between other ranks, so the cost of a rank grows with the number of ranks
// and not with its square. With rows of 0 bytes, ranks exchange only the numbers of rows. `scratch`
// is working memory that the caller may keep for the next call. MostBytesToRelay chooses the
// algorithm.
Status AlltoallLinks(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                     std::vector<std::byte>& scratch, Deadline deadline);

// Like AlltoallLinks, with a message to every rank.
Status AlltoallDirect(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                      std::vector<std::byte>& scratch, Deadline deadline);

// Like AlltoallLinks. The numbers of rows, and parts of up to `most_bytes` bytes, pass other ranks
// in log2(n) rounds among n ranks, rounded up. Longer parts are sent directly. `most_bytes` is
// equal on all ranks.
Status AlltoallBruck(Transport& transport, const RowsToSend& own, const RowsTarget& target_of,
                     size_t most_bytes, std::vector<std::byte>& scratch, Deadline deadline);

// The same among the members of an arena.
Status AlltoallShm(ArenaSteps& steps, const RowsToSend& own, const RowsTarget& target_of,
                   Deadline deadline);

// Returns how many bytes of rows AlltoallDirect sends in the same message as their number. A longer
// part follows in a second message.
size_t AlltoallShortBytes(int ranks);

}  // namespace sparkhvd
