#include "collectives/identity.h"

#include <cstdint>
#include <cstring>
#include <limits>

namespace sparkhvd {
namespace {

template <typename T>
void FillAll(std::byte* data, size_t count, T value) {
  for (size_t i = 0; i < count; ++i) std::memcpy(data + i * sizeof(T), &value, sizeof(T));
}

// The neutral elements of the operators for one element type.
template <typename T>
struct Identities {
  T one;
  T highest;
  T lowest;
};

template <typename T>
void Fill(ReduceOp op, std::byte* data, size_t count, const Identities<T>& identities) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:
      return FillAll(data, count, T{});
    case ReduceOp::kMin:
      return FillAll(data, count, identities.highest);
    case ReduceOp::kMax:
      return FillAll(data, count, identities.lowest);
    case ReduceOp::kProduct:
      return FillAll(data, count, identities.one);
  }
}

template <typename T>
void FillNumbers(ReduceOp op, std::byte* data, size_t count) {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity) {
    Fill<T>(op, data, count, {T{1}, Limits::infinity(), -Limits::infinity()});
  } else {
    Fill<T>(op, data, count, {T{1}, Limits::max(), Limits::min()});
  }
}

}  // namespace

void FillIdentity(DType dtype, ReduceOp op, std::byte* data, size_t count) {
  switch (dtype) {
    case DType::kBool:
      return Fill<uint8_t>(op, data, count, {1, 1, 0});
    case DType::kUInt8:
      return FillNumbers<uint8_t>(op, data, count);
    case DType::kInt8:
      return FillNumbers<int8_t>(op, data, count);
    case DType::kUInt16:
      return FillNumbers<uint16_t>(op, data, count);
    case DType::kInt16:
      return FillNumbers<int16_t>(op, data, count);
    case DType::kInt32:
      return FillNumbers<int32_t>(op, data, count);
    case DType::kInt64:
      return FillNumbers<int64_t>(op, data, count);
    case DType::kFloat16:
      return Fill<uint16_t>(op, data, count, {0x3c00, 0x7c00, 0xfc00});
    case DType::kBFloat16:
      return Fill<uint16_t>(op, data, count, {0x3f80, 0x7f80, 0xff80});
    case DType::kFloat32:
      return FillNumbers<float>(op, data, count);
    case DType::kFloat64:
      return FillNumbers<double>(op, data, count);
  }
}

}  // namespace sparkhvd
