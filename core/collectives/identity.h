// What a rank contributes to a reduction that has nothing to contribute.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace sparkhvd {

// Fills `data` with the element that leaves every other one as it is under `op`: 0 for a sum, 1 for
// a product, the highest value of the type (infinity, true) for a minimum, the lowest for a
// maximum.
void FillIdentity(DType dtype, ReduceOp op, std::byte* data, size_t count);

}  // namespace sparkhvd
