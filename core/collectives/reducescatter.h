// A reduction that gives every rank one slice of the result.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/arena_steps.h"
#include "collectives/reduction.h"
#include "collectives/slices.h"
#include "transport/transport.h"

namespace sparkhvd {

// Writes the elements of `slices[r]`, reduced over all ranks, to the `target` of rank r. The slices
// are in rank order and cover `source`, which stays unchanged and must not overlap the target.
// `scratch` is the caller's working memory; it grows as needed and should be reused.
// ScattersByHalving chooses the algorithm.
Status ReducescatterLinks(Transport& transport, const Reduction& reduction, const std::byte* source,
                          std::byte* target, const std::vector<Slice>& slices,
                          std::vector<std::byte>& scratch, Deadline deadline);

// Like ReducescatterLinks, but each with one fixed algorithm among n ranks: a ring in n - 1 rounds,
// or halving in about log2(n) rounds.
Status ReducescatterRing(Transport& transport, const Reduction& reduction, const std::byte* source,
                         std::byte* target, const std::vector<Slice>& slices,
                         std::vector<std::byte>& scratch, Deadline deadline);
Status ReducescatterHalving(Transport& transport, const Reduction& reduction,
                            const std::byte* source, std::byte* target,
                            const std::vector<Slice>& slices, std::vector<std::byte>& scratch,
                            Deadline deadline);

// Like ReducescatterLinks, among the members of an arena. `slices` is indexed by member.
Status ReducescatterShm(ArenaSteps& steps, const Reduction& reduction, const std::byte* source,
                        std::byte* target, const std::vector<Slice>& slices, Deadline deadline);

}  // namespace sparkhvd
