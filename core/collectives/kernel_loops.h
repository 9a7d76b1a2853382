// The loops of the kernel tables. Every function is inlined into a caller that is compiled for one
// instruction set, and is vectorized for that set. Only such callers may use these functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/dtype.h"
#include "collectives/kernels.h"

namespace sparkhvd::loops {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Boolean {
  uint8_t value;
};

template <typename To, typename From>
[[gnu::always_inline]] inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A float16 is a float32 with a shorter mantissa and an exponent whose bias is smaller by 112.
// Shifted into position and multiplied by 2^112, it has the right value, even for subnormal
// numbers. Only infinity and NaN need their exponent set.
[[gnu::always_inline]] inline float Widen(Float16 half) {
  const uint32_t magnitude = static_cast<uint32_t>(half.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t special = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0u;
  const float scaled = BitCast<float>(magnitude) * 0x1p112f;
  return BitCast<float>(BitCast<uint32_t>(scaled) | special | sign);
}

// Rounds to nearest even. Below 2^-14, adding 0.5 does the rounding: the last bit of a float32 near
// 0.5 is worth 2^-24, like the last bit of a subnormal float16.
[[gnu::always_inline]] inline Float16 NarrowToFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal =
      BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - BitCast<uint32_t>(0.5f);
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? nan : result;
  return Float16{static_cast<uint16_t>(result | sign)};
}

[[gnu::always_inline]] inline float Widen(BFloat16 value) {
  return BitCast<float>(static_cast<uint32_t>(value.bits) << 16);
}

[[gnu::always_inline]] inline BFloat16 NarrowToBFloat16(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return BFloat16{static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// The type in which a dtype is computed. Integers are unsigned, so that they wrap around, and at
// least 32 bits wide, so that promotion to int cannot overflow.
template <typename T>
using Wrapping = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;

struct Sum {
  static constexpr ReduceOp kOp = ReduceOp::kSum;
  template <typename T>
  [[gnu::always_inline]] static inline T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
  [[gnu::always_inline]] static inline Boolean Apply(Boolean a, Boolean b) {
    return Boolean{static_cast<uint8_t>((a.value | b.value) != 0)};
  }
};

struct Product {
  static constexpr ReduceOp kOp = ReduceOp::kProduct;
  template <typename T>
  [[gnu::always_inline]] static inline T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
  [[gnu::always_inline]] static inline Boolean Apply(Boolean a, Boolean b) {
    return Boolean{static_cast<uint8_t>((a.value != 0) & (b.value != 0))};
  }
};

struct Min {
  static constexpr ReduceOp kOp = ReduceOp::kMin;
  template <typename T>
  [[gnu::always_inline]] static inline T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return a < b ? a : b;
    } else {
      return ((a < b) | (a != a)) ? a : b;
    }
  }
  [[gnu::always_inline]] static inline Boolean Apply(Boolean a, Boolean b) {
    return Product::Apply(a, b);
  }
};

struct Max {
  static constexpr ReduceOp kOp = ReduceOp::kMax;
  template <typename T>
  [[gnu::always_inline]] static inline T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return a > b ? a : b;
    } else {
      return ((a > b) | (a != a)) ? a : b;
    }
  }
  [[gnu::always_inline]] static inline Boolean Apply(Boolean a, Boolean b) {
    return Sum::Apply(a, b);
  }
};

template <typename Op, typename T>
[[gnu::always_inline]] inline T CombineOne(T a, T b) {
  if constexpr (std::is_same_v<T, Float16>) {
    return NarrowToFloat16(Op::Apply(Widen(a), Widen(b)));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return NarrowToBFloat16(Op::Apply(Widen(a), Widen(b)));
  } else {
    return Op::Apply(a, b);
  }
}

// Truncates towards zero. An out-of-range value becomes the nearest representable value, NaN
// becomes 0.
template <typename T>
[[gnu::always_inline]] inline T Truncate(double value) {
  constexpr double kLow = static_cast<double>(std::numeric_limits<T>::min());
  constexpr double kHigh =
      sizeof(T) == 8 ? 0x1p63 : static_cast<double>(std::numeric_limits<T>::max());
  if (value != value) return 0;
  if (value >= kHigh) return std::numeric_limits<T>::max();
  if (value <= kLow) return std::numeric_limits<T>::min();
  return static_cast<T>(value);
}

template <typename T>
[[gnu::always_inline]] inline T ScaleOne(T value, double factor) {
  if constexpr (std::is_same_v<T, Float16>) {
    return NarrowToFloat16(Widen(value) * static_cast<float>(factor));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return NarrowToBFloat16(Widen(value) * static_cast<float>(factor));
  } else if constexpr (std::is_same_v<T, float>) {
    return value * static_cast<float>(factor);
  } else if constexpr (std::is_same_v<T, double>) {
    return value * factor;
  } else if constexpr (std::is_same_v<T, Boolean>) {
    return value;
  } else {
    return Truncate<T>(static_cast<double>(value) * factor);
  }
}

// Returns 1 / divisor, rounded to a slightly larger number of type F. For every integer n whose
// magnitude is below 2^(P - 3), where P is the precision of F, n * Reciprocal<F>(d) truncates to
// n / d, in every rounding mode: a multiple of d cannot come out too small, and the relative error
// is below 2^(3 - P), too small to reach the next integer, which is at least 1 / d away.
template <typename F>
[[gnu::always_inline]] inline F Reciprocal(int divisor) {
  const double larger = BitCast<double>(BitCast<uint64_t>(1.0 / divisor) + 1);
  if constexpr (std::is_same_v<F, double>) {
    return larger;
  } else {
    return BitCast<float>(BitCast<uint32_t>(static_cast<float>(larger)) + 1);
  }
}

// Divides integers of 64 bits by an invariant integer from 2 on: multiplies by 2^(63 + L) /
// divisor, rounded up, where 2^L is the smallest power of two that is not below the divisor
// (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994,
// theorem 4.2).
class WideDivisor {
 public:
  explicit WideDivisor(int divisor) {
    const auto number = static_cast<uint64_t>(divisor);
    while (uint64_t{2} << shift_ < number) ++shift_;
    factor_ = static_cast<uint64_t>((Wide{1} << (64 + shift_)) / number + 1);
  }
  [[gnu::always_inline]] inline int64_t Divide(int64_t value) const {
    const uint64_t sign = value < 0 ? ~uint64_t{0} : 0;
    const uint64_t magnitude = (static_cast<uint64_t>(value) ^ sign) - sign;
    const auto upper = static_cast<uint64_t>((Wide{magnitude} * factor_) >> 64);
    return static_cast<int64_t>(((upper >> shift_) ^ sign) - sign);
  }

 private:
  using Wide = unsigned __int128;
  int shift_ = 0;
  uint64_t factor_ = 0;
};

template <typename T>
[[gnu::always_inline]] inline T Load(const std::byte* data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
[[gnu::always_inline]] inline void Store(std::byte* data, size_t index, T value) {
  std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

// The pragmas state that the iterations are independent. `target` may be one of the inputs, because
// every iteration reads and writes the same index.
template <typename T, typename Op>
[[gnu::always_inline]] inline void CombineAll(std::byte* target, const std::byte* left,
                                              const std::byte* right, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    Store<T>(target, i, CombineOne<Op>(Load<T>(left, i), Load<T>(right, i)));
  }
}

template <typename T>
[[gnu::always_inline]] inline void ScaleAll(std::byte* target, const std::byte* source,
                                            size_t count, double factor) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    Store<T>(target, i, ScaleOne<T>(Load<T>(source, i), factor));
  }
}

// Uses no instruction for the division of integers, because none works on vectors.
template <typename T>
[[gnu::always_inline]] inline void DivideAll(std::byte* data, size_t count, int divisor) {
  if constexpr (sizeof(T) == 8) {
    const WideDivisor invariant(divisor);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) Store<T>(data, i, invariant.Divide(Load<T>(data, i)));
  } else {
    using F = std::conditional_t<(sizeof(T) < 4), float, double>;
    const F factor = Reciprocal<F>(divisor);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
      const F quotient = static_cast<F>(Load<T>(data, i)) * factor;
      Store<T>(data, i, static_cast<T>(static_cast<int32_t>(quotient)));
    }
  }
}

// Returns the row of an operator's kernel in a table.
constexpr size_t CombineIndex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return 0;
    case ReduceOp::kMin:
      return 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kProduct:
      return 3;
    case ReduceOp::kAdasum:  // has no elementwise kernel
      break;
  }
  return 0;
}

// Fills a table from a class template `Kernels<T>` with the static functions Combine<Op>, Scale and
// Divide.
template <template <typename> class Kernels, typename T>
void FillRow(KernelTable& table, DType dtype) {
  auto& row = table.combine[static_cast<size_t>(dtype)];
  row[CombineIndex(ReduceOp::kSum)] = &Kernels<T>::template Combine<Sum>;
  row[CombineIndex(ReduceOp::kMin)] = &Kernels<T>::template Combine<Min>;
  row[CombineIndex(ReduceOp::kMax)] = &Kernels<T>::template Combine<Max>;
  row[CombineIndex(ReduceOp::kProduct)] = &Kernels<T>::template Combine<Product>;
  table.scale[static_cast<size_t>(dtype)] = &Kernels<T>::Scale;
  if constexpr (std::is_integral_v<T>) {
    table.divide[static_cast<size_t>(dtype)] = &Kernels<T>::Divide;
  }
}

template <template <typename> class Kernels>
KernelTable MakeTable(const char* name) {
  KernelTable table;
  table.name = name;
  FillRow<Kernels, Boolean>(table, DType::kBool);
  FillRow<Kernels, uint8_t>(table, DType::kUInt8);
  FillRow<Kernels, int8_t>(table, DType::kInt8);
  FillRow<Kernels, uint16_t>(table, DType::kUInt16);
  FillRow<Kernels, int16_t>(table, DType::kInt16);
  FillRow<Kernels, int32_t>(table, DType::kInt32);
  FillRow<Kernels, int64_t>(table, DType::kInt64);
  FillRow<Kernels, Float16>(table, DType::kFloat16);
  FillRow<Kernels, BFloat16>(table, DType::kBFloat16);
  FillRow<Kernels, float>(table, DType::kFloat32);
  FillRow<Kernels, double>(table, DType::kFloat64);
  return table;
}

}  // namespace sparkhvd::loops
