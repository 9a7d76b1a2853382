// The contribution of a joined rank to a reduction.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace sparkhvd {

// Fills `data` with the neutral element of `op`: 0 for a sum, 1 for a product, the highest value of
// the type (infinity or true) for a minimum and the lowest for a maximum.
void FillIdentity(DType dtype, ReduceOp op, std::byte* data, size_t count);

}  // namespace sparkhvd
