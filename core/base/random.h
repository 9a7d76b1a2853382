// Unpredictable random bytes.
#pragma once

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// Fills `out` from the kernel's generator.
Status FillRandom(Bytes out);

}  // namespace sparkhvd
