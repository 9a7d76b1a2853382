// Adaptive summation of gradients.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/transport.h"

namespace sparkhvd {

// Whether adaptive sums are defined for a type: the floating ones.
bool HasAdasum(DType dtype);

// Replaces `data` on every rank by the adaptive sum of what the ranks hold; all ranks get the same
// bits. The data are tensors of `lengths` elements one after the other, each of which is summed by
// itself: which tensors travel together makes no difference. Computed in float32, or in float64 for
// that type.
//
// The adaptive sum of two vectors is (1 - ab/2aa) a + (1 - ab/2bb) b: their sum where they are
// orthogonal, their mean where they are equal (Maleki and others, "Scaling Distributed Training
// with Adaptive Summation", MLSys 2021). More vectors are summed in a binary tree. With n ranks and
// p the largest power of two up to n, ranks r and p + r are paired first, as long as there is such
// a rank; then the p results pair neighbours, pairs of neighbours and so on.
Status AdasumTree(Transport& transport, DType dtype, Span<const size_t> lengths, std::byte* data,
                  Deadline deadline);

}  // namespace sparkhvd
