// Broadcast across several hosts.
#pragma once

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/hierarchy.h"
#include "transport/transport.h"

namespace sparkhvd {

// Like BroadcastLinks. `steps` belongs to this group's arena and is null for a group of one rank.
Status BroadcastHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             int root, const std::byte* source, Bytes target, Deadline deadline);

}  // namespace sparkhvd
