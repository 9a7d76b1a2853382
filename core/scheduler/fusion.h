// Plans the fusion of ready operations. The plan is a pure function with the same result on all
// ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "scheduler/request.h"

namespace sparkhvd {

// Returns groups of indices into `ready`. An allreduce joins the latest group with the same
// reduction (dtype, operation, postscale) while the group's bytes stay within `threshold`. Every
// other operation is a group of its own. In device memory, fusion needs no copies, so all
// operations of a kind form one group. Groups are in the order of their first members.
std::vector<std::vector<size_t>> PlanFusion(const std::vector<const Request*>& ready,
                                            size_t threshold);

}  // namespace sparkhvd
