// Which processor core a thread runs on.
#pragma once

#include "base/status.h"

namespace sparkhvd {

// Lets the calling thread run on `core` alone. kInvalidArgument where there is no such core, or
// none that this process may use.
Status PinThisThread(int core);

// Whether that would work, found out without changing the calling thread.
Status CheckProcessorCore(int core);

}  // namespace sparkhvd
