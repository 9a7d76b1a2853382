// Allgather of contributions that may differ in length.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "transport/transport.h"

namespace sparkhvd {

// `lengths[r]` bytes come from rank r and stand in `target` in rank order; `source` is the own
// contribution.
Status AllgatherRing(Transport& transport, ConstBytes source, const std::vector<size_t>& lengths,
                     Bytes target, Deadline deadline);

// The same among the members of an arena; `lengths` is by member.
Status AllgatherShm(ArenaSteps& steps, ConstBytes source, const std::vector<size_t>& lengths,
                    Bytes target, Deadline deadline);

}  // namespace sparkhvd
