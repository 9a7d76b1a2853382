#include "data/row_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/thorough.h"

namespace sparkhvd {
namespace {

using Memory = std::vector<std::byte>;

// Columns whose rows lie in parts of given lengths. Every byte identifies its column, row and
// offset.
struct Columns {
  Columns(size_t count, size_t row_bytes, const std::vector<size_t>& part_rows, size_t picked)
      : targets(count, Memory(picked * row_bytes)) {
    for (size_t column = 0; column < count; ++column) {
      size_t row = 0;
      for (const size_t rows : part_rows) {
        Memory& part = parts.emplace_back(rows * row_bytes);
        for (size_t i = 0; i < part.size(); ++i) {
          part[i] = Expected(column, row + i / row_bytes, i % row_bytes);
        }
        row += rows;
      }
    }
    for (size_t column = 0; column < count; ++column) {
      ColumnRows& found = all.emplace_back();
      for (size_t part = 0; part < part_rows.size(); ++part) {
        const Memory& memory = parts[column * part_rows.size() + part];
        found.parts.emplace_back(memory.data(), memory.size());
      }
      found.target = Bytes(targets[column].data(), targets[column].size());
    }
  }

  static std::byte Expected(size_t column, size_t row, size_t place) {
    return static_cast<std::byte>((column * 131 + row * 7 + (row >> 8) + place * 31) % 251);
  }
  Span<const ColumnRows> span() const { return {all.data(), all.size()}; }

  std::vector<Memory> parts;
  std::vector<Memory> targets;
  std::vector<ColumnRows> all;
};

std::vector<int64_t> Shuffled(size_t rows) {
  std::vector<int64_t> places(rows);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), std::mt19937_64(7));
  return places;
}

RowOrder OrderOf(const std::vector<int64_t>& places, size_t rows) {
  Result<RowOrder> order = RowOrder::Make({places.data(), places.size()}, rows);
  EXPECT_TRUE(order.ok()) << order.status().message();
  return std::move(order).value();
}

TEST(RowOrder, PicksRowsOfEverySizeForAnyNumberOfColumns) {
  if (!Thorough()) GTEST_SKIP() << "a single thread";
  const std::vector<size_t> part_rows = {300, 0, 1, 212};
  const size_t rows = 513;
  std::vector<int64_t> places = Shuffled(rows);
  for (const size_t picked : {rows, size_t{100}, size_t{3}, size_t{0}}) {
    places.resize(picked);
    const RowOrder order = OrderOf(places, rows);
    for (const size_t row_bytes : std::vector<size_t>{1, 2, 3, 4, 8, 12, 16, 100}) {
      for (size_t count = 0; count <= 9; ++count) {
        Columns columns(count, row_bytes, part_rows, picked);
        ASSERT_TRUE(order.Pick(columns.span(), row_bytes).ok());
        for (size_t column = 0; column < count; ++column) {
          for (size_t i = 0; i < picked * row_bytes; ++i) {
            const auto row = static_cast<size_t>(places[i / row_bytes]);
            ASSERT_EQ(columns.targets[column][i], Columns::Expected(column, row, i % row_bytes))
                << "column " << column << " of " << count << ", byte " << i << " of rows of "
                << row_bytes;
          }
        }
      }
    }
  }
}

TEST(RowOrder, RefusesIndicesOutOfRange) {
  for (const int64_t wrong : {int64_t{5}, int64_t{-1}, int64_t{1} << 40}) {
    const std::vector<int64_t> places = {0, wrong, 4};
    const Status status = RowOrder::Make({places.data(), places.size()}, 5).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "row indices must be at least 0 and below 5; out of range: 1");
  }
  EXPECT_FALSE(RowOrder::Make({}, size_t{1} << 32).ok());
}

TEST(RowOrder, RefusesMemoryOfAnotherSize) {
  const RowOrder order = OrderOf({1, 0}, 3);
  const std::vector<std::vector<size_t>> divided = {{2}, {2, 2}, {}};
  for (const auto& part_rows : divided) {
    Columns columns(1, 4, part_rows, 2);
    EXPECT_EQ(order.Pick(columns.span(), 4).message(),
              "the parts of every column must hold 3 rows of 4 bytes, split alike, and its target "
              "must have room for 2");
  }
  Columns small(1, 4, {3}, 1);
  EXPECT_FALSE(order.Pick(small.span(), 4).ok());
  Columns right(1, 4, {2, 1}, 2);
  EXPECT_TRUE(order.Pick(right.span(), 4).ok());
  EXPECT_FALSE(order.Pick(right.span(), 0).ok());
  EXPECT_FALSE(order.Pick(right.span(), 8).ok());
  Columns other(1, 4, {1, 2}, 2);
  right.all.push_back(other.all[0]);
  EXPECT_FALSE(order.Pick(right.span(), 4).ok()) << "the second column is divided differently";
}

}  // namespace
}  // namespace sparkhvd
