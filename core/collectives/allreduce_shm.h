// Allreduce among the members of an arena.
#pragma once

#include "base/deadline.h"
#include "base/span.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// Contributions of up to this many bytes need one step only: everybody shows its own and combines
// all of them.
size_t SmallAllreduceBytes(const ArenaSteps& steps);

// Reduces `count` elements of every member; all members get the same bits. `target` may be
// `source`.
Status AllreduceShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                    std::byte* target, size_t count, Deadline deadline);

}  // namespace sparkhvd
