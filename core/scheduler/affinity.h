// Pins threads to processor cores.
#pragma once

#include "base/status.h"

namespace sparkhvd {

// Pins the calling thread to `core`. kInvalidArgument where there is no such core, or this process
// may not use it.
Status PinThisThread(int core);

// Checks whether that works, without changing the calling thread.
Status CheckProcessorCore(int core);

}  // namespace sparkhvd
