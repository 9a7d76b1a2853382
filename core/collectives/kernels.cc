#include "collectives/kernels.h"

#include <algorithm>
#include <cstdint>

#include "base/copy.h"
#include "collectives/kernel_loops.h"

namespace sparkhvd {
namespace {

template <typename T>
struct Generic {
  template <typename Op>
  static void Combine(std::byte* target, const std::byte* left, const std::byte* right,
                      size_t count) {
    loops::CombineAll<T, Op>(target, left, right, count);
  }
  static void Scale(std::byte* target, const std::byte* source, size_t count, double factor) {
    loops::ScaleAll<T>(target, source, count, factor);
  }
  static void Divide(std::byte* data, size_t count, int divisor) {
    loops::DivideAll<T>(data, count, divisor);
  }
};

bool IsFloating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

void Scale(DType dtype, std::byte* target, const std::byte* source, size_t count, double factor) {
  FastestKernels().scale[static_cast<size_t>(dtype)](target, source, count, factor);
}

}  // namespace

const KernelTable& GenericKernels() {
  static const KernelTable table = loops::MakeTable<Generic>("generic");
  return table;
}

void Combine(DType dtype, ReduceOp op, std::byte* target, const std::byte* left,
             const std::byte* right, size_t count) {
  const auto& row = FastestKernels().combine[static_cast<size_t>(dtype)];
  row[loops::CombineIndex(op)](target, left, right, count);
}

void ToFloats(DType dtype, const std::byte* source, float* target, size_t count) {
  if (dtype == DType::kFloat32) {
    CopyBytes(target, source, count * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    for (size_t i = 0; i < count; ++i) target[i] = Widen(loops::Load<loops::Float16>(source, i));
  } else {
    for (size_t i = 0; i < count; ++i) target[i] = Widen(loops::Load<loops::BFloat16>(source, i));
  }
}

void FromFloats(DType dtype, const float* source, std::byte* target, size_t count) {
  if (dtype == DType::kFloat32) {
    CopyBytes(target, source, count * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    for (size_t i = 0; i < count; ++i) {
      loops::Store(target, i, loops::NarrowToFloat16(source[i]));
    }
  } else {
    for (size_t i = 0; i < count; ++i) {
      loops::Store(target, i, loops::NarrowToBFloat16(source[i]));
    }
  }
}

void CopyPrescaled(const Reduction& reduction, std::byte* target, const std::byte* source,
                   size_t count) {
  if (reduction.prescale != 1.0) {
    Scale(reduction.dtype, target, source, count, reduction.prescale);
  } else {
    CopyBytes(target, source, count * SizeOf(reduction.dtype));
  }
}

void Finish(const Reduction& reduction, int ranks, std::byte* data, size_t count) {
  double factor = reduction.postscale;
  if (reduction.op == ReduceOp::kAverage) {
    if (IsFloating(reduction.dtype)) {
      factor /= ranks;
    } else if (ranks > 1) {
      FastestKernels().divide[static_cast<size_t>(reduction.dtype)](data, count, ranks);
    }
  }
  if (factor != 1.0) Scale(reduction.dtype, data, data, count, factor);
}

}  // namespace sparkhvd
