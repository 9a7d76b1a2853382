// Allreduce of small data in few rounds.
#pragma once

#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "collectives/reduction.h"
#include "transport/transport.h"

namespace sparkhvd {

// Like AllreduceRingInPlace, in about log2 of the number of ranks rounds, each of which exchanges
// all of the data.
Status AllreduceDoublingInPlace(Transport& transport, const Reduction& reduction, int ranks,
                                std::byte* data, size_t count, std::vector<std::byte>& scratch,
                                Deadline deadline);

}  // namespace sparkhvd
