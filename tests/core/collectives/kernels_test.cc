#include "collectives/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "collectives/kernel_loops.h"
#include "collectives/ranks.h"

namespace sparkhvd {
namespace {

using testing::Elements;
using testing::LoadElement;

TEST(Kernels, CombineEveryDTypeAndOperatorLikeTheScalarOracleAtEveryAlignment) {
  for (const DType dtype : testing::kEveryDType) {
    for (const ReduceOp op : testing::kEveryOp) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{31}, size_t{1027}}) {
        for (const size_t misalignment : {size_t{0}, size_t{1}, size_t{3}}) {
          Elements left(dtype, count, misalignment);
          Elements right(dtype, count, misalignment + 1);
          for (size_t i = 0; i < count; ++i) {
            left.Set(i, testing::Contribution(dtype, op, 0, i));
            right.Set(i, testing::Contribution(dtype, op, 1, i));
          }
          Combine(dtype, op, left.data(), left.data(), right.data(), count);
          for (size_t i = 0; i < count; ++i) {
            ASSERT_EQ(left.Get(i), testing::Expected(dtype, op, 2, i))
                << Name(dtype) << " " << Name(op) << " element " << i << " of " << count;
          }
        }
      }
    }
  }
}

TEST(Kernels, FastestGivesTheSameBitsAsGenericForEveryPairOfHalves) {
  if (!Thorough()) GTEST_SKIP() << "a single thread";
  // Combines every float16 and bfloat16 with a few partners: normal, subnormal, infinite and NaN.
  constexpr uint16_t kPartners[] = {0x0000, 0x0001, 0x03ff, 0x3c00, 0x3c01,
                                    0xbc00, 0x7bff, 0x7c00, 0x7e01, 0x4248};
  std::vector<uint16_t> all(0x10000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (size_t op = 0; op < kCombineCount; ++op) {
      for (const uint16_t partner : kPartners) {
        const std::vector<uint16_t> others(all.size(), partner);
        std::vector<uint16_t> fast(all.size());
        std::vector<uint16_t> generic(all.size());
        const auto index = static_cast<size_t>(dtype);
        const auto* left = reinterpret_cast<const std::byte*>(all.data());
        const auto* right = reinterpret_cast<const std::byte*>(others.data());
        FastestKernels().combine[index][op](reinterpret_cast<std::byte*>(fast.data()), left, right,
                                            all.size());
        GenericKernels().combine[index][op](reinterpret_cast<std::byte*>(generic.data()), left,
                                            right, all.size());
        for (size_t i = 0; i < all.size(); ++i) {
          if (fast[i] == generic[i]) continue;
          const double one = LoadElement(dtype, reinterpret_cast<std::byte*>(fast.data()), i);
          const double two = LoadElement(dtype, reinterpret_cast<std::byte*>(generic.data()), i);
          ASSERT_TRUE(one == two || (std::isnan(one) && std::isnan(two)))
              << Name(dtype) << " operator " << op << ": " << all[i] << " and " << partner;
        }
      }
    }
  }
}

TEST(Kernels, Float16RoundsToNearestEvenOverItsWholeRange) {
  // A midpoint between neighbors rounds to the even one, everything else to the nearer one.
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const auto half = [](uint32_t b) { return loops::Float16{static_cast<uint16_t>(b)}; };
    const float low = loops::Widen(half(bits));
    const float high = loops::Widen(half(bits + 1));
    const float middle = low + (high - low) / 2;
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(loops::NarrowToFloat16(low).bits, bits);
    ASSERT_EQ(loops::NarrowToFloat16(middle).bits, even);
    ASSERT_EQ(loops::NarrowToFloat16(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(loops::NarrowToFloat16(-std::nextafter(middle, 1e9f)).bits, (bits + 1) | 0x8000u);
  }
  EXPECT_EQ(loops::NarrowToFloat16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(loops::NarrowToFloat16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(loops::NarrowToFloat16(1e30f).bits, 0x7c00);
}

TEST(Kernels, AverageOfIntegersTruncatesTowardsZero) {
  std::vector<int64_t> values{7, -7, 6, 1, -1, (int64_t{1} << 60) + 1};
  const Reduction average{DType::kInt64, ReduceOp::kAverage, 1.0, 1.0};
  Finish(average, 2, reinterpret_cast<std::byte*>(values.data()), values.size());
  EXPECT_EQ(values, (std::vector<int64_t>{3, -3, 3, 0, 0, int64_t{1} << 59}));
}

constexpr int kDivisors[] = {2,    3,    5,     6,     7,       8,          9,          10,
                             63,   64,   100,   127,   128,     255,        256,        641,
                             1000, 1024, 32767, 65535, 6700417, 1000000007, 1073741825, 2147483647};

// Divides with every table, and compares with the division of the language.
template <typename T>
void ExpectQuotients(DType dtype, const std::vector<T>& values, int divisor) {
  for (const KernelTable* table : {&GenericKernels(), &FastestKernels()}) {
    std::vector<T> quotients = values;
    table->divide[static_cast<size_t>(dtype)](reinterpret_cast<std::byte*>(quotients.data()),
                                              quotients.size(), divisor);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(quotients[i], static_cast<T>(static_cast<int64_t>(values[i]) / divisor))
          << Name(dtype) << ", " << table->name << ": " << +values[i] << " / " << divisor;
    }
  }
}

template <typename T>
void ExpectQuotientsOfAllValues(DType dtype) {
  std::vector<T> values;
  for (int64_t value = std::numeric_limits<T>::min(); value <= std::numeric_limits<T>::max();
       ++value) {
    values.push_back(static_cast<T>(value));
  }
  for (const int divisor : kDivisors) ExpectQuotients(dtype, values, divisor);
}

// Tries the values around the multiples of the divisors, and around all powers of two.
template <typename T>
void ExpectQuotientsOfCriticalValues(DType dtype) {
  using Bits = std::make_unsigned_t<T>;
  std::mt19937_64 random(7);
  for (const int divisor : kDivisors) {
    std::vector<T> values{std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
    const auto add_around = [&](Bits value) {
      for (const Bits near : {static_cast<Bits>(value - 1), value, static_cast<Bits>(value + 1)}) {
        values.push_back(static_cast<T>(near));
        values.push_back(static_cast<T>(Bits{0} - near));
      }
    };
    for (size_t bit = 0; bit < 8 * sizeof(T); ++bit) add_around(static_cast<Bits>(Bits{1} << bit));
    const auto largest =
        static_cast<Bits>(std::numeric_limits<T>::max()) / static_cast<Bits>(divisor);
    for (int i = 0; i < 3000; ++i) {
      const auto factor = static_cast<Bits>(random() % (Bits{largest} + 1));
      add_around(static_cast<Bits>(factor * static_cast<Bits>(divisor)));
      values.push_back(static_cast<T>(random()));
    }
    add_around(static_cast<Bits>(largest * static_cast<Bits>(divisor)));
    ExpectQuotients(dtype, values, divisor);
  }
}

TEST(Kernels, IntegersAreDividedLikeByTheLanguage) {
  if (!Thorough()) GTEST_SKIP() << "a single thread";
  ExpectQuotientsOfAllValues<uint8_t>(DType::kUInt8);
  ExpectQuotientsOfAllValues<int8_t>(DType::kInt8);
  ExpectQuotientsOfAllValues<uint16_t>(DType::kUInt16);
  ExpectQuotientsOfAllValues<int16_t>(DType::kInt16);
  ExpectQuotientsOfCriticalValues<int32_t>(DType::kInt32);
  ExpectQuotientsOfCriticalValues<int64_t>(DType::kInt64);
}

TEST(Kernels, ScaledIntegersTruncateAndSaturate) {
  std::vector<int32_t> values{7, -7, std::numeric_limits<int32_t>::max(), 0};
  const Reduction half{DType::kInt32, ReduceOp::kSum, 1.0, 0.5};
  Finish(half, 1, reinterpret_cast<std::byte*>(values.data()), 2);
  EXPECT_EQ(values[0], 3);
  EXPECT_EQ(values[1], -3);
  const Reduction huge{DType::kInt32, ReduceOp::kSum, 1.0, 1e9};
  Finish(huge, 1, reinterpret_cast<std::byte*>(values.data() + 2), 2);
  EXPECT_EQ(values[2], std::numeric_limits<int32_t>::max());
  EXPECT_EQ(values[3], 0);
}

TEST(Kernels, MinimumAndMaximumKeepANaNFromEitherSide) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    std::vector<float> left(19, nan);
    std::vector<float> right(19, 1.0f);
    std::vector<float> result(19);
    auto* target = reinterpret_cast<std::byte*>(result.data());
    Combine(DType::kFloat32, op, target, reinterpret_cast<std::byte*>(left.data()),
            reinterpret_cast<std::byte*>(right.data()), 19);
    for (const float value : result) EXPECT_TRUE(std::isnan(value));
    Combine(DType::kFloat32, op, target, reinterpret_cast<std::byte*>(right.data()),
            reinterpret_cast<std::byte*>(left.data()), 19);
    for (const float value : result) EXPECT_TRUE(std::isnan(value));
  }
}

}  // namespace
}  // namespace sparkhvd
