// Allreduce of medium data, for which a ring takes too many steps and doubling moves too many
// bytes.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Like AllreduceRingInPlace, in about 2 * log2 of the number of ranks rounds.
Status AllreduceHalvingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                               std::byte* data, size_t count, std::vector<std::byte>& scratch,
                               Deadline deadline);

}  // namespace sparkhvd
