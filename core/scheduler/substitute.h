// How a joined rank takes part in the operations of other ranks.
#pragma once

#include <memory>

#include "scheduler/operation.h"

namespace sparkhvd {

// Returns the operation of a joined rank, which contributes nothing to an agreed operation: the
// identity of the reduction, or no rows. It owns its buffers, which are always in host memory, and
// has no waiter.
std::shared_ptr<Operation> SubstituteFor(const Request& agreed);

}  // namespace sparkhvd
