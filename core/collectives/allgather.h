// Allgather of contributions of different lengths.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// Gathers `lengths[r]` bytes from rank r into `target`, in rank order. `source` is this rank's
// contribution.
Status AllgatherRing(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                     Bytes target, Deadline deadline);

// Like AllgatherRing, but takes log2(n) rounds among n ranks, rounded up.
Status AllgatherDoubling(Transport& transport, ConstBytes source,
                         const std::vector<size_t>& lengths, Bytes target, Deadline deadline);

// Like AllgatherRing, but chooses the algorithm by the lengths.
Status AllgatherLinks(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                      Bytes target, Deadline deadline);

// Like AllgatherRing, among the members of an arena. `lengths` is indexed by member.
Status AllgatherShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                    Bytes target, Deadline deadline);

}  // namespace sparkhvd
