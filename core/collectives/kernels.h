// The arithmetic of reductions on contiguous elements, vectorized for the current processor.
//
// Pointers need no alignment. Integers wrap around. float16 and bfloat16 are computed in float32
// and rounded to nearest even after every step. A minimum or maximum with a NaN is NaN.
#pragma once

#include <array>
#include <cstddef>

#include "base/dtype.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// Computes target = left op right. `target` may be `left` or `right`, but must not overlap them
// otherwise.
using CombineKernel = void (*)(std::byte* target, const std::byte* left, const std::byte* right,
                               size_t count);
// Computes target = source * factor. `target` may be `source`.
using ScaleKernel = void (*)(std::byte* target, const std::byte* source, size_t count,
                             double factor);
// Divides integers by `divisor`, which is at least 2, in place. Truncates towards zero.
using DivideKernel = void (*)(std::byte* data, size_t count, int divisor);

constexpr size_t kCombineCount = 4;  // sum, minimum, maximum, product

struct KernelTable {
  const char* name = "";
  std::array<std::array<CombineKernel, kCombineCount>, kDTypeCount> combine{};
  std::array<ScaleKernel, kDTypeCount> scale{};
  std::array<DivideKernel, kDTypeCount>
      divide{};  // only of integers; submission rejects an average of bool
};

// Returns the kernels that run on every processor.
const KernelTable& GenericKernels();

// Returns the best table for this processor. The choice is made once.
const KernelTable& FastestKernels();

// Computes target = left op right. An average is summed here. Adasum is not elementwise and has no
// kernel.
void Combine(DType dtype, ReduceOp op, std::byte* target, const std::byte* left,
             const std::byte* right, size_t count);

// Computes target = source * reduction.prescale for every element. With a prescale of 1, only
// copies, or does nothing if `target` is `source`.
void CopyPrescaled(const Reduction& reduction, std::byte* target, const std::byte* source,
                   size_t count);

// Converts between float32 and a floating type of up to 32 bits.
void ToFloats(DType dtype, const std::byte* source, float* target, size_t count);
void FromFloats(DType dtype, const float* source, std::byte* target, size_t count);

// Turns the combined contributions of `ranks` ranks into the result in place: applies the average
// and postscale.
void Finish(const Reduction& reduction, int ranks, std::byte* data, size_t count);

}  // namespace sparkhvd
