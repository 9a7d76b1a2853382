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
};

template <typename T>
void DivideAll(std::byte* data, size_t count, int divisor) {
  // int64_t is wide enough for every element type and for the number of ranks.
  for (size_t i = 0; i < count; ++i) {
    const int64_t value = static_cast<int64_t>(loops::Load<T>(data, i));
    loops::Store<T>(data, i, static_cast<T>(value / divisor));
  }
}

bool IsFloating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

void DivideIntegers(DType dtype, int divisor, std::byte* data, size_t count) {
  switch (dtype) {
    case DType::kUInt8:
      return DivideAll<uint8_t>(data, count, divisor);
    case DType::kInt8:
      return DivideAll<int8_t>(data, count, divisor);
    case DType::kUInt16:
      return DivideAll<uint16_t>(data, count, divisor);
    case DType::kInt16:
      return DivideAll<int16_t>(data, count, divisor);
    case DType::kInt32:
      return DivideAll<int32_t>(data, count, divisor);
    case DType::kInt64:
      return DivideAll<int64_t>(data, count, divisor);
    default:
      return;  // floating types are scaled instead; submission rejects an average of bool
  }
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
      DivideIntegers(reduction.dtype, ranks, data, count);
    }
  }
  if (factor != 1.0) Scale(reduction.dtype, data, data, count, factor);
}

}  // namespace sparkhvd
