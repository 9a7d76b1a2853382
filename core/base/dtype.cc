#include "base/dtype.h"

#include <array>
#include <string_view>

namespace sparkhvd {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;  // views a string literal
  size_t size;
};

// The index of a row is the value of its enumerator.
constexpr std::array<DTypeRow, kDTypeCount> kDTypes = {{
    {DType::kBool, "bool", 1},
    {DType::kUInt8, "uint8", 1},
    {DType::kInt8, "int8", 1},
    {DType::kUInt16, "uint16", 2},
    {DType::kInt16, "int16", 2},
    {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat64, "float64", 8},
}};

struct ReduceOpRow {
  ReduceOp op;
  std::string_view name;  // views a string literal
};

constexpr std::array<ReduceOpRow, 6> kReduceOps = {{
    {ReduceOp::kSum, "sum"},
    {ReduceOp::kAverage, "average"},
    {ReduceOp::kMin, "min"},
    {ReduceOp::kMax, "max"},
    {ReduceOp::kProduct, "product"},
    {ReduceOp::kAdasum, "adasum"},
}};

}  // namespace

size_t SizeOf(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < kDTypes.size() ? kDTypes[index].size : 0;
}

const char* Name(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < kDTypes.size() ? kDTypes[index].name.data() : "unknown";
}

const char* Name(ReduceOp op) {
  const auto index = static_cast<size_t>(op);
  return index < kReduceOps.size() ? kReduceOps[index].name.data() : "unknown";
}

std::optional<DType> ParseDType(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<ReduceOp> ParseReduceOp(std::string_view name) {
  for (const ReduceOpRow& row : kReduceOps) {
    if (name == row.name) return row.op;
  }
  return std::nullopt;
}

}  // namespace sparkhvd
