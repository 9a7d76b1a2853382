// Reorders the rows of columns: how readers shuffle the rows they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/span.h"
#include "base/status.h"

namespace sparkhvd {

// One column: its rows, part after part, and the target of the picked rows.
struct ColumnRows {
  std::vector<ConstBytes> parts;
  Bytes target;
};

// The rows `begin` to `end` (exclusive).
struct RowRun {
  uint32_t begin;
  uint32_t end;
};

// The rows to deliver, and their order.
class RowOrder {
 public:
  // `indices` are the indices of the rows to deliver, in this order, among `rows` rows; each at
  // most once.
  static Result<RowOrder> Make(Span<const int64_t> indices, size_t rows);

  // Puts rows of `row_bytes` into the columns' targets in this order. Four columns of up to 8 bytes
  // take less time together than one by one. May be called by several threads at once.
  Status Pick(Span<const ColumnRows> columns, size_t row_bytes) const;

 private:
  RowOrder(std::vector<uint32_t> indices, std::vector<RowRun> runs, size_t rows)
      : indices_(std::move(indices)), runs_(std::move(runs)), rows_(rows) {}

  std::vector<uint32_t> indices_;  // among the rows of `runs_` alone
  std::vector<RowRun> runs_;       // the rows to deliver, in the order in which they lie
  size_t rows_;
};

}  // namespace sparkhvd
