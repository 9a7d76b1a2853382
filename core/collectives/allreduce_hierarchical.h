// Allreduce among ranks of several hosts.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/hierarchy.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Reduces `count` elements of every rank; all ranks get the same bits. `target` may be `source`.
// `steps` are those of this group's arena, null for a group of one rank. `scratch` is working
// memory of the caller, which grows as needed and should be reused.
Status AllreduceHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             const Reduction& reduction, const std::byte* source, std::byte* target,
                             size_t count, std::vector<std::byte>& scratch, Deadline deadline);

}  // namespace sparkhvd
