// Allgather across several hosts.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/hierarchy.h"
#include "transport/transport.h"

namespace sparkhvd {

// Gathers `lengths[r]` bytes from rank r into `target`, in rank order. `source` is this rank's
// contribution. `steps` belongs to this group's arena and is null for a group of one rank.
Status AllgatherHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             ConstBytes source, const std::vector<size_t>& lengths, Bytes target,
                             Deadline deadline);

}  // namespace sparkhvd
