// Adaptive summation of gradients.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/transport.h"

namespace sparkhvd {

// Returns whether `dtype` is a floating-point type. Adaptive sums need one.
bool HasAdasum(DType dtype);

// Replaces `data` on every rank with the adaptive sum of all ranks' data. All ranks get the same
// bits. The data holds consecutive tensors of `lengths` elements. Each tensor is summed on its own,
// so the result does not depend on which tensors are fused. Computes in float64 for float64 data,
// and in float32 for all other types.
//
// The adaptive sum of two vectors is (1 - ab/2aa) a + (1 - ab/2bb) b: their sum if they are
// orthogonal, their mean if they are equal (Maleki and others, "Scaling Distributed Training with
// Adaptive Summation", MLSys 2021). More vectors are summed in a binary tree. With n ranks and p
// the largest power of two up to n, ranks r and p + r are paired first for every r below n - p.
// Then the p results are summed in pairs of neighbours, these sums again in pairs, and so on.
Status AdasumTree(Transport& transport, DType dtype, Span<const size_t> lengths, std::byte* data,
                  Deadline deadline);

}  // namespace sparkhvd
