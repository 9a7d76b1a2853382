// Every rank sends a part of its data to every rank.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// `lengths[s * size + r]` bytes go from rank s to rank r. The sender's `source` is in the order of
// the receivers, the receiver's `target` in the order of the senders.
Status AlltoallPairwise(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                        Bytes target, Deadline deadline);

// The same among the members of an arena; `lengths` is by member.
Status AlltoallShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                   Bytes target, Deadline deadline);

}  // namespace sparkhvd
