// The arithmetic of reductions on contiguous elements, vectorised for the processor that runs it.
//
// Pointers need no alignment. Integers wrap around, float16 and bfloat16 are computed in float32
// and rounded to nearest even after every step, a NaN on either side of a minimum or maximum is the
// result.
#pragma once

#include <array>
#include <cstddef>

#include "base/dtype.h"
#include "collectives/reduction.h"

namespace sparkhvd {

// target = left op right. `target` may be `left` or `right`, but not overlap them otherwise.
using CombineKernel = void (*)(std::byte* target, const std::byte* left, const std::byte* right,
                               size_t count);
// target = source * factor. `target` may be `source`.
using ScaleKernel = void (*)(std::byte* target, const std::byte* source, size_t count,
                             double factor);

constexpr size_t kCombineCount = 4;  // sum, min, max, product

struct KernelTable {
  const char* name = "";
  std::array<std::array<CombineKernel, kCombineCount>, kDTypeCount> combine{};
  std::array<ScaleKernel, kDTypeCount> scale{};
};

// Runs everywhere.
const KernelTable& GenericKernels();

// The best table for this processor, chosen once.
const KernelTable& FastestKernels();

// target = left op right; an average is summed here. Not for Adasum, which is not elementwise.
void Combine(DType dtype, ReduceOp op, std::byte* target, const std::byte* left,
             const std::byte* right, size_t count);

// target = source * reduction.prescale, element by element; a plain copy (or nothing) for a
// prescale of 1.
void CopyPrescaled(const Reduction& reduction, std::byte* target, const std::byte* source,
                   size_t count);

// Converts between a floating type of up to 32 bits and float32.
void ToFloats(DType dtype, const std::byte* source, float* target, size_t count);
void FromFloats(DType dtype, const float* source, std::byte* target, size_t count);

// Turns combined contributions of `ranks` ranks into the result, in place: average and postscale.
void Finish(const Reduction& reduction, int ranks, std::byte* data, size_t count);

}  // namespace sparkhvd
