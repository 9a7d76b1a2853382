// The reduction that an allreduce computes.
#pragma once

#include "base/dtype.h"

namespace sparkhvd {

// Every contribution is multiplied by `prescale`, the contributions are combined with `op`, and the
// result is multiplied by `postscale`. An average is the sum, divided by the number of ranks:
// integers by truncating division. Scales of integers are applied in double and truncated. bool:
// sum is "or", product is "and". Adasum: see adasum.h.
struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
};

}  // namespace sparkhvd
