// The reduction that an allreduce computes.
#pragma once

#include "base/dtype.h"

namespace sparkhvd {

// Multiplies every contribution by `prescale`, combines the contributions with `op`, and multiplies
// the result by `postscale`. An average is the sum divided by the number of ranks, truncated for
// integers. Scales of integers are applied in double and truncated. For bool, a sum is "or" and a
// product is "and". For Adasum, see adasum.h.
struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
};

}  // namespace sparkhvd
