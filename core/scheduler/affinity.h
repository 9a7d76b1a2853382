// Pins threads to processor cores.
#pragma once

#include "base/status.h"

namespace sparkhvd {

// Pins the calling thread to `core`. Fails with kInvalidArgument if there is no such core or this
// process may not use it.
Status PinThisThread(int core);

// Checks whether PinThisThread would work, without changing the calling thread.
Status CheckProcessorCore(int core);

}  // namespace sparkhvd
