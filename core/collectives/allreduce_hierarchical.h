// Allreduce across several hosts.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/hierarchy.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Reduces `count` elements of every rank. All ranks get bitwise identical results. `target` may be
// `source`. `steps` belongs to this group's arena and is null for a group of one rank. `scratch` is
// the caller's working memory; it grows as needed and should be reused.
Status AllreduceHierarchical(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                             const Reduction& reduction, const std::byte* source, std::byte* target,
                             size_t count, std::vector<std::byte>& scratch, Deadline deadline);

// The same in a number of parts, which is equal on all ranks. PartsToOverlap chooses it above.
Status AllreduceInParts(Transport& transport, ArenaSteps* steps, const Hierarchy& hierarchy,
                        const Reduction& reduction, const std::byte* source, std::byte* target,
                        size_t count, int parts, std::vector<std::byte>& scratch,
                        Deadline deadline);

}  // namespace sparkhvd
