// Reorders the rows of columns. Readers use it to shuffle the rows that they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// One column: the parts that hold its rows, and the target of the picked rows.
struct ColumnRows {
  std::vector<ConstBytes> parts;
  Bytes target;
};

// The rows from `begin` to `end` (exclusive).
struct RowRun {
  uint32_t begin;
  uint32_t end;
};

// The rows to deliver and their order.
class RowOrder {
 public:
  // `indices` lists the rows to deliver, in this order, out of `rows` rows. Each index appears at
  // most once.
  static Result<RowOrder> Make(Span<const int64_t> indices, size_t rows);

  // Copies rows of `row_bytes` to the columns' targets in this order. For rows of 1, 2, 4 or 8
  // bytes, four columns take less time together than one by one. Several threads may call it at
  // once.
  Status Pick(Span<const ColumnRows> columns, size_t row_bytes) const;

 private:
  RowOrder(std::vector<uint32_t> indices, std::vector<RowRun> runs, size_t rows)
      : indices_(std::move(indices)), runs_(std::move(runs)), rows_(rows) {}

  std::vector<uint32_t> indices_;  // indices into the rows of `runs_`
  std::vector<RowRun> runs_;       // the rows to deliver, in storage order
  size_t rows_;
};

}  // namespace sparkhvd
