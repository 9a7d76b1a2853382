// Reduction in which every rank gets one slice of the result.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"
#include "collectives/slices.h"
#include "transport/transport.h"

namespace sparkhvd {

// Rank r gets the elements of `slices[r]`, reduced over all ranks, in its `target`. The slices are
// in rank order and cover the `source`, which is not changed and must not overlap the target.
// `scratch` is working memory of the caller, which grows as needed and should be reused.
Status ReducescatterRing(Transport& transport, const Reduction& reduction, const std::byte* source,
                         std::byte* target, const std::vector<Slice>& slices,
                         std::vector<std::byte>& scratch, Deadline deadline);

// The same among the members of an arena; `slices` is by member.
Status ReducescatterShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                        std::byte* target, const std::vector<Slice>& slices, Deadline deadline);

}  // namespace sparkhvd
