// Alltoall: every rank sends a part of its data to every rank.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// Sends `lengths[s * size + r]` bytes from rank s to rank r. The sender's `source` is in the order
// of the receivers, and the receiver's `target` is in the order of the senders.
Status AlltoallPairwise(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                        Bytes target, Deadline deadline);

// Like AlltoallPairwise, among the members of an arena. `lengths` is indexed by member.
Status AlltoallShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                   Bytes target, Deadline deadline);

}  // namespace sparkhvd
