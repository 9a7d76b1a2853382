#include <cmath>
#include <limits>

#include "collectives/kernels.h"
#include "collectives/ranks.h"

namespace sparkhvd::testing {
namespace {

// An independent, slow conversion of a 16-bit float: arithmetic on sign, exponent and mantissa.
double FromHalfBits(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits) + (exponent == 0 ? 0.0 : 1.0);
  return sign * std::ldexp(fraction, (exponent == 0 ? 1 : exponent) - bias);
}

// Searches for the bits of a value, which the format must hold exactly.
uint16_t ToHalfBits(double value, int exponent_bits) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if (FromHalfBits(static_cast<uint16_t>(bits), exponent_bits) == value) {
      return static_cast<uint16_t>(bits);
    }
  }
  ADD_FAILURE() << value << " is not exact in 16 bits";
  return 0;
}

uint16_t SmallHalfBits(double value, int exponent_bits) {
  // The tests use few values: 0, +-1, +-2 and so on. They are computed directly, because
  // remembering them between calls would be state.
  if (value == 0) return 0;
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent) * 2 - 1;
  if (exponent - 1 + bias <= 0) return ToHalfBits(value, exponent_bits);
  const auto mantissa = static_cast<unsigned>(std::ldexp(fraction, mantissa_bits));
  const auto shifted = static_cast<unsigned>(exponent - 1 + bias) << mantissa_bits;
  return static_cast<uint16_t>((value < 0 ? 0x8000u : 0u) | shifted | mantissa);
}

template <typename T>
void Put(std::byte* data, size_t index, T value) {
  std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

template <typename T>
double Fetch(const std::byte* data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return static_cast<double>(value);
}

uint16_t FetchBits(const std::byte* data, size_t index) {
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, 2);
  return bits;
}

}  // namespace

void StoreElement(DType dtype, std::byte* data, size_t index, double value) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return Put(data, index, static_cast<uint8_t>(value));
    case DType::kInt8:
      return Put(data, index, static_cast<int8_t>(value));
    case DType::kInt16:
      return Put(data, index, static_cast<int16_t>(value));
    case DType::kUInt16:
      return Put(data, index, static_cast<uint16_t>(value));
    case DType::kInt32:
      return Put(data, index, static_cast<int32_t>(value));
    case DType::kInt64:
      return Put(data, index, static_cast<int64_t>(value));
    case DType::kFloat16:
      return Put(data, index, SmallHalfBits(value, 5));
    case DType::kBFloat16:
      return Put(data, index, SmallHalfBits(value, 8));
    case DType::kFloat32:
      return Put(data, index, static_cast<float>(value));
    case DType::kFloat64:
      return Put(data, index, value);
  }
}

double LoadElement(DType dtype, const std::byte* data, size_t index) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return Fetch<uint8_t>(data, index);
    case DType::kInt8:
      return Fetch<int8_t>(data, index);
    case DType::kInt16:
      return Fetch<int16_t>(data, index);
    case DType::kUInt16:
      return Fetch<uint16_t>(data, index);
    case DType::kInt32:
      return Fetch<int32_t>(data, index);
    case DType::kInt64:
      return Fetch<int64_t>(data, index);
    case DType::kFloat16:
      return FromHalfBits(FetchBits(data, index), 5);
    case DType::kBFloat16:
      return FromHalfBits(FetchBits(data, index), 8);
    case DType::kFloat32:
      return Fetch<float>(data, index);
    case DType::kFloat64:
      return Fetch<double>(data, index);
  }
  return 0;
}

}  // namespace sparkhvd::testing
