// Allgather among ranks of several hosts.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/hierarchy.h"
#include "transport/transport.h"

namespace sparkhvd {

// `lengths[r]` bytes come from rank r and stand in `target` in rank order; `source` is the own
// contribution. `steps` are those of the own group's arena, null where that is this rank alone.
Status AllgatherHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             ConstBytes source, const std::vector<size_t>& lengths, Bytes target,
                             Deadline deadline);

}  // namespace sparkhvd
