// Element types and reduction operators that collectives understand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace sparkhvd {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};
constexpr size_t kDTypeCount = static_cast<size_t>(DType::kFloat64) + 1;

enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct, kAdasum };
constexpr ReduceOp kLastReduceOp = ReduceOp::kAdasum;

size_t SizeOf(DType dtype);
const char* Name(DType dtype);
const char* Name(ReduceOp op);
std::optional<DType> ParseDType(std::string_view name);
std::optional<ReduceOp> ParseReduceOp(std::string_view name);

}  // namespace sparkhvd
