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

// Like AllgatherRing, in log2 of the number of ranks rounds.
Status AllgatherDoubling(Transport& transport, ConstBytes source,
                         const std::vector<size_t>& lengths, Bytes target, Deadline deadline);

// Like AllgatherRing, by the algorithm that suits the lengths.
Status AllgatherLinks(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                      Bytes target, Deadline deadline);

// Like AllgatherRing, among the members of an arena. `lengths` is indexed by member.
Status AllgatherShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                    Bytes target, Deadline deadline);

}  // namespace sparkhvd
