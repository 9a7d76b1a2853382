// Unpredictable random bytes.
#pragma once

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// Fills `out` from the kernel's random number generator.
Status FillRandom(Bytes out);

}  // namespace sparkhvd
