// Ranks as threads of one process.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "base/thorough.h"
#include "transport/mesh.h"

namespace sparkhvd::testing {

// Runs `body(rank, mesh)` on one thread per mesh and returns the results.
inline std::vector<Status> OnEveryRank(std::vector<Mesh>& meshes,
                                       const std::function<Status(int, Mesh&)>& body) {
  std::vector<Status> statuses(meshes.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < meshes.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { statuses[rank] = body(static_cast<int>(rank), meshes[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

inline void ExpectAllOk(const std::vector<Status>& statuses) {
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    EXPECT_TRUE(statuses[rank].ok()) << "rank " << rank << ": " << statuses[rank].message();
  }
}

inline Deadline Soon() { return Deadline::AfterSeconds(30); }

// Stores and loads elements as doubles, so that one oracle serves all dtypes. Values stay small
// enough to be exact in every dtype.
void StoreElement(DType dtype, std::byte* data, size_t index, double value);
double LoadElement(DType dtype, const std::byte* data, size_t index);

// Repeats the first `period` bytes over `size` bytes. A sanitizer checks the bytes that this copies
// and `SameBytes` compares as a whole, which takes a fraction of the time of a loop over elements.
inline void Repeat(std::byte* data, size_t period, size_t size) {
  for (size_t done = period; done < size; done *= 2) {
    std::memcpy(data + done, data, std::min(done, size - done));
  }
}

inline bool SameBytes(ConstBytes one, ConstBytes other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

// Memory for `count` elements that begins `misalignment` bytes after an aligned address.
class Elements {
 public:
  Elements(DType dtype, size_t count, size_t misalignment = 0)
      : dtype_(dtype), count_(count), offset_(misalignment), bytes_(count * SizeOf(dtype) + 64) {}
  std::byte* data() { return bytes_.data() + offset_; }
  size_t count() const { return count_; }
  size_t size_bytes() const { return count_ * SizeOf(dtype_); }
  void Set(size_t index, double value) { StoreElement(dtype_, data(), index, value); }
  double Get(size_t index) { return LoadElement(dtype_, data(), index); }
  // Sets every element to `value(index)`, which must repeat after kPeriod elements.
  template <typename Value>
  void Fill(Value value) {
    for (size_t i = 0; i < std::min(count_, kPeriod); ++i) Set(i, value(i));
    Repeat(data(), kPeriod * SizeOf(dtype_), size_bytes());
  }
  // Returns the first element that is not `value(index)`, which must repeat as for `Fill`.
  template <typename Value>
  std::optional<size_t> FirstOtherThan(Value value) {
    Elements expected(dtype_, count_);
    expected.Fill(value);
    if (std::memcmp(data(), expected.data(), size_bytes()) == 0) return std::nullopt;
    for (size_t i = 0; i < count_; ++i) {
      if (Get(i) != expected.Get(i)) return i;
    }
    return std::nullopt;  // zeros of different signs
  }

 private:
  static constexpr size_t kPeriod = 5;  // of the contributions

  DType dtype_;
  size_t count_;
  size_t offset_;
  std::vector<std::byte> bytes_;
};

inline constexpr DType kEveryDType[] = {DType::kBool,    DType::kUInt8,   DType::kInt8,
                                        DType::kUInt16,  DType::kInt16,   DType::kInt32,
                                        DType::kInt64,   DType::kFloat16, DType::kBFloat16,
                                        DType::kFloat32, DType::kFloat64};
inline constexpr ReduceOp kEveryOp[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                        ReduceOp::kMax, ReduceOp::kProduct};

// Returns the types to reduce on whole jobs; the tests of the kernels reduce every type.
inline std::vector<DType> DTypesToReduce() {
  if (!Thorough()) return {DType::kInt8, DType::kBFloat16, DType::kFloat32};
  return {std::begin(kEveryDType), std::end(kEveryDType)};
}

// Returns the numbers of ranks to try: powers of two, and others.
inline std::vector<int> SizesToTry() {
  return Thorough() ? std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8} : std::vector<int>{1, 2, 3, 5, 7, 8};
}

// Returns the contribution of `rank` at `index`. It is small, so that every dtype holds sums and
// products of eight ranks exactly.
inline double Contribution(DType dtype, ReduceOp op, int rank, size_t index) {
  const auto seed = static_cast<int>((index * 7 + static_cast<size_t>(rank) * 3) % 5);
  if (dtype == DType::kBool) return seed < 2 ? 1 : 0;
  if (op == ReduceOp::kProduct) return rank % 4 == 0 ? 2 : 1;
  return dtype == DType::kUInt8 || dtype == DType::kUInt16 ? seed : seed - 2;
}

// The scalar oracle.
inline double Expected(DType dtype, ReduceOp op, int size, size_t index) {
  double result = Contribution(dtype, op, 0, index);
  for (int rank = 1; rank < size; ++rank) {
    const double value = Contribution(dtype, op, rank, index);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        result = dtype == DType::kBool ? std::max(result, value) : result + value;
        break;
      case ReduceOp::kMin:
        result = std::min(result, value);
        break;
      case ReduceOp::kMax:
        result = std::max(result, value);
        break;
      case ReduceOp::kProduct:
        result *= value;
        break;
      case ReduceOp::kAdasum:  // not elementwise
        break;
    }
  }
  return result;
}

}  // namespace sparkhvd::testing
