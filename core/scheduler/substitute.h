// How a rank that has joined takes part in what the others still do.
#pragma once

#include <memory>

#include "scheduler/operation.h"

namespace sparkhvd {

// The operation of a rank that has nothing to contribute to what the others agreed on: the identity
// of the reduction, or no rows. It owns its buffers, in the memory of the
// host in any case, and nobody waits for it.
std::shared_ptr<Operation> SubstituteFor(const Request& agreed);

}  // namespace sparkhvd
