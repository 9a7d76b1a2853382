// Which of the operations that are ready travel together: a pure decision that every rank makes
// alike.
#pragma once

#include <cstddef>
#include <vector>

#include "scheduler/request.h"

namespace sparkhvd {

// Groups of positions in `ready`. An allreduce joins the latest group that computes the same
// (dtype, operation, postscale) while the group's bytes stay within `threshold`; every other
// operation is a group of its own. In the memory of devices nothing is copied to travel together:
// there all operations of a kind are one group. Groups are in the order of their first members.
std::vector<std::vector<size_t>> PlanFusion(const std::vector<const Request*>& ready,
                                            size_t threshold);

}  // namespace sparkhvd
