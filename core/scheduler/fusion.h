// The fusion of ready operations: a pure decision, equal on all ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "scheduler/request.h"

namespace sparkhvd {

// Groups of positions in `ready`. An allreduce joins the latest group with the same reduction
// (dtype, operation, postscale) while the group's bytes stay within `threshold`; every other
// operation is a group of its own. In the memory of devices fusing needs no copies: there all
// operations of a kind are one group. Groups are in the order of their first members.
std::vector<std::vector<size_t>> PlanFusion(const std::vector<const Request*>& ready,
                                            size_t threshold);

}  // namespace sparkhvd
