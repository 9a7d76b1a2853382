// Adaptive summation of gradients.
#pragma once

#include <cstddef>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/span.h"
#include "base/status.h"
#include "transport/transport.h"

namespace sparkhvd {

// Returns whether adaptive sums support `dtype`. They need a floating-point type.
bool SupportsAdasum(DType dtype);

// Replaces `data` on every rank with the adaptive sum of all ranks' data. The results of all ranks
// are bitwise identical. The data holds consecutive tensors of `lengths` elements. Each tensor is
// summed separately, so fusion does not change the result beyond rounding. Computes in float64 for
// float64 data, and in float32 for all other types.
//
// The adaptive sum of two vectors is (1 - ab / (2 aa)) a + (1 - ab / (2 bb)) b, where ab, aa and bb
// are dot products. This is their sum if they are orthogonal, and their mean if they are equal
// (Maleki and others, "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More
// vectors are summed in a binary tree. Let p be the largest power of two up to the number n of
// ranks. First, ranks r and p + r are paired for every r below n - p. Then the p results are summed
// in pairs of neighbors, these sums again in pairs, and so on.
Status AdasumTree(Transport& transport, DType dtype, Span<const size_t> lengths, std::byte* data,
                  Deadline deadline);

}  // namespace sparkhvd
