// The part of a rank that has joined in the other ranks' operations.
#pragma once

#include <memory>

#include "scheduler/operation.h"

namespace sparkhvd {

// The operation of a rank that contributes nothing to an agreed operation: the identity of the
// reduction, or no rows. It owns its buffers, which are always in the memory of the host, and has
// no waiter.
std::shared_ptr<Operation> SubstituteFor(const Request& agreed);

}  // namespace sparkhvd
